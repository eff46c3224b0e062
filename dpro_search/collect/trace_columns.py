"""The tables of a trace: events, dependencies and steps in columns, executed graphs, and the small tables that columns index."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.signedinteger[Any]]  # as narrow as their values

_UNKNOWN: Codes = np.full(1, -1, np.int8)  # stands for a column of which nothing is known


class EventKind(enum.IntEnum):
    """The kind of an event. `COMM` and all later kinds except `CYCLE` carry a tensor."""

    OP = 0  # a computation op that ran on a rank
    COMM = 1  # a tensor's communication as its rank sees it: from the enqueue to the completion callback
    NEGOTIATE = 2  # from the first rank that enqueued the tensor to the last
    QUEUE = 3  # ready on every rank, waiting for its turn
    MEMCPY_IN = 4  # copy into the fusion buffer
    ALLREDUCE = 5  # the transfer and the reduction
    MEMCPY_OUT = 6  # copy out of the fusion buffer
    CYCLE = 7  # an instant: the communication thread of the recording rank woke up
    KERNEL = 8  # computation on a device stream
    COPY = 9  # a copy or fill on a device stream
    COLLECTIVE = 10  # a rank's part of a collective or a message, on a device stream or a communication thread; holds its wait
    RUNTIME = 11  # a host call that launches work on a device
    SYNC = 12  # a host call that waits for a device
    SERVER = 13  # work of a parameter server's thread; `rank` is the server's, counted after the workers
    UNKNOWN = 14  # work of a device of which it is not known whether it computes or communicates


class CollectiveKind(enum.IntEnum):
    """Which communication an event is a part of, whatever library carries it out.

    The collectives are those of MPI and NCCL. `PUSH` and `PULL` are what a worker exchanges with a parameter server, `SEND` and
    `RECV` the two ends of a message. What moves data by an all-reduce but is enqueued as something else (a barrier, a
    reduce-scatter of Gloo) is what it was enqueued as.
    """

    UNKNOWN = -1  # no communication, or the format does not have it
    ALL_REDUCE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2
    BROADCAST = 3
    REDUCE = 4
    ALL_TO_ALL = 5
    SEND = 6
    RECV = 7
    BARRIER = 8
    GATHER = 9
    SCATTER = 10
    PUSH = 11
    PULL = 12

    @property
    def label(self) -> str:
        """In lower case without underscores, as libraries' logs have it: "allreduce"."""
        return self.name.lower().replace("_", "")


class Role(enum.IntEnum):
    """The role of an event within a training step."""

    UNKNOWN = -1
    FORWARD = 0
    BACKWARD = 1
    UPDATE = 2  # the optimizer's work, on a worker or on a server
    COPY = 3  # into or out of a buffer that is communicated, or a server's copy of what a worker pushed
    LOADING = 4  # the training thread reads input, or waits for who does


class DependencyKind(enum.IntEnum):
    """Why an event could not start before another had ended (for LAUNCH: had started); order on a stream goes without saying."""

    LAUNCH = 0  # a device op after the start of the host call that launched it
    EVENT = 1  # a stream waited for an event recorded on another stream
    SYNC = 2  # a host call waited for a device op
    DATA = 3  # an op used another's result
    HOST = 4  # a thread waited for another thread
    INFERRED = 5  # nothing records it, but the event follows the end of the op in every step (`readers.kineto.device_waits`)


@dataclass(frozen=True, kw_only=True)
class Events:
    """n events, one entry a column. Times are microseconds on the aligned clock.

    The columns from `collective_kind` on describe what an event is about. They are codes as narrow as their values; -1 stands for
    what does not apply or is unknown. A column that is left out is -1 throughout, and then takes no memory and no room in the file.
    Tables that columns index belong to the `Trace`: an entry stands there once, however many events have it.
    """

    name: Ints  # Index into `Trace.names`. A label: nothing is decided from a name once a reader has seen it.
    kind: Ints  # `EventKind`.
    rank: Ints  # Rank in which it ran; parameter servers are counted after the workers.
    stream: Ints  # Thread or device stream within the rank.
    # start_us, end_us: Microseconds.
    start_us: Floats
    end_us: Floats
    step: Ints  # Index of the training step; -1: outside any.
    tensor: Ints  # Index into `Trace.tensors`; -1: none.
    collective: Ints  # Events of one number moved in the same (fused) collective, or copied what it moves; -1: none.
    size_bytes: Ints  # Bytes that are communicated or copied.
    # `CollectiveKind`, of all events of a communication: its enqueue, copies and transfer.
    collective_kind: Codes = field(default_factory=lambda: _UNKNOWN)
    group: Codes = field(default_factory=lambda: _UNKNOWN)  # Index into `Trace.groups`: the process group that communicates.
    # Index into `Trace.dtypes`: element type of what is communicated, else of an op's first tensor.
    dtype: Codes = field(default_factory=lambda: _UNKNOWN)
    # Index into `Trace.shapes`: shapes of the inputs of an op, or of that which launched a kernel.
    shapes: Codes = field(default_factory=lambda: _UNKNOWN)
    role: Codes = field(default_factory=lambda: _UNKNOWN)  # `Role`.
    # op, module, source: Indices into `Trace.names` of where a device's op (without devices, any op) comes from: the framework's op
    # that launched it, the path of the module that called that op, or whose forward pass it differentiates, and the line of the
    # user's code.
    op: Codes = field(default_factory=lambda: _UNKNOWN)
    module: Codes = field(default_factory=lambda: _UNKNOWN)
    source: Codes = field(default_factory=lambda: _UNKNOWN)

    def __post_init__(self) -> None:
        for name in DESCRIPTIONS:
            if getattr(self, name) is _UNKNOWN:
                object.__setattr__(self, name, np.broadcast_to(_UNKNOWN, len(self.name)))

    def __len__(self) -> int:
        return len(self.name)

    def select(self, mask: npt.NDArray[Any]) -> Events:
        """The events under a boolean mask or an index array."""
        return Events(**{f.name: getattr(self, f.name)[mask] for f in fields(self)})


# Columns of `Events` that may be left out, and the type in which readers build them.
DESCRIPTIONS: Mapping[str, type[np.signedinteger[Any]]] = {
    "collective_kind": np.int8,
    "group": np.int32,
    "dtype": np.int32,
    "shapes": np.int32,
    "role": np.int8,
    "op": np.int32,
    "module": np.int32,
    "source": np.int32,
}

Shapes = tuple[tuple[int, ...], ...]


class ProcessGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that communicate with each other."""

    # name, description: As the framework has them, "7" and "mesh_tp"; empty where unknown.
    name: str = ""
    description: str = ""
    # As the job numbers them, in order; a recording of some ranks may count its own otherwise. Empty: unknown.
    ranks: tuple[int, ...] = ()
    size: int = -1  # Number of ranks, also where they are not listed; -1: unknown.


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """Recorded dependencies between events, beyond the order on a stream: `target` needed `source`, [k] each."""

    source: Ints  # index of an event
    target: Ints
    kind: Ints  # DependencyKind

    @staticmethod
    def none() -> Dependencies:
        """The columns of a trace whose format records no dependencies, or keeps them in its graphs."""
        return Dependencies(**{f.name: np.zeros(0, np.int64) for f in fields(Dependencies)})

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """m training steps of all ranks (rank-major): the ground truth, measured around the step call by the hook."""

    rank: Ints
    index: Ints
    start_us: Floats
    end_us: Floats
    traced: npt.NDArray[np.bool_]  # False: no profiler ran, so the duration is the truth
    compute_cpu_us: Floats  # CPU time of the process's threads but the communication's, from this step's start to the next's
    comm_cpu_us: Floats  # CPU time of the communication library's threads, likewise

    def __len__(self) -> int:
        return len(self.rank)

    def select(self, mask: npt.NDArray[Any]) -> Steps:
        """The steps under a boolean mask or an index array."""
        return Steps(**{f.name: getattr(self, f.name)[mask] for f in fields(self)})


@dataclass(frozen=True, kw_only=True)
class MemorySamples:
    """Memory that the allocator of each rank's device (or of its host) had handed out, k counts in no order."""

    rank: Ints
    time_us: Floats
    allocated_bytes: Ints

    @staticmethod
    def none() -> MemorySamples:
        """The columns of a recording without counts of memory."""
        return MemorySamples(rank=np.zeros(0, np.int64), time_us=np.zeros(0), allocated_bytes=np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.rank)


class TensorType(msgspec.Struct, frozen=True, array_like=True):
    """Element type and shape of a tensor, "float32" and (8, 64)."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Size; an element of an unknown type is taken for 4 bytes."""
        return self.elements * _ELEMENT_BYTES.get(self.dtype, 4)


_ELEMENT_BYTES = {"float64": 8, "int64": 8, "uint64": 8, "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2}
_ELEMENT_BYTES |= {"int8": 1, "uint8": 1, "bool": 1}


@dataclass(frozen=True, kw_only=True)
class GraphTensors:
    """The tensors along a graph's edges, and the memory that its nodes take beside them."""

    types: tuple[TensorType, ...]  # The distinct types, in no order.
    input_port: Ints  # Of each edge, which output of the producing node it is; -1: a control edge. [edges]
    input_type: Ints  # Of each edge, index into `types`; -1: a control edge, a variable's handle, or not seen. [edges]
    # Of each node, the most that it took and gave back while it ran; 0 where that is less than the allocator counts. [v]
    workspace_bytes: Ints


@dataclass(frozen=True, kw_only=True)
class NodeGraph:
    """The executed graph of a rank: v nodes and their inputs (data and control) in CSR form."""

    name: tuple[str, ...]
    op: tuple[str, ...]  # op type, "MatMul"
    input_ptr: Ints  # [v + 1]
    input_idx: Ints  # [edges], indices of the producing nodes
    tensors: GraphTensors | None = None  # None: the recording does not have them
    backward: npt.NDArray[np.bool_] | None = None  # [v], nodes that the framework made for the backward pass; None: not known


class TensorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A gradient that is communicated."""

    name: str  # the communication library's name, equal on every rank
    node: str  # the graph node that enqueues it
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
