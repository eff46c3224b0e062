"""``replay_horovod(graph) -> HorovodTimeline``: run the machine and read the answer off its settled part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dpro_search.collect.trace import Floats, Ints
from dpro_search.errors import GraphError
from dpro_search.machine import machine_constants
from dpro_search.replay.horovod import machine
from dpro_search.replay.iterations import DRAWS, WARMUP, IterationTimes, iteration_times, sample_order
from dpro_search.space.tensorflow.horovod_job import LONGEST_US, HorovodJob


@dataclass(frozen=True, kw_only=True)
class HorovodReplay(IterationTimes):
    """Result of a replay.

    Attributes
    ----------
    log
        Rows (kind, rank, unit, collective, iteration, start, end) of the machine, empty unless asked for; of ranks that behave
        alike the first is there.
    """

    log: Floats


def replay_horovod(
    graph: HorovodJob,
    *,
    iterations: int = 32,
    seed: int | np.random.SeedSequence = 0,
    samples: Ints | None = None,
    log: bool = False,
) -> HorovodReplay:
    """Replay a graph over several iterations.

    Parameters
    ----------
    iterations
        Iterations after the warm-up. Each takes the durations of a recorded step, all of them equally often.
    seed
        Seed of the order of the samples, of latencies and of negotiation times; the same seed gives the same timeline.
    samples
        The recorded steps to take instead, in turn, [any].

    Raises
    ------
    GraphError
        An iteration does not end within `machine.MOST_EVENTS` events, or all take more than `LONGEST_US`.
    """
    total = iterations + WARMUP
    drawn = _drawn if isinstance(seed, int) else _drawn.__wrapped__
    sample_of, draws = drawn(seed, graph.samples, iterations, samples is None)
    if samples is not None:
        sample_of = np.resize(samples, total).astype(np.int64)
    costs = graph.comm
    rows = total * (graph.units * (graph.classes + 5) + 2 * graph.classes) if log else 0
    buffer = np.zeros((rows, 7))
    end, breakdown, used, unfinished = machine.simulate(
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
                machine_constants().host.saturation_bytes,
                graph.fusion_threshold_bytes,
                graph.cycle_us,
                costs.poll_share,
                costs.burst_us,
                machine_constants().host.least_us_per_byte,
            ]
        ),
        costs.negotiate_busy_us,
        costs.negotiate_idle_us,
        graph.ratio_from_bytes,
        graph.ratio,
        sample_of,
        draws,
        buffer,
        machine.MOST_EVENTS,
    )
    if unfinished >= 0:
        raise GraphError(_unfinished(graph, unfinished, int(np.count_nonzero(end[:, unfinished]))))
    if not end.max() <= LONGEST_US:
        raise GraphError(f"the replay of Horovod took {end.max() / 1e6:.3g} s of {total} iterations; record the job again")
    followed = buffer[:used]
    if log:
        of_rank = followed[:, machine.LOG_RANK] >= 0
        first_rank = np.unique(graph.class_of_rank, return_index=True)[1]
        followed[of_rank, machine.LOG_RANK] = first_rank[followed[of_rank, machine.LOG_RANK].astype(np.int64)]
    return HorovodReplay(**iteration_times(end, breakdown, graph.class_of_rank), log=followed)


def _unfinished(graph: HorovodJob, number: int, ended: int) -> str:
    rank = int(np.flatnonzero(graph.class_of_rank == number)[0])
    work_s = float((graph.main_us + graph.host_us)[:, number].max()) / 1e6
    return (
        f"the replay of Horovod was given up: iteration {ended} of rank {rank} did not end within {machine.MOST_EVENTS} events"
        f" (its longest step computes for {work_s:.3g} s, a cycle takes {graph.cycle_us:.3g} us); choose a longer cycle time, or"
        " record the job again"
    )


@lru_cache(maxsize=16)
def _drawn(seed: int | np.random.SeedSequence, samples: int, iterations: int, ordered: bool) -> tuple[Ints, Floats]:
    """Recorded step of each iteration, and the numbers that are drawn from; a search replays with the same draws."""
    rng = np.random.default_rng(seed)
    sample_of = sample_order(rng, samples, iterations) if ordered else np.zeros(0, np.int64)
    return sample_of, rng.random(DRAWS)
