"""Write the table of dpro_search/cluster/README.md from the bundled data: python scripts/make_cluster_tables.py"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from dpro_search.cluster import Host, bundled

PAGE = Path(__file__).parents[1] / "dpro_search" / "cluster" / "README.md"
_MARKED = re.compile(r"(<!-- machines: written by scripts/make_cluster_tables.py -->\n).*?(<!-- end -->)", re.DOTALL)


def page(text: str) -> str:
    """The page with its tables as the data have them now."""
    return _MARKED.sub(lambda match: match[1] + "\n" + "\n".join(machines()) + "\n\n" + match[2], text)


def machines() -> Iterator[str]:
    """A row for each device, with the bundled machines that have it."""
    of_device: dict[str, list[str]] = {}
    for name in bundled.names("machine"):
        machine = bundled.machine(name)
        host = machine.groups[0].host
        hosts = f"{machine.hosts} x " if machine.hosts > 1 else ""
        of_device.setdefault(host.device.name, []).append(f"`{name}` ({hosts}{host.devices}; {_nics(host)})")
    yield "| device | machines (devices; NICs of a host x Gbit/s) |"
    yield "|---|---|"
    yield from (f"| {device} | {', '.join(names)} |" for device, names in sorted(of_device.items()))


def _nics(host: Host) -> str:
    if host.nics is None:
        return "-"
    rate_bps = host.nics.link.rate_bps
    return f"{host.nics.count} x " + ("no limit" if rate_bps is None else f"{rate_bps / 1e9:g}")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
