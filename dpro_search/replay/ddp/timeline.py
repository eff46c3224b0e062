"""``replay_ddp(job) -> DdpTimeline``: run the machine and read the answer off its settled part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.costmodel.horovod import SATURATION_BYTES
from dpro_search.errors import GraphError
from dpro_search.replay.ddp import machine
from dpro_search.replay.steady import halves_agree
from dpro_search.space.ddp_job import DdpJob

_WARMUP = 2
_DRAWS = 4096


@dataclass(frozen=True, kw_only=True)
class DdpTimeline:
    """Result of a replay; times in microseconds.

    Attributes
    ----------
    iteration_us
        Settled iteration time: median distance between the ends of iterations (the latest rank counts).
    iterations_us
        Each distance after the warm-up, [iterations - 1].
    breakdown_us
        Per iteration on the rank that computes most: compute, contention (computing slower than alone), exposed communication.
    rank_breakdown_us
        The same on every rank.
    settled
        False: the two halves of the run disagree by more than 1 % beyond their noise, so `iteration_us` is not a steady state.
    collective_us
        Start and end of every collective in the order of posting, [iterations, collectives, 2].
    """

    iteration_us: float
    iterations_us: Floats
    breakdown_us: dict[str, float]
    rank_breakdown_us: tuple[dict[str, float], ...]
    settled: bool
    collective_us: Floats


def replay_ddp(job: DdpJob, *, iterations: int = 32, seed: int | np.random.SeedSequence = 0) -> DdpTimeline:
    """Replay a job over several iterations; each takes the durations of a recorded step, all of them equally often.

    The same seed gives the same timeline. Raises `GraphError` for a program that cannot end.
    """
    rng = np.random.default_rng(seed)
    total = iterations + _WARMUP
    sample_of = np.concatenate([rng.permutation(job.samples) for _ in range(-(-total // job.samples))])[:total]
    costs = job.comm
    end, breakdown, moved = machine.simulate(
        job.core,
        job.work_us,
        job.action,
        job.collective,
        job.size_bytes,
        job.is_broadcast,
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
        sample_of.astype(np.int64),
        rng.random(_DRAWS),
    )
    if len(moved) != total * len(job.size_bytes):
        raise GraphError("the job cannot go on: a rank waits for a collective that another never posts")
    distances = np.diff(end.max(axis=1)[_WARMUP - 1 :])
    per_rank = tuple(
        {"compute": compute / total, "contention": contention / total, "exposed_communication": exposed / total}
        for compute, contention, exposed in breakdown.T.tolist()
    )
    return DdpTimeline(
        iteration_us=float(np.median(distances)),
        iterations_us=distances,
        breakdown_us=per_rank[int(breakdown[machine.COMPUTE].argmax())],
        rank_breakdown_us=per_rank,
        settled=halves_agree(distances),
        collective_us=moved.reshape(total, len(job.size_bytes), 2),
    )
