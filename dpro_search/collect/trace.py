"""The `Trace`: everything recorded of one job, in columns, as one folder on disk (``trace.npz`` and ``meta.json``)."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dpro_search.collect._files import DAMAGED, written_folder
from dpro_search.collect.modules import ModuleCalls, ModuleInfo
from dpro_search.collect.trace_check import check, packed, read_columns, widened
from dpro_search.errors import InputError, TraceFormatError, TraceVersionError

TRACE_VERSION = 1
SETTLING_STEPS = 4  # the first steps of a job also allocate memory and fill caches
_MOST_OF_A_KNOB = 1e15  # bytes, or anything smaller

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class EventKind(enum.IntEnum):
    """What an event is. `COMM` and all later kinds carry a tensor, but for `CYCLE`."""

    OP = 0  # a computation op that ran on a rank
    COMM = 1  # a tensor's communication as its rank sees it: from the enqueue to the completion callback
    NEGOTIATE = 2  # from the first rank that posted the tensor to the last
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


class DependencyKind(enum.IntEnum):
    """Why an event could not start before another had ended (for LAUNCH: had started); order on a stream goes without saying."""

    LAUNCH = 0  # a device op after the start of the host call that launched it
    EVENT = 1  # a stream waited for an event recorded on another stream
    SYNC = 2  # a host call waited for a device op
    DATA = 3  # an op used another's result
    HOST = 4  # a thread waited for another thread


@dataclass(frozen=True, kw_only=True)
class Events:
    """n events, one entry a column. Times are microseconds on the aligned clock."""

    name: Ints  # index into Trace.names
    kind: Ints  # EventKind
    rank: Ints
    stream: Ints  # thread or device stream within the rank
    start_us: Floats
    end_us: Floats
    step: Ints  # index of the training step; -1: outside any
    tensor: Ints  # index into Trace.tensors; -1: none
    collective: Ints  # events of one number moved in the same (fused) collective; -1: none
    size_bytes: Ints

    def __len__(self) -> int:
        return len(self.name)

    def select(self, mask: npt.NDArray[Any]) -> Events:
        """The events under a boolean mask or an index array."""
        return Events(**{f.name: getattr(self, f.name)[mask] for f in fields(self)})


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """Recorded dependencies between events, beyond the order on a stream: `target` needed `source`, [k] each."""

    source: Ints  # index of an event
    target: Ints
    kind: Ints  # DependencyKind

    @staticmethod
    def none() -> Dependencies:
        """Of a trace whose format records none, or keeps them in its graphs."""
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
    """The tensors along a graph's edges, and the memory that its nodes take beside them.

    Attributes
    ----------
    types
        The distinct types, in no order.
    input_port
        Of each edge, which output of the producing node it is; -1: a control edge. [edges]
    input_type
        Of each edge, index into `types`; -1: a control edge, a variable's handle, or not seen. [edges]
    workspace_bytes
        Of each node, the most that it took and gave back while it ran; 0 where that is less than the allocator counts. [v]
    """

    types: tuple[TensorType, ...]
    input_port: Ints
    input_type: Ints
    workspace_bytes: Ints


@dataclass(frozen=True, kw_only=True)
class NodeGraph:
    """The executed graph of a rank: v nodes and their inputs (data and control) in CSR form."""

    name: tuple[str, ...]
    op: tuple[str, ...]  # op type, "MatMul"
    input_ptr: Ints  # [v + 1]
    input_idx: Ints  # [edges], indices of the producing nodes
    tensors: GraphTensors | None = None  # None: the recording says nothing of them


class TensorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A gradient that is communicated."""

    name: str  # the communication library's name, equal on every rank
    node: str  # the graph node that posts it
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


class AllocatorReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the framework's own allocator counted in the profiled steps, of the rank that took the most.

    TensorFlow's on a CPU ("mklcpu") leaves out whatever is smaller than 256 KiB.
    """

    name: str
    peak_bytes: int  # most in use, in pieces as the allocator hands them out
    requested_peak_bytes: int  # the same, but of what was taken in these steps only as much as was asked for
    least_bytes: int  # least in use: what stays from step to step


class CommSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The communication library's knobs as recorded."""

    fusion_threshold_bytes: int
    cycle_time_us: float
    groups: tuple[tuple[str, ...], ...] | None = None  # tensor names of exact groups; None: dynamic fusion


class ClockReport(msgspec.Struct, frozen=True, kw_only=True):
    """How the ranks' clocks were aligned: what was subtracted, and what stays unknown."""

    offset_us: tuple[float, ...]  # per rank, 0 for rank 0
    residual_us: tuple[float, ...]  # per rank: half-width of a 95 % interval of the offset
    method: str


class TraceMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Provenance and settings of a recording."""

    version: int = TRACE_VERSION
    framework: str
    comm: str
    ranks: int
    hosts: tuple[str, ...]  # host of each rank
    cores: tuple[int, ...]  # core of each rank, -1 where not pinned
    rate_bps: float | None = None  # shaped link rate per host and direction; None: not shaped
    settings: CommSettings | None = None  # None: not a Horovod job
    format: str = "tensorflow-horovod"  # what the raw files were
    clock: ClockReport
    versions: dict[str, str] = {}
    knobs: dict[str, str] = {}  # settings of the communication library, by the name of their environment variable
    command: tuple[str, ...] = ()
    machine: str = ""
    recorded_at: str = ""
    overhead_pct: float | None = None  # traced over untraced steps
    peak_rss_bytes: int | None = None  # largest of all ranks
    allocator: AllocatorReport | None = None
    idle_cycle_cpu_us: float | None = None  # CPU time of one wake-up of the communication thread with nothing to do
    dropped: dict[str, int] = {}  # raw events that were left out, by reason
    warnings: tuple[str, ...] = ()

    @property
    def ranks_per_host(self) -> int | None:
        """Ranks side by side on each of several hosts; 1 where all are on one, without links; None: hosts differ."""
        runs = [(host, len(list(ranks))) for host, ranks in itertools.groupby(self.hosts)]
        if len(runs) == 1:
            return 1
        alike = len({count for _, count in runs}) == 1 and len({host for host, _ in runs}) == len(runs)
        return runs[0][1] if alike else None

    def number_knob(self, name: str, unset: float, *, least: float = 0) -> float:
        """A knob that is a number, `unset` where it was not recorded; raises `InputError` if it is none, or below `least`."""
        text = self.knobs.get(name)
        if text is None:
            return unset
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= _MOST_OF_A_KNOB:
            raise InputError(f"meta.json: knobs: {name}={text}: must be a number >= {least:g}; record the job again")
        return value


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One recorded job. `graph_of_rank[r]` indexes `graphs`: ranks that run the same graph share it."""

    meta: TraceMeta
    names: tuple[str, ...]
    events: Events
    steps: Steps
    tensors: tuple[TensorInfo, ...]
    graphs: tuple[NodeGraph, ...]
    graph_of_rank: tuple[int, ...]
    dependencies: Dependencies = dataclasses.field(default_factory=Dependencies.none)
    modules: tuple[ModuleInfo, ...] = ()  # none: not of PyTorch's DDP, or recorded before they were kept
    module_calls: ModuleCalls = dataclasses.field(default_factory=ModuleCalls.none)

    @property
    def horovod_settings(self) -> CommSettings:
        """Horovod's knobs; raises `InputError` for a trace of another kind."""
        if self.meta.settings is None:
            raise InputError(f"the trace ({self.meta.format}) is not of a Horovod job: its knobs are not known")
        return self.meta.settings

    def iterations_us(self, *, traced: bool = False) -> Floats:
        """Distances between the starts of consecutive steps on rank 0: the measured iterations, without the job's first steps.

        Iterations beside a start or a stop of the profiler are left out, for they hold its own work. MXNet's engine runs behind the
        script, and has nothing left to do after such a switch: there, the iteration after it is short, and left out as well.
        """
        mine = self.steps.select(self.steps.rank == 0)
        kind = mine.traced
        steady = (kind[:-1] == kind[1:]) & (kind[:-1] == traced) & (mine.index[:-1] >= SETTLING_STEPS)
        if self.meta.framework == "mxnet":
            steady[1:] &= kind[:-2] == kind[1:-1]
        distances: Floats = np.diff(mine.start_us)[steady]
        return distances

    def save(self, folder: Path) -> None:
        """Write the folder under a temporary name, then rename it; raises `InputError` if it exists already."""
        with written_folder(folder) as tmp:
            columns = {f"events.{f.name}": packed(getattr(self.events, f.name)) for f in fields(Events)}
            columns |= {f"steps.{f.name}": packed(getattr(self.steps, f.name)) for f in fields(Steps)}
            columns |= {f"dependencies.{f.name}": packed(getattr(self.dependencies, f.name)) for f in fields(Dependencies)}
            if self.modules:
                columns |= {f"modules.{f.name}": packed(getattr(self.module_calls, f.name)) for f in fields(ModuleCalls)}
            for i, graph in enumerate(self.graphs):
                columns[f"graph{i}.input_ptr"] = packed(graph.input_ptr)
                columns[f"graph{i}.input_idx"] = packed(graph.input_idx)
                for column in _TENSOR_COLUMNS if graph.tensors else ():
                    columns[f"graph{i}.{column}"] = packed(getattr(graph.tensors, column))
            strings = _Strings(
                names=self.names,
                tensors=self.tensors,
                graph_of_rank=self.graph_of_rank,
                modules=self.modules,
                graphs=tuple(
                    _GraphStrings(name=g.name, op=g.op, types=g.tensors.types if g.tensors else None) for g in self.graphs
                ),
            )
            columns["strings"] = np.frombuffer(msgspec.json.encode(strings), dtype=np.uint8)
            np.savez_compressed(tmp / "trace.npz", **columns)  # type: ignore[arg-type]
            (tmp / "meta.json").write_bytes(msgspec.json.format(msgspec.json.encode(self.meta), indent=1) + b"\n")

    @staticmethod
    def load(folder: Path) -> Trace:
        """Read a folder written by `save`.

        Raises
        ------
        InputError
            The folder or one of its files is missing.
        TraceVersionError
            Written by another version.
        TraceFormatError
            A file is damaged.
        """
        for name in ("meta.json", "trace.npz"):
            if not (folder / name).is_file():
                raise InputError(f"{folder}: not a trace folder, {name} is missing; make one with 'dpro-search collect'")
        raw = (folder / "meta.json").read_bytes()
        try:
            version = msgspec.json.decode(raw, type=_Version).version
            if version != TRACE_VERSION:
                raise TraceVersionError(
                    f"{folder}/meta.json: trace version {version}, this program reads {TRACE_VERSION}; record it again"
                )
            meta = msgspec.json.decode(raw, type=TraceMeta)
        except DAMAGED as error:
            raise TraceFormatError(f"{folder}/meta.json: {error}") from error
        try:
            columns = read_columns(folder / "trace.npz")
            strings = msgspec.json.decode(columns["strings"].tobytes(), type=_Strings)
            events = Events(**{f.name: widened(columns[f"events.{f.name}"]) for f in fields(Events)})
            steps = Steps(**{f.name: widened(columns[f"steps.{f.name}"]) for f in fields(Steps)})
            none = np.zeros(0, np.int32)  # of traces written before there were dependencies
            dependencies = Dependencies(
                **{f.name: widened(columns.get(f"dependencies.{f.name}", none)) for f in fields(Dependencies)}
            )
            calls = ModuleCalls.none()
            if strings.modules:
                # Of traces from before ends were kept, whose modules say nothing of bfloat16.
                columns.setdefault("modules.end_us", columns["modules.again_us"])
                columns.setdefault("modules.backward_end_us", columns["modules.backward_us"])
                calls = ModuleCalls(**{f.name: widened(columns[f"modules.{f.name}"]) for f in fields(ModuleCalls)})
            graphs = tuple(
                NodeGraph(
                    name=g.name,
                    op=g.op,
                    input_ptr=widened(columns[f"graph{i}.input_ptr"]),
                    input_idx=widened(columns[f"graph{i}.input_idx"]),
                    tensors=_tensors(g, columns, f"graph{i}"),
                )
                for i, g in enumerate(strings.graphs)
            )
        except (KeyError, ValueError, TypeError, OverflowError, OSError, *DAMAGED) as error:
            raise TraceFormatError(f"{folder}/trace.npz: damaged or cut off ({error}); record it again") from error
        trace = Trace(
            meta=meta,
            names=strings.names,
            events=events,
            steps=steps,
            tensors=strings.tensors,
            graphs=graphs,
            graph_of_rank=strings.graph_of_rank,
            dependencies=dependencies,
            modules=strings.modules,
            module_calls=calls,
        )
        try:
            check(trace)
        except ValueError as error:
            raise TraceFormatError(f"{folder}/trace.npz: does not fit together ({error}); record it again") from error
        return trace


class _Version(msgspec.Struct):
    version: int


class _GraphStrings(msgspec.Struct, frozen=True):
    name: tuple[str, ...]
    op: tuple[str, ...]
    types: tuple[TensorType, ...] | None = None


class _Strings(msgspec.Struct, frozen=True):
    names: tuple[str, ...]
    tensors: tuple[TensorInfo, ...]
    graph_of_rank: tuple[int, ...]
    graphs: tuple[_GraphStrings, ...]
    modules: tuple[ModuleInfo, ...] = ()


_TENSOR_COLUMNS = ("input_port", "input_type", "workspace_bytes")


def _tensors(graph: _GraphStrings, columns: dict[str, npt.NDArray[Any]], prefix: str) -> GraphTensors | None:
    if graph.types is None:
        return None
    found = GraphTensors(types=graph.types, **{name: widened(columns[f"{prefix}.{name}"]) for name in _TENSOR_COLUMNS})
    edges = len(columns[f"{prefix}.input_idx"])
    lengths = [len(found.input_port), len(found.input_type), len(found.workspace_bytes)]
    if lengths != [edges, edges, len(graph.name)] or found.input_type.max(initial=-1) >= len(graph.types):
        raise ValueError("the tensors do not fit their graph")
    return found
