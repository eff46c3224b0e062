"""Monte-Carlo replays: how the iteration time varies with the durations that were recorded."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from dpro_search._compiled import njit
from dpro_search.collect.trace import Floats, Ints
from dpro_search.errors import InputError
from dpro_search.replay.engine import Engine
from dpro_search.space.replay_graph import Int32s, ReplayGraph

Draw = TypeVar("Draw")


def sampled_iterations(engine: Engine, graph: ReplayGraph, samples: int, seed: int, threads: int | None = None) -> Floats:
    """Iteration time of each of many replays, [samples].

    Each iteration takes all durations from one recorded step, so that what varies together in the job does so here. The iteration
    time of a replay is the mean distance between its iterations without the first quarter and the last (as in `settled_distance`);
    the makespan where there is only one. The kernel releases the GIL: as many threads as there are processors run it. The result
    depends on the seed only.

    Raises
    ------
    InputError
        The graph has no recorded samples.
    """
    if not graph.samples_us.size:
        raise InputError("the graph has no recorded durations to draw from (samples_us is empty)")
    iteration_of, op_of = np.divmod(engine.layout.op_of, np.int32(len(graph)))
    first, last = engine.iterations // 4, engine.iterations - (2 if engine.iterations > 2 else 1)

    def one(child: np.random.SeedSequence) -> float:
        rows = np.random.default_rng(child).integers(len(graph.samples_us), size=engine.iterations)
        duration = np.empty(len(op_of))
        _draw(graph.samples_us, rows, iteration_of, op_of, duration)
        run = engine.simulate(duration)
        if engine.iterations == 1:
            return run.makespan_us
        ends = np.zeros(engine.iterations)
        _latest(run.end_us, iteration_of, ends)
        return float((ends[last] - ends[first]) / (last - first))

    return iterations_of_draws_us(one, np.random.SeedSequence(seed).spawn(samples), threads=threads)


def iterations_of_draws_us(
    iteration_us: Callable[[Draw], float],
    draws: Sequence[Draw],
    *,
    threads: int | None = None,
    on_sample: Callable[[], None] = lambda: None,
) -> Floats:
    """Iteration times of replays, one for each draw, [draws].

    Parameters
    ----------
    iteration_us
        Replays with a draw: of durations, or the seed of all random numbers. It releases the GIL.
    threads
        Number of replays at a time; None: one for each processor that this process may use. The result does not depend on it.
    on_sample
        Called after each replay, from the calling thread.

    Raises
    ------
    InputError
        There is no draw, or `threads` is below 1.
    """
    if not draws or (threads is not None and threads < 1):
        raise InputError(f"samples and threads must be >= 1, not {len(draws)} and {threads}")
    sampled_us = np.empty(len(draws))
    with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
        for number, us in enumerate(pool.map(iteration_us, draws)):
            sampled_us[number] = us
            on_sample()
    return sampled_us


@njit(nogil=True)
def _draw(samples_us: npt.NDArray[np.float32], rows: Ints, iteration_of: Int32s, op_of: Int32s, duration_us: Floats) -> None:
    for label in range(len(duration_us)):
        duration_us[label] = samples_us[rows[iteration_of[label]], op_of[label]]


@njit(nogil=True)
def _latest(end_us: Floats, iteration_of: Int32s, ends: Floats) -> None:
    for label in range(len(end_us)):
        ends[iteration_of[label]] = max(ends[iteration_of[label]], end_us[label])
