"""What NCCL's collectives take on a cluster: published measurements, scaling laws, and what must hold on any cluster."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.cluster import parse_cluster
from dpro_search.costmodel.collectives.nccl import (
    COLLECTIVES,
    Placement,
    bytes_in,
    collective_us,
    estimate,
    paths,
    placement_of,
    ways_of,
)
from dpro_search.costmodel.collectives.nccl.constants import nccl_constants
from dpro_search.errors import InputError
from tests.every_case import every_case

MIB = 2**20
MACHINES = ("hgx-h100", "hgx-b200", "dgx-a100-80", "p3dn.24xlarge", "g4dn.8xlarge", "l40s-pcie-8", "polaris", "gb200-nvl72")


def time_us(cluster: str, size: float, *, collective: str = "all_reduce", **placement: int) -> float:
    return float(collective_us(collective, size, parse_cluster(cluster), Placement(**placement)))


# Public measurements (nccl-tests), within the interval.


@every_case(
    ("cluster", "collective", "per_node", "nodes", "size", "measured_us"),
    [
        ("hgx-h100", "all_reduce", 8, 1, 2**30, 4029.0),  # NVIDIA/dgxc-benchmarking, DGX H100
        ("hgx-h100", "all_reduce", 8, 1, 2048, 16.4),
        ("hgx-h100", "all_gather", 8, 1, 256 * MIB, 730.0),  # SimuMax
        ("dgx-a100-80", "all_reduce", 4, 1, 256 * MIB, 1929.0),  # vTrain
        ("10xhgx-h100", "all_reduce", 1, 10, 256 * MIB, 10062.0),  # xxrjun/nccl-tests-cluster
        ("10xhgx-h100", "all_to_all", 8, 10, 2**30, 21160.0),
        ("16xabci-a", "all_reduce", 8, 16, 1024, 74.0),  # ABCI 2.0
        ("32xabci-v", "all_reduce", 4, 32, 8 * MIB, 1663.0),
        ("2xp4de.24xlarge", "all_reduce", 8, 2, 16 * MIB, 1192.0),  # aws-samples/awsome-distributed-training
        ("2xp4de.24xlarge", "all_reduce", 8, 2, 2**30, 26217.0),
    ],
)
def test_published_measurements_lie_in_the_interval(
    cluster: str, collective: str, per_node: int, nodes: int, size: int, measured_us: float
) -> None:
    estimated = estimate(collective, size, parse_cluster(cluster), Placement(ranks_per_node=per_node, nodes=nodes))
    low, high = estimated.interval_us
    assert low < measured_us < high
    assert estimated.time_us == pytest.approx(measured_us, rel=0.35)


# Scaling.


def test_latency_grows_with_the_logarithm_of_the_hosts_for_trees_and_linearly_for_rings() -> None:
    hosts = [64, 256, 1024]
    trees = [time_us(f"{count}xhgx-h100", 512, ranks_per_node=8, nodes=count) for count in hosts]
    assert trees[2] - trees[1] == pytest.approx(trees[1] - trees[0], rel=0.01)
    rings = [time_us(f"{count}xhgx-h100", 512, collective="all_gather", ranks_per_node=8, nodes=count) for count in hosts]
    assert rings[2] - rings[1] == pytest.approx(4 * (rings[1] - rings[0]), rel=0.01)


def test_items_that_cross_to_a_host_once_take_as_much_less_of_the_network_as_hosts_repeat() -> None:
    """Of 8 ranks for each item, drawn on 2 hosts, all but 1 in 256 leave a copy on the other: 1 crosses where 4 would."""

    def large(copies: int, nodes: int) -> float:
        cluster, placement = parse_cluster(f"{nodes}xhgx-h100@200gbit"), Placement(ranks_per_node=8, nodes=nodes)
        return min(way.us_per_byte for way in ways_of("all_to_all", cluster, placement, copies=copies))

    assert large(8, 2) / large(0, 2) == pytest.approx((1 - 1 / 256) / 4)
    assert large(1, 2) == large(0, 2)
    assert large(8, 1) == pytest.approx(large(0, 1)), "within a host every copy is sent"
    assert large(8, 64) / large(0, 64) > 0.9, "on many hosts few items repeat one"


def test_rings_over_networks_out_of_order_wait_for_the_network_at_every_step() -> None:
    ordered, unordered = (
        [time_us(f"{count}x{name}", 2**20, collective="all_gather", ranks_per_node=8, nodes=count) for count in (2, 4)]
        for name in ("hgx-h100", "p5.48xlarge")
    )
    steps = 16  # more of 4 hosts than of 2
    assert unordered[1] - unordered[0] == pytest.approx(steps * nccl_constants().net_hop[2] * 15, rel=0.05)
    assert ordered[1] - ordered[0] < (unordered[1] - unordered[0]) / 5


def test_many_hosts_reduce_in_trees_and_a_host_of_hopper_gpus_in_the_switch() -> None:
    many, one = parse_cluster("512xpolaris"), parse_cluster("hgx-h100")
    assert estimate("all_reduce", 4096, many, Placement(ranks_per_node=4, nodes=512)).algorithm == "tree"
    assert estimate("all_reduce", 2**30, one, Placement(ranks_per_node=8)).algorithm == "switch"
    assert estimate("all_reduce", 4096, one, Placement(ranks_per_node=8)).protocol == "LL"
    assert estimate("all_gather", 2**30, one, Placement(ranks_per_node=8)).algorithm == "ring"


def test_between_two_hosts_trees_exceed_the_rate_of_the_nics() -> None:
    size, ranks = 2**32, 16
    busbw_bytes_per_us = 2 * (ranks - 1) / ranks * size / time_us("2xp4de.24xlarge", size, ranks_per_node=8, nodes=2)
    assert 1.2 < busbw_bytes_per_us / 50e3 < 1.7


def test_two_hosts_with_fast_nics_reduce_in_rings_and_those_with_slow_ones_in_trees() -> None:
    """A channel of a tree moves 11.8 GB/s at most on Ampere: less than a ring over a NIC of 25 GB/s, more than one of 12.5."""
    algorithms = {name: estimate("all_reduce", 2**30, parse_cluster(f"2x{name}"), Placement(ranks_per_node=8, nodes=2)).algorithm
             for name in ("dgx-a100-80", "p4de.24xlarge")}  # fmt: skip
    assert algorithms == {"dgx-a100-80": "ring", "p4de.24xlarge": "tree"}


def test_a_tree_takes_up_to_twice_as_long_for_bytes_until_it_is_full() -> None:
    cluster = "2xp4de.24xlarge"
    full_us = time_us(cluster, 2**31, ranks_per_node=8, nodes=2) - time_us(cluster, 2**30, ranks_per_node=8, nodes=2)
    some_us = time_us(cluster, 8 * MIB, ranks_per_node=8, nodes=2) - time_us(cluster, 4 * MIB, ranks_per_node=8, nodes=2)
    assert some_us / 4 == pytest.approx(2 * full_us / 1024, rel=1e-6)


def test_each_hop_of_a_tree_waits_for_the_whole_of_a_message_of_one_chunk() -> None:
    """A channel moves 23.6 GB/s on Ampere; EFA has no protocol that passes on a part of a chunk."""
    cluster = "2xp4de.24xlarge"

    def of_bytes_us(ranks_per_node: int) -> float:
        return time_us(cluster, 16384, ranks_per_node=ranks_per_node, nodes=2) - time_us(
            cluster, 0, ranks_per_node=ranks_per_node, nodes=2
        )

    within = of_bytes_us(8) - of_bytes_us(4)
    assert within == pytest.approx(2 * 4 * 16384 / 23.6e3, rel=1e-6)


def test_slingshot_carries_less_than_other_networks_of_its_rate() -> None:
    slingshot = parse_cluster("8xpolaris")
    group = slingshot.groups[0]
    nics = msgspec.structs.replace(group.host.nics, fabric="rdma")  # type: ignore[type-var]
    other = msgspec.structs.replace(
        slingshot, groups=(msgspec.structs.replace(group, host=msgspec.structs.replace(group.host, nics=nics)),)
    )
    slower, faster = (
        float(collective_us("all_reduce", 2**30, cluster, Placement(ranks_per_node=4, nodes=8))) for cluster in (slingshot, other)
    )
    assert 1.1 < slower / faster < 1.5


def test_a_rack_of_nvlink_is_one_domain() -> None:
    rack_paths = paths(parse_cluster("4xgb200-nvl72"), Placement(ranks_per_node=4, nodes=18))
    assert (rack_paths.domains, rack_paths.ranks_per_domain) == (1, 72)
    four = paths(parse_cluster("4xgb200-nvl72"), Placement(ranks_per_node=4, nodes=72))
    assert (four.domains, four.ranks_per_domain) == (4, 72)
    assert four.nic_bytes_per_us == pytest.approx(72 * 50e3)


# Placement.


def test_groups_that_share_the_nics_share_their_rate() -> None:
    eight = parse_cluster("8xpolaris")  # four GPUs and two NICs a host
    alone = paths(eight, Placement(ranks_per_node=1, nodes=8))
    all_four = paths(eight, Placement(ranks_per_node=1, nodes=8, concurrent=4))
    assert alone.nic_bytes_per_us == 25e3
    assert all_four.nic_bytes_per_us == 12.5e3


def test_the_placement_of_ranks_is_found_from_their_numbers() -> None:
    cluster = parse_cluster("4xhgx-h100")
    assert placement_of(cluster, range(32)) == Placement(ranks_per_node=8, nodes=4)
    assert placement_of(cluster, (0, 4, 8, 12)) == Placement(ranks_per_node=2, nodes=2, stride=4, concurrent=4)
    assert placement_of(cluster, (3, 19)) == Placement(ranks_per_node=1, nodes=2, node_stride=2, concurrent=8)


def test_what_does_not_fit_is_one_line() -> None:
    with pytest.raises(InputError, match="does not fit on HGX H100"):
        time_us("hgx-h100", 1.0, ranks_per_node=8, nodes=2)
    with pytest.raises(InputError, match="use all_reduce, all_gather"):
        time_us("hgx-h100", 1.0, collective="allreduce", ranks_per_node=8)


# What holds anywhere.

_sizes = st.floats(1, 2**36)


@settings(max_examples=60, deadline=None)
@given(
    machine=st.sampled_from(MACHINES),
    collective=st.sampled_from(COLLECTIVES),
    nodes=st.sampled_from([1, 2, 3, 8, 17]),
    sizes=st.lists(_sizes, min_size=2, max_size=5),
    faster=st.floats(1, 8),
)
def test_more_bytes_take_no_less_time_and_faster_nics_no_more(
    machine: str, collective: str, nodes: int, sizes: list[float], faster: float
) -> None:
    cluster = parse_cluster(f"{nodes}x{machine}")
    per_node = cluster.ranks_per_host or 1
    placement = Placement(ranks_per_node=per_node, nodes=nodes)
    times = collective_us(collective, sorted(sizes), cluster, placement)
    assert (np.diff(times) >= 0).all()
    assert (times >= 0).all()
    rate_bps = cluster.groups[0].host.nics.link.rate_bps * faster  # type: ignore[union-attr, operator]
    quick = collective_us(collective, sorted(sizes), cluster.at_nic_rate(rate_bps, "faster"), placement)
    assert (quick <= times * (1 + 1e-12)).all()


@settings(max_examples=40, deadline=None)
@given(machine=st.sampled_from(MACHINES), collective=st.sampled_from(COLLECTIVES), size=st.floats(MIB, 2**36))
def test_bytes_are_found_again_from_their_time(machine: str, collective: str, size: float) -> None:
    cluster, placement = parse_cluster(f"2x{machine}"), Placement(ranks_per_node=1, nodes=2)
    size_bytes = bytes_in(collective, collective_us(collective, size, cluster, placement), cluster, placement)
    assert float(size_bytes) == pytest.approx(size, rel=1e-6)


@every_case("collective", COLLECTIVES)
def test_one_rank_communicates_nothing(collective: str) -> None:
    assert time_us("hgx-h100", 2**30, collective=collective, ranks_per_node=1) == 0.0
