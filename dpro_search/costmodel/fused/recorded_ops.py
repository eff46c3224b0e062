"""The ops of a recorded job's rank as arrays, from which clusters of them are put together by compiled passes.

Ops have the numbers that the dataflow graph gives them. Every trace holds which op needs which (`Wiring`); only some hold the
tensors between them (`Tensors`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpro_search._compiled import njit
from dpro_search.collect.trace import Floats, GraphTensors, Ints, NodeGraph
from dpro_search.costmodel.fused.flat import FlatClusters, Records, pointers
from dpro_search.costmodel.fused.flatten import op_records, type_records
from dpro_search.costmodel.fused.op_classes import KINDS, Shape, TypedOp, kind_of
from dpro_search.costmodel.fused.timed import TimedOps, depth_and_width
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import DataflowGraph

Bools = npt.NDArray[np.bool_]

_PASSING = frozenset(["Identity", "IdentityN", "StopGradient", "PreventGradient", "Snapshot"])  # hand their input on
_NO_TENSOR = frozenset(["Const", "NoOp"])  # a constant is compiled in, and an order is no data
_HANDLES = frozenset(["_Arg", "VarHandleOp"])  # a variable's handle has no shape
_UPDATES = frozenset(["variable", "gather"])  # kinds whose inputs may be handles
_IN, _CONST, _VARIABLE, _INNER, _OUT = range(5)  # places in `ROLES`


class Wiring(NamedTuple):
    """Dependencies between ops: v ops of all ranks."""

    # needs_ptr, needs: Of each op, those that it needs.
    needs_ptr: Ints
    needs: Ints
    # users_ptr, users: Of each op of the rank, those of the rank that need it.
    users_ptr: Ints
    users: Ints
    maker: Ints  # The op that made what an op hands on, mostly itself, [v].
    carries: Bools  # Whether an op makes a tensor, [v].
    kind: Ints  # Place in `KINDS`, [v].


class Tensors(NamedTuple):
    """The recorded tensors: t of them."""

    known: Bools  # Whether all tensors of an op were seen, [v]; what follows counts for such ops only.
    op: Ints  # Place in `ops`, [v].
    # input_ptr, inputs, output_ptr, outputs: Tensors that each op reads, in the order of its arguments, and those that it makes and
    # any op reads.
    input_ptr: Ints
    inputs: Ints
    output_ptr: Ints
    outputs: Ints
    # users_ptr, users: Ops that read each tensor, [t + 1].
    users_ptr: Ints
    users: Ints
    # type, outside: Place in `types` of each tensor, and its role in clusters that its maker is not in, [t].
    type: Ints
    outside: Ints
    # ops, types, lengths: As `FlatClusters` has them.
    ops: Records
    types: Records
    lengths: Ints


def wiring_of(graph: DataflowGraph, rank: int, order: Ints) -> Wiring:
    """The wiring of a rank's ops; `order`: all ops in topological order."""
    count, types = len(graph.op_name), graph.op_type
    of_rank = graph.op_rank == rank
    op = np.repeat(np.arange(count), np.diff(graph.pred_ptr))
    kept = of_rank[op] & of_rank[graph.pred_idx]  # a communication op also needs ops of other ranks
    source, user = graph.pred_idx[kept], op[kept]
    maker = np.arange(count)
    for number in order.tolist():
        if types[number] in _PASSING and of_rank[number] and graph.pred_ptr[number] < graph.pred_ptr[number + 1]:
            maker[number] = maker[graph.pred_idx[graph.pred_ptr[number]]]
    return Wiring(
        needs_ptr=graph.pred_ptr,
        needs=graph.pred_idx,
        users_ptr=pointers(np.bincount(source, minlength=count).tolist()),
        users=user[np.argsort(source, kind="stable")],
        maker=maker,
        carries=np.array([name not in _NO_TENSOR for name in types], dtype=np.bool_),
        kind=np.array([KINDS.index(kind_of(name)) for name in types], dtype=np.int64),
    )


def tensors_of(graph: DataflowGraph, recorded: NodeGraph, tensors: GraphTensors, index: dict[str, int]) -> Tensors:
    """The recorded tensors of a rank's ops, whose numbers in the dataflow graph `index` has by name.

    Raises
    ------
    InputError
        The recorded graph has an op that the rank has not.
    """
    unknown = next((name for name in recorded.name if name not in index), None)
    if unknown is not None:
        raise InputError(f"the recorded graph is of another rank or job: it has op '{unknown}'")
    count, types = len(graph.op_name), graph.op_type
    numbers = [index[name] for name in recorded.name]
    known = np.zeros(count, dtype=np.bool_)
    known[numbers] = True
    place: dict[tuple[int, int], int] = {}  # of a tensor, by its maker and which of its results it is
    seen: list[int] = []  # recorded type of each tensor; -1: none
    users: list[list[int]] = []
    inputs: list[list[int]] = [[] for _ in range(count)]
    ports, edge_type = tensors.input_port.tolist(), tensors.input_type.tolist()
    edge_source, first = recorded.input_idx.tolist(), recorded.input_ptr.tolist()
    for node, op in enumerate(numbers):
        for edge in range(first[node], first[node + 1]):
            if ports[edge] < 0:
                continue
            source = numbers[edge_source[edge]]
            tensor = place.setdefault((source, ports[edge]), len(place))
            if tensor == len(seen):
                seen.append(-1)
                users.append([])
            if edge_type[edge] >= 0:
                seen[tensor] = edge_type[edge] if seen[tensor] < 0 else seen[tensor]
            elif not (types[source] in _HANDLES and kind_of(types[op]) in _UPDATES):
                known[op] = False
            users[tensor].append(op)
            inputs[op].append(tensor)
    outputs: list[list[int]] = [[] for _ in range(count)]
    outside = np.full(len(place), _IN)
    for (source, _), tensor in sorted(place.items()):
        outputs[source].append(tensor)
        if seen[tensor] < 0:
            known[source] = False
        if types[source] == "Const":
            outside[tensor] = _CONST
        elif seen[tensor] < 0:
            outside[tensor] = _VARIABLE
    kinds: dict[tuple[str, Shape], int] = {}
    described = [(tensors.types[kind].dtype, tensors.types[kind].shape) if kind >= 0 else ("resource", ()) for kind in seen]
    of_type = [kinds.setdefault(one, len(kinds)) for one in described]
    ops: dict[TypedOp, int] = {}
    op_at = np.zeros(count, dtype=np.int64)
    for number in np.flatnonzero(known).tolist():
        read, made = (tuple(described[tensor][1] for tensor in rows[number]) for rows in (inputs, outputs))
        op_at[number] = ops.setdefault(TypedOp(types[number], read, made), len(ops))
    records, lengths = type_records(kinds)
    return Tensors(
        known=known,
        op=op_at,
        **_rows("input_ptr", "inputs", inputs),
        **_rows("output_ptr", "outputs", outputs),
        **_rows("users_ptr", "users", users),
        type=np.array(of_type, dtype=np.int64),
        outside=outside,
        ops=op_records(ops),
        types=records,
        lengths=lengths,
    )


def _rows(ptr: str, idx: str, rows: list[list[int]]) -> dict[str, Ints]:
    return {ptr: pointers(map(len, rows)), idx: np.array([one for row in rows for one in row], dtype=np.int64)}


def timed_clusters(ptr: Ints, members: Ints, us: Floats, wiring: Wiring) -> TimedOps:
    """Clusters without shapes, each of its ops in topological order: members from ptr[i] to ptr[i + 1]."""
    member_us = us[members]
    ran = member_us > 0
    extent = _extent(ptr, members, us, wiring)
    counts = np.concatenate(([0], np.cumsum(ran)))[ptr]
    return TimedOps(
        ptr=counts,
        kinds=wiring.kind[members[ran]],
        us=member_us[ran],
        depth=extent[:, 0],
        width=extent[:, 1],
        inputs=extent[:, 2],
        outputs=extent[:, 3],
    )


def shaped_clusters(ptr: Ints, members: Ints, us: Floats, tensors: Tensors) -> FlatClusters:
    """Clusters of ops all of which are known, each of its ops in topological order: members from ptr[i] to ptr[i + 1]."""
    input_ptr = pointers((tensors.input_ptr[members + 1] - tensors.input_ptr[members]).tolist())
    output_ptr = pointers((tensors.output_ptr[members + 1] - tensors.output_ptr[members]).tolist())
    inputs, outputs = np.empty(input_ptr[-1], dtype=np.int64), np.empty(output_ptr[-1], dtype=np.int64)
    tensor, role = (np.empty(len(inputs) + len(outputs), dtype=np.int64) for _ in range(2))
    tensor_ptr = _collect(ptr, members, tensors, inputs, outputs, tensor, role)
    return FlatClusters(
        op_ptr=ptr,
        op=tensors.op[members],
        us=us[members],
        input_ptr=input_ptr,
        inputs=inputs,
        output_ptr=output_ptr,
        outputs=outputs,
        tensor_ptr=tensor_ptr,
        tensor=tensor[: tensor_ptr[-1]],
        role=role[: tensor_ptr[-1]],
        ops=tensors.ops,
        types=tensors.types,
        lengths=tensors.lengths,
    )


@njit(nogil=True)
def _extent(ptr: Ints, members: Ints, us: Floats, wiring: Wiring) -> Ints:
    """Depth, width, inputs and outputs of each cluster, as `TimedOps` has them, [n, 4]."""
    extent = np.zeros((len(ptr) - 1, 4), np.int64)
    inside, counted = np.full(len(us), -1, np.int64), np.full(len(us), -1, np.int64)
    level = np.zeros(len(us), np.int64)
    for cluster in range(len(extent)):
        ops = members[ptr[cluster] : ptr[cluster + 1]]
        at_level = np.zeros(len(ops) + 1, np.int64)
        for op in ops:
            inside[op] = cluster
        for op in ops:
            level[op] = 0
            for at in range(wiring.needs_ptr[op], wiring.needs_ptr[op + 1]):
                source = wiring.needs[at]
                if inside[source] == cluster:
                    level[op] = max(level[op], level[source])
                    continue
                source = wiring.maker[source]
                if counted[source] != cluster:
                    counted[source] = cluster
                    if inside[source] != cluster and wiring.carries[source]:
                        extent[cluster, 2] += 1
            if us[op] > 0:
                level[op] += 1
                at_level[level[op]] += 1
            needed = wiring.users_ptr[op] == wiring.users_ptr[op + 1]
            for at in range(wiring.users_ptr[op], wiring.users_ptr[op + 1]):
                needed = needed or inside[wiring.users[at]] != cluster
            if needed:
                extent[cluster, 3] += 1
        extent[cluster, 0], extent[cluster, 1] = depth_and_width(at_level)
    return extent


@njit(nogil=True)
def _collect(ptr: Ints, members: Ints, tensors: Tensors, inputs: Ints, outputs: Ints, tensor: Ints, role: Ints) -> Ints:
    """Fill in what clusters read, make and hold; gives where the tensors of each begin, [n + 1]."""
    tensor_ptr = np.zeros(len(ptr), np.int64)
    inside = np.full(len(tensors.op), -1, np.int64)
    number, owner = np.zeros(len(tensors.type), np.int64), np.full(len(tensors.type), -1, np.int64)
    count = read = made = 0
    for cluster in range(len(ptr) - 1):
        first = count
        ops = members[ptr[cluster] : ptr[cluster + 1]]
        for op in ops:
            inside[op] = cluster
        for op in ops:
            for at in range(tensors.output_ptr[op], tensors.output_ptr[op + 1]):
                one = tensors.outputs[at]
                owner[one] = cluster
                number[one] = count - first
                tensor[count] = tensors.type[one]
                role[count] = _INNER
                for user in range(tensors.users_ptr[one], tensors.users_ptr[one + 1]):
                    if inside[tensors.users[user]] != cluster:
                        role[count] = _OUT
                outputs[made] = count - first
                count += 1
                made += 1
        for op in ops:
            for at in range(tensors.input_ptr[op], tensors.input_ptr[op + 1]):
                one = tensors.inputs[at]
                if owner[one] != cluster:
                    owner[one] = cluster
                    number[one] = count - first
                    tensor[count] = tensors.type[one]
                    role[count] = tensors.outside[one]
                    count += 1
                inputs[read] = number[one]
                read += 1
        tensor_ptr[cluster + 1] = count
    return tensor_ptr
