"""Replays of DistributedDataParallel jobs, on programs whose times can be worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
import state_machine
from ddp_jobs import FREE, NONE, POST, WAIT, job, programs
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.errors import GraphError
from dpro_search.machine import machine_constants
from dpro_search.replay.ddp.timeline import replay_ddp
from dpro_search.replay.iterations import DRAWS, WARMUP, sample_order


def iteration_us(program, sizes, **options) -> float:
    return replay_ddp(job(program, sizes, **options), iterations=8).iteration_us


def test_an_exposed_transfer_adds_its_latency_and_time():
    assert iteration_us([(100, POST, 0), (0, WAIT, 0), (10, NONE, -1)], [50]) == pytest.approx(100 + 1 + 50 + 10)


def test_a_transfer_is_hidden_behind_later_work():
    assert iteration_us([(100, POST, 0), (70, WAIT, 0), (10, NONE, -1)], [50]) == pytest.approx(180)


def test_the_slowest_rank_sets_the_pace():
    assert iteration_us([(100, POST, 0), (0, WAIT, 0)], [50], scale=(1, 1.5)) == pytest.approx(150 + 1 + 50)


def test_two_transfers_share_the_link():
    program = [(100, POST, 0), (0, POST, 1), (0, WAIT, 0), (0, WAIT, 1)]
    assert iteration_us(program, [50, 50], threads=2) == pytest.approx(100 + 1 + 100)


def test_one_thread_runs_them_one_after_the_other():
    program = [(100, POST, 0), (0, POST, 1), (0, WAIT, 0), (0, WAIT, 1)]
    assert iteration_us(program, [50, 50], threads=1) == pytest.approx(100 + 2 * (1 + 50))


def test_the_sender_of_a_broadcast_goes_on_and_the_others_wait():
    program = [(10, POST, 0), (0, WAIT, 0), (100, NONE, -1)]
    timeline = replay_ddp(job(program, [50], broadcast={0}), iterations=8)
    waited = [rank["exposed_communication"] for rank in timeline.rank_breakdown_us]
    assert waited[0] == 0
    assert waited[1] > 0


def test_communication_takes_core_time_from_the_main_thread():
    costs = replace(FREE, cpu_us=0.25)
    # While 50 bytes move, the main thread runs at three quarters: 100 us of work after the post take 12.5 us more.
    assert iteration_us([(100, POST, 0), (100, WAIT, 0)], [50], costs=costs) == pytest.approx(200 + 12.5)


def test_a_cast_of_the_result_ends_before_the_wait_does():
    program = [(100, POST, 0), (0, WAIT, 0), (10, NONE, -1)]
    assert iteration_us(program, [50], finish=[7]) == pytest.approx(100 + 1 + 50 + 7 + 10)


def test_a_cast_of_the_result_shares_the_core_with_the_main_thread():
    # 51 of the 100 us after the post are done when the cast begins: both have half of the core for 40 us.
    assert iteration_us([(100, POST, 0), (100, WAIT, 0)], [50], finish=[20]) == pytest.approx(200 + 20, abs=2)


def test_one_result_is_cast_while_the_next_one_moves():
    program = [(100, POST, 0), (0, POST, 1), (0, WAIT, 0), (0, WAIT, 1)]
    assert iteration_us(program, [50, 50], threads=2, finish=[0, 0]) == pytest.approx(100 + 1 + 100)
    assert iteration_us(program, [50, 90], threads=2, finish=[20, 0]) == pytest.approx(100 + 1 + 140)


def test_a_latency_beside_computing_ranks_is_drawn_and_repeats_with_the_seed():
    costs = replace(FREE, alpha_busy_us=30.0)
    changing = job([(100, POST, 0), (1, WAIT, 0)], [1], costs=costs)
    assert replay_ddp(changing, seed=1).iterations_us.tolist() == replay_ddp(changing, seed=1).iterations_us.tolist()
    assert replay_ddp(changing, seed=1).iterations_us.std() > 0


def test_ranks_on_one_core_share_it():
    assert iteration_us([(100, POST, 0), (0, WAIT, 0)], [50], core=(0, 0)) == pytest.approx(200 + 1 + 50)


def test_a_breakdown_adds_up_to_the_iterations():
    timeline = replay_ddp(job([(100, POST, 0), (20, WAIT, 0)], [50], costs=replace(FREE, cpu_us=0.5)), iterations=30)
    for rank in timeline.rank_breakdown_us:
        assert sum(rank.values()) == pytest.approx(timeline.iteration_us, rel=0.01)


def test_collectives_have_a_start_and_an_end_in_the_order_of_posting():
    timeline = replay_ddp(job([(100, POST, 0), (100, POST, 1), (0, WAIT, 0), (0, WAIT, 1)], [50, 20]), iterations=4)
    start, end = timeline.collective_us[0].T
    np.testing.assert_allclose(start, [100, 200])
    np.testing.assert_allclose(end, [151, 221], atol=5)  # a latency of 1 us on average


def test_a_wait_for_what_nobody_posts_is_an_error():
    with pytest.raises(GraphError, match="never posts"):
        replay_ddp(job([(100, WAIT, 0)], [50]))


def of_state_machine(found, timeline, seed):
    """End of each iteration on each rank, and the other results of the state machine, for the draws of a replay."""
    costs = found.comm
    rng = np.random.default_rng(seed)
    sample_order(rng, found.samples, len(timeline.sample_of) - WARMUP)
    return state_machine.simulate(
        found.core, found.work_us, found.action, found.collective, found.size_bytes, found.is_broadcast, found.finish_us,
        found.threads,
        np.array([
            costs.alpha_busy_us, costs.alpha_more_us, costs.alpha_tail_us, costs.beta_busy_us, costs.beta_tail_us, costs.cpu_us,
            costs.collective_cpu_us, machine_constants().host.saturation_bytes,
        ]),
        timeline.sample_of, rng.random(DRAWS),
    )  # fmt: skip


@settings(max_examples=100)
@given(programs(), st.integers(0, 3))
def test_the_graph_of_a_program_has_the_times_of_the_state_machine(found, seed):
    timeline = replay_ddp(found, iterations=6, seed=seed)
    end_us, breakdown_us, moved_us, _ = of_state_machine(found, timeline, seed)
    close = {"rtol": 1e-6, "atol": 1e-3}
    np.testing.assert_allclose(timeline.iterations_us, np.diff(end_us.max(axis=1)[WARMUP - 1 :]), **close)
    seen = np.isfinite(moved_us)  # it stops when the last rank has ended, whatever still moves
    np.testing.assert_allclose(timeline.collective_us.reshape(-1, 2)[seen], moved_us[seen], **close)
    for rank, row in enumerate(timeline.rank_breakdown_us):
        np.testing.assert_allclose(list(row.values()), breakdown_us[:, rank] / len(end_us), **close)
