"""The bundled machines and devices: every file loads, says where its values come from, and is plausible."""

import re
from pathlib import Path

import msgspec
import pytest

from dpro_search.cluster import Cluster, Device, bundled, parse_cluster, to_toml
from dpro_search.cluster.files import load_cluster
from tests.every_case import every_case

DEVICES = tuple(name for name in bundled.names("device") if bundled.device(name).kind != "tpu")  # TPUs: test_tpus.py
MACHINES = bundled.names("machine")
GPU_MACHINES = [name for name in MACHINES if name != "testbed"]


def test_the_machines_that_people_name_are_there():
    assert {
        "dgx-1-v100",
        "titan-xp-pcie-8",
        "dgx-a100-40",
        "dgx-a100-80",
        "hgx-h100",
        "hgx-h200",
        "hgx-b200",
        "gb200-nvl72",
        "l40s-pcie-8",
        "mi300x-platform",
        "p3.16xlarge",
        "p4d.24xlarge",
        "p5.48xlarge",
        "g5.48xlarge",
        "nd-a100-v4",
        "nd-h100-v5",
        "a2-highgpu-8g",
        "a3-highgpu-8g",
        "testbed",
    } <= set(MACHINES)


@every_case("name", DEVICES)
def test_a_device_is_described_in_full(name: str):
    device = bundled.device(name)
    for field in ("memory_bytes", "memory_bytes_per_s", "l2_cache_bytes", "cores", "clock_hz", "power_w"):
        assert getattr(device, field) is not None, field
    assert device.peak.fp32 is not None


@every_case("name", DEVICES)
def test_a_device_is_plausible(name: str):
    device = bundled.device(name)
    assert 2**32 < device.memory_bytes < 2**40
    assert 1e11 < device.memory_bytes_per_s < 2e13
    assert 1e6 < device.l2_cache_bytes < 2e8
    assert 8e8 < device.clock_hz < 3e9
    assert 50 < device.power_w < 2000
    assert 5e12 < device.peak.fp32 < 3e14
    # Vector units: 64 or 128 multiply-adds a cycle, twice as many on AMD's dual-issue units.
    per_cycle = device.peak.fp32 / (device.cores * device.clock_hz) / 2
    assert min(abs(per_cycle / lanes - 1) for lanes in (64, 128, 256)) < 0.12


@every_case("name", DEVICES)
def test_lower_precision_is_not_slower(name: str):
    peak = bundled.device(name).peak
    for higher, lower in (("fp64", "fp32"), ("fp32", "tf32"), ("tf32", "fp16"), ("fp32", "fp16"), ("fp16", "fp8")):
        if getattr(peak, higher) is not None and getattr(peak, lower) is not None:
            assert getattr(peak, higher) <= getattr(peak, lower)


@every_case("name", DEVICES)
def test_a_memory_is_no_larger_than_the_name_says(name: str):
    device = bundled.device(name)
    stated = float(re.search(r"(\d+)GB", device.name)[1])
    assert 0.9 * stated < device.memory_bytes / 2**30 <= 1.03 * stated


@pytest.mark.parametrize(
    ("name", "bf16_tflops", "memory_tb_per_s"),
    [
        ("a100-sxm-40gb", 312, 1.555),
        ("a100-sxm-80gb", 312, 2.0),
        ("h100-sxm", 989, 3.35),
        ("h200-sxm", 989, 4.8),
        ("b200-sxm", 2250, 8),
        ("mi300x", 1307, 5.3),
    ],
)
def test_peaks_are_those_that_are_published(name: str, bf16_tflops: float, memory_tb_per_s: float):
    device = bundled.device(name)
    assert device.peak_flops_per_s("bf16") == pytest.approx(bf16_tflops * 1e12, rel=0.005)
    assert device.memory_bytes_per_s == pytest.approx(memory_tb_per_s * 1e12, rel=0.05)


@every_case(
    ("name", "gigabytes_per_s"),
    [
        ("dgx-1-v100", 150),
        ("abci-v", 150),
        ("dgx-a100-80", 300),
        ("polaris", 300),
        ("hgx-h100", 450),
        ("hgx-b200", 900),
        ("mi300x-platform", 448),
        ("gb200-nvl72", 900),
    ],
)
def test_rings_through_all_devices_use_all_links_of_each(name: str, gigabytes_per_s: float):
    machine = parse_cluster(name)
    assert machine.bandwidth_bytes_per_us(range(machine.ranks)) == pytest.approx(gigabytes_per_s * 1e3)


@every_case(
    ("name", "gbit_per_s"),
    [
        ("p4d", 400),
        ("p5", 3200),
        ("nd-a100-v4", 1600),
        ("nd-h100-v5", 3200),
        ("a2-highgpu-8g", 100),
        ("p3.16xlarge", 25),
        ("g5.48xlarge", 100),
        ("hgx-h100", 3200),
        ("gb200-nvl72", 1600),
    ],
)
def test_a_host_has_the_network_that_its_provider_states(name: str, gbit_per_s: float):
    assert parse_cluster(name).rate_bps == gbit_per_s * 1e9


@every_case("name", GPU_MACHINES)
def test_a_machine_is_plausible(name: str):
    machine = bundled.machine(name)
    host = machine.groups[0].host
    for link in host.links:
        assert 8e9 <= link.rate_bps <= 1e13
        assert 0 < link.latency_us < 100
    if host.nics is not None:
        assert 1e10 <= host.nics.link.rate_bps <= 1e12
        assert 0 < host.nics.link.latency_us < 100
    if machine.power_per_device_w is not None:
        assert host.device.power_w < machine.power_per_device_w < 3 * host.device.power_w
    if machine.price_per_device_hour_usd is not None:
        assert 0.5 < machine.price_per_device_hour_usd < 50


@every_case("name", MACHINES)
def test_every_source_is_named_with_a_year_or_says_how_the_value_was_found(name: str):
    machine = bundled.machine(name)
    sources = [machine.provenance, *(device.provenance for device in {group.host.device for group in machine.groups})]
    for provenance in sources:
        for text in (provenance.source, *(text for _, text in provenance.exceptions)):
            assert re.search(r"20[012]\d|^(derived|estimated|measured): |^collect/", text), text


@every_case("name", MACHINES)
def test_a_latency_is_never_taken_for_a_vendor_s_figure(name: str):
    machine = bundled.machine(name)
    host = machine.groups[0].host
    for link in (*host.links, *([host.nics.link] if host.nics else []), *machine.links):
        assert re.match("(derived|estimated|measured): ", machine.provenance.of(f"{link.level}.latency"))


@every_case("name", [*MACHINES, "2xdgx-1-v100", "4xtestbed@1gbit", "24xgb200"])
def test_a_cluster_comes_back_from_toml_and_json(name: str, tmp_path: Path):
    cluster = parse_cluster(name)
    (tmp_path / "it.toml").write_text(to_toml(cluster))
    assert load_cluster(tmp_path / "it.toml", bundled.find) == cluster
    assert msgspec.json.decode(msgspec.json.encode(cluster), type=Cluster) == cluster


@every_case("name", DEVICES)
def test_a_device_is_of_its_usual_machine(name: str):
    usual = bundled.usual_machine(name)
    if usual is not None:
        assert bundled.machine(usual).groups[0].host.device == bundled.device(name)


def test_no_name_stands_for_two_things():
    for kind in ("machine", "device"):
        count = sum(1 + len(re.findall(r'"[^"]+"', line)) for line in _alias_lines(kind))
        assert len(bundled.aliases(kind)) == count
    assert not bundled.aliases("machine").keys() & bundled.aliases("device").keys()


def _alias_lines(kind: str) -> list[str]:
    """Of each file: its line of aliases, empty if it has none."""
    files = [bundled.find(kind, name).read_text() for name in bundled.names(kind)]
    return [next((line for line in text.splitlines() if line.startswith("aliases")), "") for text in files]


@every_case(
    "measured",
    [
        "Tesla P4",
        "Tesla P100-PCIE-16GB",
        "Tesla V100-PCIE-32GB",
        "Tesla T4",
        "NVIDIA A100-SXM4-40GB",
        "NVIDIA A100-PCIE-40GB",
        "NVIDIA A100 80GB PCIe",
        "NVIDIA L4",
        "NVIDIA H100 80GB HBM3",
        "AMD Instinct MI100",
        "AMD Instinct MI210",
        "NVIDIA H200",
        "NVIDIA B200",
        "NVIDIA L40S",
        "Tesla V100-SXM2-16GB",
    ],
)
def test_devices_of_measured_data_are_found_by_the_name_that_their_driver_reports(measured: str):
    assert isinstance(bundled.device(bundled.aliases("device")[bundled.plain(measured)]), Device)
