"""Raw files of a recorded MXNet + Horovod job -> `Trace`: `assemble_mxnet_horovod`.

A raw folder holds ``job.json``, ``rank{r}/{hook,worker,symbol}.json`` of every rank, and ``horovod_timeline.json`` of rank 0.

MXNet's engine runs behind the script, so the hook's clock does not divide its operators into steps; what they wait for does. Which
tensor an all-reduce of the profile carries is in the timeline: Horovod completes all-reduces in one order on all ranks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dpro_search.collect.assemble.common import (
    aligned,
    completed,
    event_columns,
    joined,
    no_profiled_step,
    read_job,
    read_json,
    shifted,
)
from dpro_search.collect.assemble.horovod_phases import (
    HorovodJobFile,
    HorovodRankFile,
    horovod_facts,
    phase_events,
    timeline_dropped,
    timeline_warnings,
)
from dpro_search.collect.assemble.kvstore import StoreFacts, StoreParameter
from dpro_search.collect.assemble.mxnet_horovod_steps import CarriedTensor, StepOps, comm_node, divide_into_steps, step_graph
from dpro_search.collect.readers.horovod.timeline import HorovodTimeline, TimelinePhase, read_horovod_timeline
from dpro_search.collect.readers.mxnet.files import COMM, Profile, Symbol, read_profile, read_symbol
from dpro_search.collect.readers.mxnet.node_matching import unmatched_warnings
from dpro_search.collect.recorded_names import role_in_mxnet
from dpro_search.collect.trace import CollectiveKind, EventKind, Events, Floats, Ints, Steps, TensorInfo, Trace, TraceMeta
from dpro_search.errors import InputError, TraceFormatError

FORMAT = "mxnet-horovod"

_LATE_END_US = 100_000.0
_END_SLACK_US = 5000.0  # between Horovod's note that an all-reduce is complete and the profiler's


class TrainerFacts(StoreFacts, kw_only=True):
    """Facts of a rank about its Trainer. The prefix stands before the keys in the names of its all-reduces."""

    prefix: str = ""


class MxnetHorovodHookFile(HorovodRankFile, kw_only=True):
    """``hook.json`` of one rank; `kvstore` is None if no step was profiled."""

    kvstore: TrainerFacts | None = None


@dataclass(frozen=True)
class _MxnetRank:
    hook: MxnetHorovodHookFile
    profile: Profile
    steps: list[StepOps]


def read_mxnet_horovod_hook(folder: Path) -> MxnetHorovodHookFile:
    """Read what the hook of one rank wrote; raises `InputError` or `TraceFormatError` that name the file."""
    return read_json(
        folder / "hook.json",
        MxnetHorovodHookFile,
        "no step of a hvd.DistributedTrainer was seen in autograd.record, or the rank's process was killed",
    )


def assemble_mxnet_horovod(raw: Path) -> Trace:
    """Build the trace of one job from its raw folder: see `Launcher.assemble`."""
    job = read_job(raw, HorovodJobFile, FORMAT)
    if job.ranks < 2:
        raise TraceFormatError(f"{raw}/job.json: {job.ranks} ranks; Horovod communicates between two or more: record the job again")
    timeline = read_horovod_timeline(raw / "horovod_timeline.json")
    dropped: Counter[str] = Counter()
    hooks = [_checked_hook(raw / f"rank{rank}") for rank in range(job.ranks)]
    profiles = [read_profile(raw / f"rank{rank}" / "worker.json", dropped) for rank in range(job.ranks)]
    symbol_path = raw / "rank0" / "symbol.json"
    symbol = read_symbol(symbol_path) if symbol_path.is_file() else None
    parameters = _trained(hooks[0])
    carried = _carried(timeline, profiles[0], hooks[0], parameters)
    ranks = [_rank(profile, hook, carried, len(parameters), symbol) for profile, hook in zip(profiles, hooks, strict=True)]
    return _trace(job, ranks, timeline, parameters, symbol, dropped)


def _checked_hook(folder: Path) -> MxnetHorovodHookFile:
    hook = read_mxnet_horovod_hook(folder)
    if not hook.traced_steps:
        raise no_profiled_step(folder, hook)
    if len(hook.steps) < 2:
        raise InputError(f"{folder}/hook.json: fewer than two steps ran; nothing can be measured")
    if hook.kvstore is None or hook.idle_comm is None:
        raise InputError(f"{folder}/hook.json: Horovod was not started in this job; train with hvd.DistributedTrainer")
    return hook


def _trained(hook: MxnetHorovodHookFile) -> list[StoreParameter]:
    assert hook.kvstore is not None  # it was checked
    return [parameter for parameter in hook.kvstore.parameters if parameter.trained]


def _carried(
    timeline: HorovodTimeline, profile: Profile, hook: MxnetHorovodHookFile, parameters: list[StoreParameter]
) -> list[CarriedTensor]:
    """The all-reduces that ended while rank 0 was profiled, in their order: the tensor (an index) and collective of each."""
    ends_us = [op.end_us for op in profile.ops if COMM.search(op.name)]
    if not ends_us:
        raise InputError(f"{profile.path}: no all-reduce in the profiled steps; train with hvd.DistributedTrainer on several ranks")
    index = _tensors_by_name(timeline, hook, parameters)
    before = hook.traced_steps[0] * len(parameters)
    rows = _rows_of(timeline, np.sort(ends_us), before, profile.path)
    all_reduces = []
    for row in rows:
        name = timeline.tensors[timeline.tensor[row]].name
        if name not in index:
            raise InputError(
                f"horovod_timeline.json: '{name}' is no gradient's all-reduce of a hvd.DistributedTrainer with num_groups=0; "
                "all-reduce nothing else in the profiled steps, and fuse with HOROVOD_FUSION_THRESHOLD"
            )
        all_reduces.append(CarriedTensor(tensor=index[name], collective=int(timeline.collective[row])))
    return all_reduces


def _rows_of(timeline: HorovodTimeline, ends_us: Floats, before: int, path: Path) -> Ints:
    """The timeline's rows of all-reduces with these ends (epoch, sorted): successive ones, in the order of their completion.

    A job that all-reduces nothing but each gradient once a step had `before` of them before: then Horovod's note and the
    profiler's end may be further apart, as they are where the engine waits for its core.
    """
    rows = np.flatnonzero(timeline.phase == TimelinePhase.WHOLE)
    noted_us = timeline.end_us[rows] + timeline.origin_ns / 1e3

    def apart_us(start: int) -> float:
        return float(np.median(np.abs(noted_us[start : start + len(ends_us)] - ends_us)))

    if before + len(ends_us) <= len(rows) and apart_us(before) <= _LATE_END_US:
        return rows[before : before + len(ends_us)]
    first, last = (int(np.searchsorted(noted_us, ends_us[0] + slack)) for slack in (-_END_SLACK_US, _END_SLACK_US))
    starts = [i for i in range(first, last + 1) if i + len(ends_us) <= len(rows)]
    start = min(starts, key=apart_us, default=-1)
    if start < 0 or apart_us(start) > _END_SLACK_US:
        raise TraceFormatError(f"{path}: its {len(ends_us)} all-reduces are not in horovod_timeline.json; record the job again")
    return rows[start : start + len(ends_us)]


def _tensors_by_name(timeline: HorovodTimeline, hook: MxnetHorovodHookFile, parameters: list[StoreParameter]) -> dict[str, int]:
    """The gradients (their indices) by the names that Horovod has for them."""
    assert hook.kvstore is not None  # it was checked
    position = {f"{hook.kvstore.prefix}{parameter.key}": number for number, parameter in enumerate(parameters)}
    known = {tensor.name: tensor.name.partition(".")[2] for tensor in timeline.tensors}
    return {name: position[key] for name, key in known.items() if key in position}


def _rank(
    profile: Profile, hook: MxnetHorovodHookFile, carried: list[CarriedTensor], tensors: int, symbol: Symbol | None
) -> _MxnetRank:
    steps = hook.traced_steps
    return _MxnetRank(hook, profile, divide_into_steps(profile, carried, steps, tensors, symbol))


def _trace(
    job: HorovodJobFile,
    ranks: list[_MxnetRank],
    timeline: HorovodTimeline,
    parameters: list[StoreParameter],
    symbol: Symbol | None,
    dropped: Counter[str],
) -> Trace:
    base_ns = ranks[0].hook.steps[0][0]
    names: dict[str, int] = {}
    reference = ranks[0].steps[min(1, len(ranks[0].steps) - 1)]
    all_steps = [(number, step) for number, rank in enumerate(ranks) for step in rank.steps]
    graph = step_graph(reference, [step for _, step in all_steps], symbol, [parameter.name for parameter in parameters])
    steps = joined([_steps(rank, number, base_ns) for number, rank in enumerate(ranks)])
    recorded = [_step_events(step, number, base_ns, parameters, names) for number, step in all_steps]
    tensor_of = _tensors_by_name(timeline, ranks[0].hook, parameters)
    phases = phase_events(timeline, base_ns, steps, tensor_of, names)
    events = joined([*recorded, _in_their_steps(phases, ranks[0].steps)])
    clock = aligned(events, tuple(rank.hook.machine for rank in ranks), [0.0] * len(ranks))
    events, steps = shifted(events, steps, clock)
    trace = Trace(
        meta=TraceMeta(
            framework="mxnet",
            format=FORMAT,
            **horovod_facts(job, [rank.hook for rank in ranks], timeline),
            settings=job.settings,
            clock=clock,
            dropped={reason: count for reason, count in (dropped + Counter(timeline_dropped(timeline))).items() if count},
            warnings=_warnings(ranks, timeline, events, symbol),
        ),
        names=tuple(names),
        events=events,
        steps=steps,
        tensors=tuple(_tensor(number, parameter) for number, parameter in enumerate(parameters)),
        graphs=(graph,),
        graph_of_rank=(0,) * job.ranks,
    )
    return completed(trace)


def _tensor(number: int, parameter: StoreParameter) -> TensorInfo:
    return TensorInfo(
        name=parameter.name,
        node=comm_node(number),
        dtype=parameter.dtype,
        shape=parameter.shape,
        size_bytes=parameter.size_bytes,
    )


def _steps(rank: _MxnetRank, number: int, base_ns: int) -> Steps:
    """Steps of a rank: as the hook saw them, but the profiled ones as the engine ran them; the last, of unknown end, is left out.

    CPU time was read at the hook's starts; up to the engine's it is interpolated.
    """
    start_ns, end_ns, compute_ns, comm_ns, traced = zip(*rank.hook.steps, strict=True)
    seen_us = (np.array(start_ns, dtype=np.int64) - base_ns) / 1e3
    start_us, end_us = seen_us.copy(), (np.array(end_ns, dtype=np.int64) - base_ns) / 1e3
    for step in rank.steps:
        start_us[step.index] = step.start_us - base_ns / 1e3
        end_us[step.index] = step.end_us - base_ns / 1e3
    used = [np.diff(np.interp(start_us, seen_us, np.array(cpu) / 1e3)) for cpu in (compute_ns, comm_ns)]
    count = len(start_us) - 1
    return Steps(
        rank=np.full(count, number, dtype=np.int64),
        index=np.arange(count),
        start_us=start_us[:-1],
        end_us=end_us[:-1],
        traced=np.array(traced[:-1], dtype=np.bool_),
        compute_cpu_us=used[0],
        comm_cpu_us=used[1],
    )


def _step_events(step: StepOps, rank: int, base_ns: int, parameters: list[StoreParameter], names: dict[str, int]) -> Events:
    """Operators and all-reduces of one step of one rank."""
    base_us = base_ns / 1e3
    ops = [*step.compute, *(op for op, _ in step.updates)]
    op_events = event_columns(
        name=np.array([names.setdefault(op.name, len(names)) for op in ops], dtype=np.int64),
        kind=EventKind.OP,
        rank=rank,
        stream=np.array([op.span.thread for op in ops], dtype=np.int64),
        start_us=np.array([op.span.start_us for op in ops]) - base_us,
        end_us=np.array([op.span.end_us for op in ops]) - base_us,
        step=step.index,
        role=np.array([role_in_mxnet(op.name) for op in ops], dtype=np.int8),
    )
    comm = step.comm
    comm_events = event_columns(
        name=np.array([names.setdefault(comm_node(c.tensor), len(names)) for c in comm], dtype=np.int64),
        kind=EventKind.COMM,
        rank=rank,
        start_us=np.array([c.span.start_us for c in comm]) - base_us,
        end_us=np.array([c.span.end_us for c in comm]) - base_us,
        step=step.index,
        tensor=np.array([c.tensor for c in comm], dtype=np.int64),
        collective=np.array([c.collective for c in comm], dtype=np.int64),
        size_bytes=np.array([parameters[c.tensor].size_bytes for c in comm], dtype=np.int64),
        collective_kind=CollectiveKind.ALL_REDUCE,
    )
    return joined([op_events, comm_events])


def _in_their_steps(phases: Events, steps: list[StepOps]) -> Events:
    """The phases with the step of their collective: the last ones may run beside the next step's first operators."""
    step_of = {comm.collective: step.index for step in steps for comm in step.comm}
    moved = [step_of.get(number, step) for number, step in zip(phases.collective.tolist(), phases.step.tolist(), strict=True)]
    return replace(phases, step=np.array(moved, dtype=np.int64))


def _warnings(ranks: list[_MxnetRank], timeline: HorovodTimeline, events: Events, symbol: Symbol | None) -> tuple[str, ...]:
    warnings = timeline_warnings(timeline, events)
    if symbol is None:
        return (*warnings, "no graph of the network: operators are known by type and order")
    ops = [op for rank in ranks for step in rank.steps for op in step.compute]
    unmatched_us = sum(op.span.end_us - op.span.start_us for op in ops if op.node < 0)
    return (*warnings, *unmatched_warnings(unmatched_us, sum(op.span.end_us - op.span.start_us for op in ops)))
