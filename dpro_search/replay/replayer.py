"""``replay(graph) -> Timeline``: the settled iteration time of a graph, with the times of every op; `settled_us` without them."""

from __future__ import annotations

from dpro_search.collect.trace import Floats
from dpro_search.errors import InputError
from dpro_search.replay.engine import Engine, ends_us
from dpro_search.replay.monte_carlo import sampled_iterations
from dpro_search.replay.steady import settled_distance
from dpro_search.replay.timeline import Timeline
from dpro_search.space.replay_graph import ReplayGraph

_FIRST_TRY, _LAST_TRY = 8, 64
_BEFORE = 2  # iterations that do not count where iterations vary


def replay(graph: ReplayGraph, *, iterations: int | None = None, samples: int = 0, seed: int = 0) -> Timeline:
    """Replay a graph.

    Parameters
    ----------
    iterations
        How many to replay; None: one if no dependency is carried to the next iteration, else as many as it takes to settle (8 to
        64).
    samples
        Monte-Carlo replays beside the one with `duration_us`: each iteration takes the durations of one recorded step, chosen at
        random. They run in parallel threads, and depend on the seed only.

    Raises
    ------
    GraphError
        The graph cannot be replayed.
    InputError
        Samples are asked for of a graph without any.
    """
    if iterations is not None and iterations < 1:
        raise InputError(f"iterations must be >= 1, not {iterations}")
    engine = Engine(graph, iterations or _first_try(graph))
    timeline = _timeline(graph, engine)
    while iterations is None and not timeline.settled and engine.iterations < _LAST_TRY:
        engine = Engine(graph, engine.iterations * 2)
        timeline = _timeline(graph, engine)
    if samples:
        timeline = timeline.with_samples(sampled_iterations(engine, graph, samples, seed))
    return timeline


def settled_us(graph: ReplayGraph) -> tuple[float, bool]:
    """The iteration time of ``replay(graph)``, and whether it has settled, in a fraction of its time; raises the same errors."""
    graph.validate()
    iterations = _first_try(graph)
    while True:
        ends = ends_us(graph, iterations)
        if iterations == 1:
            return float(ends[0]), True
        iteration_us, settled = settled_distance(ends)
        if settled or iterations >= _LAST_TRY:
            return iteration_us, settled
        iterations *= 2


def varied_us(graph: ReplayGraph, longer: Floats) -> float:
    """The mean iteration time where iterations vary, without the first two and, as in `settled_distance`, the last.

    Parameters
    ----------
    longer
        How many times its duration each op takes in each iteration, [iterations >= 5, ops].

    Raises
    ------
    GraphError
        The graph cannot be replayed.
    """
    graph.validate()
    ends = ends_us(graph, len(longer), longer)
    return float((ends[-2] - ends[_BEFORE - 1]) / (len(ends) - _BEFORE - 1))


def _first_try(graph: ReplayGraph) -> int:
    return _FIRST_TRY if len(graph.carry_src) else 1


def _timeline(graph: ReplayGraph, engine: Engine) -> Timeline:
    times = engine.first.times()
    if engine.iterations == 1:
        return Timeline(graph=graph, times=times, iteration_us=engine.first.makespan_us)
    ends = times.end_us.reshape(engine.iterations, -1).max(axis=1)
    iteration_us, settled = settled_distance(ends)
    return Timeline(graph=graph, times=times, iterations=engine.iterations, iteration_us=iteration_us, settled=settled)
