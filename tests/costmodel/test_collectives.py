"""All-reduce costs: the counts of each algorithm, fits to points of known constants, and published NCCL measurements."""

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.costmodel.collectives.all_reduce_formula import AllReduceCost, fit_all_reduce
from dpro_search.costmodel.collectives.counts import Algorithm, Points, _leaves_a_host, counts
from dpro_search.errors import InputError
from tests.every_case import every_case

NCCL = Path(__file__).parents[3] / "shared" / "traces" / "tables" / "nccl_allreduce_a100"


def cost(algorithm=Algorithm.RING, **constants) -> AllReduceCost:
    usual = {
        "overhead_us": 0.0,
        "message_us": 0.0,
        "wire_factor": 1.0,
        "move_us_per_byte": 0.0,
        "add_us_per_byte": 0.0,
        "exposed": 0.0,
    }
    return AllReduceCost(algorithm=algorithm, **(usual | constants))


@every_case(
    ("algorithm", "ranks", "messages", "wire", "added"),
    [
        (Algorithm.RING, 4, 6, 1.5, 0.75),
        (Algorithm.RECURSIVE_DOUBLING, 8, 3, 3, 3),
        (Algorithm.RECURSIVE_DOUBLING, 6, 4, 4, 3),
        (Algorithm.HALVING_DOUBLING, 8, 6, 1.75, 0.875),
        (Algorithm.HALVING_DOUBLING, 5, 6, 3.5, 1.75),
        (Algorithm.TREE, 8, 6, 6, 3),
        (Algorithm.CHAIN, 4, 6, 2, 1),
        (Algorithm.PARAMETER_SERVER, 4, 2, 8, 4),
    ],
)
def test_counts_are_those_of_the_algorithm(algorithm, ranks, messages, wire, added):
    counted = counts(algorithm, np.array([ranks]))
    assert (counted.messages[0], counted.wire[0], counted.added[0]) == (messages, wire, added)


def test_ranks_that_share_cores_move_more_bytes_for_each_and_wait_for_their_turn():
    alone, crowded = (counts(Algorithm.RING, np.array([8.0]), cores=cores) for cores in (8, 2))
    assert (alone.moved, alone.turns) == (alone.wire, 0)
    assert (crowded.wire, crowded.moved, crowded.added, crowded.turns) == (alone.wire, 4 * alone.moved, 4 * alone.added, 3)


def test_bytes_that_workers_and_servers_move_do_not_depend_on_how_many_servers_share_them_but_for_whole_cores():
    one, two, eight = (counts(Algorithm.PARAMETER_SERVER, np.array([8.0]), servers, cores=2).moved for servers in (1, 2, 8))
    assert one > two == eight == 16


def test_the_longer_of_link_and_processors_counts_and_a_part_of_the_shorter():
    points = Points(size_bytes=np.array([1e4, 1e6]), ranks=np.array([2, 2]), link_bytes_per_us=np.array([200.0, 50.0]))
    constants = {"move_us_per_byte": 1e-2}  # 10 us a KB beside 5 and 20 on the link
    np.testing.assert_allclose(cost(**constants).predict(points), [100.0, 20000.0])
    np.testing.assert_allclose(cost(**constants, exposed=0.5).predict(points), [125.0, 25000.0])


def test_a_link_catches_up_on_what_it_could_not_carry_while_it_rested_up_to_its_burst():
    points = Points(size_bytes=np.array(1e6), ranks=np.array([2]), link_bytes_per_us=np.array(100.0))
    for burst_bytes, lost_us in ((0.0, 400.0), (5e3, 300.0), (1e5, 0.0)):  # two messages, a rest of 200 us each
        np.testing.assert_allclose(cost(message_us=200.0, burst_bytes=burst_bytes).predict(points), 10000.0 + lost_us)
    small = Points(size_bytes=np.array([1e3]), ranks=np.array([2]), link_bytes_per_us=np.array(100.0))
    np.testing.assert_allclose(cost(message_us=200.0, burst_bytes=1e5).predict(small), 400.0)


def test_pushes_rest_while_pulls_are_under_way_and_the_links_save_up():
    points = Points(size_bytes=np.array([1e4, 1e6]), ranks=np.array(2), link_bytes_per_us=np.array(100.0))
    prediction = cost(Algorithm.PARAMETER_SERVER, burst_bytes=1e5).predict(points)  # of two workers: 4 bytes a byte
    np.testing.assert_allclose(prediction, [400.0 / 2, 40000.0 - 2 * 1000.0])


@every_case("algorithm", list(Algorithm))
def test_one_rank_has_nothing_to_do(algorithm):
    alone = Points(size_bytes=np.array([1e6]), ranks=np.array([1]))
    assert cost(algorithm, overhead_us=10.0, message_us=5.0).predict(alone) == [0.0]


@settings(deadline=None, max_examples=12)
@given(
    overhead_us=st.floats(5, 500),
    message_us=st.floats(1, 100),
    move_us_per_byte=st.floats(1e-5, 1e-2),
    algorithm=st.sampled_from([Algorithm.RING, Algorithm.HALVING_DOUBLING, Algorithm.TREE]),
)
def test_points_of_known_constants_are_met_again(overhead_us, message_us, move_us_per_byte, algorithm):
    true = cost(algorithm, overhead_us=overhead_us, message_us=message_us, move_us_per_byte=move_us_per_byte, exposed=0.2)
    size, ranks, rate = (axis.ravel() for axis in np.meshgrid(np.geomspace(1e3, 1e8, 5), [2, 4, 8], [60.0, 240.0, np.inf]))
    points = Points(size_bytes=size, ranks=ranks, link_bytes_per_us=rate)
    fitted = fit_all_reduce((algorithm,), points, true.predict(points))
    between = Points(size_bytes=size * 1.7, ranks=ranks * 2, link_bytes_per_us=rate * 1.5)
    np.testing.assert_allclose(fitted.predict(between), true.predict(between), rtol=0.05)


def test_a_few_wild_points_do_not_bend_a_fit():
    true = cost(overhead_us=50.0, message_us=10.0, move_us_per_byte=1e-3)
    points = Points(size_bytes=np.geomspace(1e3, 1e8, 40), ranks=np.full(40, 4))
    duration = true.predict(points)
    duration[[5, 20, 30]] *= 6
    clean = np.delete(np.arange(40), [5, 20, 30])
    fitted = fit_all_reduce((Algorithm.RING,), points, duration)
    np.testing.assert_allclose(fitted.predict(points)[clean], duration[clean], rtol=0.05)


@every_case(
    ("algorithm", "ranks", "ranks_per_host", "wire"),
    [
        (Algorithm.RING, 4, 2, 1.5),  # in and out of a host goes one of its ranks' part
        (Algorithm.CHAIN, 4, 2, 2),
        (Algorithm.TREE, 8, 2, 4),
        (Algorithm.TREE, 8, 8, 0),
        (Algorithm.RECURSIVE_DOUBLING, 4, 2, 2),  # both ranks of a host exchange the whole tensor with the other host at once
        (Algorithm.RECURSIVE_DOUBLING, 8, 2, 4),
        (Algorithm.RECURSIVE_DOUBLING, 6, 3, 4),
        (Algorithm.HALVING_DOUBLING, 4, 2, 1),  # the half that goes furthest stays on the host
        (Algorithm.HALVING_DOUBLING, 8, 4, 1),
        (Algorithm.HIERARCHY, 4, 2, 1),
        (Algorithm.HIERARCHY, 8, 4, 1),
        (Algorithm.HIERARCHY, 6, 2, 4 / 3),
    ],
)
def test_what_leaves_a_host_of_several_ranks_shares_its_link_and_the_rest_is_none_of_it(algorithm, ranks, ranks_per_host, wire):
    assert counts(algorithm, np.array([ranks]), ranks_per_host=ranks_per_host).wire[0] == pytest.approx(wire)


@given(st.sampled_from([Algorithm.TREE, Algorithm.RECURSIVE_DOUBLING, Algorithm.HALVING_DOUBLING]), st.integers(2, 70))
def test_what_leaves_a_host_of_one_rank_is_what_its_algorithm_sends(algorithm, ranks):
    assert _leaves_a_host(algorithm, ranks, 1) == pytest.approx(float(counts(algorithm, ranks).wire))


@given(st.integers(2, 16), st.integers(2, 8))
def test_no_algorithm_puts_less_on_a_link_than_a_hierarchy(hosts, ranks_per_host):
    ranks = np.array([hosts * ranks_per_host])
    counted = {one: counts(one, ranks, ranks_per_host=ranks_per_host).wire[0] for one in Algorithm if one != "parameter-server"}
    assert min(counted.values()) >= counted[Algorithm.HIERARCHY] - 1e-9
    assert counted[Algorithm.RING] > counted[Algorithm.HIERARCHY]


def test_constants_are_of_the_ranks_per_host_that_they_were_fitted_to():
    points = Points(size_bytes=np.geomspace(1e3, 1e8, 12), ranks=np.array(4), link_bytes_per_us=np.array(60.0))
    true = cost(Algorithm.HIERARCHY, overhead_us=100.0, move_us_per_byte=1e-3, ranks_per_host=2)
    fitted = fit_all_reduce((Algorithm.HIERARCHY,), points, true.predict(points), ranks_per_host=2)
    assert fitted.ranks_per_host == 2
    np.testing.assert_allclose(fitted.predict(points), true.predict(points), rtol=0.05)


@pytest.mark.parametrize(
    ("size", "ranks", "duration", "message"),
    [([1.0] * 3, [2] * 3, [1.0] * 3, "at least 4"), ([1.0] * 4, [2] * 4, [1.0, 2.0, 0.0, 1.0], "not a positive number")],
)
def test_points_that_cannot_be_fitted_are_refused(size, ranks, duration, message):
    points = Points(size_bytes=np.array(size), ranks=np.array(ranks))
    with pytest.raises(InputError, match=message):
        fit_all_reduce((Algorithm.RING,), points, np.array(duration))


def _nccl() -> tuple[Points, np.ndarray]:
    if not NCCL.is_dir():
        pytest.skip("the published NCCL measurements are not here")
    size, ranks, duration = [], [], []
    for path in sorted(NCCL.glob("AR_GPU*")):
        with path.open() as file:
            for row in list(csv.reader(file))[1:]:
                size.append(float(row[0]))
                ranks.append(int(path.name.removeprefix("AR_GPU").split("_")[0]))
                duration.append((float(row[3]) + float(row[5])) / 2e3)  # out of place, in place
    return Points(size_bytes=np.array(size), ranks=np.array(ranks)), np.array(duration)


def test_nccl_on_eight_gpus_follows_from_two_to_four():
    points, duration = _nccl()
    few, many = np.flatnonzero(points.ranks <= 4)[::8], points.ranks == 8
    fitted = fit_all_reduce((Algorithm.RING,), points.select(few), duration[few])
    errors = np.abs(fitted.predict(points.select(many)) / duration[many] - 1)
    assert errors.mean() < 0.15


def test_what_crowded_cores_cost_is_met_again():
    true = cost(
        overhead_us=100.0, message_us=40.0, turn_us=30.0, move_us_per_byte=5e-3, wire_factor=1.05, crowding=0.5, exposed=0.3
    )
    size, ranks, rate = (axis.ravel() for axis in np.meshgrid(np.geomspace(1e3, 1e8, 15), [2, 3, 4], [60.0, 120.0, 250.0]))
    points = Points(size_bytes=size, ranks=ranks, link_bytes_per_us=rate, cores=np.array(2))
    fitted = fit_all_reduce((Algorithm.RING,), points, true.predict(points))
    more = Points(size_bytes=size, ranks=np.array(8), link_bytes_per_us=rate, cores=np.array(2))
    assert np.abs(fitted.predict(more) / true.predict(more) - 1).mean() < 0.05


def test_ranks_that_use_their_core_wait_for_their_turn_and_many_for_nothing_else():
    points = Points(size_bytes=np.array(1e3), ranks=np.array([2, 4, 8]), cores=np.array(2))
    model = cost(message_us=100.0, message_busy_us=40.0)
    np.testing.assert_allclose(model.busy_us(points), [2 * 40.0, 6 * 2 * 40.0, 14 * 4 * 40.0])
    turn = 40.0 * (40.0 / 100.0)  # the other rank is at the core for that part of the time
    np.testing.assert_allclose(model.predict(points)[:2], [2 * 100.0, 6 * (100.0 + turn)])
    assert 1.0 < model.predict(points)[2] / model.busy_us(points)[2] < 1.1


def test_how_long_cores_were_used_shows_what_more_ranks_on_them_take_though_no_duration_does():
    true = cost(message_us=1000.0, wire_factor=1.05, message_busy_us=400.0, byte_busy_us=1e-3)
    size, ranks, rate = (axis.ravel() for axis in np.meshgrid(np.geomspace(1e3, 1e7, 10), [2, 3, 4], [60.0, 250.0]))
    points = Points(size_bytes=size, ranks=ranks, link_bytes_per_us=rate, cores=np.array(2))
    more = Points(size_bytes=size, ranks=np.array(8), link_bytes_per_us=rate, cores=np.array(2))
    busy = true.busy_us(points)
    busy[::3] = np.nan
    blind, seeing = (fit_all_reduce((Algorithm.RING,), points, true.predict(points), each) for each in (None, busy))
    wrong = [np.abs(fit.predict(more) / true.predict(more) - 1).mean() for fit in (blind, seeing)]
    assert wrong[1] < 0.03 < 0.06 < wrong[0]


def test_the_algorithm_that_explains_the_points_best_is_taken():
    true = cost(Algorithm.CHAIN, message_us=20.0, move_us_per_byte=1e-3)
    size, ranks = (axis.ravel() for axis in np.meshgrid(np.geomspace(1e3, 1e7, 9), [2, 4, 8]))
    points = Points(size_bytes=size, ranks=ranks)
    assert fit_all_reduce((Algorithm.TREE, Algorithm.CHAIN), points, true.predict(points)).algorithm is Algorithm.CHAIN
