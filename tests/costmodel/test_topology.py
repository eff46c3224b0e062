"""Collectives on a cluster cost what its links say."""

import numpy as np
import pytest

from dpro_search.cluster import parse_cluster
from dpro_search.costmodel.topology import ring_all_reduce_us
from dpro_search.replay.reference import replay_reference
from dpro_search.space.data_parallel import Network, Ring, layered_step, replicated
from dpro_search.space.job_graph import build

SIZES = np.array([1e3, 1e6, 1e9])


@pytest.mark.parametrize(
    ("name", "ranks", "latency_us", "bytes_per_us"),
    [
        ("8xtestbed@1gbit", range(8), 25.0, 125.0),
        ("hgx-h100", range(8), 0.6, 450e3),
        ("2xhgx-h100", range(16), 3.9, 400e3),
        ("2xhgx-h100", (0, 8), 2.7, 50e3),
        ("4xp4d", range(32), 15.0, 50e3),
        ("gb200-nvl72", range(72), 0.6, 900e3),
    ],
)
def test_a_ring_all_reduce_is_the_formula(name: str, ranks: range, latency_us: float, bytes_per_us: float):
    p = len(ranks)
    expected = 2 * (p - 1) * latency_us + 2 * (p - 1) / p * SIZES / bytes_per_us
    np.testing.assert_allclose(ring_all_reduce_us(parse_cluster(name), ranks, SIZES), expected)


def test_one_rank_costs_nothing():
    np.testing.assert_array_equal(ring_all_reduce_us(parse_cluster("hgx-h100"), [3], SIZES), 0.0)


def test_a_link_without_a_limit_costs_its_latency():
    np.testing.assert_allclose(ring_all_reduce_us(parse_cluster("4xtestbed"), range(4), SIZES), 6 * 25.0)


@pytest.mark.parametrize("flows", [False, True])
@pytest.mark.parametrize("name", ["6xtestbed@2gbit", "4xg4dn"])
def test_the_replay_of_its_messages_takes_as_long(name: str, flows: bool):
    cluster = parse_cluster(name)
    step = layered_step([1e6], forward_us=0.0, backward_us=0.0, update_us=0.0)
    graph = build(replicated(step, cluster.ranks, Ring(), network=Network.of(cluster, flows=flows)))
    assert replay_reference(graph).end_us.max() == pytest.approx(
        ring_all_reduce_us(cluster, range(cluster.ranks), np.array([1e6])).item()
    )
