"""A cluster as the text of a file."""

from __future__ import annotations

from typing import Any

import msgspec

from dpro_search.cluster.cluster import Cluster
from dpro_search.cluster.device import PRECISIONS, Device, Provenance, Sample
from dpro_search.cluster.host import Host
from dpro_search.cluster.link import INSIDE, Link, Torus

Values = dict[str, Any]


def to_toml(cluster: Cluster) -> str:
    """The whole cluster as a file that `load_cluster` reads back, base and devices written out; numbers in the fields' units."""
    values: dict[str, Any] = {
        "name": cluster.name,
        "price_per_device_hour_usd": cluster.price_per_device_hour_usd,
        "power_per_device": cluster.power_per_device_w,
    }
    tables: list[str] = []
    if len(cluster.groups) == 1:
        group = cluster.groups[0]
        values |= {"hosts": group.count, **_host_values(group.host)}
        tables += _host_tables(group.host, "")
    else:
        for group in cluster.groups:
            tables += _lines("[host]", {"count": group.count, **_host_values(group.host)}) + _host_tables(group.host, "host.")
    if cluster.torus is not None:
        tables += _lines("torus", _torus_values(cluster.torus))
    for link in cluster.links:
        tables += _lines(link.level, _link_values(link, ("hosts", "oversubscription")))
    return "\n".join([*_lines("", values | _source_values(cluster.provenance))[2:], *tables]) + "\n"


def _host_values(host: Host) -> Values:
    return {
        "devices": host.devices,
        "cpu_cores": host.cpu_cores,
        "host_memory": host.memory_bytes,
        "host_memory_rate": host.memory_bytes_per_s,
        "host_link_rate": host.device_link_bytes_per_s,
    }


def device_toml(device: Device, **additional: object) -> str:
    """A device as a file that `load_device` reads back; `own`: keys of the file that a device has not, like ``machine``."""
    return "\n".join(_lines("", {**_device_values(device), **additional})[2:]) + "\n"


def _device_values(device: Device) -> Values:
    return {
        "name": device.name,
        "vendor": device.vendor,
        "kind": device.kind,
        "memory": device.memory_bytes,
        "memory_rate": device.memory_bytes_per_s,
        "l2_cache": device.l2_cache_bytes,
        "vector_memory": device.vector_memory_bytes,
        "cores": device.cores,
        "clock": device.clock_hz,
        "launch": device.launch_us,
        "power": device.power_w,
        **{f"peak.{precision}": device.peak_flops_per_s(precision) for precision in PRECISIONS},
        **_source_values(device.provenance),
        "samples": device.samples,
    }


def _host_tables(host: Host, prefix: str) -> list[str]:
    lines = _lines(f"{prefix}device", _device_values(host.device))
    for link in host.links:
        lines += _lines(f"{prefix}{link.level}", _link_values(link, ("sharing", "devices", "hosts", "wires")))
    if host.nics is not None:
        defaults = (("buffers", "device"), ("fabric", "rdma"))
        others = {name: getattr(host.nics, name) for name, usual in defaults if getattr(host.nics, name) != usual}
        lines += _lines(f"{prefix}nic", {"count": host.nics.count, **others, **_link_values(host.nics.link, ())})
    return lines


def _link_values(link: Link, names: tuple[str, ...]) -> Values:
    """A link's values, those that only some levels have by their names."""
    values: Values = {"rate": link.rate_bps, "latency": link.latency_us, "duplex": link.duplex}
    values |= {name: getattr(link, name) for name in names}
    if link.level in INSIDE:
        values["hosts"] = "all" if link.hosts is None else link.hosts
    return values


def _torus_values(torus: Torus) -> Values:
    return {
        "shape": torus.shape,
        "wraps": torus.wraps,
        "slices": torus.slices,
        "link_rate": torus.link_bytes_per_us * 1e6,
        "hop": torus.hop_us,
        "devices_per_chip": torus.devices_per_chip,
    }


def _source_values(source: Provenance) -> Values:
    return {"source.all": source.source, **{f"source.{_string(key)}": text for key, text in source.exceptions}}


def _lines(table: str, values: Values) -> list[str]:
    return ["", f"[{table}]", *(f"{key} = {_literal(value)}" for key, value in values.items() if value not in (None, ()))]


def _literal(value: object) -> str:
    if isinstance(value, Sample):
        return f"[{_string(value.op)}, {value.us!r}, {value.spread_pct!r}]"
    if isinstance(value, tuple):
        between, end = (",\n    ", ",\n") if isinstance(value[0], Sample) else (", ", "")
        return f"[{between.lstrip(', ')}{between.join(map(_literal, value))}{end}]"
    if isinstance(value, bool):
        return str(value).lower()
    return _string(value) if isinstance(value, str) else repr(value)


def _string(text: str) -> str:
    return msgspec.json.encode(text).decode()
