"""`Trace` of a PyTorch job whose model ``fully_shard`` divided -> `FsdpGraph`: what each rank's main thread does in a step.

Each unit of the model gathers its parameters before its forward pass, gives most of them up after it, gathers them again before its
backward pass, and reduce-scatters its gradients after it. All of this is the main thread's program: enqueues of collectives, waits
for them, and copies before and after. Core time is that of `graph/main_thread.py`.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass

import numpy as np

from dpro_search.collect.trace import Codes, CollectiveKind, EventKind, Events, Floats, Ints, Role, Trace
from dpro_search.errors import GraphError
from dpro_search.graph.main_thread import CoreTime, MainThreadGraph, core_times, ops_per_step
from dpro_search.graph.measured import sampled_steps

# Of the bytes that an all-reduce of the same tensor moves on each link: a ring gathers in p - 1 of its 2 (p - 1) steps.
GATHER_SHARE = 0.5


class CollectiveMark(enum.IntEnum):
    """An instant in the program of a main thread, of one of its collectives."""

    COPY_IN = 0  # a gather: copying of this rank's part to where it is sent from begins
    POST = 1
    WAIT = 2
    COPY_OUT = 3  # a gather: copying of the parameters to their places begins
    READY = 4  # a gather: they are in their places


class Purpose(enum.IntEnum):
    """The purpose of a collective."""

    FORWARD = 0  # gathers parameters that the rank has not
    BACKWARD = 1  # gathers again what was given up after the forward pass
    SCATTER = 2  # reduces gradients
    OTHER = 3  # the script's own


@dataclass(frozen=True, kw_only=True)
class FsdpGraph(MainThreadGraph):
    """One step of a job, a sample per profiled step; times are core time of a rank's main thread in microseconds.

    Attributes
    ----------
    tensors
        Gradients, unit by unit.
    labels
        Labels of the C collectives, in enqueue order, [C].
    purpose, size_bytes
        Of each collective: `Purpose`, and bytes of the whole tensor, [C].
    moved_bytes
        Of an all-reduce that moves as many bytes on each link, [C]. Gloo executes a reduce-scatter as an all-reduce.
    lag
        Time until the last rank had what a collective brought, over that until the first had it. The directions of a link are
        not in step, and a rank goes on when it has its own part; but the next collective waits for all.
    mark, collective
        The program of every rank: `CollectiveMark`, and of which collective, [S].
    work_us
        Core time from the mark before to this one, [samples, ranks, S].
    after_us
        From the last mark to the next step: the rest of the backward pass, optimizer and script, [samples, ranks].
    """

    labels: tuple[str, ...]
    purpose: Ints
    size_bytes: Floats
    moved_bytes: Floats
    lag: float
    mark: Ints
    collective: Ints
    work_us: Floats


def build_fsdp_graph(trace: Trace, steps: tuple[int, ...] | None = None, *, with_profiler: bool = False) -> FsdpGraph:
    """The graph of a job from the given profiled steps, as `build_ddp_graph` makes it.

    Raises
    ------
    GraphError
        A rank was not profiled, or the profiled steps or the ranks differ in what they communicate.
    """
    sampled = sampled_steps(trace, steps)
    times = core_times(trace, with_profiler=with_profiler)
    parts = [[_FsdpStepPart(trace, rank, step, times[step, rank]) for rank in range(trace.meta.ranks)] for step in sampled]
    first = parts[0][0]
    if not first.names:
        raise GraphError("the trace has no collective in its profiled steps; record a distributed job")
    for step, row in zip(sampled, parts, strict=True):
        for rank, part in enumerate(row):
            if part.program != first.program:
                raise GraphError(
                    f"rank {rank} communicated differently in step {step} than rank 0 in step {sampled[0]}; "
                    "record steps that do the same"
                )
    return FsdpGraph(
        tensors=trace.tensors,
        labels=_labels(first.names),
        purpose=_purposes(first.kind, first.role),
        size_bytes=first.size_bytes,
        moved_bytes=first.size_bytes * moved_share(first.kind, first.role),
        lag=_lag(trace, sampled),
        mark=first.mark,
        collective=first.collective,
        work_us=np.array([[part.work_us for part in row] for row in parts]),
        after_us=np.array([[part.after_us for part in row] for row in parts]),
        steps=np.array(sampled, dtype=np.int64),
        ops=ops_per_step(trace),
    )


def moved_share(kind: Codes, role: Codes) -> Floats:
    """Bytes that collectives move, over those of an all-reduce of the same size, [collectives].

    Parameters
    ----------
    kind, role
        `CollectiveKind` and `Role` of each. An all-gather without a role is the script's own, whose size is that of its output.
    """
    gathers = (kind == CollectiveKind.ALL_GATHER) & (role != Role.UNKNOWN)
    return np.where(gathers, GATHER_SHARE, 1.0)


class _FsdpStepPart:
    """One rank in one step, divided at its marks."""

    def __init__(self, trace: Trace, rank: int, step: int, time: CoreTime) -> None:
        step_events = trace.events.select((trace.events.rank == rank) & (trace.events.step == step))
        whole = step_events.select(step_events.kind == EventKind.COLLECTIVE)
        whole = whole.select(np.argsort(whole.collective, kind="stable"))
        waits = step_events.select(step_events.kind == EventKind.SYNC)
        waits = waits.select(np.argsort(waits.collective, kind="stable"))
        if not np.array_equal(waits.collective, whole.collective):
            raise GraphError(f"rank {rank} did not wait for each of its collectives in step {step}; record the job again")
        self.names = tuple(trace.names[name] for name in whole.name)
        self.kind, self.role = whole.collective_kind, whole.role
        self.size_bytes = whole.size_bytes.astype(np.float64)
        instants = [(float(start), CollectiveMark.POST, number) for number, start in enumerate(whole.start_us)]
        instants += [(float(start), CollectiveMark.WAIT, number) for number, start in enumerate(waits.start_us)]
        instants += _copies(time.ops, whole)
        instants.sort()
        self.mark = np.array([mark for _, mark, _ in instants], dtype=np.int64)
        self.collective = np.array([number for *_, number in instants], dtype=np.int64)
        used_us = time.used_us(np.array([instant for instant, *_ in instants]))
        self.work_us = np.diff(used_us, prepend=0.0)
        self.after_us = float(time.core_us[-1] - used_us[-1]) if len(used_us) else 0.0

    @property
    def program(self) -> tuple[object, ...]:
        """Equal where the same was done."""
        kinds = self.kind.tolist(), self.role.tolist()
        return self.names, *kinds, self.size_bytes.tolist(), self.mark.tolist(), self.collective.tolist()


def _copies(ops: Events, whole: Events) -> list[tuple[float, CollectiveMark, int]]:
    """When parameters were copied: of each gather the beginning of the copy in, and beginning and end of the copy out.

    Parameters
    ----------
    ops
        The main thread's. Those that copy for a gather have its number; one before its enqueue copies in, one after it out.
    whole
        The step's collectives in enqueue order.
    """
    place = {number: i for i, number in enumerate(whole.collective.tolist())}
    marks: list[tuple[float, CollectiveMark, int]] = []
    for op in np.flatnonzero((ops.role == Role.COPY) & (ops.collective >= 0)).tolist():
        gather = place.get(int(ops.collective[op]))
        if gather is None:
            continue  # a gather of another step
        if ops.start_us[op] < whole.start_us[gather]:
            marks.append((float(ops.start_us[op]), CollectiveMark.COPY_IN, gather))
        else:
            marks.append((float(ops.start_us[op]), CollectiveMark.COPY_OUT, gather))
            marks.append((float(ops.end_us[op]), CollectiveMark.READY, gather))
    return marks


def _lag(trace: Trace, steps: tuple[int, ...]) -> float:
    moved = trace.events.select((trace.events.kind == EventKind.ALLREDUCE) & np.isin(trace.events.step, steps))
    numbers, row = np.unique(moved.collective, return_inverse=True)
    begun, first, last = np.full((3, len(numbers)), [[np.inf], [np.inf], [-np.inf]])
    np.minimum.at(begun, row, moved.start_us)
    np.minimum.at(first, row, moved.end_us)
    np.maximum.at(last, row, moved.end_us)
    return float((last - begun).sum() / max((first - begun).sum(), 1.0))


def _purposes(kind: Codes, role: Codes) -> Ints:
    """The role of each collective. Collectives of the script itself have none."""
    gathers, units = kind == CollectiveKind.ALL_GATHER, role != Role.UNKNOWN
    scatters = (kind == CollectiveKind.REDUCE_SCATTER) & units
    purpose = np.where(gathers & (role == Role.FORWARD), Purpose.FORWARD, Purpose.OTHER)
    purpose = np.where(gathers & (role == Role.BACKWARD), Purpose.BACKWARD, purpose)
    return np.where(scatters, Purpose.SCATTER, purpose).astype(np.int64)


def _labels(names: tuple[str, ...]) -> tuple[str, ...]:
    """Labels; those that come more than once in a step are counted."""
    seen: Counter[str] = Counter()
    labels = []
    for name in names:
        label = name.replace("all_gather", "all-gather", 1).replace("reduce_scatter", "reduce-scatter", 1)
        seen[label] += 1
        labels.append(label if seen[label] == 1 else f"{label}, {seen[label]}")
    return tuple(labels)
