"""``replay_ddp(job) -> DdpTimeline``: run the machine and read the answer off its settled part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpro_search.collect.trace import Floats, Ints
from dpro_search.costmodel.horovod import SATURATION_BYTES
from dpro_search.errors import GraphError
from dpro_search.replay.ddp import machine
from dpro_search.replay.iterations import DRAWS, WARMUP, IterationTimes, iteration_times, sample_order
from dpro_search.space.ddp_job import DdpJob


@dataclass(frozen=True, kw_only=True)
class DdpTimeline(IterationTimes):
    """Result of a replay.

    Attributes
    ----------
    collective_us
        Start and end of every collective in the order of posting, [iterations, collectives, 2].
    work_us
        Start and end of the work of every segment of the program; what follows on a rank starts later where it waits, [iterations,
        ranks, segments, 2].
    sample_of
        Recorded step that each iteration took its durations from, [iterations].
    """

    collective_us: Floats
    work_us: Floats
    sample_of: Ints

    @property
    def typical(self) -> int:
        """The iteration after the warm-up whose time is nearest to the settled one."""
        return WARMUP + int(np.abs(self.iterations_us - self.iteration_us).argmin())


def replay_ddp(job: DdpJob, *, iterations: int = 32, seed: int | np.random.SeedSequence = 0) -> DdpTimeline:
    """Replay a job over several iterations; each takes the durations of a recorded step, all of them equally often.

    The same seed gives the same timeline. Raises `GraphError` for a program that cannot end.
    """
    rng = np.random.default_rng(seed)
    sample_of = sample_order(rng, job.samples, iterations)
    costs = job.comm
    end, breakdown, moved, worked = machine.simulate(
        job.core,
        job.work_us,
        job.action,
        job.collective,
        job.size_bytes,
        job.is_broadcast,
        job.finish_us if len(job.finish_us) else np.zeros(len(job.size_bytes)),
        job.threads,
        np.array(
            [
                costs.alpha_busy_us,
                costs.alpha_more_us,
                costs.alpha_tail_us,
                costs.beta_busy_us,
                costs.beta_tail_us,
                costs.cpu_us,
                costs.collective_cpu_us,
                SATURATION_BYTES,
            ]
        ),
        sample_of,
        rng.random(DRAWS),
    )
    if not len(moved):
        raise GraphError("the job cannot go on: a rank waits for a collective that another never posts")
    return DdpTimeline(
        **iteration_times(end, breakdown),
        collective_us=moved.reshape(len(sample_of), len(job.size_bytes), 2),
        work_us=worked,
        sample_of=sample_of,
    )
