"""Pipelines take what their formulas say; collectives of parameters and gradients hide behind computation where they can."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.errors import InputError
from dpro_search.parallel.schedule import Schedule, stages_on
from dpro_search.parallel.steps.pipeline import pipeline_orders
from dpro_search.parallel.steps.step_costs import LayerCosts, StepCosts
from dpro_search.parallel.steps.step_graph import step_graph
from dpro_search.replay import replay


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


ONE_STAGE = (Schedule.GPIPE, Schedule.ONE_F_ONE_B)


OTHERS = tuple(schedule for schedule in Schedule if schedule is not Schedule.DUAL_PIPE)


@given(schedule=st.sampled_from(OTHERS), ranks=st.integers(2, 4), rounds=st.integers(2, 4))
def test_every_pass_runs_once_after_what_it_needs(schedule, ranks, rounds):
    stages = 1 if schedule in ONE_STAGE else 2
    micro_batches = ranks * rounds
    orders = pipeline_orders(schedule, ranks, stages, micro_batches)
    for rank, order in enumerate(orders):
        assert len(set(order)) == len(order)
        assert {done.stage for done in order} == set(stages_on(schedule, rank, ranks, stages))
        for done in order:
            forward, inputs = (done._replace(direction=direction) for direction in "FI")
            assert forward in order
            if done.direction == "B":
                assert order.index(forward) < order.index(done)
            if done.direction == "W":
                assert order.index(forward) < order.index(inputs) < order.index(done)
        backward = [done for done in order if done.direction in "BW"]
        assert len(backward) == stages * micro_batches
        assert len([done for done in order if done.direction in "BI"]) == stages * micro_batches


@given(half=st.integers(1, 4), rounds=st.integers(2, 4))
def test_dual_pipe_takes_half_of_the_micro_batches_from_each_end(half, rounds):
    ranks = 2 * half
    micro_batches = ranks * rounds
    for rank, order in enumerate(pipeline_orders(Schedule.DUAL_PIPE, ranks, 1, micro_batches)):
        assert len(set(order)) == len(order)
        for stage in (rank, 2 * ranks - 1 - rank):
            for direction in ("F", "BI", "BW"):
                done = [each.micro_batch for each in order if each.stage == stage and each.direction in direction]
                assert sorted(done) == list(range(micro_batches // 2))


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_the_bubble_of_dual_pipe_is_at_most_that_of_its_paper(ranks):
    """DeepSeek-AI 2024, table 2: (p / 2 - 1)(F&B + B - 3 W). There both passes of a pair end together; here one ends first."""
    forward_us, backward_us, weights_us, micro_batches = 1.0, 2.0, 1.0, 4 * ranks
    layer = LayerCosts(forward_us=forward_us, backward_us=backward_us, weights_us=weights_us)
    parts = StepCosts(stages=((layer,),) * 2 * ranks, copies=2)
    graph = step_graph(parts, pipeline_orders(Schedule.DUAL_PIPE, ranks, 1, micro_batches))
    bubble_us = replay(graph, iterations=1).times.end_us.max() - micro_batches * (forward_us + backward_us)
    in_paper_us = (ranks / 2 - 1) * (forward_us + backward_us + backward_us - 3 * weights_us)
    assert in_paper_us / 2 <= bubble_us <= in_paper_us


def busy_us(graph, rank):
    """From the start of a rank's first op to the end of its last one."""
    times = replay(graph, iterations=1).times
    of_rank = graph.rank_of_op == rank
    return times.end_us[of_rank].max() - times.start_us[of_rank].min()


def split(ranks, stages, schedule, micro_batches, forward_us, inputs_us, weights_us):
    layer = LayerCosts(forward_us=forward_us, backward_us=inputs_us + weights_us, weights_us=weights_us)
    parts = StepCosts(stages=((layer,),) * (ranks * stages))
    return step_graph(parts, pipeline_orders(schedule, ranks, stages, micro_batches))


def bubble_us(schedule, ranks, stages, micro_batches, weights_us):
    """What a step takes beyond the passes of a rank, whose forward pass and gradient of the input take 1 us a stage."""
    graph = split(ranks, stages, schedule, micro_batches, 1.0, 1.0, weights_us)
    return replay(graph, iterations=1).times.end_us.max() - micro_batches * stages * (2 + weights_us)


@given(ranks=st.integers(2, 6), more=st.integers(0, 8), weights_us=st.sampled_from([0.5, 1.0]))
def test_gradients_of_weights_fill_the_bubble(ranks, more, weights_us):
    """ZB-H1: (p - 1)(F + I - W), where 1F1B has (p - 1)(F + I + W) (Qi et al. 2024, table 1)."""
    micro_batches = 2 * ranks + more
    assert bubble_us(Schedule.ZERO_BUBBLE, ranks, 1, micro_batches, weights_us) == pytest.approx((ranks - 1) * (2 - weights_us))
    assert bubble_us(Schedule.ONE_F_ONE_B, ranks, 1, micro_batches, weights_us) == pytest.approx((ranks - 1) * (2 + weights_us))


@given(ranks=st.integers(2, 5), stages=st.integers(2, 4), rounds=st.integers(2, 4), weights_us=st.sampled_from([0.5, 1.0]))
def test_interleaved_stages_divide_the_bubble_that_is_left(ranks, stages, rounds, weights_us):
    """Times are of a stage, of which each rank has v."""
    bubble = bubble_us(Schedule.ZERO_BUBBLE, ranks, stages, ranks * rounds, weights_us)
    assert bubble == pytest.approx((ranks - 1) * (2 - weights_us))


@given(ranks=st.integers(2, 6), more=st.integers(0, 8))
def test_a_v_of_equal_parts_has_no_bubble(ranks, more):
    """From its first to its last pass every rank computes all the time (Qi et al. 2024, section 6)."""
    micro_batches = 2 * ranks + more
    graph = split(ranks, 2, Schedule.ZERO_BUBBLE_V, micro_batches, 1.0, 1.0, 1.0)
    assert [busy_us(graph, rank) for rank in range(ranks)] == [pytest.approx(6 * micro_batches)] * ranks


@given(ranks=st.integers(2, 5), rounds=st.integers(2, 4), weights_us=st.sampled_from([0.5, 1.0]))
def test_dual_pipe_v_that_overlaps_nothing_has_the_bubble_of_zero_bubble(ranks, rounds, weights_us):
    """DeepSeek-AI 2024, table 2: what it gains over ZB1P is from forward and backward passes that overlap."""
    numbers = (ranks, 2, ranks * rounds, weights_us)
    assert bubble_us(Schedule.DUAL_PIPE_V, *numbers) == pytest.approx(bubble_us(Schedule.ZERO_BUBBLE, *numbers))


@given(ranks=st.integers(2, 5), schedule=st.sampled_from([Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE]))
def test_uneven_stages_wait_for_the_slowest(ranks, schedule):
    layer = LayerCosts(forward_us=1.0, backward_us=2.0, weights_us=1.0)
    stages = tuple((layer,) * (3 if rank == 0 else 1) for rank in range(ranks))
    graph = step_graph(StepCosts(stages=stages), pipeline_orders(schedule, ranks, 1, 20))
    assert replay(graph, iterations=1).times.end_us.max() >= 20 * 3 * 3


def test_gradients_are_reduced_beside_the_last_backward_pass():
    hidden = step_us(Schedule.ONE_F_ONE_B, 1, 1, 4, layers=4, reduce_us=2.0)
    assert hidden == 4 * 4 * 3 + 2, "only the first layer's reduction is left at the end"
    assert step_us(Schedule.ONE_F_ONE_B, 1, 1, 4, layers=4, reduce_us=2.0, overlap=False) == 4 * 4 * 3 + 4 * 2


def test_zero_3_gathers_for_every_pass():
    """Collectives that take longer than the passes they hide behind decide the step: 4 gathers forward, 4 reductions, and 3 gathers
    back, for the last layer is needed again at once."""
    costs = {"gather_us": 9.0, "reduce_us": 9.0, "gathers_every_pass": True, "reduces_every_pass": True}
    assert step_us(Schedule.ONE_F_ONE_B, 1, 1, 1, layers=4, **costs) >= 11 * 9
    assert step_us(Schedule.ONE_F_ONE_B, 1, 1, 1, layers=4, regather=False, **costs) < 11 * 9


def test_zero_2_reduces_after_every_backward_pass_and_gathers_once():
    """No rank holds a sum of whole gradients, so that every micro-batch's are exchanged; parameters are whole."""
    costs = {"layers": 4, "gather_us": 9.0, "reduce_us": 9.0, "overlap": False, "blocking": True}
    zero_1 = step_us(Schedule.ONE_F_ONE_B, 1, 1, 3, **costs)
    zero_2 = step_us(Schedule.ONE_F_ONE_B, 1, 1, 3, reduces_every_pass=True, **costs)
    assert zero_1 == pytest.approx(3 * 4 * 3 + 4 * 9 + 4 * 9)
    assert zero_2 == pytest.approx(3 * (4 * 3 + 4 * 9) + 4 * 9)


def test_sends_delay_the_next_stage():
    assert step_us(Schedule.ONE_F_ONE_B, 2, 1, 1, send_us=0.5) == 3 * 2 + 2 * 0.5


def test_stages_of_one_rank_send_nothing():
    """The turn of a V is on the last rank: 2 p - 2 stages of 2 p send forward, and as many back."""
    orders = pipeline_orders(Schedule.ZERO_BUBBLE_V, 3, 2, 6)
    layer = LayerCosts(forward_us=1.0, backward_us=2.0, weights_us=1.0)
    names = step_graph(StepCosts(stages=((layer,),) * 6, send_us=0.1), orders).names
    assert sum(name.startswith("send ") for name in names) == 2 * 4 * 6


def test_no_rank_updates_before_the_norm_is_known():
    costs = {"send_us": 0.5, "update_us": (1.0, 1.0)}
    assert step_us(Schedule.ONE_F_ONE_B, 2, 1, 1, norm_us=0.0, **costs) == 3 * 2 + 2 * 0.5 + 1
    assert step_us(Schedule.ONE_F_ONE_B, 2, 1, 1, norm_us=0.25, **costs) == 3 * 2 + 2 * 0.5 + 0.25 + 1


def test_both_copies_of_an_embedding_are_summed_before_their_ranks_update():
    """The last rank waits for the first, which ends last; ranks between them do not."""
    layer = LayerCosts(forward_us=1.0, backward_us=2.0)
    parts = StepCosts(stages=((layer,),) * 3, update_us=(1.0,) * 3, tied_us=0.5)
    graph = step_graph(parts, pipeline_orders(Schedule.ONE_F_ONE_B, 3, 1, 4))
    ends = replay(graph, iterations=1).times.end_us
    updates = [end for name, end in zip(graph.names, ends, strict=True) if name == "update"]
    last_backward = 3 * (4 + 2)
    assert updates == [last_backward + 0.5 + 1, last_backward - 2 + 1, last_backward + 0.5 + 1]


@pytest.mark.parametrize(
    ("schedule", "numbers", "said"),
    [
        (Schedule.INTERLEAVED, (4, 2, 9), "2 equal rounds of at least 4, not 9: use 8"),
        (Schedule.GPIPE, (4, 2, 8), "one stage on each rank, not 2"),
        (Schedule.ZERO_BUBBLE_V, (4, 1, 8), "two stages on each rank"),
        (Schedule.DUAL_PIPE_V, (4, 2, 6), "at least 8 micro-batches"),
    ],
)
def test_schedules_that_do_not_exist_are_refused(schedule, numbers, said):
    with pytest.raises(InputError, match=said):
        pipeline_orders(schedule, *numbers)


def test_a_rank_that_blocks_computes_nothing_beside_its_collectives():
    costs = {"gather_us": 5.0, "reduce_us": 7.0, "gathers_every_pass": True, "reduces_every_pass": True}
    beside, blocking = (step_us(Schedule.ONE_F_ONE_B, 1, 1, 1, layers=3, blocking=waits, **costs) for waits in (False, True))
    one_after_the_other = 3 * (1.0 + 2.0 + 7.0) + 5.0 * (3 + 2)  # the last layer keeps its parameters for the backward pass
    assert blocking == pytest.approx(one_after_the_other)
    assert beside < blocking


def test_a_message_that_waits_for_its_receiver_is_not_hidden_behind_its_passes():
    """Two ranks, two micro-batches: a rank that computes would take the second message of either direction meanwhile."""
    hidden, waited = (step_us(Schedule.GPIPE, 2, 1, 2, send_us=0.5, receives=receives) for receives in (False, True))
    assert hidden == pytest.approx(3 * (2 + 1) + 2 * 0.5)
    assert waited == pytest.approx(3 * (2 + 1) + 4 * 0.5)


def test_stages_on_one_core_take_turns():
    one_core = step_us(Schedule.GPIPE, 2, 1, 4, cores=((0, 1), (0, 1)))
    assert one_core == pytest.approx(3 * 2 * 4)
    assert step_us(Schedule.GPIPE, 2, 1, 4, cores=((0, 1), (1, 1))) == pytest.approx(step_us(Schedule.GPIPE, 2, 1, 4))


def test_ranks_of_a_stage_on_one_core_take_as_many_times_as_long():
    assert step_us(Schedule.ONE_F_ONE_B, 1, 1, 2, cores=((0, 2),)) == pytest.approx(2 * step_us(Schedule.ONE_F_ONE_B, 1, 1, 2))


def test_a_rank_uses_no_core_while_it_waits_for_collectives_of_a_pass():
    layer = LayerCosts(forward_us=3.0, backward_us=6.0, waits_forward_us=2.0, waits_backward_us=4.0)
    parts = StepCosts(stages=((layer,), (layer,)), cores=((0, 1), (0, 1)))
    graph = step_graph(parts, pipeline_orders(Schedule.GPIPE, 2, 1, 1))
    assert replay(graph, iterations=1).times.end_us.max() == pytest.approx(2 * (3.0 + 6.0))
    shared = step_graph(StepCosts(stages=((layer,),), cores=((0, 2),)), pipeline_orders(Schedule.GPIPE, 1, 1, 1))
    assert replay(shared, iterations=1).times.end_us.max() == pytest.approx(2 * 1.0 + 2.0 + 2 * 2.0 + 4.0)
