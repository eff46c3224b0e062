"""Write the tables of docs/clusters.md from the bundled data: python scripts/make_cluster_tables.py"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from dpro_search.cluster import Host, Link, bundled

PAGE = Path(__file__).parents[1] / "docs" / "clusters.md"
_MARKED = re.compile(r"(<!-- (machines|devices): written by scripts/make_cluster_tables.py -->\n).*?(<!-- end -->)", re.DOTALL)


def page(text: str) -> str:
    """The page with its tables as the data have them now."""
    tables = {"machines": machines, "devices": devices}
    return _MARKED.sub(lambda match: match[1] + "\n" + "\n".join(tables[match[2]]()) + "\n\n" + match[3], text)


def machines() -> Iterator[str]:
    """A row for each bundled machine; rates are of each device, pair or host and direction."""
    yield "| name | hosts x devices | device | inside a host | NICs | ring inside, GB/s | USD a device-hour | source |"
    yield "|---|---|---|---|---|---:|---:|---|"
    for name in bundled.names("machine"):
        machine = bundled.machine(name)
        host = machine.groups[0].host
        ring = machine.bandwidth_bytes_per_us(range(machine.ranks)) / 1e3
        price = machine.price_per_device_hour_usd
        cells = [
            f"`{name}`",
            f"{machine.hosts} x {host.devices}",
            host.device.name,
            ", ".join(_link(link) for link in host.links) or "-",
            _nics(host),
            f"{ring:g}" if machine.ranks > 1 else "-",
            "-" if price is None else f"{price:.2f}",
            machine.provenance.source,
        ]
        yield f"| {' | '.join(cells)} |"


def devices() -> Iterator[str]:
    """A row for each bundled device."""
    yield "| name | device | TFLOP/s fp32 | fp16 | bf16 | fp8 | memory, GiB | TB/s | usual machine |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|---|"
    for name in bundled.names("device"):
        device = bundled.device(name)
        peaks = [device.peak_flops_per_s(precision) for precision in ("fp32", "fp16", "bf16", "fp8")]
        usual = bundled.usual_machine(name)
        cells = [
            f"`{name}`",
            device.name,
            *("-" if peak is None else f"{peak / 1e12:.4g}" for peak in peaks),
            f"{(device.memory_bytes or 0) / 2**30:.1f}",
            f"{(device.memory_bytes_per_s or 0) / 1e12:.3g}",
            f"`{usual}`" if usual else "-",
        ]
        yield f"| {' | '.join(cells)} |"


def _link(link: Link) -> str:
    rate = "no limit" if link.rate_bps is None else f"{link.rate_bps / 8e9:g} GB/s"
    each = {"device": "", "pair": " each pair", "host": " shared"}[link.sharing]
    reach = " in a mesh" if link.wires else f" over {link.hosts} hosts" if link.hosts != 1 else ""
    return f"{link.level} {rate}{each}{reach}"


def _nics(host: Host) -> str:
    if host.nics is None:
        return "-"
    rate_bps = host.nics.link.rate_bps
    return f"{host.nics.count} x " + ("no limit" if rate_bps is None else f"{rate_bps / 1e9:g} Gbit/s")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
