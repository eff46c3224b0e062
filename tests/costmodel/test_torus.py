"""Collectives on a torus of TPUs: laws that hold on any torus, worked examples, and published measurements."""

from __future__ import annotations

from statistics import median

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.cluster import Cluster, parse_cluster
from dpro_search.costmodel.collectives.torus import (
    COLLECTIVES,
    FITTED,
    PUBLISHED,
    TorusConstants,
    collective_us,
    permute_us,
    torus_of,
)
from dpro_search.costmodel.collectives.torus_groups import Places, link_loads, places_of, spans_of
from dpro_search.errors import InputError
from experiments.costmodel.torus.__main__ import fitted, groups_along, measured
from tests.every_case import every_case

MIB = 2**20
BARE = TorusConstants(start_us=0.0, link_share=1.0)


def without_latency(cluster: Cluster, **changes: object) -> Cluster:
    torus = msgspec.structs.replace(torus_of(cluster), hop_us=0.0, **changes)
    return msgspec.structs.replace(cluster, torus=torus)


def time_us(
    cluster: Cluster, collective: str, size_bytes: float, groups: list[list[int]], constants: TorusConstants = BARE
) -> float:
    torus = torus_of(cluster)
    return float(collective_us(collective, size_bytes, cluster, spans_of(torus, places_of(torus), groups), constants))


def along(cluster: Cluster, axes: str) -> list[list[int]]:
    """Groups of devices that differ in their places on these axes only."""
    torus = torus_of(cluster)
    return groups_along(places_of(torus), axes, torus.devices_per_chip)


# What must hold on any torus.


@given(
    name=st.sampled_from(["v5e:4x4", "v6e:16x16", "v5p:4x4x8", "v4:2x2x4", "tpu7x:2x2x2", "2x v6e:4x4"]),
    axes=st.sampled_from(["x", "y", "xy"]),
    size_bytes=st.floats(1.0, 1e10),
)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(name: str, axes: str, size_bytes: float):
    cluster = parse_cluster(name)
    groups = along(cluster, axes)
    parts_us = time_us(cluster, "reduce_scatter", size_bytes, groups) + time_us(cluster, "all_gather", size_bytes, groups)
    assert time_us(cluster, "all_reduce", size_bytes, groups) == pytest.approx(parts_us)


@every_case("collective", COLLECTIVES)
def test_a_group_of_one_costs_nothing(collective: str):
    cluster = parse_cluster("v5p:2x2x2")
    assert time_us(cluster, collective, 1e9, [[device] for device in range(8)], FITTED) == 0


def test_a_permute_to_oneself_costs_nothing():
    cluster = parse_cluster("v5p:2x2x2")
    assert permute_us(1e9, cluster, places_of(torus_of(cluster)), [(device, device) for device in range(8)]) == 0


@every_case("collective", COLLECTIVES)
def test_a_ring_that_wraps_around_is_twice_as_fast_as_a_line(collective: str):
    ring = without_latency(parse_cluster("v6e:16x16"))
    line = without_latency(ring, wraps=(False, False))
    groups = along(ring, "x")
    assert time_us(line, collective, 1e9, groups) == pytest.approx(2 * time_us(ring, collective, 1e9, groups))


@every_case(("axes", "factor"), [("x", 1), ("xy", 2), ("xyz", 3)])
def test_a_gather_over_several_axes_uses_the_links_of_all(axes: str, factor: int):
    cluster = without_latency(parse_cluster("v5p:8x8x8"))
    chips = 8 ** len(axes)
    links_us = 1e9 * (chips - 1) / chips / (2 * factor * 100e3)
    assert time_us(cluster, "all_gather", 1e9, along(cluster, axes)) == pytest.approx(links_us)


def test_every_chip_receives_no_more_than_its_links_carry():
    """The bytes that a chip lacks, over all its links, are a bound for any group."""
    cluster = without_latency(parse_cluster("v5p:4x4x8"))
    for axes in ("x", "z", "xy", "yz", "xyz"):
        groups = along(cluster, axes)
        lacks = 1e9 * (len(groups[0]) - 1) / len(groups[0])
        assert time_us(cluster, "all_gather", 1e9, groups) >= lacks / (6 * 100e3)


@given(size_bytes=st.floats(1.0, 1e10), more=st.floats(1.0, 100.0))
def test_more_bytes_never_take_less_time(size_bytes: float, more: float):
    cluster = parse_cluster("2x v6e:4x4")
    for collective in COLLECTIVES:
        groups = [list(range(32))]
        assert time_us(cluster, collective, size_bytes * more, groups) >= time_us(cluster, collective, size_bytes, groups)


# Links that groups share.


def test_groups_that_alternate_on_an_axis_share_its_links():
    """Four rings of every fourth chip use each link four times; lines of four neighbours use links of their own."""
    cluster = without_latency(parse_cluster("v6e:16x16"))
    torus = torus_of(cluster)
    number = {place: device for device, place in enumerate(torus.coordinates())}
    apart = [[number[x, y, 0] for x in range(first, 16, 4)] for first in range(4) for y in range(16)]
    beside = [[number[x, y, 0] for x in range(first, first + 4)] for first in range(0, 16, 4) for y in range(16)]
    (span,) = spans_of(torus, places_of(torus), apart)
    assert [(axis.size, axis.closed, axis.sharing) for axis in span.axes] == [(4, True, 4)]
    assert time_us(cluster, "all_gather", 1e9, apart) == pytest.approx(2 * time_us(cluster, "all_gather", 1e9, beside))


def test_groups_of_different_cores_share_the_links_of_their_chips():
    cluster = without_latency(parse_cluster("tpu7x:2x2x1"))
    one, both = [[0, 2, 4, 6]], [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert time_us(cluster, "all_gather", 1e9, both) == pytest.approx(2 * time_us(cluster, "all_gather", 1e9, one))


def test_cores_of_one_chip_need_no_links():
    cluster = without_latency(parse_cluster("tpu7x:2x2x1"))
    assert time_us(cluster, "all_gather", 1e9, [[0, 1], [2, 3], [4, 5], [6, 7]]) == 0
    whole, of_chips = [list(range(8))], [[0, 2, 4, 6]]
    assert time_us(cluster, "all_gather", 1e9, whole) == time_us(cluster, "all_gather", 1e9, of_chips)


def test_a_group_over_the_seam_of_a_ring_is_a_short_line():
    torus = torus_of(parse_cluster("v6e:16x16"))
    number = {place: device for device, place in enumerate(torus.coordinates())}
    (span,) = spans_of(torus, places_of(torus), [[number[x, 0, 0] for x in (14, 15, 0, 1)]])
    assert [(axis.closed, axis.hops) for axis in span.axes] == [(False, 3)]


def test_the_first_two_axes_of_a_mesh_in_libtpus_order_are_boxes():
    """Devices of a v6e:4x4 as a mesh of 4 x 4 without a layout: hosts of 2 x 2 chips, and every second chip of each axis."""
    torus = torus_of(parse_cluster("v6e:4x4"))
    mesh = np.arange(16).reshape(4, 4)
    (inner,) = spans_of(torus, places_of(torus), mesh)
    (outer,) = spans_of(torus, places_of(torus), mesh.T)
    assert [(axis.size, axis.hops, axis.sharing) for axis in inner.axes] == [(2, 1, 1), (2, 1, 1)]
    assert [(axis.size, axis.hops, axis.sharing) for axis in outer.axes] == [(2, 2, 2), (2, 2, 2)]


def test_replica_groups_of_a_compiled_program_span_an_axis():
    """An all-reduce of a program that libtpu 0.0.42 compiled for v5e:2x4 with a mesh of 4 x 2."""
    torus = torus_of(parse_cluster("v5e:2x4"))
    (span,) = spans_of(torus, places_of(torus), [[0, 2, 4, 6], [1, 3, 5, 7]])
    assert [(axis.axis, axis.size, axis.closed, axis.sharing) for axis in span.axes] == [(1, 4, False, 1)]


def test_chips_that_form_no_box_send_along_a_ring():
    """An L of three chips: between its ends, messages of both directions pass the corner, so that two share each of its links."""
    cluster = without_latency(parse_cluster("v5e:4x4"))
    torus = torus_of(cluster)
    number = {place: device for device, place in enumerate(torus.coordinates())}
    (span,) = spans_of(torus, places_of(torus), [[number[0, 0, 0], number[1, 0, 0], number[1, 1, 0]]])
    assert (span.axes, span.chips, span.ring_sharing, span.ring_hops) == ((), 3, 2, 2)
    line = [[number[0, 0, 0], number[1, 0, 0], number[2, 0, 0]]]
    corner_us = float(collective_us("all_gather", 1e9, cluster, [span], BARE))
    assert corner_us == pytest.approx(time_us(cluster, "all_gather", 1e9, line))


# Messages between pairs.


@given(size=st.sampled_from([2, 4, 6, 8]), other=st.sampled_from([2, 4]))
def test_an_all_to_all_on_lines_takes_as_long_as_its_messages_on_the_busiest_link(size: int, other: int):
    """The formula against a count of the links that all messages pass."""
    cluster = without_latency(parse_cluster(f"v5e:{size}x{other}"))
    torus = torus_of(cluster)
    chips = np.array(torus.coordinates())
    count = len(chips)
    loads, _ = link_loads(torus, np.repeat(chips, count, axis=0), np.tile(chips, (count, 1)))
    counted_us = loads.max() * (1e9 / count) / torus.link_bytes_per_us
    assert time_us(cluster, "all_to_all", 1e9, [list(range(count))]) == pytest.approx(counted_us)


def test_an_all_to_all_on_a_ring_takes_a_quarter_of_an_all_gather():
    """A gather makes an array whole on each device; an all-to-all of the same array moves it from one dimension to another."""
    cluster = without_latency(parse_cluster("v6e:16x16"))
    groups = along(cluster, "x")
    gather_us = time_us(cluster, "all_gather", 1e9, groups) * 16 / 15
    assert time_us(cluster, "all_to_all", 1e9 / 16, groups) == pytest.approx(gather_us / 4)


@every_case(("distance", "links"), [(1, 1), (3, 3), (8, 8), (13, 3), (15, 1)])
def test_a_permute_by_several_places_uses_each_link_so_often(distance: int, links: int):
    cluster = without_latency(parse_cluster("v6e:16x16"))
    torus = torus_of(cluster)
    number = {place: device for device, place in enumerate(torus.coordinates())}
    pairs = [(device, number[(x + distance) % 16, y, z]) for (x, y, z), device in number.items()]
    assert permute_us(1e6, cluster, places_of(torus), pairs, BARE) == pytest.approx(links * 1e6 / 100e3)


def test_a_permute_waits_for_the_latency_of_the_longest_way():
    cluster = parse_cluster("v5e:4x4")  # lines: the last of four chips sends over three links to the first
    pairs = [
        (device, target) for group in along(cluster, "x") for device, target in zip(group, [*group[1:], group[0]], strict=True)
    ]
    assert permute_us(0.0, cluster, places_of(torus_of(cluster)), pairs, BARE) == pytest.approx(3.0)


# Several slices.


def test_slices_reduce_over_the_network_what_their_chips_hold():
    cluster = without_latency(parse_cluster("2x v6e:4x4"))
    inside_us = time_us(without_latency(parse_cluster("v6e:4x4")), "all_reduce", 1e9, [list(range(16))])
    between_us = 2 * (1e9 / 16) / 2 / (100e9 / 8e6)  # each chip, 100 Gbit/s
    assert time_us(cluster, "all_reduce", 1e9, [list(range(32))]) == pytest.approx(inside_us + between_us)


def test_chips_of_the_same_place_in_several_slices_use_the_network_alone():
    cluster = parse_cluster("4x v5p:2x2x1")
    groups = np.arange(16).reshape(4, 4).T.tolist()
    assert time_us(cluster, "all_gather", 1e9, groups) == pytest.approx(1e9 * 3 / 4 / (50e9 / 8e6))
    pairs = [(device, device + 4) for device in range(4)]
    assert permute_us(1e9, cluster, places_of(torus_of(cluster)), pairs, BARE) == pytest.approx(1e9 / (50e9 / 8e6))


def test_a_rate_between_slices_that_is_not_known_is_no_prediction():
    cluster = parse_cluster("2x v5p:2x2x1@unlimited")
    with pytest.raises(InputError, match="the rate between slices is not known"):
        time_us(cluster, "all_reduce", 1e9, [list(range(8))])


# What cannot be.


@every_case(
    ("groups", "message"),
    [
        ([[0, 8]], "numbers of the program's 8 devices"),
        ([[0, -1]], "numbers of the program's 8 devices"),
        ([[0, 1], [1, 2]], "a device is in two replica groups"),
        ([], "replica groups must be numbers"),
    ],
)
def test_groups_of_devices_that_do_not_exist_are_refused(groups: list[list[int]], message: str):
    torus = torus_of(parse_cluster("v5p:2x2x2"))
    with pytest.raises(InputError, match=message):
        spans_of(torus, places_of(torus), groups)


def test_devices_that_are_not_on_the_torus_are_refused():
    torus = torus_of(parse_cluster("v5e:4x4"))
    outside = Places(coordinates=np.array([[0, 0, 0], [4, 0, 0]]), slices=np.zeros(2, np.int64))
    with pytest.raises(InputError, match="coordinates are not on 4x4"):
        spans_of(torus, outside, [[0, 1]])
    with pytest.raises(InputError, match="coordinates are not on 4x4"):
        permute_us(1.0, parse_cluster("v5e:4x4"), outside, [(0, 1)])
    with pytest.raises(InputError, match="three coordinates each"):
        Places(coordinates=np.zeros((2, 2), np.int64), slices=np.zeros(2, np.int64))
    elsewhere = Places(coordinates=np.zeros((2, 3), np.int64), slices=np.array([0, 1]))
    with pytest.raises(InputError, match="a device is in none of 1 slices"):
        spans_of(torus, elsewhere, [[0, 1]])


def test_other_clusters_and_collectives_are_refused():
    with pytest.raises(InputError, match="is no torus of TPUs"):
        torus_of(parse_cluster("hgx-h100"))
    with pytest.raises(InputError, match="use all_reduce, all_gather"):
        time_us(parse_cluster("v5e:2x2"), "broadcast", 1.0, [[0, 1]])


# What was published.


def test_a_worked_example_of_the_scaling_book():
    """AllGather over Y of bf16[2048, 8192] on v5e, mesh 8 x 4: three shards of 8.4 MB over links of 45 GB/s, 560 us."""
    cluster = without_latency(parse_cluster("v5e:8x4"))
    assert time_us(cluster, "all_gather", 2048 * 8192 * 2, along(cluster, "y"), PUBLISHED) == pytest.approx(560, rel=0.01)


def test_large_all_gathers_on_tpu7x_take_what_published_rates_say():
    rows = [row for row in measured() if row.generation == "tpu7x" and row.bytes >= 16 * MIB]
    assert len(rows) == 6
    for row in rows:
        assert row.predicted_us(PUBLISHED) == pytest.approx(row.time_us, rel=0.1)


def test_errors_are_those_that_the_report_gives():
    rows = measured()
    errors = {
        name: median(abs(row.predicted_us(PUBLISHED) / row.time_us - 1) for row in rows if row.generation == name)
        for name in ("tpu7x", "v5e", "v6e")
    }
    assert errors == pytest.approx({"tpu7x": 0.087, "v5e": 0.263, "v6e": 0.339}, abs=0.005)


def test_the_constants_are_those_that_the_measurements_give():
    assert fitted(measured()) == FITTED
