"""Every key of a cluster file changes a prediction of a described job, or is said to be of no use to it."""

from __future__ import annotations

from dataclasses import astuple

from dpro_search.cluster.files import _BetweenTable, _ClusterTable, _DeviceTable, _InsideTable, _NicTable
from dpro_search.kinds import job_of, load_source
from dpro_search.space.plan import Plan
from tests.every_case import every_case
from tests.parallel.jobs import job, prepared, text

CHANGED = {  # of a host of A100, in a form that differs from theirs
    "hosts": "8",
    "devices": "4",
    "cpu_cores": "4",
    "price_per_device_hour_usd": "3.5",
    "power_per_device": '"2 kW"',
    "device.peak.bf16": '"100 TFLOP/s"',
    "device.memory": '"20 GB"',
    "device.memory_rate": '"1 TB/s"',
    "device.l2_cache": '"1 MB"',
    "device.vector_memory": '"1 MB"',
    "device.cores": "50",
    "device.clock": '"1 GHz"',
    "device.launch": '"50 us"',
    "device.power": '"200 W"',
    "device.samples": '[["gemm bf16 m=4096 n=4096 k=1024", 900.0]]',
    "nvlink.rate": '"10 GB/s"',
    "nvlink.latency": '"100 us"',
    "nvlink.duplex": '"half"',
    "nvlink.sharing": '"host"',
    "nic.rate": '"10 Gbit/s"',
    "nic.latency": '"100 us"',
    "nic.duplex": '"half"',
    "nic.count": "1",
    "nic.buffers": '"host"',
    "nic.fabric": '"slingshot"',
    "spine.rate": '"1 Gbit/s"',
    "spine.latency": '"100 us"',
    "spine.duplex": '"half"',
    "spine.oversubscription": "8.0",
}
# Words about a device or a file; tables; what takes a second key to mean anything (links that join some devices or hosts).
NO_NUMBERS = {"name", "aliases", "base", "host", "device", "source", "vendor", "kind", "machine", "peak"}
WITH_OTHERS = {"nvlink.wires", "nvlink.devices", "nvlink.hosts", "spine.hosts"}


def answer(folder, line=""):
    (folder / "mine.toml").write_text(f'base = "dgx-a100-80"\n{"" if line.startswith("hosts") else "hosts = 4"}\n{line}\n')
    (folder / "job.toml").write_text(text('tp = 2\npp = 2\nrecompute = "none"', cluster="mine.toml"))
    changed = job_of(load_source(folder / "job.toml"))
    prediction = changed.predict(Plan())
    return (prediction.iteration_us, prediction.infeasible, *astuple(changed.work)), changed.job.prepared(
        changed.scenario
    ).description.warnings


@every_case("key", CHANGED)
def test_a_key_changes_the_prediction_or_is_said_to_be_unused(tmp_path, key):
    usual, _ = answer(tmp_path)
    changed, warnings = answer(tmp_path, f"{key} = {CHANGED[key]}")
    assert (changed != usual) is not any(f"{key}" in said and "not used" in said for said in warnings)


def test_every_key_is_tried():
    tables = {"device.": _DeviceTable, "nvlink.": _InsideTable, "nic.": _NicTable, "spine.": _BetweenTable}
    every = {f"{table}{key}" for table, keys in tables.items() for key in keys.__struct_fields__ if key not in NO_NUMBERS}
    every |= {key for key in _ClusterTable.__struct_fields__ if key in ("hosts", "devices", "cpu_cores") or "_per_" in key}
    assert every - WITH_OTHERS <= {*CHANGED}


def test_a_lower_power_limit_takes_longer_and_is_said(tmp_path):
    """By the cube root of the power at most: memory keeps its rate."""
    times = []
    for watts in (700, 500, 300):
        (tmp_path / "mine.toml").write_text(f'base = "hgx-h100"\ndevice.power = "{watts} W"\n')
        planned = job(tmp_path, "micro_batch = 1", cluster="mine.toml", framework="fsdp")
        times.append(planned.predict(Plan()).iteration_us)
        assert any(f"at {watts} W, below its rated power" in said for said in prepared(planned).description.warnings) is (
            watts < 700
        )
    assert times[0] < times[1] < times[2] <= times[0] * (700 / 300) ** (1 / 3)
