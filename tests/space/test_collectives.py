"""Collectives cost what the formulas say, move the bytes that they must, and give every rank everybody's gradients."""

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.graph.dataflow import OpKind
from dpro_search.replay.reference import replay_reference
from dpro_search.space.collectives import halving_doubling_partners, least_load, partition, round_robin
from dpro_search.space.data_parallel import layered_step, replicated
from dpro_search.space.job_graph import build
from dpro_search.space.network import HalvingDoubling, Network, ParameterServer, Rendezvous, Ring
from dpro_search.space.replay_graph import OrderPolicy

_BYTES, _RATE, _LATENCY_US, _REDUCE = 960_000.0, 125.0, 30.0, 0.002


def _exchange(ranks, scheme, *, flows=False, groups=1, **options):
    """A job that does nothing but exchange."""
    step = layered_step(np.full(groups, _BYTES), forward_us=0.0, backward_us=0.0, update_us=0.0)
    network = options.pop("network", None) or Network.uniform(ranks, _RATE, latency_us=_LATENCY_US, flows=flows)
    return build(replicated(step, ranks, scheme, network=network, **options))


def _makespan_us(graph):
    return replay_reference(graph).end_us.max()


def _bytes_of_links(graph):
    moved = np.zeros(len(graph.link_bytes_per_us))
    np.add.at(moved, graph.link_idx, np.repeat(graph.flow_bytes, np.diff(graph.link_ptr)))
    return moved


def _with_servers(ranks, servers, *, flows=True):
    """A host for each rank, then one for each server."""
    return Network.uniform(ranks, _RATE, latency_us=_LATENCY_US, flows=flows, other_hosts=servers)


def test_rendezvous_costs_latency_and_bytes():
    graph = _exchange(3, Rendezvous(latency_us=7.0, us_per_byte=0.01))
    assert _makespan_us(graph) == pytest.approx(7.0 + 0.01 * _BYTES)


@pytest.mark.parametrize("flows", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_ring_costs_what_its_formula_says(ranks, flows):
    expected = 2 * (ranks - 1) * _LATENCY_US + 2 * (ranks - 1) / ranks * _BYTES / _RATE + (ranks - 1) / ranks * _BYTES * _REDUCE
    assert _makespan_us(_exchange(ranks, Ring(reduce_us_per_byte=_REDUCE), flows=flows)) == pytest.approx(expected)


# As flows, surplus ranks' data share the keepers' links with their partners' first messages, which the formula does not know.
@pytest.mark.parametrize(("ranks", "flows"), [(1, True), (2, True), (4, True), (8, True), (2, False), (3, False), (6, False)])
def test_halving_doubling_costs_what_its_formula_says(ranks, flows):
    dimensions = ranks.bit_length() - 1
    core = 2**dimensions
    expected = 2 * dimensions * _LATENCY_US + (core - 1) / core * _BYTES * (2 / _RATE + _REDUCE)
    if core < ranks:  # surplus ranks hand everything over, which is added, and get everything back
        expected += 2 * (_LATENCY_US + _BYTES / _RATE) + _BYTES * _REDUCE
    assert _makespan_us(_exchange(ranks, HalvingDoubling(reduce_us_per_byte=_REDUCE), flows=flows)) == pytest.approx(expected)


@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (4, 1), (4, 2), (3, 3), (2, 4)])
def test_parameter_server_is_limited_by_the_busiest_link(workers, servers):
    scheme = ParameterServer(server_host=tuple(range(workers, workers + servers)), partition_bytes=_BYTES / servers)
    graph = _exchange(workers, scheme, network=_with_servers(workers, servers))
    one_way = _LATENCY_US + max(_BYTES, workers * _BYTES / servers) / _RATE
    assert _makespan_us(graph) == pytest.approx(2 * one_way)


def test_a_server_thread_sums_each_push_and_merges_once():
    scheme = ParameterServer(server_host=(3,), sum_us_per_byte=0.01, merge_us_per_byte=0.003)
    graph = _exchange(3, scheme, network=_with_servers(3, 1))
    one_way = _LATENCY_US + 3 * _BYTES / _RATE
    assert _makespan_us(graph) == pytest.approx(2 * one_way + _BYTES * (3 * 0.01 + 0.003))


def test_threads_of_a_server_sum_partitions_at_a_time():
    network = _with_servers(2, 1)
    busy = [
        _makespan_us(
            _exchange(
                2,
                ParameterServer(server_host=(2,), threads=threads, partition_bytes=_BYTES / 4, sum_us_per_byte=0.1),
                network=network,
            )
        )
        for threads in (1, 2, 4)
    ]
    summing = 2 * _BYTES * 0.1
    assert np.diff(busy) == pytest.approx([-summing / 2, -summing / 4])


def test_pushes_are_summed_in_the_order_of_their_arrival():
    step = layered_step([_BYTES], forward_us=1000.0, backward_us=0.0, update_us=0.0)
    job = replicated(
        step,
        3,
        ParameterServer(server_host=(3,), sum_us_per_byte=0.001),
        network=_with_servers(3, 1),
        compute_factor=np.array([30.0, 10.0, 1.0]),
    )
    graph = build(job)
    times = replay_reference(graph)
    sums = [op for op in range(len(graph)) if ".sum" in graph.name(op)]
    assert [graph.name(op)[-1] for op in sorted(sums, key=lambda op: times.start_us[op])] == ["2", "1", "0"]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_each_link_carries_a_rings_bytes_once_in_each_direction(ranks):
    moved = _bytes_of_links(_exchange(ranks, Ring(), flows=True))
    assert moved == pytest.approx(np.full(2 * ranks, 2 * (ranks - 1) / ranks * _BYTES))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_link_carries_halving_doublings_bytes_once_in_each_direction(ranks):
    moved = _bytes_of_links(_exchange(ranks, HalvingDoubling(), flows=True))
    assert moved == pytest.approx(np.full(2 * ranks, 2 * (ranks - 1) / ranks * _BYTES))


def test_a_servers_links_carry_its_share_of_every_worker():
    workers, servers = 3, 2
    scheme = ParameterServer(server_host=(3, 4), partition_bytes=_BYTES / 4)
    moved = _bytes_of_links(_exchange(workers, scheme, network=_with_servers(workers, servers)))
    assert moved == pytest.approx(np.tile([_BYTES] * workers + [workers * _BYTES / servers] * servers, 2))


def test_ranks_of_one_host_use_no_link():
    network = Network(
        host=np.array([0, 0, 1, 1]),
        transmit_bytes_per_us=np.full(2, _RATE),
        receive_bytes_per_us=np.full(2, _RATE),
        local_bytes_per_us=10 * _RATE,
        flows=True,
    )
    graph = _exchange(4, Ring(), network=network)
    assert _bytes_of_links(graph) == pytest.approx(np.full(4, 6 / 4 * _BYTES))  # one of two messages leaves the host
    assert _makespan_us(graph) == pytest.approx(6 / 4 * _BYTES / _RATE)


def test_receives_of_one_ring_overlap_sends_of_another():
    # What a message takes on the wire equals what its reduction takes, so two rings fill each other's gaps; on one shared
    # device they would take twice the time of one.
    scheme = Ring(reduce_us_per_byte=1 / _RATE)
    one, two = (_makespan_us(_exchange(4, scheme, groups=groups, network=Network.uniform(4, _RATE))) for groups in (1, 2))
    assert two < 1.45 * one


def test_two_rings_share_the_wire():
    one, two = (_makespan_us(_exchange(4, Ring(), groups=groups, network=Network.uniform(4, _RATE))) for groups in (1, 2))
    assert two == pytest.approx(2 * one)


_SCHEMES = (
    Rendezvous(us_per_byte=0.001),
    Ring(),
    HalvingDoubling(),
    ParameterServer(server_host=(0, 1), partition_bytes=250_000.0),
)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 11), st.sampled_from(_SCHEMES), st.booleans(), st.sampled_from([None, 5.0]))
def test_every_result_needs_the_gradients_of_all_ranks(ranks, scheme, flows, negotiate_us):
    graph = _exchange(ranks, scheme, flows=flows, negotiate_us=negotiate_us)
    graph.validate()
    needs = networkx.DiGraph()
    needs.add_nodes_from(range(len(graph)))
    needs.add_edges_from(zip(*(array.tolist() for array in graph.edges()), strict=True))
    for collective in np.unique(graph.collective[graph.collective >= 0]) if len(graph.collective) else ():
        parts = np.flatnonzero(graph.collective == collective).tolist()
        hub = ("collective", int(collective))
        causes = {source for part in parts for source in needs.predecessors(part)}
        needs.add_edges_from([(source, hub) for source in causes] + [(hub, part) for part in parts])
    assert networkx.is_directed_acyclic_graph(needs)
    made = {op for op in range(len(graph)) if graph.kind[op] == OpKind.BACKWARD}
    for op in np.flatnonzero(graph.kind == OpKind.UPDATE).tolist():
        assert made <= networkx.ancestors(needs, op)


@pytest.mark.parametrize("scheme", [Rendezvous(us_per_byte=0.001), ParameterServer(server_host=(0,))])
def test_dependencies_grow_with_the_ranks_not_with_their_square(scheme):
    few, many = (len(_exchange(ranks, scheme, negotiate_us=0.0).pred_idx) / ranks for ranks in (8, 256))
    assert many == pytest.approx(few, rel=0.05)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 8, 12])
def test_partners_of_the_hypercube_are_mutual(ranks):
    cube = halving_doubling_partners(ranks)
    core = np.flatnonzero(~cube.surplus)
    assert len(core) == 2 ** len(cube.partner)
    for partner in cube.partner:
        assert (partner[cube.surplus] == -1).all()
        np.testing.assert_array_equal(partner[partner[core]], core)
    paired = np.flatnonzero(cube.mate >= 0)
    np.testing.assert_array_equal(cube.mate[cube.mate[paired]], paired)
    np.testing.assert_array_equal(cube.surplus[paired], ~cube.surplus[cube.mate[paired]])
    assert cube.surplus.sum() == ranks - len(core)


@given(st.floats(1, 1e9), st.floats(1e5, 1e8))
def test_partitions_add_up_and_only_the_last_is_smaller(size_bytes, partition_bytes):
    sizes = partition(size_bytes, partition_bytes)
    assert sizes.sum() == pytest.approx(size_bytes)
    assert (sizes[:-1] == partition_bytes).all()
    assert 0 < sizes[-1] <= partition_bytes


@given(st.lists(st.floats(1, 100), min_size=1, max_size=40), st.integers(1, 5))
def test_least_load_is_balanced_to_within_one_partition(sizes, servers):
    sizes = np.array(sizes)
    load = np.bincount(least_load(sizes, servers), weights=sizes, minlength=servers)
    assert load.max() - load.min() <= sizes.max() * (1 + 1e-9)


def test_round_robin_takes_servers_one_after_the_other():
    assert round_robin(np.ones(5), 2).tolist() == [0, 1, 0, 1, 0]


def test_messages_of_a_sender_wait_for_each_other_by_default():
    network = _with_servers(1, 1, flows=False)
    queued, at_once = (
        _makespan_us(_exchange(1, ParameterServer(server_host=(1,), partition_bytes=_BYTES / 4, policy=policy), network=network))
        for policy in (None, OrderPolicy.UNBOUNDED)
    )
    assert at_once == pytest.approx(2 * (_LATENCY_US + _BYTES / 4 / _RATE))
    assert queued > 4 * (_LATENCY_US + _BYTES / 4 / _RATE)
