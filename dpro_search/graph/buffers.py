"""Which buffers a rank's training step takes, who writes and reads them, and when: from an executed graph with tensor types.

A buffer is what tensors share: TensorFlow hands some tensors on without a copy (`VIEWS`), and some kernels write their result over
an input of equal size that no other op will read (`_IN_PLACE`, "forward_input_or_allocate_output" in its sources). Otherwise each
output is a buffer of its own, from the start of its op to the end of the last op that reads it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Floats, GraphTensors, Ints, NodeGraph, TensorType
from dpro_search.graph.dataflow import OpKind, StepMemory, topological_order, waits_for_gradients

_Tensor = tuple[int, int]  # node, output

_ARGUMENTS = frozenset(["_Arg", "Arg", "Placeholder", "VarHandleOp"])
_CONSTANTS = frozenset(["Const", "_HostConst"])
_BATCHES = frozenset(["_Arg", "Arg", "Placeholder", "IteratorGetNext", "IteratorGetNextSync", "IteratorGetNextAsOptional"])
VIEWS = frozenset([
    "Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient", "CheckNumerics", "EnsureShape",
    "ReadVariableOp", "_ReadVariablesOp", "Bitcast", "_Retval",
])  # fmt: skip
_IN_PLACE = frozenset([
    "Abs", "Add", "AddN", "AddV2", "BiasAdd", "Ceil", "ClipByValue", "Cos", "Div", "DivNoNan", "Elu", "EluGrad", "Erf", "Erfc",
    "Exp", "Expm1", "Floor", "FloorDiv", "FloorMod", "Inv", "InvGrad", "LeakyRelu", "LeakyReluGrad", "Log", "Log1p", "LogSoftmax",
    "Maximum", "Minimum", "Mul", "Neg", "OnesLike", "Pow", "RealDiv", "Reciprocal", "Relu", "Relu6", "Relu6Grad", "ReluGrad",
    "Round", "Rsqrt", "RsqrtGrad", "Select", "SelectV2", "Selu", "SeluGrad", "Sigmoid", "SigmoidGrad", "Sign", "Sin", "Softmax",
    "Softplus", "SoftplusGrad", "Softsign", "Sqrt", "SqrtGrad", "Square", "SquaredDifference", "Sub", "Tanh", "TanhGrad",
    "ZerosLike", "_UnaryOpsComposition",
])  # fmt: skip
# Between a gradient and what is communicated of it.
_SAME_SIZE = VIEWS | _IN_PLACE | {"Cast", "Transpose"}
_LEAST_US = 1e-3  # an op takes some time, whatever the clock's resolution


def step_memory(
    graph: NodeGraph, kinds: Ints, spans_us: Sequence[tuple[Floats, Floats]], gradient_bytes: Sequence[int]
) -> StepMemory | None:
    """The buffers of a step, in the order of that recorded one which takes the most; None if the recording has no tensor types.

    Parameters
    ----------
    kinds
        `OpKind` of every node, [v].
    spans_us
        Of each recorded step, start and end of every node, not finite where it did not run, [v] each.
    gradient_bytes
        Sizes of the communicated gradients.
    """
    if graph.tensors is None or not graph.tensors.types:
        return None
    # Steps hardly differ in what shares a buffer, but in how many gradients wait to be communicated.
    first = _Buffers(graph, graph.tensors, kinds, *spans_us[0]).result(gradient_bytes)
    ran = first.begin >= 0
    alike = [span for span in spans_us if np.array_equal(np.isfinite(span[0]) & np.isfinite(span[1]), ran)]
    orders = [_instants(*span, ran) for span in alike]
    most = max(range(len(alike)), key=lambda i: replace(first, begin=orders[i][0], end=orders[i][1]).taken_bytes())
    return _Buffers(graph, graph.tensors, kinds, *alike[most]).result(gradient_bytes)


class _Buffers:
    """Walks the nodes in the order in which they ran, and gives each tensor a buffer."""

    def __init__(self, graph: NodeGraph, tensors: GraphTensors, kinds: Ints, begin_us: Floats, end_us: Floats) -> None:
        self._graph, self._kinds = graph, kinds
        self._ran = np.isfinite(begin_us) & np.isfinite(end_us)
        self._begin, self._end = _instants(begin_us, end_us, self._ran)
        self._workspace = tensors.workspace_bytes
        self._inputs: list[list[_Tensor]] = [[] for _ in graph.name]
        self._readers: dict[_Tensor, list[int]] = {}
        self._type: dict[_Tensor, TensorType] = {}
        node_of_edge = np.repeat(np.arange(len(graph.name)), np.diff(graph.input_ptr))
        edges = (graph.input_idx, tensors.input_port, tensors.input_type, node_of_edge)
        for source, port, kind, node in zip(*(column.tolist() for column in edges), strict=True):
            if port >= 0:
                self._inputs[node].append((source, port))
                self._readers.setdefault((source, port), []).append(node)
                if kind >= 0:
                    self._type[source, port] = tensors.types[kind]
        self._ports: list[list[int]] = [[] for _ in graph.name]
        for source, port in sorted(self._type):
            self._ports[source].append(port)
        self._order = self._ordered()
        self._batch = self._found_batch()
        self._fixed = self._gradients()
        self._from_batch, self._after_comm = self._reached()
        self._buffer: dict[_Tensor, int] = {}
        self._size: list[int] = []
        self._of: list[tuple[TensorType, bool, bool]] = []  # type, scales, persistent
        self._writers: list[list[int]] = []
        self._held: list[list[int]] = []  # nodes that read a tensor of the buffer

    def result(self, gradient_bytes: Sequence[int]) -> StepMemory:
        for node in self._order:
            self._visit(node)
        graph = self._graph
        uses = [
            (buffer, op)
            for buffer, readers in enumerate(self._held)
            for op in dict.fromkeys(readers)
            if self._ran[op] and graph.op[op] not in VIEWS
        ]
        columns = np.array(uses, dtype=np.int64).reshape(-1, 2)
        scales = np.array([scales for _, scales, _ in self._of], dtype=np.bool_)
        return StepMemory(
            op_name=graph.name,
            begin=self._begin,
            end=self._end,
            backward=np.isin(self._kinds, (OpKind.UPDATE, OpKind.COMM))
            | waits_for_gradients(self._kinds, graph.op, graph.input_ptr, graph.input_idx),
            workspace_bytes=np.where(self._ran, self._workspace, 0).astype(np.float64),
            workspace_scales=np.array([self._workspace_scales(node) for node in range(len(graph.name))], dtype=np.bool_),
            size_bytes=np.array(self._size, dtype=np.float64),
            scales=scales,
            is_float32=np.array([kind.dtype == "float32" for kind, _, _ in self._of], dtype=np.bool_),
            persistent=np.array([persistent for _, _, persistent in self._of], dtype=np.bool_),
            writer_ptr=np.cumsum([0, *map(len, self._writers)], dtype=np.int64),
            writer_op=np.array([op for writers in self._writers for op in writers], dtype=np.int64),
            use_buffer=columns[:, 0],
            use_op=columns[:, 1],
            assigned=np.array(self._assigned(), dtype=np.int64).reshape(-1, 2),
            gradient_bytes=np.array(gradient_bytes, dtype=np.float64),
            first_post=int(self._begin[(self._kinds == OpKind.COMM) & self._ran].min(initial=2 * len(graph.name))),
            instants=2 * int(self._ran.sum()) + 1,
            batch=self._batch,
        )

    def _assigned(self) -> list[tuple[int, int]]:
        assignments = []
        for node in np.flatnonzero(self._ran).tolist():
            if self._graph.op[node] == "AssignVariableOp" and len(self._inputs[node]) > 1:
                variable, value = (self._buffer.get(tensor, -1) for tensor in self._inputs[node][:2])
                if min(variable, value) >= 0 and not self._of[value][2] and self._size[variable] == self._size[value]:
                    assignments.append((value, variable))
        return assignments

    def _visit(self, node: int) -> None:
        kind, inputs = self._graph.op[node], self._inputs[node]
        if kind in _ARGUMENTS or kind in _CONSTANTS:
            for port in self._ports[node] or [0]:
                output_type = self._type.get((node, port)) or self._variable((node, port))
                if output_type is not None:
                    is_batch = kind in _BATCHES and bool(output_type.shape) and output_type.shape[0] == self._batch
                    self._allocate((node, port), output_type, is_batch and (node, port) in self._type, None)
        elif kind in VIEWS:
            for port in self._ports[node]:
                source = inputs[min(port, len(inputs) - 1)] if inputs else None
                if source in self._buffer:
                    self._share((node, port), self._buffer[source])
                elif self._ran[node]:
                    self._allocate((node, port), self._type[node, port], self._scales((node, port)), node)
        elif self._ran[node]:
            for port in self._ports[node]:
                target = self._overwritten(node, port) if kind in _IN_PLACE else None
                if target is None:
                    self._allocate((node, port), self._type[node, port], self._scales((node, port)), node)
                else:
                    self._writers[target].append(node)
                    self._share((node, port), target)

    def _allocate(self, tensor: _Tensor, kind: TensorType, scales: bool, writer: int | None) -> None:
        """A new buffer; without a writer, one that stays."""
        self._size.append(kind.size_bytes)
        self._of.append((kind, scales, writer is None))
        self._writers.append([] if writer is None else [writer])
        self._held.append([])
        self._share(tensor, len(self._size) - 1)

    def _share(self, tensor: _Tensor, buffer: int) -> None:
        self._buffer[tensor] = buffer
        self._held[buffer] += self._readers.get(tensor, [])

    def _overwritten(self, node: int, port: int) -> int | None:
        """The buffer that an output of an op takes over from an input that no other op reads any more."""
        buffers = [self._buffer.get(tensor, -1) for tensor in self._inputs[node]]
        output_type = self._type[node, port]
        for tensor, buffer in zip(self._inputs[node], buffers, strict=True):
            fits = buffer >= 0 and not self._of[buffer][2] and self._type.get(tensor, output_type).dtype == output_type.dtype
            if fits and self._size[buffer] == output_type.size_bytes and buffers.count(buffer) == 1:
                others = (op for op in self._held[buffer] if op != node and self._ran[op])
                if all(self._end[op] <= self._begin[node] for op in others):
                    return buffer
        return None

    def _variable(self, handle: _Tensor) -> TensorType | None:
        """Type of the variable behind a handle, by what is read from it or assigned to it."""
        for reader in self._readers.get(handle, []):
            kind = self._graph.op[reader]
            tensor = (reader, 0) if kind == "ReadVariableOp" else None
            if kind.startswith("Assign") and len(self._inputs[reader]) > 1:
                tensor = self._inputs[reader][1]
            if tensor in self._type:
                return self._type[tensor]
        return None

    def _found_batch(self) -> int:
        """The commonest leading size of what the step is fed with; of equally common ones the least."""
        fed = [kind for (node, _), kind in self._type.items() if self._graph.op[node] in _BATCHES and kind.shape]
        counts = Counter(kind.shape[0] for kind in fed if kind.shape[0] > 1)
        return min(counts, key=lambda size: (-counts[size], size), default=0)

    def _gradients(self) -> set[_Tensor]:
        """Tensors that are gradients of parameters: what is communicated, and what it was before its shape or scale was changed."""
        comm = np.flatnonzero(self._kinds == OpKind.COMM).tolist()
        left = [tensor for node in comm for tensor in self._inputs[node]]
        gradients: set[_Tensor] = set()
        while left:
            tensor = left.pop()
            if tensor in gradients or tensor not in self._type:
                continue
            gradients.add(tensor)
            if self._graph.op[tensor[0]] in _SAME_SIZE:
                size = self._type[tensor].elements
                left += [
                    source for source in self._inputs[tensor[0]] if source in self._type and self._type[source].elements == size
                ]
        return gradients

    def _reached(self) -> tuple[set[int], set[int]]:
        """Nodes that need the batch, and nodes that need what was communicated."""
        graph = self._graph
        from_batch = {
            node for (node, _), kind in self._type.items() if graph.op[node] in _BATCHES and kind.shape[:1] == (self._batch,)
        }
        after_comm = set(np.flatnonzero(self._kinds == OpKind.COMM).tolist())
        for node in self._order:
            sources = [source for source, _ in self._inputs[node]]
            if any(source in from_batch for source in sources):
                from_batch.add(node)
            if any(source in after_comm for source in sources):
                after_comm.add(node)
        return from_batch, after_comm

    def _scales(self, tensor: _Tensor) -> bool:
        kind, node = self._type[tensor], tensor[0]
        if not self._batch or tensor in self._fixed or node not in self._from_batch or node in self._after_comm:
            return False
        return kind.elements == self._batch if len(kind.shape) < 2 else kind.elements % self._batch == 0

    def _workspace_scales(self, node: int) -> bool:
        """Whether an op's workspace grows with the batch: as that of its tensors does which is nearest to it in size."""
        if not self._workspace[node] or not self._ran[node]:
            return False
        tensors = [tensor for tensor in self._inputs[node] if tensor in self._buffer]
        tensors += [(node, port) for port in self._ports[node] if (node, port) in self._buffer]
        buffers = [self._buffer[tensor] for tensor in tensors if self._size[self._buffer[tensor]] > 0]
        near = min(buffers, key=lambda buffer: abs(math.log(self._size[buffer] / self._workspace[node])), default=None)
        return near is not None and self._of[near][1]

    def _ordered(self) -> list[int]:
        """Nodes as they ran; one that did not comes with the last of what it needs."""
        graph = self._graph
        place = self._begin.astype(np.int64)
        order = topological_order(graph.input_ptr, graph.input_idx)
        for node in order:
            if not self._ran[node]:
                place[node] = place[graph.input_idx[graph.input_ptr[node] : graph.input_ptr[node + 1]]].max(initial=-1)
        rank = np.full(len(graph.name), len(graph.name))
        rank[order] = np.arange(len(order))
        return [int(node) for node in np.lexsort((rank, place))]


def _instants(begin_us: Floats, end_us: Floats, ran: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Places of the starts and ends of ops in their order; at equal times ends come first. -1 for ops that did not run."""
    count = int(ran.sum())
    times = np.concatenate((begin_us[ran], np.maximum(end_us[ran], begin_us[ran] + _LEAST_US)))
    order = np.lexsort((np.arange(2 * count) < count, times))
    place = np.empty(2 * count, dtype=np.int64)
    place[order] = np.arange(2 * count)
    begin, end = np.full(len(ran), -1), np.full(len(ran), -1)
    begin[ran], end[ran] = place[:count], place[count:]
    return begin, end
