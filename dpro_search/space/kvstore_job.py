"""A recorded job of MXNet with parameter servers -> `ReplayGraph`, also with other servers, another slicing, other links.

KVStore sends each gradient as soon as its operator has ended. One of fewer elements than MXNET_KVSTORE_BIGARRAY_BOUND goes to one
server, which follows from its key; a larger one is cut into a slice for each server. A server copies the first worker's part, adds
the other ones, updates the weights once all are there, and sends them to all workers; an operator of the next step starts when its
weights are back. Messages between two processes follow each other; those of different pairs share the hosts' links.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dpro_search.collect.trace import SETTLING_STEPS, EventKind, Events, Floats, Ints, Trace
from dpro_search.errors import GraphError, InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.replay_graph import OrderPolicy, ReplayGraph

DEFAULT_BOUND = 1_000_000
_BOUND = "MXNET_KVSTORE_BIGARRAY_BOUND"
_GOODPUT = 1448 / 1514  # of Ethernet frames of 1514 bytes, what TCP carries
_QUANTUM_US = 1_000.0  # for so long an operator keeps a core that others want
_UPDATE = "_update"
_BACKWARD = " backward"
_OPS = (EventKind.OP, EventKind.KERNEL)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive operators of one worker: no weight is first used and no gradient ready but at its ends.

    Attributes
    ----------
    work_us
        Core time.
    uses, makes
        Tensors whose weights the first operator needs, and whose gradients are ready after the last.
    """

    kind: OpKind
    work_us: float
    uses: tuple[int, ...]
    makes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class KvstoreJob:
    """Workers, servers and what they cost.

    Attributes
    ----------
    workers
        Segments of each worker, in their order, [workers].
    tensor_bytes, element_bytes, key
        Of each tensor, [tensors].
    worker_core, server_core
        Core of each process; those of equal number share it, [workers] and [servers].
    bound
        Elements from which on a tensor is cut.
    bytes_per_us
        What a host's link carries in each direction; with None the processors are the limit.
    comm_us_per_byte
        CPU time of a process for each byte that it sends or receives.
    sum_us_per_byte, update_us_per_byte
        Core time of a server for each byte of one worker's part, and of the update.
    slice_us
        Core time of a server for each slice, whatever its size: messages, and the optimizer's own work.
    """

    workers: tuple[tuple[Segment, ...], ...]
    tensor_bytes: Floats
    element_bytes: Floats
    key: Ints
    worker_core: tuple[int, ...]
    server_core: tuple[int, ...]
    bound: int
    bytes_per_us: float | None
    comm_us_per_byte: float
    sum_us_per_byte: float
    update_us_per_byte: float
    slice_us: float

    def __post_init__(self) -> None:
        if not self.server_core or self.bound < 1 or (self.bytes_per_us is not None and not self.bytes_per_us > 0):
            raise InputError("a job needs at least one server, a bound of at least one element, and links with a rate above 0")

    def slices(self, tensor: int) -> list[tuple[int, float]]:
        """(server, bytes) of each slice of a tensor, by KVStore's rule."""
        servers = len(self.server_core)
        elements = round(float(self.tensor_bytes[tensor] / self.element_bytes[tensor]))
        if elements < self.bound:
            return [(int(self.key[tensor]) * 9973 % servers, float(self.tensor_bytes[tensor]))]
        cuts = np.round(np.arange(servers + 1) * elements / servers)
        return list(enumerate((np.diff(cuts) * self.element_bytes[tensor]).tolist()))


def goodput_bytes_per_us(rate_bps: float | None) -> float | None:
    """What TCP carries over a link of a rate; None stays None."""
    return None if rate_bps is None else rate_bps / 8e6 * _GOODPUT


def recorded_kvstore_job(trace: Trace) -> KvstoreJob:
    """The job as it was recorded.

    Raises
    ------
    GraphError
        The trace holds no gradient with a known size, or no server.
    """
    workers = _workers(trace)
    servers = trace.meta.ranks - workers
    sizes = np.array([tensor.size_bytes for tensor in trace.tensors], dtype=np.float64)
    if not len(sizes) or not sizes.all() or not all(tensor.node.startswith("key") for tensor in trace.tensors):
        raise GraphError("the trace's gradients have no known key and size: record a HybridBlock with 'dpro-search collect'")
    if servers < 1:
        raise GraphError("the trace holds no server: its profile is missing")
    free = max((*trace.meta.cores, -1)) + 1
    cores = tuple(core if core >= 0 else free + rank for rank, core in enumerate(trace.meta.cores))
    sum_us_per_byte, update_us_per_byte = _server_us_per_byte(trace)
    job = KvstoreJob(
        workers=tuple(_segments(trace, rank) for rank in range(workers)),
        tensor_bytes=sizes,
        element_bytes=np.array([np.dtype(tensor.dtype).itemsize for tensor in trace.tensors], dtype=np.float64),
        key=np.array([int(tensor.node.removeprefix("key")) for tensor in trace.tensors]),
        worker_core=cores[:workers],
        server_core=cores[workers:],
        bound=int(trace.meta.knobs.get(_BOUND, DEFAULT_BOUND)),
        bytes_per_us=goodput_bytes_per_us(trace.meta.rate_bps),
        comm_us_per_byte=float(np.mean([_untraced_us(trace, w, trace.steps.comm_cpu_us) for w in range(workers)]))
        / (2 * sizes.sum()),
        sum_us_per_byte=sum_us_per_byte,
        update_us_per_byte=update_us_per_byte,
        slice_us=0.0,
    )
    return replace(job, slice_us=_slice_us(trace, job))


def kvstore_graph(job: KvstoreJob) -> ReplayGraph:
    """The graph of one iteration, whose end carries over to the next."""
    return _KvstoreGraph(job).build()


# What was recorded


def _workers(trace: Trace) -> int:
    """Ranks that send gradients; the servers are those after them."""
    return len(np.unique(trace.events.rank[trace.events.kind == EventKind.COMM]))


def _untraced_us(trace: Trace, rank: int, column: Floats) -> float:
    """Median of a column at a rank's steps without the profiler, of all its steps if it always ran; 0 if it has none."""
    mine = trace.steps.rank == rank
    if not mine.any():
        return 0.0
    plain = mine & ~trace.steps.traced & (trace.steps.index >= SETTLING_STEPS)
    return float(np.median(column[plain if plain.any() else mine]))


def _slice_us(trace: Trace, job: KvstoreJob) -> float:
    """What the servers' CPU time leaves for each slice after what its bytes cost."""
    workers, servers = len(job.workers), len(job.server_core)
    used_us = sum(_untraced_us(trace, workers + server, trace.steps.compute_cpu_us) for server in range(servers))
    for_byte_us = workers * (2 * job.comm_us_per_byte + job.sum_us_per_byte) + job.update_us_per_byte
    slices = sum(len(job.slices(tensor)) for tensor in range(len(job.tensor_bytes)))
    return max(used_us - float(job.tensor_bytes.sum()) * for_byte_us, 0.0) / slices


def _segments(trace: Trace, rank: int) -> tuple[Segment, ...]:
    kept = np.isin(trace.events.kind, (*_OPS, EventKind.COMM))
    events = trace.events.select((trace.events.rank == rank) & kept & (trace.events.step >= 0))
    by_step = [events.select(events.step == step) for step in np.unique(events.step)]
    whole = max(by_step, key=lambda part: int((part.kind == EventKind.COMM).sum()))
    ops = _ops(whole)
    names = [trace.names[name] for name in ops.name]
    uses, makes = _users(trace, names), _makers(trace, whole, ops, names)
    mean_us = _mean_durations(by_step)
    seen: defaultdict[int, int] = defaultdict(int)
    work_us = []
    for name in ops.name.tolist():
        work_us.append(mean_us[name, seen[name]])
        seen[name] += 1
    # Operators also last while others have the core, and the script has core time beside them.
    used_us = _untraced_us(trace, rank, trace.steps.compute_cpu_us)
    scale = used_us / sum(work_us)
    segments: list[Segment] = []
    start = 0
    for i, name in enumerate(names):
        if makes[i] or i + 1 == len(names) or uses[i + 1]:
            is_backward = name.endswith(_BACKWARD) or name.startswith("_backward_")
            segments.append(
                Segment(
                    kind=OpKind.BACKWARD if is_backward else OpKind.FORWARD,
                    work_us=sum(work_us[start : i + 1]) * scale,
                    uses=uses[start],
                    makes=makes[i],
                )
            )
            start = i + 1
    return tuple(segments)


def _ops(step: Events) -> Events:
    """A step's operators in the order of their starts."""
    ops = step.select(np.isin(step.kind, _OPS))
    return ops.select(np.argsort(ops.start_us, kind="stable"))


def _mean_durations(steps: Sequence[Events]) -> dict[tuple[int, int], float]:
    """Mean duration of the i-th op of a name in a step, by (name, i)."""
    found: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for part in steps:
        ops = _ops(part)
        seen: defaultdict[int, int] = defaultdict(int)
        for name, duration in zip(ops.name.tolist(), (ops.end_us - ops.start_us).tolist(), strict=True):
            found[name, seen[name]].append(duration)
            seen[name] += 1
    return {key: float(np.mean(values)) for key, values in found.items()}


def _consumers(trace: Trace) -> dict[str, list[int]]:
    """Tensors that each node of the model's graph reads."""
    if not trace.graphs:
        return {}
    graph = trace.graphs[0]
    tensor_of = {tensor.name: number for number, tensor in enumerate(trace.tensors)}
    reads = {
        name: [tensor_of[graph.name[j]] for j in inputs if graph.name[j] in tensor_of]
        for name, inputs in zip(graph.name, np.split(graph.input_idx, graph.input_ptr[1:-1]), strict=True)
    }
    return {name: tensors for name, tensors in reads.items() if tensors}


def _users(trace: Trace, names: Sequence[str]) -> list[tuple[int, ...]]:
    """Tensors that each op is the first to need; those that no op is known to need are needed by the first."""
    reads, left = _consumers(trace), set(range(len(trace.tensors)))
    uses: list[tuple[int, ...]] = []
    for name in names:
        mine = [tensor for tensor in reads.get(name, []) if tensor in left]
        left -= set(mine)
        uses.append(tuple(mine))
    uses[0] = (*uses[0], *sorted(left))
    return uses


def _makers(trace: Trace, step: Events, ops: Events, names: Sequence[str]) -> list[tuple[int, ...]]:
    """Tensors whose gradients are ready after each op: its node's, else those sent after it and before the next had ended."""
    maker: dict[int, int] = {}
    for i, name in enumerate(names):
        if name.endswith(_BACKWARD):
            maker |= dict.fromkeys(_consumers(trace).get(name.removesuffix(_BACKWARD), []), i)
    sent = step.select(step.kind == EventKind.COMM)
    for tensor, start_us in zip(sent.tensor.tolist(), sent.start_us.tolist(), strict=True):
        maker.setdefault(tensor, max(int(np.searchsorted(ops.end_us, start_us, side="right")) - 1, 0))
    makes: list[list[int]] = [[] for _ in names]
    for tensor, i in sorted(maker.items()):
        makes[i].append(tensor)
    return [tuple(tensors) for tensors in makes]


def _server_us_per_byte(trace: Trace) -> tuple[float, float]:
    """Core time of a server for each byte of a worker's part, and of the update."""
    work = trace.events.select((trace.events.kind == EventKind.SERVER) & (trace.events.tensor >= 0))
    size = np.array([tensor.size_bytes for tensor in trace.tensors], dtype=np.float64)
    steps = len(np.unique(work.step))
    if not steps:
        raise GraphError("the trace holds no work of a server that was matched to a gradient")
    is_update = np.array([_UPDATE in name for name in trace.names])[work.name]
    duration = work.end_us - work.start_us
    workers = _workers(trace)
    total = float(size.sum()) * steps
    return float(duration[~is_update].sum()) / (total * workers), float(duration[is_update].sum()) / total


# The graph


class _KvstoreGraph:
    """Every process's core time is ops of its core's device: in pieces, served as they become ready, as a core is shared."""

    def __init__(self, job: KvstoreJob) -> None:
        self._job = job
        self._builder = GraphBuilder()
        cores = dict.fromkeys((*job.worker_core, *job.server_core))
        devices = self._builder.add_devices(np.arange(len(cores)), OrderPolicy.FIFO, "core{0}", (tuple(cores),))
        self._core = dict(zip(cores, devices.tolist(), strict=True))
        processes = len(job.worker_core) + len(job.server_core)
        rank = [list(cores).index(core) for core in (*job.worker_core, *job.server_core)]
        # A process sends to each other one in order.
        self._send = self._builder.add_devices(
            np.broadcast_to(np.array(rank)[:, None], (processes, processes)),
            OrderPolicy.FIFO,
            "{0} to {1}",
            (range(processes), range(processes)),
        )
        if job.bytes_per_us is not None:
            self._out, self._into = (self._builder.add_links(np.full(processes, job.bytes_per_us)) for _ in range(2))

    def build(self) -> ReplayGraph:
        job = self._job
        ready, wanted = self._compute()
        for tensor in range(len(job.tensor_bytes)):
            for part, (server, size) in enumerate(job.slices(tensor)):
                updated = self._served(f"tensor{tensor}.{part}", server, size, [ready[w][tensor] for w in range(len(ready))])
                for worker in range(len(job.workers)):
                    name = f"tensor{tensor}.{part}.pull@{worker}"
                    pulled = self._message(name, len(job.workers) + server, worker, size, updated)
                    self._builder.carry(pulled, wanted[worker][tensor])
        return self._builder.build()

    def _served(self, what: str, server: int, size: float, ready: Sequence[int]) -> int:
        """Push, sum and update a slice whose gradients are ready after these ops of the workers; returns the update."""
        job, core = self._job, self._core[self._job.server_core[server]]
        summed = []
        for worker, made in enumerate(ready):
            pushed = self._message(f"{what}.push@{worker}", worker, len(job.workers) + server, size, made)
            cost_us = size * job.sum_us_per_byte
            summed.append(self._builder.add_op(core, cost_us, name=f"{what}.sum@{worker}", kind=OpKind.SERVER, after=[pushed]))
        return self._builder.add_op(
            core, job.slice_us + size * job.update_us_per_byte, name=f"{what}.update", kind=OpKind.SERVER, after=summed
        )

    def _message(self, name: str, sender: int, receiver: int, size: float, after: int) -> int:
        """From a process to another: core time on both sides, and between them the way over their links."""
        job, builder = self._job, self._builder
        cores = (*job.worker_core, *job.server_core)
        cpu_us = size * job.comm_us_per_byte
        sent = builder.add_op(self._core[cores[sender]], cpu_us, name=f"{name}.send", kind=OpKind.COMM, after=[after])
        if job.bytes_per_us is not None:
            sent = builder.add_op(
                int(self._send[sender, receiver]),
                0.0,
                name=name,
                kind=OpKind.COMM,
                after=[sent],
                flow_bytes=size,
                links=[int(self._out[sender]), int(self._into[receiver])],
            )
        return builder.add_op(self._core[cores[receiver]], cpu_us, name=f"{name}.receive", kind=OpKind.COMM, after=[sent])

    def _compute(self) -> tuple[list[dict[int, int]], list[dict[int, int]]]:
        """Of each worker, the op that makes each tensor's gradient and the op that wants its weights."""
        ready: list[dict[int, int]] = []
        wanted: list[dict[int, int]] = []
        for worker, segments in enumerate(self._job.workers):
            device = self._core[self._job.worker_core[worker]]
            makes: dict[int, int] = {}
            uses: dict[int, int] = {}
            ops: list[int] = []
            for number, segment in enumerate(segments):
                first = len(ops)
                pieces = max(int(np.ceil(segment.work_us / _QUANTUM_US)), 1)
                for piece in range(pieces):
                    name = f"segment{number}.{piece}@{worker}"
                    ops.append(self._builder.add_op(device, segment.work_us / pieces, kind=segment.kind, name=name, after=ops[-1:]))
                uses |= dict.fromkeys(segment.uses, ops[first])
                makes |= dict.fromkeys(segment.makes, ops[-1])
            self._builder.carry(ops[-1], ops[0])
            ready.append(makes)
            wanted.append(uses)
        return ready, wanted
