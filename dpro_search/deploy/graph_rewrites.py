"""Rewrites of a training step's GraphDef that change what its ops compute with: precision and recomputation.

Exported beside `xla.py`, which calls them. Needs TensorFlow, nothing else; Python 3.8 and later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_EARLY = ("Const", "Shape", "ShapeN", "Size", "Rank", "BroadcastGradientArgs")  # of the backward pass, and yet run at once
_FLOAT, _BFLOAT16 = 1, 14  # of types.proto


def recompute(definition: Any, names: Sequence[str]) -> dict[str, str]:
    """Let the backward pass use copies of ops that run again when it comes to them; returns the copies' names.

    The copies of ops that hang together wait for the gradients that the first of their users waits for. Ops of the backward pass
    that wait for no gradient run at once, and keep the first results. What only such ops use is not computed again: nothing would
    be gained.

    Nodes are added in the order of the graph, so that it is the same in every process: TensorFlow numbers what it inlines in that
    order, and the numbers are in the names under which Horovod's ranks agree on tensors.
    """
    from tensorflow.python.framework import op_def_registry

    order = {node.name: position for position, node in enumerate(definition.node)}
    nodes = {node.name: node for node in definition.node}
    copies = {name: f"{name}/recomputed" for name in names}

    def awaited(node: Any) -> list[str]:
        sources = sorted({node_of(entry) for entry in node.input})
        return [n for n in sources if _is_backward(n) and n in nodes and nodes[n].op not in _EARLY]

    for group in _connected(sorted(copies, key=order.__getitem__), nodes):
        users = [n for n in definition.node if _is_backward(n.name) and any(node_of(e) in group for e in n.input if e[0] != "^")]
        users = sorted((node for node in users if awaited(node)), key=lambda node: order[node.name])
        if not users:
            for name in group:
                del copies[name]
            continue
        triggers = awaited(users[0])
        for name in sorted(group, key=order.__getitem__):
            source = nodes[name]
            if op_def_registry.get(source.op).is_stateful or _is_backward(name):
                raise ValueError(f"the plan recomputes {name!r}, and an op of type {source.op} must run once")
            copy = definition.node.add()
            copy.CopyFrom(source)
            copy.name = copies[name]
            data = [entry for entry in source.input if not entry.startswith("^")]
            del copy.input[:]
            copy.input.extend([_redirected(entry, copies) if node_of(entry) in group else entry for entry in data])
            copy.input.extend(f"^{trigger}" for trigger in triggers)
        for user in users:
            for k, entry in enumerate(user.input):
                if node_of(entry) in group and not entry.startswith("^"):
                    user.input[k] = _redirected(entry, copies)
    if names and not copies:
        raise ValueError(f"the plan recomputes {min(names)!r} and others, all of which the backward pass uses at once")
    return copies


def _connected(names: Sequence[str], nodes: Mapping[str, Any]) -> list[set[str]]:
    """Ops in sets that hang together by their inputs, in the order of the first of each."""
    group_of = {name: {name} for name in names}
    for name in names:
        for entry in nodes[name].input:
            other = group_of.get(node_of(entry))
            mine = group_of[name]
            if other is not None and other is not mine:
                mine |= other
                for member in other:
                    group_of[member] = mine
    return list({id(group): group for group in group_of.values()}.values())


def to_bfloat16(definition: Any, names: Sequence[str], cluster_of: dict[str, int], returned: Sequence[str]) -> dict[str, str]:
    """Let ops compute in bfloat16, with casts where a neighbour does not; gives the float32 twins of results, by tensor name.

    A cast belongs to the cluster of the op that it serves: that is noted in `cluster_of`.
    """
    chosen = dict.fromkeys(names)
    nodes = {node.name: node for node in definition.node}
    twins: dict[str, str] = {}  # result in bfloat16 -> the same in float32
    slots = {name: _slots(nodes[name]) for name in chosen}
    for name, (_, outputs) in slots.items():
        for k in outputs:
            twins[f"{name}:{k}"] = f"{name}/float32_{k}:0"
    made: dict[str, Any] = {}

    def cast(name: str, source: str, to: int, served: str) -> str:
        if name not in made:
            node = definition.node.add(name=name, op="Cast", input=[source])
            node.attr["SrcT"].type, node.attr["DstT"].type = (_FLOAT, _BFLOAT16) if to == _BFLOAT16 else (_BFLOAT16, _FLOAT)
            made[name] = node
            if served in cluster_of:
                cluster_of[name] = cluster_of[served]
        return name

    for node in [*definition.node]:
        inputs = slots[node.name][0] if node.name in chosen else ()
        for k, entry in enumerate(node.input):
            tensor = tensor_of(entry)
            if entry.startswith("^") or (k in inputs and tensor in twins):
                continue
            if k in inputs:
                node.input[k] = cast(f"{node.name}/bfloat16_{k}", entry, _BFLOAT16, node.name)
            elif tensor in twins:
                node.input[k] = cast(node_of(twins[tensor]), tensor, _FLOAT, node_of(tensor))
    for name in chosen:
        nodes[name].attr["T"].type = _BFLOAT16
    for tensor in returned:
        if tensor in twins:
            cast(node_of(twins[tensor]), tensor, _FLOAT, node_of(tensor))
    return twins


def _slots(node: Any) -> tuple[list[int], list[int]]:
    """Positions of a node's inputs and outputs of its element type; `ValueError` if it cannot compute in bfloat16."""
    from tensorflow.python.framework import op_def_registry

    definition = op_def_registry.get(node.op)
    kinds = {attr.name: attr.allowed_values.list.type for attr in definition.attr} if definition is not None else {}
    if "T" not in kinds or (kinds["T"] and _BFLOAT16 not in kinds["T"]) or node.attr["T"].type != _FLOAT:
        raise ValueError(f"the plan computes {node.name!r} in bfloat16, which {node.op} does not have in this step")
    return _positions(node, definition.input_arg), _positions(node, definition.output_arg)


def _positions(node: Any, arguments: Any) -> list[int]:
    found: list[int] = []
    place = 0
    for argument in arguments:
        count = node.attr[argument.number_attr].i if argument.number_attr else 1
        if argument.type_attr == "T":
            found.extend(range(place, place + count))
        place += count
    return found


def _is_backward(name: str) -> bool:
    return "gradient_tape/" in name or name.startswith("gradients/")


def _redirected(entry: str, copies: Mapping[str, str]) -> str:
    name, colon, place = entry.partition(":")
    return copies[name] + colon + place


def node_of(entry: str) -> str:
    """Name of the node that an entry of a node's inputs names."""
    return entry[1:] if entry.startswith("^") else entry.partition(":")[0]


def tensor_of(entry: str) -> str:
    """An entry of a node's inputs with its output written out."""
    return entry if ":" in entry or entry.startswith("^") else f"{entry}:0"
