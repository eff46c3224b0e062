"""Cluster files: TOML of a machine, or of one that differs from a bundled one in some keys (`base`).

The structs are the tables of a file, with its keys and units; `Cluster`, `Host`, `Link` and `Device` are made of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from dpro_search._text import visible
from dpro_search._toml import TomlFile, TomlQuantity
from dpro_search.cluster.base import Find, found_file, with_base
from dpro_search.cluster.cluster import Cluster, HostGroup
from dpro_search.cluster.device import PRECISIONS, Device, Peaks, Provenance, Sample
from dpro_search.cluster.host import Host, Nics
from dpro_search.cluster.link import BETWEEN, INSIDE, Level, Link, Torus
from dpro_search.errors import InputError
from dpro_search.quantities import parse_bytes, parse_flops_per_s, parse_hz, parse_number, parse_rate_bps, parse_us, parse_watts


def _parse_text_rate(text: str) -> float:
    """Bytes a second of "3.35 TB/s"; a bare number is bytes a second, as the field is."""
    try:
        return float(text)
    except ValueError:
        rate_bps = parse_rate_bps(text)
    if rate_bps is None:
        raise InputError("a memory has a rate: write it like 3.35 TB/s")
    return rate_bps / 8


class _Bytes(TomlQuantity):
    parse = parse_bytes


class _BytesPerSecond(TomlQuantity):
    parse = _parse_text_rate


class _BitsPerSecond(TomlQuantity):
    parse = parse_rate_bps


class _Microseconds(TomlQuantity):
    parse = parse_us


class _FlopsPerSecond(TomlQuantity):
    parse = parse_flops_per_s


class _Hertz(TomlQuantity):
    parse = parse_hz


class _Watts(TomlQuantity):
    parse = parse_watts


class _Number(TomlQuantity):
    parse = parse_number


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class _LinkTable(_Table, frozen=True, kw_only=True):
    rate: _BitsPerSecond | None = None
    latency: _Microseconds | None = None
    duplex: Literal["full", "half"] = "full"


class _InsideTable(_LinkTable, frozen=True, kw_only=True):
    """A link inside a host."""

    sharing: Literal["device", "pair", "host"] = "device"
    devices: int | None = None
    hosts: int | Literal["all"] = 1
    wires: tuple[tuple[int, int, int], ...] = ()  # Triples [device, other device, number of wires].


class _BetweenTable(_LinkTable, frozen=True, kw_only=True):
    """A link between hosts."""

    hosts: int | None = None
    oversubscription: _Number = _Number(1.0)


class _NicTable(_LinkTable, frozen=True, kw_only=True):
    count: int = 1
    buffers: Literal["device", "host"] = "device"
    fabric: Literal["rdma", "slingshot"] = "rdma"


class _TorusTable(_Table, frozen=True, kw_only=True):
    """Links between chips of TPUs."""

    shape: tuple[int, ...]
    wraps: tuple[bool, ...]
    slices: int = 1
    link_rate: _BytesPerSecond
    hop: _Microseconds
    devices_per_chip: int = 1


class _HostTable(_Table, frozen=True, kw_only=True):
    """The keys of a host; a link that is ``false`` leaves out that of the base. `with_base` takes out `base` and `source`."""

    base: Any = None
    source: Any = None
    device: str | dict[str, Any] | None = None
    devices: int = 1
    cpu_cores: int | None = None
    host_memory: _Bytes | None = None
    host_memory_rate: _BytesPerSecond | None = None
    host_link_rate: _BytesPerSecond | None = None
    nic: _NicTable | Literal[False] = False
    loopback: _InsideTable | Literal[False] = False
    nvlink: _InsideTable | Literal[False] = False
    pcie: _InsideTable | Literal[False] = False
    socket: _InsideTable | Literal[False] = False


class _ListedHostTable(_HostTable, frozen=True, kw_only=True):
    """A table ``[[host]]``."""

    count: int = 1


class _ClusterTable(_HostTable, frozen=True, kw_only=True):
    name: str
    aliases: Any = None
    hosts: int = 1
    host: list[dict[str, Any]] | None = None
    rail: _BetweenTable | Literal[False] = False
    leaf: _BetweenTable | Literal[False] = False
    spine: _BetweenTable | Literal[False] = False
    torus: _TorusTable | Literal[False] = False
    price_per_device_hour_usd: _Number | None = None
    power_per_device: _Watts | None = None


class _PeakTable(_Table, frozen=True, kw_only=True):
    fp64: _FlopsPerSecond | None = None
    fp32: _FlopsPerSecond | None = None
    tf32: _FlopsPerSecond | None = None
    fp16: _FlopsPerSecond | None = None
    bf16: _FlopsPerSecond | None = None
    fp8: _FlopsPerSecond | None = None
    fp4: _FlopsPerSecond | None = None
    int8: _FlopsPerSecond | None = None


class _SampleRow(_Table, frozen=True, array_like=True):
    """A measured op: [op, time] or [op, time, spread of repetitions in %]."""

    op: str
    time: _Microseconds
    spread_pct: float = 0.0


class _DeviceTable(_Table, frozen=True, kw_only=True):
    name: str
    vendor: str
    base: Any = None
    source: Any = None
    aliases: Any = None
    machine: Any = None
    kind: Literal["gpu", "cpu", "tpu"] = "gpu"
    peak: _PeakTable = _PeakTable()
    memory: _Bytes | None = None
    memory_rate: _BytesPerSecond | None = None
    l2_cache: _Bytes | None = None
    vector_memory: _Bytes | None = None
    cores: int | None = None
    clock: _Hertz | None = None
    launch: _Microseconds | None = None
    power: _Watts | None = None
    samples: tuple[_SampleRow, ...] = ()


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
    file = TomlFile(path)
    file_values = file.values()
    values, source = with_base(file, file_values, "machine", find, ())
    if "name" not in file_values and isinstance(values.get("name"), str):
        values["name"] = f"{values['name']} as in {path.name}"
    table = file.convert(values, _ClusterTable)
    if not table.name.strip():
        file.fail("name", "must not be empty")
    if "host" in values:
        mixed = [key for key in values if key in ("hosts", *_HostTable.__struct_fields__)]
        if mixed:
            file.fail(mixed[0], "stands beside [[host]]: write it into each of them")
        groups, source = _listed_hosts(file, table.host or [], source, find)
    else:
        host = _host(file, table, "", find)
        groups = (file.placed("hosts", partial(HostGroup, count=table.hosts, host=host)),)
    links = tuple(_between(file, level, link) for level in BETWEEN if (link := getattr(table, level)))
    return file.placed(
        "",
        lambda: Cluster(
            name=visible(table.name),
            groups=groups,
            links=links,
            torus=_torus(file, table.torus) if table.torus else None,
            price_per_device_hour_usd=_plain(table.price_per_device_hour_usd),
            power_per_device_w=_plain(table.power_per_device),
            provenance=source,
        ),
    )


def load_device(path: Path, find: Find) -> Device:
    """The device of a file; raises `InputError` as `load_cluster` does."""
    file = TomlFile(path)
    return _device(file, file.values(), "", find)


def _listed_hosts(
    file: TomlFile, listed: list[dict[str, Any]], source: Provenance, find: Find
) -> tuple[tuple[HostGroup, ...], Provenance]:
    """Hosts that differ, and where values come from, with the sources of those that are based on a machine."""
    if not listed:
        file.fail("host", "must be [[host]] tables, one for each kind of host")
    groups, sources = [], dict[str, str]()
    for number, values in enumerate(listed):
        key = f"host[{number}]"
        merged, host_source = with_base(file, values, "machine", find, (), key)
        if "base" in values:
            sources[key] = host_source.source
        known = (*_ListedHostTable.__struct_fields__, *values)
        table = file.convert({name: value for name, value in merged.items() if name in known}, _ListedHostTable, key)
        host = _host(file, table, key, find)
        groups.append(file.placed(f"{key}.count", partial(HostGroup, count=table.count, host=host)))
    exceptions = tuple(sorted({**sources, **dict(source.exceptions)}.items()))
    return tuple(groups), msgspec.structs.replace(source, exceptions=exceptions)


def _host(file: TomlFile, table: _HostTable, key: str, find: Find) -> Host:
    """The host whose keys stand in a table of that key."""
    prefix = f"{key}." if key else ""
    if table.device is None:
        file.fail(f"{prefix}device", "missing")
    elif isinstance(table.device, str):
        name = table.device
        device = load_device(file.placed(f"{prefix}device", lambda: found_file(file, name, "device", find)), find)
    else:
        device = _device(file, table.device, f"{prefix}device", find)
    links = tuple(_inside(file, level, link, prefix) for level in INSIDE if (link := getattr(table, level)))
    nics = _nics(file, table.nic, prefix) if table.nic else None
    return file.placed(
        key,
        lambda: Host(
            device=device,
            devices=table.devices,
            links=links,
            nics=nics,
            cpu_cores=table.cpu_cores,
            memory_bytes=_plain(table.host_memory),
            memory_bytes_per_s=_plain(table.host_memory_rate),
            device_link_bytes_per_s=_plain(table.host_link_rate),
        ),
    )


def _device(file: TomlFile, given: Mapping[str, Any], key: str, find: Find) -> Device:
    values, source = with_base(file, dict(given), "device", find, (), key)
    table = file.convert(values, _DeviceTable, key)
    return file.placed(
        key,
        lambda: Device(
            name=visible(table.name),
            vendor=visible(table.vendor),
            kind=table.kind,
            peak=Peaks(**{precision: _plain(getattr(table.peak, precision)) for precision in PRECISIONS}),
            memory_bytes=None if table.memory is None else int(table.memory),
            memory_bytes_per_s=_plain(table.memory_rate),
            l2_cache_bytes=None if table.l2_cache is None else int(table.l2_cache),
            vector_memory_bytes=None if table.vector_memory is None else int(table.vector_memory),
            cores=table.cores,
            clock_hz=_plain(table.clock),
            launch_us=_plain(table.launch),
            power_w=_plain(table.power),
            samples=file.placed(
                f"{key}.samples" if key else "samples",
                lambda: tuple(Sample(row.op, float(row.time), row.spread_pct) for row in table.samples),
            ),
            provenance=source,
        ),
    )


def _nics(file: TomlFile, table: _NicTable, prefix: str) -> Nics:
    link = _link(file, f"{prefix}nic", "nic", table, {})
    return file.placed(f"{prefix}nic.count", lambda: Nics(count=table.count, link=link, buffers=table.buffers, fabric=table.fabric))


def _inside(file: TomlFile, level: Level, table: _InsideTable, prefix: str) -> Link:
    hosts = None if table.hosts == "all" else table.hosts
    more = {"sharing": table.sharing, "devices": table.devices, "hosts": hosts, "wires": table.wires}
    return _link(file, f"{prefix}{level}", level, table, more)


def _between(file: TomlFile, level: Level, table: _BetweenTable) -> Link:
    more = {"hosts": table.hosts, "oversubscription": float(table.oversubscription)}
    return _link(file, level, level, table, more)


def _link(file: TomlFile, key: str, level: Level, table: _LinkTable, more: Mapping[str, Any]) -> Link:
    unlimited = table.rate is None or math.isinf(table.rate)
    return file.placed(
        key,
        lambda: Link(
            level=level,
            rate_bps=None if unlimited else _plain(table.rate),
            latency_us=float(table.latency or 0.0),
            duplex=table.duplex,
            **more,
        ),
    )


def _torus(file: TomlFile, table: _TorusTable) -> Torus:
    return file.placed(
        "torus",
        lambda: Torus(
            shape=table.shape,
            wraps=table.wraps,
            slices=table.slices,
            link_bytes_per_us=float(table.link_rate) / 1e6,
            hop_us=float(table.hop),
            devices_per_chip=table.devices_per_chip,
        ),
    )


def _plain(quantity: float | None) -> float | None:
    """The number of a quantity: the structs of a cluster hold plain numbers, which JSON can store."""
    return None if quantity is None else float(quantity)
