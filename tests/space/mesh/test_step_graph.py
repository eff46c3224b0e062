"""Pipelines take what their formulas say; collectives of parameters and gradients hide behind computation where they can."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.errors import InputError
from dpro_search.replay.replayer import replay
from dpro_search.space.mesh import Schedule, pipeline_orders, step_graph
from dpro_search.space.mesh.step_graph import LayerCosts, StepCosts


def step_us(schedule, ranks, stages, micro_batches, layers=1, **costs):
    layer = LayerCosts(
        forward_us=1.0, backward_us=2.0, **{name: costs.pop(name) for name in ("gather_us", "reduce_us") if name in costs}
    )
    parts = StepCosts(stages=((layer,) * layers,) * (ranks * stages), **costs)
    graph = step_graph(parts, pipeline_orders(schedule, ranks, stages, micro_batches))
    return replay(graph, iterations=1).times.end_us.max()


@given(ranks=st.integers(1, 6), micro_batches=st.integers(1, 12))
@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B])
def test_the_bubble_is_one_pass_a_rank(schedule, ranks, micro_batches):
    assert step_us(schedule, ranks, 1, micro_batches) == pytest.approx(3 * (micro_batches + ranks - 1))


@given(ranks=st.integers(2, 4), stages=st.integers(2, 4), rounds=st.integers(1, 4))
def test_interleaved_stages_divide_the_bubble(ranks, stages, rounds):
    """Narayanan et al. 2021, section 2.2: the bubble of v stages a rank is 1 / v of that of one."""
    micro_batches = ranks * rounds
    assert step_us(Schedule.INTERLEAVED, ranks, stages, micro_batches) == pytest.approx(3 * (micro_batches * stages + ranks - 1))


@given(schedule=st.sampled_from(Schedule), ranks=st.integers(2, 4), rounds=st.integers(1, 3))
def test_every_pass_runs_once_after_what_it_needs(schedule, ranks, rounds):
    stages = 2 if schedule is Schedule.INTERLEAVED else 1
    orders = pipeline_orders(schedule, ranks, stages, ranks * rounds)
    for rank, order in enumerate(orders):
        assert len(set(order)) == len(order) == 2 * stages * ranks * rounds
        assert {done.stage % ranks for done in order} == {rank}
        for done in order:
            if done.direction == "B":
                assert order.index(done._replace(direction="F")) < order.index(done)


def test_gradients_are_reduced_beside_the_last_backward_pass():
    hidden = step_us(Schedule.ONE_F_ONE_B, 1, 1, 4, layers=4, reduce_us=2.0)
    assert hidden == 4 * 4 * 3 + 2, "only the first layer's reduction is left at the end"
    assert step_us(Schedule.ONE_F_ONE_B, 1, 1, 4, layers=4, reduce_us=2.0, overlap=False) == 4 * 4 * 3 + 4 * 2


def test_zero_3_gathers_for_every_pass():
    """Collectives that take longer than the passes they hide behind decide the step: 4 gathers forward, 4 back, 4 reductions."""
    assert step_us(Schedule.ONE_F_ONE_B, 1, 1, 1, layers=4, gather_us=9.0, reduce_us=9.0, every_pass=True) >= 12 * 9
    assert step_us(Schedule.ONE_F_ONE_B, 1, 1, 1, layers=4, gather_us=9.0, reduce_us=9.0, every_pass=True, regather=False) < 12 * 9


def test_sends_delay_the_next_stage():
    assert step_us(Schedule.ONE_F_ONE_B, 2, 1, 1, send_us=0.5) == 3 * 2 + 2 * 0.5


def test_interleaved_stages_need_micro_batches_for_all_ranks():
    with pytest.raises(InputError, match="divide by 4 ranks, not 6"):
        pipeline_orders(Schedule.INTERLEAVED, 4, 2, 6)
