"""What a slice costs the processes of MXNet's KVStore, apart from any job: core time where workers only push and pull.

    python -m experiments.costmodel.kvstore_slices OUT.jsonl --python ENV/bin/python [--rounds 4] [--rate 2gbit]

Two workers and two servers on shaped hosts, worker and server of a number sharing a core. Arrays of 102 MB in all are cut into ever
more priority slices; small ones tell what a slice costs that has hardly any bytes. Settings run in turn, round by round. Needs
root; nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from dpro_search.collect.assemble.kvstore_slices import SLICE_THRESHOLD, VAN
from dpro_search.collect.launch.netns import shaped_hosts
from dpro_search.collect.launch.parameter_servers import ServerSpec, hosts_needed, run_with_servers
from dpro_search.collect.launch.ranks import JobSpec
from dpro_search.quantities import parse_rate_bps
from experiments.costmodel.told import server_cpu_ns, told_by

_JOB = Path(__file__).with_name("kvstore_slices_job.py")
_RANKS = 2
_SHARES = 1, _RANKS  # slices that a server and a worker handle, over those of a server


class Setting(NamedTuple):
    """Arrays, the elements of each, those of a slice, and how many times all are pushed and pulled."""

    arrays: int
    elements: int
    slice_elements: int
    steps: int

    @property
    def slices(self) -> int:
        """Of each server."""
        return self.arrays * -(-self.elements // self.slice_elements) // _RANKS


SETTINGS = (
    Setting(160, 1_000, 1_000, 60),
    Setting(40, 640_000, 640_000, 12),
    Setting(40, 640_000, 320_000, 12),
    Setting(160, 160_000, 160_000, 12),
    Setting(160, 160_000, 80_000, 12),
    Setting(160, 160_000, 40_000, 12),
    Setting(160, 160_000, 20_000, 12),
)


class Used(msgspec.Struct, frozen=True, kw_only=True):
    """Core time of a step, us: of a worker and of a server, means; and a step's duration."""

    setting: Setting
    worker_us: float
    server_us: float
    step_us: float


def measure(setting: Setting, python: str, rate_bps: float | None) -> Used:
    """Run workers and servers in one setting."""
    arguments = (setting.arrays, setting.elements, setting.steps)
    spec = JobSpec(
        command=(python, str(_JOB), *map(str, arguments)),
        ranks=_RANKS,
        cores=(0, 1),
        env={"OMP_NUM_THREADS": "1", VAN: "p3", SLICE_THRESHOLD: str(setting.slice_elements)},
    )
    servers = ServerSpec(count=_RANKS)
    with tempfile.TemporaryDirectory() as name, shaped_hosts(hosts_needed(spec, servers), rate_bps, True) as hosts:
        folder = Path(name)
        run_with_servers(spec, folder, servers, hosts=hosts)
        told = [told_by(folder / f"rank{rank}") for rank in range(_RANKS)]
        span_ns = [told[0].begin_ns, told[0].end_ns]
        used_us = []
        for server in range(_RANKS):
            at_ns, cpu_ns = server_cpu_ns(folder / f"server{server}")
            used_us.append(float(np.diff(np.interp(span_ns, at_ns, cpu_ns))[0]) / setting.steps / 1e3)
    return Used(
        setting=setting,
        worker_us=float(np.mean([one.cpu_us for one in told])),
        server_us=float(np.mean(used_us)),
        step_us=float(np.diff(span_ns)[0]) / setting.steps / 1e3,
    )


def table(rows: list[Used]) -> str:
    """Medians (spans), and what a slice more costs from one setting to the next of the same arrays."""
    found: dict[Setting, list[Used]] = defaultdict(list)
    for row in rows:
        found[row.setting].append(row)
    lines = [
        "| arrays x elements | elements of a slice | slices of a server | server, ms | a slice, us | worker, ms | a slice, us |",
        "|---|---:|---:|---|---:|---|---:|",
    ]
    before: tuple[Setting, float, float] | None = None
    for setting, used in found.items():
        server_us, worker_us = ([getattr(one, name) for one in used] for name in ("server_us", "worker_us"))
        medians = float(np.median(server_us)), float(np.median(worker_us))
        more = ["", ""]
        if before is not None and before[0][:2] == setting[:2]:
            handled = [(setting.slices - before[0].slices) * share for share in _SHARES]
            more = [f"{(now - then) / slices:.0f}" for now, then, slices in zip(medians, before[1:], handled, strict=True)]
        elif setting.elements == setting.slice_elements and setting.elements <= 1_000:
            more = [f"{median / (setting.slices * share):.0f} (all)" for median, share in zip(medians, _SHARES, strict=True)]
        cells = [
            f"{median / 1e3:.0f} ({min(each) / 1e3:.0f}-{max(each) / 1e3:.0f})"
            for median, each in zip(medians, (server_us, worker_us), strict=True)
        ]
        lines.append(
            f"| {setting.arrays} x {setting.elements:,} | {setting.slice_elements:,} | {setting.slices} "
            f"| {cells[0]} | {more[0]} | {cells[1]} | {more[1]} |"
        )
        before = setting, *medians
    return "\n".join(lines)


def main() -> None:
    """Measure what is not in the file yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.jsonl")
    parser.add_argument("--python", required=True, help="interpreter of MXNet's environment")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--rate", default="2gbit")
    options = parser.parse_args()
    options.out.touch()
    rows = [msgspec.json.decode(line, type=Used) for line in options.out.read_bytes().splitlines()]
    for setting in (SETTINGS * options.rounds)[len(rows) :]:
        rows.append(measure(setting, options.python, parse_rate_bps(options.rate)))
        with options.out.open("ab") as file:
            file.write(msgspec.json.encode(rows[-1]) + b"\n")
    print(table(rows))


if __name__ == "__main__":
    main()
