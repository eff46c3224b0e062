"""A folded job has exactly the times of the whole one."""

import numpy as np
import pytest
from graphs import TIMES
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.errors import GraphError
from dpro_search.graph.dataflow import OpKind
from dpro_search.replay.reference import replay_reference
from dpro_search.replay.replayer import replay
from dpro_search.space.data_parallel import DataParallelJob, layered_step, replicated
from dpro_search.space.folding import classes, fold
from dpro_search.space.job_graph import build
from dpro_search.space.network import HalvingDoubling, Network, ParameterServer, Rendezvous, Ring
from dpro_search.space.replay_graph import OrderPolicy
from tests.random_steps import random_step

_TENSOR_BYTES = np.array([700.0, 1100.0, 300.0])
_POLICIES = (OrderPolicy.FIFO, OrderPolicy.PRIORITY, OrderPolicy.UNBOUNDED)


_DURATIONS_US = (0.0, 1.0, 2.5, 7.0 / 3.0)


_SCHEMES = {
    "rendezvous": lambda ranks: Rendezvous(latency_us=1.0, us_per_byte=0.01),
    "ring": lambda ranks: Ring(reduce_us_per_byte=0.003),
    "halving-doubling": lambda ranks: HalvingDoubling(reduce_us_per_byte=0.003),
    "parameter-server": lambda ranks: ParameterServer(server_host=(0, ranks - 1), partition_bytes=500.0, sum_us_per_byte=0.002),
}
_EACH_SCHEME = pytest.mark.parametrize(
    ("scheme", "flows"), [(scheme, flows) for scheme in _SCHEMES for flows in (False, True) if scheme != "rendezvous" or not flows]
)


@st.composite
def _jobs(draw, scheme, flows):
    """Small jobs whose ranks repeat a pattern of steps, speeds and link rates, so that some of them are alike."""
    ranks = draw(st.sampled_from([8, 6, 4, 9, 7, 5, 3, 2, 1]))
    period = draw(st.sampled_from([p for p in range(1, 5) if ranks % p == 0]))

    def pattern(values):
        return np.resize(draw(st.lists(st.sampled_from(values), min_size=period, max_size=period)), ranks)

    steps = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=2))
    factor = pattern([1.0, 1.3])
    if draw(st.integers(0, 4)) == 4:  # a straggler
        factor = factor.copy()
        factor[draw(st.integers(0, ranks - 1))] = 2.0
    per_host = draw(st.sampled_from([1, 1, 2]))
    rates = [pattern([50.0, 125.0, 100.0 / 3.0]) for _ in range(2)]
    network = Network(
        host=np.arange(ranks) // per_host,
        transmit_bytes_per_us=rates[0],
        receive_bytes_per_us=rates[1],
        latency_us=draw(st.sampled_from([0.0, 0.7])),
        local_bytes_per_us=400.0,
        flows=flows,
    )
    slowdown = np.ones((len(OpKind), len(OpKind)))
    slowdown[OpKind.BACKWARD, OpKind.COMM] = draw(st.sampled_from([1.0, 1.5]))
    return DataParallelJob(
        steps=tuple(random_step(seed, _TENSOR_BYTES, _POLICIES, _DURATIONS_US) for seed in steps),
        step_of_rank=pattern(range(len(steps))).astype(np.int64),
        scheme=_SCHEMES[scheme](ranks),
        network=network,
        groups=draw(st.sampled_from([((0,), (1,), (2,)), ((0, 1), (2,)), ((2, 0, 1),)])),
        compute_factor=factor,
        negotiate_us=draw(st.sampled_from([None, 0.0, 0.4])),
        slowdown=slowdown,
    )


def _assert_equal(whole, whole_times, folded, folded_times, iterations=1):
    for rank in range(len(folded.rank_class)):
        ops = np.flatnonzero(whole.rank_of_op == rank)
        what = [folded.graph.name(op).split("@")[0] for op in folded.ops_of_rank(rank)]
        assert what == [whole.name(op).split("@")[0] for op in ops]
        for name in TIMES:
            expected = getattr(whole_times, name).reshape(iterations, -1)[:, ops]
            np.testing.assert_array_equal(folded.unfold(getattr(folded_times, name), rank), expected)


@_EACH_SCHEME
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_folded_times_are_the_whole_jobs_in_one_iteration_and_in_several(scheme, flows, data):
    job = data.draw(_jobs(scheme, flows))
    whole, folded = build(job), fold(job)
    assert len(folded.graph) <= len(whole)
    assert folded.multiplicity.sum() == job.ranks
    _assert_equal(whole, replay_reference(whole), folded, replay_reference(folded.graph))
    times = [replay(graph, iterations=3).times for graph in (whole, folded.graph)]
    _assert_equal(whole, times[0], folded, times[1], iterations=3)


@_EACH_SCHEME
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_ranks_of_a_class_compute_alike(scheme, flows, data):
    job = data.draw(_jobs(scheme, flows))
    own = np.stack((job.step_of_rank, job.compute_factor), axis=1)
    found = classes(job)
    assert len(np.unique(np.column_stack((found, own)), axis=0)) == len(np.unique(found))
    if isinstance(job.scheme, Rendezvous):
        assert len(np.unique(own, axis=0)) == len(np.unique(found))


def _step(tensors=2):
    return layered_step(np.full(tensors, 1000.0), forward_us=5.0, backward_us=2.0, update_us=1.0)


def _factor(ranks, **slow):
    factor = np.ones(ranks)
    for rank, value in slow.items():
        factor[int(rank[1:])] = value
    return factor


@pytest.mark.parametrize("scheme", [Rendezvous(us_per_byte=0.01), Ring(), HalvingDoubling()])
@pytest.mark.parametrize("flows", [False, True])
def test_ranks_that_are_all_alike_fold_into_one(scheme, flows):
    folded = fold(replicated(_step(), 8, scheme, network=Network.uniform(8, 100.0, flows=flows)))
    assert folded.multiplicity.tolist() == [8]
    assert folded.graph.ranks == 1


def test_a_straggler_is_apart_under_rendezvous():
    folded = fold(replicated(_step(), 8, Rendezvous(us_per_byte=0.01), compute_factor=_factor(8, r3=2.0)))
    assert folded.rank_class.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    assert folded.representative.tolist() == [0, 3]


def test_a_straggler_separates_all_ranks_of_a_ring():
    job = replicated(_step(), 6, Ring(), network=Network.uniform(6, 100.0), compute_factor=_factor(6, r3=2.0))
    assert fold(job).multiplicity.tolist() == [1] * 6


def test_a_ring_that_repeats_itself_folds_to_its_period():
    job = replicated(_step(), 6, Ring(), network=Network.uniform(6, 100.0), compute_factor=np.tile([1.0, 1.0, 2.0], 2))
    assert fold(job).rank_class.tolist() == [0, 1, 2, 0, 1, 2]


def test_a_straggler_separates_ranks_of_a_hypercube_where_it_is_seen_differently():
    network = Network.uniform(8, 100.0)
    one = replicated(_step(), 8, HalvingDoubling(), network=network, compute_factor=_factor(8, r3=2.0))
    all_of_a_half = replicated(_step(), 8, HalvingDoubling(), network=network, compute_factor=np.repeat([1.0, 2.0], 4))
    assert len(fold(one).multiplicity) == 8
    assert fold(all_of_a_half).multiplicity.tolist() == [4, 4]


def test_surplus_ranks_their_keepers_and_those_in_between_are_classes():
    job = replicated(_step(), 6, HalvingDoubling(), network=Network.uniform(6, 100.0))
    assert fold(job).rank_class.tolist() == [0, 1, 0, 1, 2, 2]


def test_a_slower_link_is_another_class_only_where_messages_take_it():
    rates = np.array([100.0, 100.0, 50.0, 100.0])
    network = Network(host=np.arange(4), transmit_bytes_per_us=rates, receive_bytes_per_us=rates)
    assert len(fold(replicated(_step(), 4, Ring(), network=network)).multiplicity) == 4
    assert len(fold(replicated(_step(), 4, Rendezvous(us_per_byte=0.01), network=network)).multiplicity) == 1


def test_equal_hosts_of_several_ranks_fold_into_one_host():
    host = np.repeat(np.arange(4), 3)
    network = Network(
        host=host, transmit_bytes_per_us=np.full(4, 100.0), receive_bytes_per_us=np.full(4, 100.0), local_bytes_per_us=500.0
    )
    # The third rank of each host sends to the next host.
    assert fold(replicated(_step(), 12, Ring(), network=network)).rank_class.tolist() == [0, 1, 2] * 4


def test_ranks_that_share_links_or_servers_stay_apart():
    shared = Network(
        host=np.repeat([0, 1], 2), transmit_bytes_per_us=np.full(2, 100.0), receive_bytes_per_us=np.full(2, 100.0), flows=True
    )
    assert classes(replicated(_step(), 4, Ring(), network=shared)).tolist() == [0, 1, 2, 3]
    servers = replicated(_step(), 4, ParameterServer(server_host=(0,)), network=Network.uniform(4, 100.0))
    assert classes(servers).tolist() == [0, 1, 2, 3]


def test_a_job_that_does_not_fold_and_is_too_large_is_refused_with_advice():
    ranks = 10_240
    job = replicated(_step(161), ranks, Ring(), network=Network.uniform(ranks, 100.0), compute_factor=_factor(ranks, r77=2.0))
    with pytest.raises(GraphError, match=r"10240 ranks under Ring fold into 10240 classes.*use Rendezvous"):
        fold(job)


def _large_step():
    """161 gradients of an uneven model."""
    rng = np.random.default_rng(161)
    return layered_step(
        rng.integers(1_000, 9_000_000, 161).astype(np.float64),
        forward_us=90_000.0,
        backward_us=rng.uniform(100.0, 3_000.0, 161),
        update_us=rng.uniform(5.0, 60.0, 161),
    )


def _handful(ranks):
    return np.random.default_rng(7).choice([0.9, 0.95, 1.0, 1.1], ranks)


@pytest.mark.parametrize("negotiate_us", [None, 120.0])
def test_512_ranks_of_161_tensors_are_equal_to_the_last_bit(negotiate_us):
    scheme = Rendezvous(latency_us=60.0, us_per_byte=0.0017)
    job = replicated(_large_step(), 512, scheme, compute_factor=_handful(512), negotiate_us=negotiate_us)
    whole, folded = build(job), fold(job)
    whole_times, folded_times = replay(whole, iterations=1).times, replay(folded.graph, iterations=1).times
    order = np.argsort(whole.rank_of_op, kind="stable").reshape(512, -1)
    for name in TIMES:
        unfolded = np.stack([folded.unfold(getattr(folded_times, name), rank)[0] for rank in range(512)])
        np.testing.assert_array_equal(unfolded, getattr(whole_times, name)[order])


@pytest.mark.parametrize(
    ("factor", "expected"),
    [(np.ones(10_240), 1), (_handful(10_240), 4), (_factor(10_240, r77=1.5), 2)],
    ids=["alike", "handful", "straggler"],
)
def test_10240_ranks_are_a_few_classes(factor, expected):
    job = replicated(_large_step(), 10_240, Rendezvous(latency_us=60.0, us_per_byte=0.0017), compute_factor=factor)
    folded = fold(job)
    assert len(folded.multiplicity) == expected
    assert len(folded.graph) == expected * (1 + 4 * 161)
    timeline = replay(folded.graph)
    assert timeline.settled
    slowest = int(np.argmax(factor))
    compute_us = _large_step().duration_us.sum() * factor.max()
    assert timeline.iteration_us >= compute_us * (1 - 1e-9)
    assert folded.unfold(timeline.times.end_us, slowest).max() == timeline.times.end_us.max()
