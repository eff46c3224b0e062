"""Puts a plan's op fusion, precision and recomputation into effect on a TensorFlow 2 training step, by rewriting its graph.

Copy beside `step.json` and import it from the training script; one line does it:

    @tf.function
    def train_step():
        ...

    train_step = planned_step(train_step)     # from xla import planned_step

The first call runs the step as it was written, for that call makes the variables; the ones after it run the rewritten graph. In
graph mode (TensorFlow 1):

    tf.import_graph_def(planned_graph_def(definition), name="")
    session = tf.Session(config=planned_config(tf.ConfigProto()))

An op that does not exist, or a cluster that cannot be one, is a `ValueError` that names it. Needs TensorFlow, nothing else; Python
3.8 and later.
"""

from __future__ import annotations

import heapq
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PLAN_FILE = "step.json"
# What TensorFlow's optimizer does to nodes that it did not make: fused or merged ones would leave their cluster or lie in two.
_MOVES_NODES = ("remapping", "arithmetic_optimization")
# Not computation, or computation that a compiler of clusters does not take.
_OUTSIDE = frozenset(
    (
        *("Placeholder", "PlaceholderWithDefault", "_Arg", "_Retval", "PartitionedCall", "StatefulPartitionedCall", "If", "While"),
        *("StatelessIf", "StatelessWhile", "Case", "StatelessCase", "PyFunc", "EagerPyFunc", "Print", "PrintV2", "Assert"),
        *("VarHandleOp", "IteratorGetNext", "SymbolicGradient", "RemoteCall"),
    )
)
_FUSED_TYPES = ("_Fused", "_MklFused", "_MklNativeFused", "_MklNativePadWithFused")
_HEAVY = ("MatMul", "Conv2D", "DepthwiseConv2dNative", "BatchMatMulV2", "Conv3D")
_NORMALISATION, _NORMALISED = "FusedBatchNorm", "FusedBatchNormEx"
_ACTIVATIONS = ("Relu", "Relu6", "Elu", "LeakyRelu")
_PASSING = frozenset(("Identity", "StopGradient", "PreventGradient", "Snapshot"))  # one tensor in, the same out
_PART = re.compile(r"micro_batch_\d+/")
_CLUSTER = "dpro_cluster_%d"


def planned_step(function: Any) -> Any:
    """A function that is called like the `tf.function` given, and runs the plan's version of its graph from the second call on.

    Arguments must be tensors (or arrays), nested as they like; what is returned has the structure that `function` returns. Stateful
    random ops begin their sequences again with the second call.
    """
    import tensorflow as tf

    _report_used()
    plan = _read_plan()
    if not any(plan.values()):
        return function
    if plan["clusters"]:
        tf.config.optimizer.set_experimental_options(dict.fromkeys(_MOVES_NODES, False))
    return _PlannedStep(function, plan)


def planned_graph_def(definition: Any) -> Any:
    """A copy of a GraphDef under the plan, for graph mode; results that are computed in bfloat16 then are of that type."""
    return _rewritten_def(definition, _read_plan())[0]


def planned_config(config: Any) -> Any:
    """A session's ConfigProto, changed so that TensorFlow's optimizer leaves the nodes of the plan's clusters where they are."""
    from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

    for name in _MOVES_NODES:
        setattr(config.graph_options.rewrite_options, name, RewriterConfig.OFF)
    return config


def cluster_problem(cluster_of: Mapping[str, int], inputs: Mapping[str, Sequence[str]]) -> str | None:
    """Why ops cannot be fused in these clusters, in a sentence; None if they can.

    Parameters
    ----------
    cluster_of
        Number of the cluster of each op that is in one.
    inputs
        For every op of the graph, the names of the ops that it needs (for data or for order).
    """
    missing = [name for name in cluster_of if name not in inputs]
    if missing:
        return f"no op is named {missing[0]!r} ({len(missing)} of {len(cluster_of)} ops of the plan are missing)"
    users: dict[str, list[str]] = {name: [] for name in inputs}
    for name, needed in inputs.items():
        for source in needed:
            users[source].append(name)
    for number in sorted(set(cluster_of.values())):
        cluster = [name for name in cluster_of if cluster_of[name] == number]
        path = _path_outside(number, cluster, cluster_of, users)
        if path:
            return (
                f"cluster {number} (of {path[0]!r} and {len(cluster) - 1} more ops) is not convex: {path[1]!r} is not in it, "
                f"and is on a way from {path[0]!r} to {path[-1]!r}, which are"
            )
    place = places(cluster_of, inputs)
    numbers = sorted({number for name, number in cluster_of.items() if name not in place})
    return f"clusters {numbers[:4]} need each other's results: no order runs each as a whole" if len(place) < len(inputs) else None


def places(cluster_of: Mapping[str, int], inputs: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Place of each op in an order that follows the dependencies, as near to the graph's as they allow.

    The ops of a cluster have one place; ops on or behind a cycle have none. Parameters as of `cluster_problem`.
    """
    first: dict[int, int] = {}
    whole_of = {
        name: first.setdefault(cluster_of[name], number) if name in cluster_of else number for number, name in enumerate(inputs)
    }
    needs: dict[int, set[int]] = {whole: set() for whole in whole_of.values()}
    for name, sources in inputs.items():
        needs[whole_of[name]] |= {whole_of[source] for source in sources} - {whole_of[name]}
    users: dict[int, list[int]] = {whole: [] for whole in needs}
    for whole, needed in needs.items():
        for source in needed:
            users[source].append(whole)
    open_needs = {whole: len(needed) for whole, needed in needs.items()}
    ready = [whole for whole, count in open_needs.items() if count == 0]
    heapq.heapify(ready)
    order: dict[int, int] = {}
    while ready:
        whole = heapq.heappop(ready)
        order[whole] = len(order)
        for user in users[whole]:
            open_needs[user] -= 1
            if open_needs[user] == 0:
                heapq.heappush(ready, user)
    return {name: order[whole] for name, whole in whole_of.items() if whole in order}


def _path_outside(number: int, cluster: Sequence[str], cluster_of: Mapping[str, int], users: Mapping[str, list[str]]) -> list[str]:
    """A path from an op of a cluster through ops outside of it back into it: its first two ops and its last; empty if none."""
    reached = {user: name for name in cluster for user in users[name] if cluster_of.get(user) != number}
    first = {name: [source, name] for name, source in reached.items()}
    front = list(reached)
    while front:
        name = front.pop()
        for user in users[name]:
            if cluster_of.get(user) == number:
                return [*first[name], user]
            if user not in first:
                first[user] = first[name]
                front.append(user)
    return []


class _PlannedStep:
    def __init__(self, function: Any, plan: Mapping[str, Any]) -> None:
        self._function = function
        self._plan = plan
        self._ran = False
        self._planned: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import tensorflow as tf

        if not self._ran:
            self._ran = True
            return self._function(*args, **kwargs)
        leaves = tf.nest.flatten((args, kwargs), expand_composites=True)
        given = [tf.convert_to_tensor(leaf) for leaf in leaves if tf.is_tensor(leaf) or hasattr(leaf, "__array__")]
        key = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in given)
        if key not in self._planned:
            concrete = self._function.get_concrete_function(*args, **kwargs)
            if len(given) != len(concrete.inputs) - len(concrete.captured_inputs) or len(given) != len(leaves):
                raise ValueError(f"the arguments of a planned step must be tensors, not {[type(leaf).__name__ for leaf in leaves]}")
            self._planned[key] = _planned_function(concrete, self._plan)
        return self._planned[key](*given)


def _planned_function(concrete: Any, plan: Mapping[str, Any]) -> Any:
    """A `tf.function` of a concrete function's graph under the plan; it captures what that one captured."""
    import tensorflow as tf

    outputs = [tensor.name for tensor in concrete.outputs]
    definition, renamed = _rewritten_def(concrete.graph.as_graph_def(), plan, outputs)
    arguments = [tensor.name for tensor in concrete.inputs]
    _without_nodes(definition, {name.partition(":")[0] for name in arguments})
    read = {_tensor(entry) for node in definition.node for entry in node.input}
    structure = concrete.structured_outputs
    returned = [renamed.get(name, name) for name in outputs]
    effects = [op.name for op in concrete.graph.control_outputs]
    captured = concrete.captured_inputs

    def planned(*given: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        values = [*given, *(graph.capture(value) for value in captured)]
        fed = {name: values[i] for i, name in enumerate(arguments)}
        made = [name for name in returned if name not in fed]
        imported = tf.import_graph_def(
            definition,
            input_map={name: value for name, value in fed.items() if name in read},
            return_elements=made + effects,
            name="",
        )
        tensors = {**fed, **{name: imported[i] for i, name in enumerate(made)}}
        with tf.control_dependencies(imported[len(made) :]):
            made_again = iter([tf.identity(tensors[name]) for name in returned])
        leaves = tf.nest.flatten(structure, expand_composites=True)
        filled = [None if leaf is None else next(made_again) for leaf in leaves]
        return tf.nest.pack_sequence_as(structure, filled, expand_composites=True)

    return tf.function(planned, autograph=False)


def _rewritten_def(definition: Any, plan: Mapping[str, Any], returned: Sequence[str] = ()) -> tuple[Any, dict[str, str]]:
    """A GraphDef under the plan, and where the tensors are that are returned and were in float32 before."""
    changed = type(definition)()
    changed.CopyFrom(definition)
    for node in changed.node:
        if "_class" in node.attr:  # colocation with what is replaced here
            del node.attr["_class"]
    plan = with_parts(plan, changed)
    clusters = with_passed([with_absorbed(cluster, changed) for cluster in plan["clusters"]], changed)
    bfloat16, recomputed = (with_absorbed(plan[kind], changed) for kind in ("bfloat16", "recomputed"))
    _check_exist([*(name for cluster in clusters for name in cluster), *bfloat16, *recomputed], changed)
    cluster_of = {name: number for number, cluster in enumerate(clusters) for name in cluster}
    _require_order(cluster_of, changed)
    renamed: dict[str, str] = {}
    if recomputed or bfloat16:
        from graph_rewrites import recompute, to_bfloat16  # the file beside this one

        copies = recompute(changed, recomputed, places(cluster_of, _inputs(changed)))
        lower = [*bfloat16, *(copies[name] for name in bfloat16 if name in copies)]
        renamed = to_bfloat16(changed, lower, cluster_of, returned)
        _require_order(cluster_of, changed)
    _mark(changed, cluster_of)
    return changed, renamed


def _require_order(cluster_of: Mapping[str, int], definition: Any) -> None:
    problem = cluster_problem(cluster_of, _inputs(definition))
    if problem:
        raise ValueError(f"the plan does not fit this step: {problem}")


def _inputs(definition: Any) -> dict[str, list[str]]:
    return {node.name: [_node(entry) for entry in node.input] for node in definition.node}


def _mark(definition: Any, cluster_of: Mapping[str, int]) -> None:
    """Name the cluster on each of its nodes; a sum of two as the op that the compiler has."""
    for node in definition.node:
        if node.name not in cluster_of:
            continue
        if node.op in _OUTSIDE or node.op.startswith("Horovod"):
            raise ValueError(f"the plan fuses {node.name!r}, and no cluster can hold an op of type {node.op}")
        if node.op == "AddN" and node.attr["N"].i == 2:
            node.op = "AddV2"
            del node.attr["N"]
        node.attr["_XlaCluster"].s = (_CLUSTER % cluster_of[node.name]).encode()


def with_parts(plan: Mapping[str, Any], definition: Any) -> dict[str, Any]:
    """A plan that does to every micro-batch what it does to the first; the others' ops are in scopes of `micro_batches.py`."""
    of_part: dict[str, dict[str, str]] = {}  # names of a part's ops by those of the first part's
    for node in definition.node:
        scope = _PART.search(node.name)
        if scope:
            of_part.setdefault(scope[0], {})[node.name.replace(scope[0], "", 1)] = node.name

    def in_parts(ops: Sequence[Any]) -> list[list[Any]]:
        return [[*ops], *([(names[name], kind) for name, kind in ops if name in names] for names in of_part.values())]

    parts: dict[str, Any] = {"clusters": [part for cluster in plan["clusters"] for part in in_parts(cluster) if part]}
    return parts | {kind: [op for part in in_parts(plan[kind]) for op in part] for kind in ("bfloat16", "recomputed")}


def with_absorbed(ops: Sequence[Sequence[Any]], definition: Any) -> list[str]:
    """Names of ops, given as [name, type or None]; of one that TensorFlow had fused by itself, all that it stood for.

    TensorFlow's optimizer fuses a matrix product or convolution with what follows it, under the name of the last op, and a batch
    normalisation with its activation, under the name of the first. Here these are ops of their own, one consumer each.
    """
    nodes = {node.name: node for node in definition.node}
    users: dict[str, list[Any]] = {}
    for node in definition.node:
        for entry in node.input:
            if not entry.startswith("^"):
                users.setdefault(_tensor(entry), []).append(node)
    names: list[str] = []
    for name, kind in ops:
        fused = kind if kind and kind.startswith(_FUSED_TYPES) and name in nodes else ""
        names.append(name)
        if _NORMALISED in fused and nodes[name].op.startswith(_NORMALISATION):
            names += _activation(users.get(f"{name}:0", []))
        elif any(heavy in fused for heavy in _HEAVY):
            names += _product_before(nodes[name], nodes, users)
    return list(dict.fromkeys(names))


def _activation(users: Sequence[Any]) -> list[str]:
    """The ops that follow a fused normalisation, given the users of its result."""
    return [node.name for node in users if len(users) == 1 and node.op in _ACTIVATIONS]


def _product_before(node: Any, nodes: Mapping[str, Any], users: Mapping[str, Sequence[Any]]) -> list[str]:
    """The ops from one up to the product that it was fused with; none if there is no such product."""
    chain: list[str] = []
    while node.op not in _HEAVY:
        node = nodes.get(_node(node.input[0])) if node.input else None
        if node is None or len(users.get(f"{node.name}:0", ())) != 1:
            return []
        chain.append(node.name)
    return chain


def with_passed(clusters: Sequence[Sequence[str]], definition: Any) -> list[list[str]]:
    """Names of each cluster's ops, with the ops between them that only pass a tensor on.

    TensorFlow's optimizer takes these out before a step runs, so that a recording does not have them.
    """
    nodes = {node.name: node for node in definition.node}
    taken = {name for cluster in clusters for name in cluster}
    extended = []
    for cluster in clusters:
        ops = dict.fromkeys(cluster)
        for name in cluster:
            for entry in nodes[name].input if name in nodes else ():
                source, passed = _node(entry), []
                while source not in taken and nodes[source].op in _PASSING and len(nodes[source].input) == 1:
                    passed.append(source)
                    source = _node(nodes[source].input[0])
                if source in ops:
                    ops.update(dict.fromkeys(passed))
        extended.append(list(ops))
    return extended


def _check_exist(names: Sequence[str], definition: Any) -> None:
    known = {node.name for node in definition.node}
    missing = [name for name in names if name not in known]
    if missing:
        raise ValueError(
            f"the plan does not fit this step: no op is named {missing[0]!r} ({len(missing)} of the plan's ops are missing); the "
            "plan was made for another model, or the op was made by TensorFlow's optimizer"
        )


def _without_nodes(definition: Any, names: set[str]) -> None:
    for position in reversed(range(len(definition.node))):
        node = definition.node[position]
        if node.name in names:
            del definition.node[position]
            continue
        for k in reversed(range(len(node.input))):
            if node.input[k][0] == "^" and node.input[k][1:] in names:
                del node.input[k]


def _node(entry: str) -> str:
    return entry[1:] if entry.startswith("^") else entry.partition(":")[0]


def _tensor(entry: str) -> str:
    return entry if ":" in entry or entry.startswith("^") else f"{entry}:0"


def _read_plan() -> dict[str, Any]:
    content = json.loads(Path(__file__).resolve().with_name(PLAN_FILE).read_text())
    return {name: content.get(name, []) for name in ("clusters", "bfloat16", "recomputed")}


def _report_used() -> None:
    """Let `dpro-search validate` know that the script follows the plan."""
    folder = os.environ.get("DPRO_SEARCH_REPORT")
    if folder:
        Path(folder, "used-" + Path(__file__).name).touch()
