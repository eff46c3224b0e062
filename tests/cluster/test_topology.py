"""Levels between ranks, and the rate of rings over them."""

from itertools import combinations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.cluster import (
    LEVELS,
    Cluster,
    Device,
    Host,
    HostGroup,
    Link,
    Nics,
    Provenance,
    bundled,
    each_host,
    parse_cluster,
    to_toml,
)
from dpro_search.cluster.files import load_cluster
from dpro_search.cluster.rings import disjoint_rings
from dpro_search.errors import InputError
from tests.every_case import every_case

SOURCE = Provenance(source="made up, 2026")
GPU = Device(name="gpu", vendor="none", kind="gpu", provenance=SOURCE)
NIC = Link(level="nic", rate_bps=1e11, latency_us=3.0)


def host(devices: int, nics: int, rate_bps: float = 1e11) -> Host:
    """Two PCIe switches, a socket link over both."""
    pcie = Link(level="pcie", rate_bps=8e10, latency_us=1.0, devices=max(devices // 2, 1))
    socket = Link(level="socket", rate_bps=4e10, latency_us=2.0, sharing="host")
    link = msgspec.structs.replace(NIC, rate_bps=rate_bps)
    return Host(device=GPU, devices=devices, links=(pcie, socket), nics=Nics(count=nics, link=link))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Small clusters of one or two kinds of hosts, with rails, leaves and spines or without."""
    groups = tuple(
        HostGroup(
            count=draw(st.integers(1, 5)),
            host=host(devices, draw(st.sampled_from([1, 2, devices])), draw(st.sampled_from([1e10, 1e11]))),
        )
        for devices in draw(st.lists(st.sampled_from([2, 4]), min_size=1, max_size=2))
    )
    links = []
    if draw(st.booleans()):
        if draw(st.booleans()):
            links.append(Link(level="rail", latency_us=3.0, hosts=draw(st.integers(1, 4))))
        if draw(st.booleans()):
            links.append(Link(level="leaf", latency_us=4.0, hosts=draw(st.integers(1, 4))))
        links.append(Link(level="spine", latency_us=5.0, hosts=None, oversubscription=draw(st.sampled_from([1.0, 2.0]))))
    return Cluster(name="made", groups=groups, links=tuple(links), provenance=SOURCE)


@st.composite
def clusters_and_ranks(draw: st.DrawFn) -> tuple[Cluster, list[int]]:
    cluster = draw(clusters())
    return cluster, draw(st.lists(st.integers(0, cluster.ranks - 1), max_size=8, unique=True))


def farness(link: Link) -> tuple[int, float]:
    return LEVELS.index(link.level), -link.each_way_bps


@given(clusters_and_ranks())
def test_a_level_is_the_same_from_both_ends(asked: tuple[Cluster, list[int]]):
    cluster, ranks = asked
    for first, second in combinations(ranks, 2):
        assert cluster.level_between(first, second) == cluster.level_between(second, first) is not None
    assert all(cluster.level_between(rank, rank) is None for rank in ranks)


@given(clusters_and_ranks())
def test_the_slowest_level_is_the_farthest_of_all_pairs(asked: tuple[Cluster, list[int]]):
    cluster, ranks = asked
    links = [cluster.level_between(first, second) for first, second in combinations(ranks, 2)]
    slowest = cluster.slowest_level(ranks)
    if not links:
        assert slowest is None
    else:
        assert farness(slowest) == max(farness(link) for link in links)


@given(clusters_and_ranks())
def test_a_group_is_not_faster_than_its_nics_and_never_stands_still(asked: tuple[Cluster, list[int]]):
    cluster, ranks = asked
    rate = cluster.bandwidth_bytes_per_us(ranks)
    assert rate > 0
    if len({cluster.place(rank)[0] for rank in ranks}) > 1:
        assert rate <= max(host.rate_bps for host in each_host(cluster)) / 8e6


@given(clusters())
def test_ranks_are_the_devices_host_by_host(cluster: Cluster):
    places = [cluster.place(rank) for rank in range(cluster.ranks)]
    assert places == [(number, device) for number, kind in enumerate(each_host(cluster)) for device in range(kind.devices)]
    assert len(cluster.devices) == cluster.ranks


@given(clusters())
def test_clusters_are_values(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster):
    path = tmp_path_factory.getbasetemp() / "cluster.toml"
    path.write_text(to_toml(cluster))
    for again in (load_cluster(path, bundled.find), msgspec.json.decode(msgspec.json.encode(cluster), type=Cluster)):
        assert again == cluster
        assert hash(again) == hash(cluster)
    with pytest.raises(AttributeError):
        cluster.name = "other"


def test_levels_of_a_pod_with_rails():
    pod = parse_cluster("64xhgx-h100")
    pairs = {"same host": (0, 7), "same rail": (0, 8), "other rail": (0, 9), "other block of the rail": (0, 32 * 8)}
    levels = {name: pod.level_between(*pair).level for name, pair in pairs.items()}
    assert levels == {"same host": "nvlink", "same rail": "rail", "other rail": "spine", "other block of the rail": "spine"}


def test_a_cube_mesh_joins_some_pairs_only():
    dgx = parse_cluster("dgx-1-v100")
    assert [dgx.level_between(0, device).level for device in range(1, 8)] == ["nvlink"] * 4 + ["socket"] * 3


@pytest.mark.parametrize(("name", "wires"), [("dgx-1-v100", 6), ("p3.16xlarge", 6), ("abci-v", 6), ("polaris", 12)])
def test_every_device_of_a_mesh_has_all_its_wires(name: str, wires: int):
    link = parse_cluster(name).groups[0].host.links[0]
    for device in range(parse_cluster(name).ranks):
        assert sum(number for first, second, number in link.wires if device in (first, second)) == wires


def test_devices_under_one_switch_are_nearer():
    machine = parse_cluster("titan-xp-pcie-8")
    assert machine.level_between(0, 3).level == "pcie"
    assert machine.level_between(0, 4).level == "socket"
    assert machine.bandwidth_bytes_per_us(range(4)) == 15750  # each its own slot
    assert machine.bandwidth_bytes_per_us(range(8)) == 12000  # one link between sockets


@pytest.mark.parametrize(("devices", "gigabytes_per_s"), [((0, 3), 50), ((0, 1), 25), ((0, 1, 2, 3), 100), (tuple(range(8)), 150)])
def test_rings_on_a_cube_mesh_take_its_wires(devices: tuple[int, ...], gigabytes_per_s: float):
    assert parse_cluster("dgx-1-v100").bandwidth_bytes_per_us(devices) == pytest.approx(gigabytes_per_s * 1e3)


def test_devices_without_a_wire_fall_back_on_the_next_level():
    assert parse_cluster("dgx-1-v100").bandwidth_bytes_per_us([0, 5]) == 15750  # PCIe below the socket link


@pytest.mark.parametrize(("per_host", "gigabytes_per_s"), [(1, 50), (2, 100), (4, 200), (8, 400)])
def test_between_hosts_a_group_has_the_nics_of_its_devices(per_host: int, gigabytes_per_s: float):
    pair = parse_cluster("2xhgx-h100")
    ranks = [8 * host + device for host in range(2) for device in range(per_host)]
    assert pair.bandwidth_bytes_per_us(ranks) == gigabytes_per_s * 1e3


def test_devices_that_share_a_nic_have_it_once():
    pair = parse_cluster("2xp4d")  # two GPUs share each of four NICs
    assert pair.bandwidth_bytes_per_us([0, 1, 8, 9]) == pair.bandwidth_bytes_per_us([0, 8]) == 12_500


def test_nvlink_of_a_rack_joins_its_hosts_and_nics_join_racks():
    racks = parse_cluster("2xgb200-nvl72")
    assert racks.slowest_level(range(72)).level == "nvlink"
    assert racks.bandwidth_bytes_per_us(range(72)) == 900e3
    assert racks.slowest_level(range(73)).level == "nic"
    assert racks.bandwidth_bytes_per_us(range(144)) == 200e3


def test_oversubscription_divides_the_rate_above_the_leaves():
    links = (Link(level="leaf", hosts=2), Link(level="spine", hosts=None, oversubscription=4.0))
    cluster = Cluster(name="thin", groups=(HostGroup(count=4, host=host(2, 1)),), links=links, provenance=SOURCE)
    assert cluster.bandwidth_bytes_per_us(range(4)) == 5000  # within a leaf the socket link is the limit
    assert cluster.bandwidth_bytes_per_us(range(8)) == 1e11 / 8e6 / 4


def test_half_duplex_halves_what_a_ring_gets():
    link = Link(level="pcie", rate_bps=8e10, duplex="half")
    one = Cluster(name="half", groups=(HostGroup(count=1, host=Host(device=GPU, devices=2, links=(link,))),), provenance=SOURCE)
    assert one.bandwidth_bytes_per_us([0, 1]) == 5000


def test_one_rank_and_no_limit_are_infinitely_fast():
    assert parse_cluster("hgx-h100").bandwidth_bytes_per_us([3]) == float("inf")
    assert parse_cluster("2xtestbed").bandwidth_bytes_per_us([0, 1]) == float("inf")


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_that_is_not_there_is_refused(rank: int):
    with pytest.raises(InputError, match="ranks are 0 to 7"):
        parse_cluster("hgx-h100").slowest_level([0, rank])


@st.composite
def meshes(draw: st.DrawFn) -> tuple[tuple[tuple[int, int, int], ...], int]:
    count = draw(st.integers(3, 6))
    pairs = draw(st.lists(st.sampled_from(list(combinations(range(count), 2))), unique=True))
    return tuple((first, second, draw(st.integers(1, 2))) for first, second in pairs), count


@given(meshes())
def test_rings_never_need_more_wires_than_a_device_has(mesh: tuple[tuple[tuple[int, int, int], ...], int]):
    wires, count = mesh
    rings = disjoint_rings(wires, tuple(range(count)))
    degrees = [sum(number for first, second, number in wires if device in (first, second)) for device in range(count)]
    assert rings % 2 == 0
    assert rings <= min(degrees)


@given(meshes(), st.randoms())
def test_the_number_of_rings_does_not_depend_on_how_devices_are_numbered(mesh, random):
    wires, count = mesh
    new = list(range(count))
    random.shuffle(new)
    renamed = tuple((new[first], new[second], number) for first, second, number in wires)
    assert disjoint_rings(renamed, tuple(range(count))) == disjoint_rings(wires, tuple(range(count)))


@pytest.mark.parametrize(("count", "rings"), [(3, 2), (4, 2), (5, 4), (7, 6), (8, 6)])
def test_rings_of_complete_graphs_are_those_of_walecki(count: int, rings: int):
    """A complete graph of n vertices has (n - 1) // 2 disjoint closed ways through all (Lucas, 1883, after Walecki)."""
    assert disjoint_rings(tuple((a, b, 1) for a, b in combinations(range(count), 2)), tuple(range(count))) == rings


@every_case(
    ("make", "message"),
    [
        (lambda: Link(level="pcie", rate_bps=0), "pcie.rate must be above 0"),
        (lambda: Link(level="nic", latency_us=-1), "nic.latency must be at least 0"),
        (lambda: Host(device=GPU, devices=2), "no link joins all devices"),
        (lambda: Host(device=GPU, links=(Link(level="spine"),)), "links inside a host are"),
        (
            lambda: Host(device=GPU, links=(Link(level="nvlink", hosts=4, devices=2),), devices=4),
            "no link joins all|joins several hosts",
        ),
        (lambda: Nics(count=0, link=NIC), "nic.count must be at least 1"),
        (lambda: Nics(count=1, link=Link(level="pcie")), "level nic"),
        (lambda: Cluster(name="x", groups=(), provenance=SOURCE), "at least one host"),
        (lambda: Provenance(source=" "), "name where the values come from"),
        (lambda: Device(name="x", vendor="y", kind="gpu", memory_bytes=0, provenance=SOURCE), "memory_bytes of x must be above 0"),
        (lambda: GPU.peak_flops_per_s("fp12"), "precision 'fp12': use fp64"),
        (lambda: parse_cluster("hgx-h100").groups[0].host.with_devices(9), "has no 9 devices"),
    ],
)
def test_values_that_cannot_be_are_refused(make, message: str):
    with pytest.raises(InputError, match=message):
        make()
