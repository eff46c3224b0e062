"""A cluster knows the latency and the rate of a ring over its ranks."""

import pytest

from dpro_search.cluster import parse_cluster


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
