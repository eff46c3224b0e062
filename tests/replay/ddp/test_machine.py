"""The machine of DistributedDataParallel jobs, on programs whose times can be worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
from ddp_jobs import FREE, NONE, POST, WAIT, job

from dpro_search.errors import GraphError
from dpro_search.replay.ddp import machine
from dpro_search.replay.ddp.timeline import replay_ddp


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


def test_compiled_and_plain_agree():
    stuck = job([(100, POST, 0), (20, POST, 1), (5, WAIT, 0), (7, WAIT, 1)], [50, 20], scale=(1, 1.2))
    costs = np.array([5.0, 3.0, 2.0, 1.1, 1.0, 0.2, 1.0, 1e5])
    finish_us = np.array([3.0, 0.0])
    arguments = (
        stuck.core, stuck.work_us, stuck.action, stuck.collective, stuck.size_bytes, stuck.is_broadcast, finish_us, 2, costs,
        np.zeros(12, dtype=np.int64), np.random.default_rng(0).random(64),
    )  # fmt: skip
    for compiled, plain in zip(machine.simulate(*arguments), machine.simulate.py_func(*arguments), strict=True):
        np.testing.assert_allclose(compiled, plain)
