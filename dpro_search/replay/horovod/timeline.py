"""``replay_horovod(graph) -> HorovodTimeline``: run the machine and read the answer off its settled part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpro_search.collect.trace import Floats, Ints
from dpro_search.costmodel.horovod import SATURATION_BYTES
from dpro_search.replay.horovod import machine
from dpro_search.replay.steady import halves_agree
from dpro_search.space.horovod_job import HorovodJob

_WARMUP = 2
_DRAWS = 4096


@dataclass(frozen=True, kw_only=True)
class HorovodTimeline:
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
    log
        Rows (kind, rank, unit, collective, iteration, start, end) of the machine, empty unless asked for; of ranks that behave
        alike the first is there.
    """

    iteration_us: float
    iterations_us: Floats
    breakdown_us: dict[str, float]
    rank_breakdown_us: tuple[dict[str, float], ...]
    settled: bool
    log: Floats


def replay_horovod(
    graph: HorovodJob,
    *,
    iterations: int = 32,
    seed: int | np.random.SeedSequence = 0,
    samples: Ints | None = None,
    log: bool = False,
) -> HorovodTimeline:
    """Replay a graph over several iterations.

    Parameters
    ----------
    iterations
        Iterations after the warm-up. Each takes the durations of a recorded step, all of them equally often.
    seed
        Of the order of the samples, and of latencies and negotiation times; the same seed gives the same timeline.
    samples
        The recorded steps to take instead, in turn, [any].
    """
    rng = np.random.default_rng(seed)
    total = iterations + _WARMUP
    if samples is None:
        rounds = -(-total // graph.samples)
        sample_of = np.concatenate([rng.permutation(graph.samples) for _ in range(rounds)])[:total]
    else:
        sample_of = np.resize(samples, total)
    costs = graph.comm
    rows = total * (graph.units * (graph.classes + 5) + 2 * graph.classes) if log else 0
    buffer = np.zeros((rows, 7))
    end, breakdown, used = machine.simulate(
        graph.core,
        graph.on_core,
        graph.main_us + graph.host_us,
        graph.post_us + graph.host_us[:, :, None],
        graph.post_order,
        graph.unit_bytes,
        graph.unit_tensors,
        graph.release_class,
        graph.release_work_us,
        graph.release_ptr,
        graph.release_unit,
        graph.exact_groups,
        np.array(
            [
                costs.alpha_busy_us,
                costs.alpha_more_us,
                costs.alpha_tail_us,
                costs.dispatch_us,
                costs.beta_busy_us,
                costs.beta_tail_us,
                costs.copy_in_us,
                costs.copy_out_us,
                costs.cpu_us,
                costs.cycle_cpu_us,
                costs.collective_cpu_us,
                SATURATION_BYTES,
                graph.fusion_threshold_bytes,
                graph.cycle_us,
            ]
        ),
        costs.negotiate_busy_us,
        costs.negotiate_idle_us,
        sample_of.astype(np.int64),
        rng.random(_DRAWS),
        buffer,
    )
    distances = np.diff(end.max(axis=1)[_WARMUP - 1 :])
    per_class = [
        {"compute": compute / total, "contention": contention / total, "exposed_communication": exposed / total}
        for compute, contention, exposed in breakdown.T.tolist()
    ]
    followed = buffer[:used]
    of_rank = followed[:, machine.LOG_RANK] >= 0
    first_rank = np.unique(graph.class_of_rank, return_index=True)[1]
    followed[of_rank, machine.LOG_RANK] = first_rank[followed[of_rank, machine.LOG_RANK].astype(np.int64)]
    return HorovodTimeline(
        iteration_us=float(np.median(distances)),
        iterations_us=distances,
        breakdown_us=per_class[int(breakdown[machine.COMPUTE].argmax())],
        rank_breakdown_us=tuple(per_class[number] for number in graph.class_of_rank.tolist()),
        settled=halves_agree(distances),
        log=followed,
    )
