"""A ring all-reduce on a cluster takes what the cluster's links say: 2 (p - 1) alpha + 2 (p - 1) / p * n / B."""

import pytest

from dpro_search.cluster import parse_cluster
from dpro_search.replay.reference import replay_reference
from dpro_search.space.data_parallel import layered_step, replicated
from dpro_search.space.job_graph import build
from dpro_search.space.network import Network, Ring

SIZE_BYTES = 1e6


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
def test_a_cluster_knows_latency_and_rate_of_a_ring(name, ranks, latency_us, bytes_per_us):
    cluster = parse_cluster(name)
    assert cluster.latency_us(ranks) == pytest.approx(latency_us)
    assert cluster.bandwidth_bytes_per_us(ranks) == pytest.approx(bytes_per_us)


@pytest.mark.parametrize("flows", [False, True])
@pytest.mark.parametrize("name", ["6xtestbed@2gbit", "4xg4dn", "4xtestbed"])
def test_the_replay_of_its_messages_takes_as_long(name, flows):
    cluster = parse_cluster(name)
    p, everyone = cluster.ranks, range(cluster.ranks)
    step = layered_step([SIZE_BYTES], forward_us=0.0, backward_us=0.0, update_us=0.0)
    graph = build(replicated(step, p, Ring(), network=Network.of(cluster, flows=flows)))
    transfer_us = 2 * (p - 1) / p * SIZE_BYTES / cluster.bandwidth_bytes_per_us(everyone)
    assert replay_reference(graph).end_us.max() == pytest.approx(2 * (p - 1) * cluster.latency_us(everyone) + transfer_us)
