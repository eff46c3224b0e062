"""``replay_ddp(job) -> DdpTimeline``: replay the graph of a job's program and read the answer off its settled part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dpro_search.collect.trace import Floats, Ints
from dpro_search.replay.iterations import DRAWS, WARMUP, IterationTimes, iteration_times, sample_order
from dpro_search.replay.kernels.repeated import Repeated
from dpro_search.space.programs.ddp_job import DdpJob
from dpro_search.space.programs.program_graph import Pattern, pattern_graph, program_graph, segment_work_us

_LEAST_FACTOR = 1e-3  # of a latency


@dataclass(frozen=True, kw_only=True)
class DdpTimeline(IterationTimes):
    """Result of a replay."""

    collective_us: Floats  # Start and end of every collective in the order of posting, [iterations, collectives, 2].
    # Start and end of the work of every segment of the program; what follows on a rank starts later where it waits, [iterations,
    # ranks, segments, 2].
    work_us: Floats
    sample_of: Ints  # Recorded step that each iteration took its durations from, [iterations].

    @property
    def typical(self) -> int:
        """The iteration after the warm-up whose time is nearest to the settled one."""
        return WARMUP + int(np.abs(self.iterations_us - self.iteration_us).argmin())


def replay_ddp(job: DdpJob, *, iterations: int = 32, seed: int | np.random.SeedSequence = 0) -> DdpTimeline:
    """Replay a job over several iterations; each takes the durations of a recorded step, all of them equally often.

    The same seed gives the same timeline. Raises `GraphError` for a program that cannot end.
    """
    drawn = _drawn if isinstance(seed, int) else _drawn.__wrapped__
    sample_of, latency_factors = drawn(seed, job.samples, iterations)
    graph = program_graph(job, latency_factors)
    work_us = segment_work_us(job)
    total, (ranks, segments) = len(sample_of), (len(job.core), len(job.action))
    worked_ops = work_us.shape[1]
    duration_us = np.empty((total, len(graph)))
    duration_us[:, :worked_ops] = work_us[sample_of]
    duration_us[:, worked_ops:] = graph.duration_us[worked_ops:]
    times = _laid_out(Pattern.of(job), total).replay(graph, duration_us)
    start, end = times.start_us.reshape(total, -1), times.end_us.reshape(total, -1)
    of_rank = (total, ranks, worked_ops // ranks)
    worked_us = np.stack((start[:, :worked_ops].reshape(of_rank), end[:, :worked_ops].reshape(of_rank)), axis=3)
    ends_us = worked_us[:, :, -1, 1]
    alone_us = duration_us[:, :worked_ops].reshape(of_rank).sum(axis=(0, 2))
    taken_us = (worked_us[..., 1] - worked_us[..., 0]).sum(axis=(0, 2))
    return DdpTimeline(
        **iteration_times(ends_us, np.stack((alone_us, np.maximum(taken_us - alone_us, 0.0), ends_us[-1] - taken_us))),
        collective_us=np.stack((start[:, worked_ops:], end[:, worked_ops:]), axis=2),
        work_us=worked_us[:, :, :segments],
        sample_of=sample_of,
    )


@lru_cache(maxsize=16)
def _laid_out(pattern: Pattern, iterations: int) -> Repeated:
    return Repeated(pattern_graph(pattern), iterations)


@lru_cache(maxsize=16)
def _drawn(seed: int | np.random.SeedSequence, samples: int, iterations: int) -> tuple[Ints, Floats]:
    """Recorded step of each iteration, and how many times its mean each latency is: as variable as an exponential distribution."""
    rng = np.random.default_rng(seed)
    sample_of = sample_order(rng, samples, iterations)
    return sample_of, np.maximum(-np.log(1 - rng.random(DRAWS)), _LEAST_FACTOR)
