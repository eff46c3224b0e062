"""`ProgramReplay`: the replay of a job whose ranks' main threads run one program, as PyTorch's DDP and FSDP on processors do.

`iteration_ops` shows one of its iterations as a `Timeline` of ops: for Perfetto, tables, and the critical path.

The ops of a rank are its program's segments on its main thread, and its parts of the collectives on Gloo's threads; each has the
times of the replay. A part waits for a free thread (`start_us - ready_us`), then for the other ranks (`moved_us - start_us`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dpro_search.collect.trace import Floats, Ints
from dpro_search.graph.dataflow import OpKind
from dpro_search.replay.ddp.timeline import DdpTimeline, replay_ddp
from dpro_search.replay.kernels.times import OpTimes
from dpro_search.replay.monte_carlo import iterations_of_draws_us
from dpro_search.replay.timeline import Timeline
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.programs.ddp_job import Action, DdpJob
from dpro_search.space.replay_graph import OrderPolicy


@dataclass(frozen=True, kw_only=True)
class ProgramReplay:
    """A program in a scenario."""

    job: DdpJob
    op_count: int

    def iterations(self, *, detailed: bool = False) -> DdpTimeline:
        return replay_ddp(self.job)

    def sampled_us(self, *, samples: int, seed: int = 0, on_sample: Callable[[], None] = lambda: None) -> Floats:
        seeds = np.random.SeedSequence(seed).spawn(samples)
        return iterations_of_draws_us(lambda one: replay_ddp(self.job, seed=one).iteration_us, seeds, on_sample=on_sample)

    def timeline(self) -> Timeline:
        return iteration_ops(self.job, self.iterations())


def iteration_ops(job: DdpJob, timeline: DdpTimeline) -> Timeline:
    """The iteration of a replay that is nearest to the settled one; the first rank begins it at 0.

    Ops are numbered segments first, rank by rank, then parts of collectives, likewise.
    """
    ranks, segments, collectives = len(job.core), len(job.action), len(job.size_bytes)
    work_us = timeline.work_us[timeline.typical]
    begin_us = work_us[:, 0, 0].min()
    work_us, moved_us = work_us - begin_us, timeline.collective_us[timeline.typical] - begin_us
    posting, waiting = _places(job, Action.POST), _places(job, Action.WAIT)  # of all collectives; of those that are waited for
    posted_us = work_us[:, posting, 1]
    builder = GraphBuilder()
    main = builder.add_devices(np.arange(ranks), OrderPolicy.PROGRAM, "main thread of rank {0}", (range(ranks),))
    free_us, lane = _threads(timeline, job.threads)
    lanes = int(lane.max(initial=0)) + 1
    beside = builder.add_devices(
        np.repeat(np.arange(ranks)[:, None], lanes, axis=1),
        OrderPolicy.FIFO,
        "Gloo thread {1} of rank {0}",
        (range(ranks), range(lanes)),
    )
    labels, names = job.collective_names, job.segment_names
    work = builder.add_ops(
        np.broadcast_to(main[:, None], (ranks, segments)),
        work_us[:, :, 1] - work_us[:, :, 0],
        kind=[int(kind) for kind in job.segment_kinds],
        name="{1}@{0}",
        axes=(range(ranks), names),
    )
    parts = builder.add_ops(
        beside[:, lane],
        moved_us[:, 1] - moved_us[:, 0],
        kind=OpKind.COMM,
        collective=np.arange(collectives),
        name="{1}@{0}",
        axes=(range(ranks), labels),
    )
    builder.add_edges(work[:, posting], parts)
    for number, place in zip(job.collective[waiting].tolist(), waiting.tolist(), strict=True):
        if place + 1 < segments:
            held = parts[1:, number] if job.is_broadcast[number] else parts[:, number]
            builder.add_edges(held, work[ranks - len(held) :, place + 1])
    taken_us = np.maximum(posted_us, free_us - begin_us)
    ready = np.concatenate((work_us[:, :, 0].ravel(), posted_us.ravel()))
    start = np.concatenate((work_us[:, :, 0].ravel(), taken_us.ravel()))
    moved = np.concatenate((work_us[:, :, 0].ravel(), np.tile(moved_us[:, 0], ranks)))
    end = np.concatenate((work_us[:, :, 1].ravel(), np.tile(moved_us[:, 1], ranks)))
    # At one instant: in the order of the program, a part after the segment that posts it.
    place = np.concatenate((np.tile(np.arange(segments) * 2, ranks), np.tile(posting * 2 + 1, ranks)))
    order = np.lexsort((place, start)).astype(np.int32)
    return Timeline(
        graph=builder.build(),
        times=OpTimes(ready, start, moved, end, order),
        iteration_us=timeline.iteration_us,
        settled=timeline.settled,
    )


def _threads(timeline: DdpTimeline, threads: int) -> tuple[Floats, Ints]:
    """When a thread was free for each collective of the typical iteration, and which one, [collectives] each."""
    moves_us, first = timeline.collective_us.reshape(-1, 2), timeline.typical * timeline.collective_us.shape[1]
    busy_until_us = np.full(threads, -np.inf)
    free_us, lane = np.empty(len(moves_us)), np.empty(len(moves_us), np.int64)
    for number, end_us in enumerate(moves_us[:, 1].tolist()):
        lane[number] = busy_until_us.argmin()
        free_us[number] = busy_until_us[lane[number]]
        busy_until_us[lane[number]] = end_us
    of_rank = slice(first, first + timeline.collective_us.shape[1])
    return free_us[of_rank], lane[of_rank]


def _places(job: DdpJob, action: Action) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """The segments at whose end a collective is posted, or waited for, in the order of the collectives."""
    rows = np.flatnonzero(job.action == action)
    return rows[np.argsort(job.collective[rows], kind="stable")]
