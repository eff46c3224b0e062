"""Cluster files: TOML of a machine, or of one that differs from a bundled one in some keys (`base`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from dpro_search.cluster.base import Find, found_file, with_base
from dpro_search.cluster.cluster import Cluster, HostGroup
from dpro_search.cluster.device import PRECISIONS, Device, Peaks, Provenance, Sample
from dpro_search.cluster.host import Host, Nics
from dpro_search.cluster.link import BETWEEN, INSIDE, Level, Link
from dpro_search.cluster.table import File, Table
from dpro_search.errors import InputError
from dpro_search.quantities import parse_bytes, parse_flops_per_s, parse_hz, parse_rate_bps, parse_us, parse_watts

_HOST_KEYS = ("device", "devices", "cpu_cores", "nic", *INSIDE)
_CLUSTER_KEYS = (
    "name", "aliases", "base", "hosts", "host", *_HOST_KEYS, *BETWEEN, "price_per_device_hour_usd", "power_per_device", "source",
)  # fmt: skip
_DEVICE_KEYS = (
    "name", "aliases", "base", "vendor", "kind", "machine", "peak", "memory", "memory_rate", "l2_cache", "cores", "clock", "launch",
    "power", "samples", "source",
)  # fmt: skip
_LINK_KEYS = ("rate", "latency", "duplex")
_INSIDE_KEYS = (*_LINK_KEYS, "sharing", "devices", "hosts", "wires")
_BETWEEN_KEYS = (*_LINK_KEYS, "hosts", "oversubscription")
_NIC_KEYS = (*_LINK_KEYS, "count", "buffers", "fabric")


def load_cluster(path: Path, find: Find) -> Cluster:
    """The cluster of a file.

    Parameters
    ----------
    find
        Names what `base` and `device` mean: ``find("machine", name)`` and ``find("device", name)`` are paths.

    Raises
    ------
    InputError
        The file is not one, or says something impossible: one line with file, line and key.
    """
    file = File(path)
    file_values = file.values()
    values, source = with_base(file, file_values, "machine", find, ())
    if "name" not in file_values and isinstance(values.get("name"), str):
        values["name"] = f"{values['name']} as in {path.name}"
    return _cluster(Table(values, file, "", _CLUSTER_KEYS), source, find)


def load_device(path: Path, find: Find) -> Device:
    """The device of a file; raises `InputError` as `load_cluster` does."""
    file = File(path)
    values, source = with_base(file, file.values(), "device", find, ())
    return _device(Table(values, file, "", _DEVICE_KEYS), source)


def _cluster(table: Table, source: Provenance, find: Find) -> Cluster:
    if "host" in table:
        groups, of_hosts = _listed_hosts(table, find)
        source = msgspec.structs.replace(source, exceptions=tuple(sorted({**of_hosts, **dict(source.exceptions)}.items())))
    else:
        groups = (_host_group(table, "hosts", _host(table, find)),)
    links = tuple(_between(table, level) for level in BETWEEN if table.values.get(level, False) is not False)
    return table.checked(
        "",
        lambda: Cluster(
            name=table.text("name"),
            groups=groups,
            links=links,
            price_per_device_hour_usd=table.number("price_per_device_hour_usd"),
            power_per_device_w=table.quantity("power_per_device", parse_watts),
            provenance=source,
        ),
    )


def _listed_hosts(table: Table, find: Find) -> tuple[tuple[HostGroup, ...], dict[str, str]]:
    """Hosts that differ: [[host]] tables, each with a count; and the sources of those that are based on a machine."""
    mixed = [key for key in ("hosts", *_HOST_KEYS) if key in table]
    if mixed:
        table.fail(mixed[0], "stands beside [[host]]: write it into each of them")
    listed = table.required("host")
    if not isinstance(listed, list) or not listed:
        table.fail("host", "must be [[host]] tables, one for each kind of host")
    groups, sources = [], {}
    for number, values in enumerate(listed):
        prefix = f"host[{number}]"
        Table(values, table.file, prefix, ("base", "count", *_HOST_KEYS))
        merged, source = with_base(table.file, values, "machine", find, (), prefix)
        if "base" in values:
            sources[prefix] = source.source
        part = Table(
            {key: value for key, value in merged.items() if key in ("count", *_HOST_KEYS)},
            table.file,
            prefix,
            ("count", *_HOST_KEYS),
        )
        groups.append(_host_group(part, "count", _host(part, find)))
    return tuple(groups), sources


def _host_group(table: Table, key: str, host: Host) -> HostGroup:
    count = table.count(key)
    return table.checked(key, lambda: HostGroup(count=1 if count is None else count, host=host))


def _host(table: Table, find: Find) -> Host:
    """The host whose keys stand in a table."""
    named = table.required("device")
    if isinstance(named, str):
        path = table.checked("device", lambda: found_file(table.file, named, "device", find))
        device = load_device(path, find)
    else:
        if not isinstance(named, Mapping):
            table.fail("device", "must be the name of a bundled device, a file, or a table")
        values, source = with_base(table.file, dict(named), "device", find, (), table.key("device"))
        device = _device(Table(values, table.file, table.key("device"), _DEVICE_KEYS), source)
    nics = None if table.values.get("nic", False) is False else _nics(table)
    links = tuple(_inside(table, level) for level in INSIDE if table.values.get(level, False) is not False)
    count = table.count("devices")
    return table.checked(
        "",
        lambda: Host(
            device=device, devices=1 if count is None else count, links=links, nics=nics, cpu_cores=table.count("cpu_cores")
        ),
    )


def _device(table: Table, source: Provenance) -> Device:
    peaks = Table(table.values.get("peak", {}), table.file, table.key("peak"), PRECISIONS)
    return table.checked(
        "",
        lambda: Device(
            name=table.text("name"),
            vendor=table.text("vendor"),
            kind=table.choice("kind", ("gpu", "cpu"), "gpu"),
            peak=Peaks(**{precision: peaks.quantity(precision, parse_flops_per_s) for precision in PRECISIONS}),
            memory_bytes=table.quantity("memory", parse_bytes),
            memory_bytes_per_s=table.quantity("memory_rate", _bytes_per_s),
            l2_cache_bytes=table.quantity("l2_cache", parse_bytes),
            cores=table.count("cores"),
            clock_hz=table.quantity("clock", parse_hz),
            launch_us=table.quantity("launch", parse_us),
            power_w=table.quantity("power", parse_watts),
            samples=_samples(table),
            provenance=source,
        ),
    )


def _samples(table: Table) -> tuple[Sample, ...]:
    """Ops that were measured: lists of an op, its time in us or with a unit and, if known, the spread of repetitions in %."""
    listed = table.values.get("samples", [])
    if not isinstance(listed, list):
        table.fail("samples", "must be a list of [op, time, spread in %]")
    samples = []
    for number, row in enumerate(listed):
        if not isinstance(row, list) or len(row) not in (2, 3) or not isinstance(row[0], str):
            table.fail("samples", f"entry {number} must be [op, time] or [op, time, spread in %]")
        numbers = [one for one in row[1:] if isinstance(one, int | float) and not isinstance(one, bool)]
        if isinstance(row[1], str):
            numbers.insert(0, table.checked("samples", partial(parse_us, row[1])))
        if len(numbers) != len(row) - 1:
            table.fail("samples", f"entry {number} must have a time like 12.5 or '12.5us', not {row[1]!r}"[:120])
        samples.append(table.checked("samples", partial(Sample, row[0], *map(float, numbers))))
    return tuple(samples)


def _nics(table: Table) -> Nics:
    part = Table(table.values["nic"], table.file, table.key("nic"), _NIC_KEYS)
    link = _link(part, "nic", {})
    count = part.count("count")
    buffers = part.choice("buffers", ("device", "host"), "device")
    fabric = part.choice("fabric", ("rdma", "slingshot"), "rdma")
    return part.checked("count", lambda: Nics(count=1 if count is None else count, link=link, buffers=buffers, fabric=fabric))


def _inside(table: Table, level: Level) -> Link:
    part = Table(table.values[level], table.file, table.key(level), _INSIDE_KEYS)
    everywhere = part.values.get("hosts") == "all"
    return _link(
        part,
        level,
        {
            "sharing": part.choice("sharing", ("device", "pair", "host"), "device"),
            "devices": part.count("devices"),
            "hosts": None if everywhere else 1 if "hosts" not in part else part.count("hosts"),
            "wires": _wires(part),
        },
    )


def _between(table: Table, level: Level) -> Link:
    part = Table(table.values[level], table.file, table.key(level), _BETWEEN_KEYS)
    over = part.number("oversubscription")
    return _link(part, level, {"hosts": part.count("hosts"), "oversubscription": 1.0 if over is None else over})


def _link(part: Table, level: Level, more: Mapping[str, Any]) -> Link:
    latency_us = part.quantity("latency", parse_us)
    return part.checked(
        "",
        lambda: Link(
            level=level,
            rate_bps=part.quantity("rate", parse_rate_bps),
            latency_us=0.0 if latency_us is None else latency_us,
            duplex=part.choice("duplex", ("full", "half"), "full"),
            **more,
        ),
    )


def _wires(part: Table) -> tuple[tuple[int, int, int], ...]:
    wires = part.values.get("wires", [])
    if not isinstance(wires, list) or not all(
        isinstance(wire, list) and len(wire) == 3 and all(type(number) is int for number in wire) for wire in wires
    ):
        part.fail("wires", "must be a list of [device, other device, number of wires]")
    return tuple((wire[0], wire[1], wire[2]) for wire in wires)


def _bytes_per_s(text: str) -> float:
    """Bytes a second of "3.35 TB/s"; a bare number is bytes a second, as the field is."""
    try:
        return float(text)
    except ValueError:
        rate_bps = parse_rate_bps(text)
    if rate_bps is None:
        raise InputError("a memory has a rate: write it like 3.35 TB/s")
    return rate_bps / 8
