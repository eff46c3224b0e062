"""Names of clusters, as people write them."""

import subprocess
import sys
from pathlib import Path

import pytest

from dpro_search.cluster import known_names, parse_cluster
from dpro_search.errors import InputError
from tests.every_case import every_case


def test_a_count_before_a_machine_is_of_hosts():
    cluster = parse_cluster("64xhgx-h100")
    assert (cluster.hosts, cluster.ranks, cluster.ranks_per_host) == (64, 512, 8)


def test_a_count_before_a_device_is_of_devices_in_hosts_of_the_usual_machine():
    assert parse_cluster("512xh100") == parse_cluster("64xhgx-h100")


def test_a_machine_alone_is_one():
    assert parse_cluster("hgx-h100") == parse_cluster("1xhgx-h100")


def test_a_rack_is_several_hosts():
    assert (parse_cluster("2xgb200-nvl72").hosts, parse_cluster("2xgb200-nvl72").ranks) == (36, 144)


@pytest.mark.parametrize("text", ["64xHGX-H100", " 64 x hgx_h100 ", "64xdgx-h100", "64XHgx H100"])
def test_case_spaces_and_aliases_do_not_matter(text: str):
    assert parse_cluster(text) == parse_cluster("64xhgx-h100")


def test_fewer_devices_than_a_host_has_are_a_smaller_host():
    half = parse_cluster("4xh100")
    assert (half.hosts, half.ranks) == (1, 4)
    assert half.rate_bps == 4 * 400e9  # their NICs, not those of the others
    assert half.bandwidth_bytes_per_us(range(4)) == 450e3


def test_half_a_cube_mesh_keeps_its_wires():
    assert (
        parse_cluster("4xv100").bandwidth_bytes_per_us(range(4))
        == parse_cluster("8xv100").bandwidth_bytes_per_us(range(4))
        == 100e3
    )


def test_devices_that_do_not_fill_the_last_host_are_refused_with_the_nearest_numbers():
    with pytest.raises(InputError, match="use 96xh100-sxm or 104xh100-sxm"):
        parse_cluster("100xh100")


def test_a_rate_behind_the_name_is_of_each_nic():
    cluster = parse_cluster("4xtestbed@500mbit")
    assert cluster.rate_bps == 5e8
    assert cluster.provenance.of("nic.rate") == "given as '@500mbit'"
    assert parse_cluster("2xhgx-h100@200gbit").rate_bps == 8 * 200e9


def test_a_device_without_a_usual_machine_is_alone():
    assert parse_cluster("l4").ranks == 1
    with pytest.raises(InputError, match="no usual machine of NVIDIA L4 24GB is known"):
        parse_cluster("2xl4")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("hgx-h10", "hgx-h100"),
        ("64xhgxh100", "hgx-h100"),
        ("8xh1000", "h100"),
        ("p4d.24xlrge", "p4d.24xlarge"),
        ("testbd", "testbed"),
        ("this-machin", "this-machine"),
    ],
)
def test_a_misspelt_name_gets_the_nearest(text: str, meant: str):
    with pytest.raises(InputError, match="did you mean ") as caught:
        parse_cluster(text)
    assert meant in str(caught.value)


@every_case(
    "text",
    [
        "",
        "  ",
        "0xh100",
        "quantum",
        "8x",
        "x8",
        "64xhgx-h100@fast",
        "l4@1gbit",
        "2xtitan-xp-pcie-8",
        "9999999xhgx-h100",
        "@1gbit",
        "1gbit@",
        "no/such/file",
        "none.toml",
        "\x1b[31mred",
        "a\nb",
    ],
)
def test_what_is_no_cluster_is_one_line(text: str):
    with pytest.raises(InputError) as caught:
        parse_cluster(text)
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_a_file_may_be_multiplied(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "hgx-h100"\nnic.rate = "200gbit"\n')
    cluster = parse_cluster(f"8x{path}")
    assert (cluster.hosts, cluster.rate_bps) == (8, 8 * 200e9)
    assert cluster.name == "8 x HGX H100 as in mine.toml"


@every_case("name", known_names())
def test_every_known_name_is_a_cluster_that_describes_itself_in_a_line(name: str):
    cluster = parse_cluster(name)
    assert cluster.ranks >= 1
    assert len(cluster.devices) == cluster.ranks
    assert "\n" not in cluster.describe()


def test_it_is_imported_without_numpy_and_what_starts_programs():
    code = "import sys, dpro_search.cluster; print({'numpy', 'subprocess', 'dpro_search.collect'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_a_large_cluster_is_asked_as_a_small_one():
    assert [parse_cluster(f"{hosts}xhgx-h100").bandwidth_bytes_per_us(range(8 * hosts)) for hosts in (2, 2048)] == [400e3, 400e3]
