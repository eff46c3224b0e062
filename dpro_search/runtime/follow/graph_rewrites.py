"""Rewrites of a training step's GraphDef that change what its ops compute with: precision and recomputation.

Exported beside `xla.py`, which calls them. Needs TensorFlow, nothing else; Python 3.8 and later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Types of the backward pass that wait for nothing of it.
AT_ONCE = frozenset(("Const", "Shape", "ShapeN", "Size", "Rank", "BroadcastGradientArgs"))
# Results that are an input's, under another name or shape: what is behind them is kept for as long as they are.
VIEWS = frozenset(
    (
        *("Identity", "StopGradient", "PreventGradient", "Snapshot", "CheckNumerics", "EnsureShape"),
        *("Reshape", "Squeeze", "ExpandDims", "Bitcast"),
    )
)
_FLOAT, _BFLOAT16 = 1, 14  # of types.proto


def recompute(definition: Any, names: Sequence[str], place: Mapping[str, int]) -> dict[str, str]:
    """Let the backward pass use copies of ops that run again when it comes to them; returns the copies' names.

    A copy waits for the gradients that the first op which needs it waits for: see `computed_again`, also for `place`.

    Nodes are added in the order of the graph, so that it is the same in every process: TensorFlow numbers what it inlines in that
    order, and the numbers are in the names by which Horovod's ranks match tensors.
    """
    from tensorflow.python.framework import op_def_registry

    nodes = {node.name: node for node in definition.node}
    for name in names:
        if op_def_registry.get(nodes[name].op).is_stateful or _is_backward(name):
            raise ValueError(f"the plan recomputes {name!r}, and an op of type {nodes[name].op} must run once")
    step = _Backward(definition, place)
    awaited = step.computed_again(names)
    if names and not awaited:
        raise ValueError(f"the plan recomputes {min(names)!r} and others, all of which the backward pass uses at once")
    copies = {name: f"{name}/recomputed" for name in awaited}
    for node in [*definition.node]:
        if node.name in copies:
            copy = definition.node.add()
            copy.CopyFrom(node)
            copy.name = copies[node.name]
            del copy.input[:]
            copy.input.extend([_redirected(entry, copies) for entry in _data(node)])
            copy.input.extend(f"^{gradient}" for gradient in awaited[node.name])
        if step.awaited(node):
            for k, entry in enumerate(node.input):
                if not entry.startswith("^"):
                    node.input[k] = _redirected(entry, copies)
    return copies


def computed_again(definition: Any, names: Sequence[str], place: Mapping[str, int]) -> dict[str, list[str]]:
    """The ops that run again when a plan names `names`, in the order of the graph, with the gradients that each then waits for.

    Ops of the backward pass that wait for no gradient run at once, and keep the first results; an op that only such ops need does
    not run again: nothing would be gained. Views of what runs again are made again with it.

    Parameters
    ----------
    definition
        A GraphDef, or what has its `node` with `name`, `op` and `input`.
    place
        Of each op in an order that follows the dependencies; the ops of a cluster have one place.
    """
    return _Backward(definition, place).computed_again(names)


class _Backward:
    """A step's backward pass: which ops are of it, and what they wait for."""

    def __init__(self, definition: Any, place: Mapping[str, int]) -> None:
        self._nodes = {node.name: node for node in definition.node}
        self._place = place
        self._ordered = sorted(definition.node, key=lambda node: place[node.name])
        self._wholes: dict[int, list[Any]] = {}  # a cluster, or one op
        self._names: set[str] = set()
        for node in self._ordered:
            self._wholes.setdefault(place[node.name], []).append(node)
            sum_of = [node_of(entry) for entry in node.input] if node.op == "AddN" else []
            if _is_backward(node.name) or (sum_of and self._names.issuperset(sum_of)):  # sums of gradients have names of their own
                self._names.add(node.name)
        self._awaited = {place: self._gradients(members) for place, members in self._wholes.items()}

    def awaited(self, node: Any) -> list[str]:
        """The gradients that an op of the backward pass waits for, or the cluster that it is in."""
        return self._awaited[self._place[node.name]] if node.name in self._names else []

    def computed_again(self, names: Sequence[str]) -> dict[str, list[str]]:
        chosen = set(names)
        for node in self._ordered:
            if node.op in VIEWS and node.name not in self._names and node_of(node.input[0]) in chosen:
                chosen.add(node.name)
        awaited_of: dict[str, list[str]] = {}
        for user in self._ordered:
            left = [user] if self.awaited(user) else []
            while left:
                needed = {node_of(entry) for entry in _data(left.pop())} & chosen - awaited_of.keys()
                awaited_of.update(dict.fromkeys(needed, self.awaited(user)))
                left += [self._nodes[name] for name in needed]
        return {name: awaited_of[name] for name in self._nodes if name in awaited_of}

    def _gradients(self, members: Sequence[Any]) -> list[str]:
        inside = {node.name for node in members}
        sources = {node_of(entry) for node in members for entry in node.input} - inside
        return sorted(name for name in sources if name in self._names and self._nodes[name].op not in AT_ONCE)


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
    positions: list[int] = []
    place = 0
    for argument in arguments:
        count = node.attr[argument.number_attr].i if argument.number_attr else 1
        if argument.type_attr == "T":
            positions.extend(range(place, place + count))
        place += count
    return positions


def _is_backward(name: str) -> bool:
    return "gradient_tape/" in name or name.startswith("gradients/")


def _data(node: Any) -> list[str]:
    return [entry for entry in node.input if not entry.startswith("^")]


def _redirected(entry: str, copies: Mapping[str, str]) -> str:
    name, colon, place = entry.partition(":")
    return copies.get(name, name) + colon + place


def node_of(entry: str) -> str:
    """Name of the node that an entry of a node's inputs names."""
    return entry[1:] if entry.startswith("^") else entry.partition(":")[0]


def tensor_of(entry: str) -> str:
    """An entry of a node's inputs with its output written out."""
    return entry if ":" in entry or entry.startswith("^") else f"{entry}:0"
