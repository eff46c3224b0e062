"""The clock of a host jumps while a job is recorded, as when a daemon corrects it."""

from dataclasses import replace

import numpy as np
import pytest
from sample import sample

from dpro_search.collect.trace import Trace
from dpro_search.errors import InputError
from tests.cli.facts import replayed
from tests.every_case import every_case


def after_a_jump(trace: Trace, jump_us: float, rank: int | None, step: int) -> Trace:
    """The trace with a clock that jumps at the start of a step on rank 0, on one rank or on all."""
    steps, events = trace.steps, trace.events
    at_us = float(steps.start_us[(steps.rank == 0) & (steps.index == step)][0])

    def jumped(ranks, time_us):
        return time_us + jump_us * ((time_us >= at_us) & (True if rank is None else ranks == rank))

    return replace(
        trace,
        steps=replace(steps, start_us=jumped(steps.rank, steps.start_us), end_us=jumped(steps.rank, steps.end_us)),
        events=replace(events, start_us=jumped(events.rank, events.start_us), end_us=jumped(events.rank, events.end_us)),
    )


@pytest.fixture(scope="module")
def usual() -> dict:
    return replayed(sample())


@every_case("jump_us", [-3_600e6, -1e6, 1e6, 3_600e6])
@every_case("step", [8, 18], ids=["while steps are timed", "while steps are profiled"])
def test_a_jump_of_all_clocks_moves_the_prediction_by_little(jump_us, step, usual):
    facts = replayed(after_a_jump(sample(), jump_us, None, step))
    assert facts["predicted_iteration_us"] == pytest.approx(usual["predicted_iteration_us"], rel=0.05)
    assert facts["measured_iteration_us"] == pytest.approx(usual["measured_iteration_us"], rel=0.02)


@every_case("jump_us", [-3_600e6, -1e6, 1e6, 3_600e6])
@every_case("rank", [0, 1])
def test_a_jump_of_one_clock_gives_a_prediction_or_one_line(jump_us, rank):
    try:
        facts = replayed(after_a_jump(sample(), jump_us, rank, 18))
    except InputError:
        return
    assert np.isfinite(facts["predicted_iteration_us"])
    assert facts["predicted_iteration_us"] > 0
