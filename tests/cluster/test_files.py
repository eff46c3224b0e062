"""Cluster files: what they say, and what is refused with file, line and key."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.cluster import Cluster, parse_cluster
from dpro_search.errors import InputError
from tests.every_case import every_case

WHOLE = """name = "mine"
hosts = 4
device = "a100-sxm-80gb"
devices = 4
cpu_cores = 64

[nvlink]
rate = "300 GB/s"
latency = "700ns"

[nic]
count = 2
rate = "100gbit"
latency = "3us"

[leaf]
hosts = 2

[spine]
oversubscription = 2
latency = "5us"

[source]
all = "my own measurements, 2026"
"nic.latency" = "measured: ib_send_lat"
"""


def read(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return parse_cluster(str(path))


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(tmp_path / "mine.toml"), "FILE")


def test_a_whole_file(tmp_path: Path):
    cluster = read(tmp_path, WHOLE)
    assert (cluster.name, cluster.hosts, cluster.ranks, cluster.rate_bps) == ("mine", 4, 16, 200e9)
    assert cluster.level_between(0, 1).latency_us == pytest.approx(0.7)
    assert cluster.level_between(0, 4).level == "leaf"
    assert cluster.level_between(0, 8).latency_us == 5
    assert cluster.provenance.of("nic.latency") == "measured: ib_send_lat"
    assert cluster.provenance.of("nic.rate") == "my own measurements, 2026"


def test_a_base_keeps_all_that_is_not_overridden(tmp_path: Path):
    cluster = read(tmp_path, 'base = "hgx-h100"\nhosts = 16\nnic.rate = "200gbit"\nrail = false\n')
    base = parse_cluster("hgx-h100")
    assert cluster.groups[0].host.links == base.groups[0].host.links
    assert (cluster.hosts, cluster.rate_bps) == (16, 1600e9)
    assert [link.level for link in cluster.links] == ["spine"]
    assert cluster.provenance.of("nic.rate") == "given in mine.toml"
    assert cluster.provenance.of("nic.count") == "NVIDIA DGX H100 data sheet, 2023"


def test_a_device_of_a_base_may_be_changed_in_part(tmp_path: Path):
    cluster = read(tmp_path, 'base = "hgx-h100"\ndevice.memory = "96 GiB"\ndevice.peak.bf16 = "800 TFLOP/s"\n')
    device = cluster.groups[0].host.device
    assert (device.memory_bytes, device.peak.bf16, device.peak.fp8) == (96 * 2**30, 800e12, 1978.9e12)
    assert device.provenance.of("memory") == "given in mine.toml"
    assert device.provenance.of("cores").startswith("NVIDIA H100")


def test_a_base_may_be_a_file_beside_it(tmp_path: Path):
    (tmp_path / "below.toml").write_text(WHOLE)
    assert read(tmp_path, 'base = "below.toml"\nhosts = 8\n').ranks == 32


def test_hosts_may_differ(tmp_path: Path):
    cluster = read(
        tmp_path,
        'name = "mixed"\n[[host]]\nbase = "hgx-h100"\ncount = 2\n[[host]]\nbase = "dgx-a100-80"\nnic.rate = "100gbit"\n[spine]\n',
    )
    assert (cluster.hosts, cluster.ranks, cluster.rate_bps) == (3, 24, 800e9)
    assert cluster.host_of(15).device.name.startswith("NVIDIA H100")
    assert cluster.host_of(16).device.name.startswith("NVIDIA A100")
    assert cluster.bandwidth_bytes_per_us(range(24)) == 100e3
    assert cluster.provenance.of("host[1].nvlink.rate") == "NVIDIA DGX A100 data sheet, 2021"


@every_case(
    ("old", "new", "message"),
    [
        ('rate = "100gbit"', 'rate = "100 furlongs"', "FILE:13: nic.rate: '100 furlongs' is not a rate"),
        ('rate = "100gbit"', 'rate = "0gbit"', "FILE:13: nic.rate: '0gbit' is not a rate"),
        ('rate = "100gbit"', "rate = true", "FILE:13: nic.rate: must be a quantity"),
        ('rate = "100gbit"', "rate = nan", "FILE:13: nic.rate: 'nan' is not a rate"),
        ("count = 2", "cuont = 2", "FILE:12: nic.cuont: unknown key; did you mean 'count'?"),
        ("count = 2", "count = 3", "FILE: 3 NICs cannot be shared evenly by 4 devices"),
        ("count = 2", "count = 0", "FILE:12: nic.count: nic.count must be at least 1"),
        ("[nvlink]", "[nvlnk]", "FILE:7: nvlnk: unknown key; did you mean 'nvlink'?"),
        ("devices = 4", 'devices = "four"', "FILE:4: devices: must be a whole number, not 'four'"),
        ("devices = 4", "devices = 0", "FILE: devices must be at least 1, not 0"),
        ("hosts = 4", "hosts = 0", "FILE:2: hosts: a cluster has 1 to"),
        ("hosts = 4", "hosts = 10_000_000_000", "FILE:2: hosts: a cluster has 1 to"),
        ('"a100-sxm-80gb"', '"a100-sxm-80g"', "FILE:3: device: no device is called 'a100-sxm-80g'; did you mean"),
        ('latency = "700ns"', 'latency = "700ns"\ndevices = 2', "FILE: no link joins all devices of the host"),
        (
            'latency = "700ns"',
            'latency = "700ns"\nduplex = "no"',
            "FILE:10: nvlink.duplex: 'no' is not known; known are full, half",
        ),
        ('latency = "700ns"', 'latency = "700ns"\nwires = [[0, 9, 1]]', "FILE: no link joins all devices"),
        (
            'latency = "700ns"',
            'latency = "700ns"\nwires = [[0, 1]]',
            "FILE:10: nvlink.wires[0]: must be a list of 3 values, not of 2",
        ),
        ("oversubscription = 2", "oversubscription = 0.5", "FILE:19: spine: spine.oversubscription must be at least 1"),
        ("[spine]", "[spin]", "FILE:19: spin: unknown key; did you mean 'spine'?"),
        (
            "[spine]\noversubscription = 2",
            "[rail]",
            "FILE: the farthest link between hosts must be",
        ),
        ('name = "mine"\n', "", "FILE: 'name' is missing"),
        ('name = "mine"', "name = mine", "FILE: not TOML: Invalid value (at line 1, column 8)"),
        ('name = "mine"', "name = 3", "FILE:1: name: must be a text, not 3"),
        ('all = "my own measurements, 2026"', "", "FILE:23: source: must be a text, or a table with 'all'"),
        ('name = "mine"', 'base = "hgx-h10"', "FILE:1: base: no machine is called 'hgx-h10'; did you mean hgx-h100"),
        ('name = "mine"', 'base = "mine.toml"', "FILE:1: base: leads back to mine.toml"),
        ('name = "mine"', "base = 3", "FILE:1: base: must be the name of a bundled machine"),
        ("[leaf]\nhosts = 2\n\n[spine]", "[rail]\nhosts = 2", "FILE: the farthest link between hosts must be"),
    ],
)
def test_what_is_wrong_is_named_with_file_line_and_key(tmp_path: Path, old: str, new: str, message: str):
    assert old in WHOLE
    assert refusal(tmp_path, WHOLE.replace(old, new, 1)).startswith(message)


def test_two_files_that_are_based_on_each_other_are_refused(tmp_path: Path):
    (tmp_path / "other.toml").write_text('base = "mine.toml"\n')
    assert "a file cannot be based on itself" in refusal(tmp_path, 'base = "other.toml"\n')


def test_host_keys_beside_listed_hosts_are_refused(tmp_path: Path):
    assert "devices: stands beside [[host]]" in refusal(tmp_path, 'name = "x"\ndevices = 2\n[[host]]\nbase = "hgx-h100"\n')


def test_an_error_in_a_listed_host_is_found_in_its_own_table(tmp_path: Path):
    text = 'name = "x"\n[[host]]\nbase = "hgx-h100"\n[[host]]\nbase = "hgx-h100"\nnic.rate = "fast"\n[spine]\n'
    assert refusal(tmp_path, text).startswith("FILE:6: host[1].nic.rate: 'fast' is not a rate")


def test_several_hosts_without_a_nic_are_refused(tmp_path: Path):
    assert "several hosts need a 'nic'" in refusal(tmp_path, 'base = "hgx-h100"\nhosts = 2\nnic = false\n')


def test_a_file_that_is_no_text_and_one_that_is_too_large_are_refused(tmp_path: Path):
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "large.toml").write_text("# x\n" * 400_000)
    for name, reason in (("binary", "not UTF-8"), ("large", "larger than 1 MiB")):
        with pytest.raises(InputError, match=reason):
            parse_cluster(str(tmp_path / f"{name}.toml"))


_VALUES = st.recursive(
    st.one_of(st.integers(-5, 2**70), st.floats(), st.booleans(), st.sampled_from(["", "1gbit", "hgx-h100", "h100", "full"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3)),
    max_leaves=4,
)
_KEYS = st.sampled_from(
    [
        "base",
        "hosts",
        "device",
        "devices",
        "nic",
        "nic.rate",
        "nic.count",
        "nvlink.wires",
        "nvlink.devices",
        "rail",
        "leaf.hosts",
        "spine",
        "spine.oversubscription",
        "source",
        "name",
        "price_per_device_hour_usd",
        "power_per_device",
        "device.peak.bf16",
        "host",
    ]
)


@given(key=_KEYS, value=_VALUES)
def test_any_value_of_any_key_is_taken_or_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, key: str, value: object):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(f"{'' if key == 'base' else 'base = ' + chr(34) + 'hgx-h100' + chr(34)}\n{key} = {_toml(value)}\n")
    taken = refused = None
    try:
        taken = parse_cluster(str(path))
    except InputError as error:
        refused = str(error)
    assert taken.ranks >= 1 if refused is None else "\n" not in refused


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return repr(value)
