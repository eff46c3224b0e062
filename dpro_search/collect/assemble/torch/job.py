"""Raw files of a recorded distributed PyTorch job (DistributedDataParallel, or ``fully_shard``) -> `Trace`.

`files.py` reads the files, `events.py` makes a rank's events, `modules.py` determines what is known of the model's modules.

What the events are, on each rank and in each profiled step:

* OP: the outermost operators of each thread, named ``annotation/operator`` where one of PyTorch's annotations is around them.
  In the backward pass these are the autograd engine's functions; AccumulateGrad holds the copy of a gradient into its bucket.
  Where FSDP works inside of one, and waits there, it is what the function consists of.
* COMM: a gradient, from when it is in its bucket (or is enqueued with its unit) to the completion of the collective.
  ``TensorInfo.node`` names the bucket or unit; DDP's tensors are in the order in which gradients become ready.
* COLLECTIVE: a bucket's all-reduce, a unit's ``all_gather of UNIT`` or ``reduce_scatter of UNIT``, or what else was enqueued, from
  its enqueue to its completion on the rank. Bytes are those of the whole tensor; Gloo executes a reduce-scatter as an all-reduce.
* SYNC (FSDP): the main thread's wait for a collective.
* ALLREDUCE: the part of a collective after the last rank's Gloo thread has taken it up: without waiting for others.

The executed graph of a rank is that of its execution trace: outermost operators and their true dependencies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from dpro_search.collect.assemble.common import RawJobFile, aligned, completed, job_facts, joined, read_job, shifted, steps_of
from dpro_search.collect.assemble.torch.events import BUCKET, DdpEvents, FsdpEvents, fsdp_knobs, fsdp_tensors
from dpro_search.collect.assemble.torch.files import FORMAT as FORMAT
from dpro_search.collect.assemble.torch.files import FSDP_FORMAT as FSDP_FORMAT
from dpro_search.collect.assemble.torch.files import RawRank, read_rank
from dpro_search.collect.assemble.torch.modules import modules_of
from dpro_search.collect.assemble.torch.spans import RankEvents
from dpro_search.collect.trace import EventKind, Events, NodeGraph, TensorInfo, Trace, TraceMeta

_GPU_PROFILE = "kineto-gpu.json.gz"


def assemble_torch(raw: Path) -> Trace:
    """Build the trace of a DistributedDataParallel or fully sharded job from its raw folder: see `Launcher.assemble`."""
    job = read_job(raw, RawJobFile, *_KINDS)
    if (raw / "rank0" / _GPU_PROFILE).is_file():
        return _of_gpus(raw, job)
    kind = _KINDS[job.format]
    ranks = [read_rank(raw / f"rank{r}", job.format) for r in range(job.ranks)]
    base_ns = ranks[0].hook.steps[0][0]
    steps = steps_of([rank.hook for rank in ranks], base_ns)
    tensors = kind.tensors(ranks[0])
    names: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    parts = [kind.events(rank, r, base_ns, steps, tensors, names, dtypes) for r, rank in enumerate(ranks)]
    events = _numbered(joined([part.events() for part in parts]))
    clock = aligned(events, tuple(rank.hook.machine for rank in ranks), [rank.origin_residual_us for rank in ranks])
    modules, calls = modules_of(ranks, base_ns, steps)
    events, steps = shifted(events, steps, clock)
    graphs, graph_of_rank = _graphs(ranks)
    trace = Trace(
        meta=TraceMeta(
            framework="pytorch",
            comm=kind.comm,
            format=job.format,
            **job_facts(job, [rank.hook for rank in ranks]),
            clock=clock,
            knobs=kind.knobs(ranks[0]),
            dropped=_dropped(ranks),
            warnings=tuple(dict.fromkeys(text for part in parts for text in part.warnings)),
        ),
        names=tuple(names),
        events=joined([events, transfers_of(events)]),
        steps=steps,
        tensors=tensors,
        graphs=graphs,
        graph_of_rank=graph_of_rank,
        modules=modules,
        module_calls=calls.shifted(np.array(clock.offset_us)),
        dtypes=tuple(dtypes),
    )
    return completed(trace)


def _of_gpus(raw: Path, job: RawJobFile) -> Trace:
    """The trace of ranks with GPUs: what `import` makes of their profiles, with the command that was recorded."""
    from dpro_search.collect.readers.kineto.importer import read  # needs scipy

    trace = read([raw / f"rank{rank}" / _GPU_PROFILE for rank in range(job.ranks)])
    return replace(trace, meta=msgspec.structs.replace(trace.meta, command=tuple(job.command)))


@dataclass(frozen=True)
class _Kind:
    """The part of the assembly that differs between kinds of jobs."""

    comm: str
    tensors: Callable[[RawRank], tuple[TensorInfo, ...]]
    knobs: Callable[[RawRank], dict[str, str]]
    events: Callable[..., RankEvents]


def _ddp_tensors(rank: RawRank) -> tuple[TensorInfo, ...]:
    """Gradients in the order in which they become ready; their nodes are their buckets."""
    ddp = rank.ddp
    bucket_of = {index: number for number, bucket in enumerate(ddp.buckets) for index in bucket}
    order = ddp.ready_order if sorted(ddp.ready_order) == sorted(bucket_of) else list(bucket_of)
    return tuple(
        TensorInfo(
            name=ddp.parameters[index].name,
            node=f"{BUCKET}{bucket_of[index]}",
            dtype=ddp.parameters[index].dtype,
            shape=ddp.parameters[index].shape,
            size_bytes=ddp.parameters[index].size_bytes,
        )
        for index in order
    )


def _ddp_knobs(rank: RawRank) -> dict[str, str]:
    """DDP's arguments, and the hook that reduces in its place."""
    ddp = rank.ddp
    switches = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")
    knobs = {"bucket_cap_mb": f"{ddp.bucket_cap_bytes / 2**20:g}"}
    knobs |= {name: "1" for name in switches if getattr(ddp, name)}
    return knobs | ({"comm_hook": ddp.comm_hook} if ddp.comm_hook else {})


_KINDS = {
    FORMAT: _Kind("ddp", _ddp_tensors, _ddp_knobs, DdpEvents),
    FSDP_FORMAT: _Kind("fsdp", fsdp_tensors, fsdp_knobs, FsdpEvents),
}


def _graphs(ranks: Sequence[RawRank]) -> tuple[tuple[NodeGraph, ...], tuple[int, ...]]:
    """The executed graphs, those that are equal once, and which of them each rank ran; none where a rank has no execution trace."""
    graphs = [rank.execution.graph for rank in ranks if rank.execution is not None]
    if len(graphs) < len(ranks):
        return (), ()
    kept: dict[tuple[object, ...], NodeGraph] = {}
    keys = [(graph.name, graph.input_ptr.tobytes(), graph.input_idx.tobytes()) for graph in graphs]
    for key, graph in zip(keys, graphs, strict=True):
        kept.setdefault(key, graph)
    return tuple(kept.values()), tuple(list(kept).index(key) for key in keys)


def _numbered(events: Events) -> Events:
    """Collectives numbered through the whole job: equal on all ranks, in the order of steps and in enqueue order within each."""
    has = events.collective >= 0
    width = int(events.collective.max(initial=0)) + 1
    return replace(events, collective=np.where(has, events.step * width + events.collective, -1))


def transfers_of(events: Events) -> Events:
    """Transfers of collectives: each from when the last rank's thread had taken it up to its end on a rank."""
    taken = events.select(events.kind == EventKind.QUEUE)
    whole = events.select(events.kind == EventKind.COLLECTIVE)
    numbers, row = np.unique(taken.collective, return_inverse=True)
    last = np.full(len(numbers), -np.inf)
    np.maximum.at(last, row, taken.end_us)
    begun = last[np.searchsorted(numbers, whole.collective)]
    kind = np.full(len(whole), int(EventKind.ALLREDUCE))
    return replace(whole, kind=kind, start_us=np.minimum(begun, whole.end_us))


def _dropped(ranks: list[RawRank]) -> dict[str, int]:
    dropped: dict[str, int] = {}
    for rank in ranks:
        executed = {} if rank.execution is None else rank.execution.dropped
        for reason, count in (*rank.spans.dropped.items(), *executed.items()):
            dropped[reason] = dropped.get(reason, 0) + count
    return dropped
