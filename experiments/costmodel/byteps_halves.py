"""What BytePS's fp16 gradients cost beside their fewer bytes, apart from any job: core time where workers only add up arrays.

    python -m experiments.costmodel.byteps_halves OUT.jsonl --python ENV/bin/python [--rounds 3]

Two workers and two servers, worker and server of a number sharing a core, no links. Arrays of float32 are sent as halves, and
arrays of half as many elements are sent whole: the same bytes in the same messages. What a worker takes more is casts, what a
server takes more is its sums of halves. Settings run in turn, round by round. Needs root; nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from dpro_search.collect.launch.parameter_servers import byteps_servers, run_with_servers
from dpro_search.collect.launch.ranks import JobSpec
from experiments.costmodel.told import server_cpu_ns, told_by

_JOB = Path(__file__).with_name("byteps_halves_job.py")
_RANKS = 2
_WIDTH = {"half": 2, "whole": 4}
_IDLE_NS = 0.5e9


class Setting(NamedTuple):
    """Arrays, the elements of each, small ones among them, how all are sent, deviation of the values, and how many times."""

    arrays: int
    elements: int
    small: int
    kind: str
    scale: float
    steps: int

    @property
    def sent_bytes(self) -> int:
        """Of a worker in a step, without the small ones."""
        return self.arrays * self.elements * _WIDTH[self.kind]


def _pair(arrays: int, elements: int, steps: int, *, small: int = 0, scale: float = 1e-3) -> tuple[Setting, Setting]:
    return Setting(arrays, elements // 2, small, "whole", scale, steps), Setting(arrays, elements, small, "half", scale, steps)


SETTINGS = (
    *_pair(160, 1_000, 60),
    *_pair(160, 160_000, 10),
    *_pair(20, 1_280_000, 10),
    *_pair(20, 1_280_000, 10, small=160),
    *_pair(20, 1_280_000, 10, scale=1e-6),  # halves of such values are subnormal
    *_pair(4, 6_400_000, 10),
    *_pair(2, 20_000_000, 8),
)


class Used(msgspec.Struct, frozen=True, kw_only=True):
    """Core time of a step, us: of a worker and of a server, means; a server's without what it takes to look for work."""

    setting: Setting
    worker_us: float
    server_us: float
    step_us: float


def measure(setting: Setting, python: str) -> Used:
    """Run workers and servers in one setting."""
    words = (setting.arrays, setting.elements, setting.small, setting.steps, setting.kind, setting.scale)
    spec = JobSpec(
        command=(python, str(_JOB), *map(str, words)),
        ranks=_RANKS,
        cores=tuple(sorted(os.sched_getaffinity(0))[:_RANKS]),
        env={"OMP_NUM_THREADS": "1"},
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_with_servers(spec, folder, byteps_servers(_RANKS))
        told = [told_by(folder / f"rank{rank}") for rank in range(_RANKS)]
        span_ns = [told[0].begin_ns, told[0].end_ns]
        used_us = []
        for server in range(_RANKS):
            at_ns, cpu_ns = server_cpu_ns(folder / f"server{server}")
            used = float(np.diff(np.interp(span_ns, at_ns, cpu_ns))[0])
            looking = _idle_share(at_ns, cpu_ns) * float(np.diff(span_ns)[0])
            used_us.append((used - looking) / setting.steps / 1e3)
    return Used(
        setting=setting,
        worker_us=float(np.mean([one.cpu_us for one in told])),
        server_us=float(np.mean(used_us)),
        step_us=float(np.diff(span_ns)[0]) / setting.steps / 1e3,
    )


def _idle_share(at_ns: np.ndarray, cpu_ns: np.ndarray) -> float:
    """The least share of a core that a server took for half a second."""
    later = np.searchsorted(at_ns, at_ns + _IDLE_NS)
    begins = np.flatnonzero(later < len(at_ns))
    ends = later[begins]
    rising = cpu_ns[ends] > cpu_ns[begins]
    return float(((cpu_ns[ends] - cpu_ns[begins]) / (at_ns[ends] - at_ns[begins]))[rising].min())


def table(rows: list[Used]) -> str:
    """Medians (spans), and what halves take more than the same bytes of float32: of a gradient's bytes, and of those added."""
    found: dict[Setting, list[Used]] = defaultdict(list)
    for row in rows:
        found[row.setting].append(row)
    lines = [
        "| arrays x elements (small ones) | deviation | worker, ms: whole | half | casts, us | us a KB of gradient "
        "| server, ms: whole | half | sums, us a KB of halves |",
        "|---|---|---|---|---:|---:|---|---|---:|",
    ]
    for setting, halves in found.items():
        if setting.kind != "half":
            continue
        wholes = found[setting._replace(elements=setting.elements // 2, kind="whole")]
        worker, server = ([[getattr(one, name) for one in ran] for ran in (wholes, halves)] for name in ("worker_us", "server_us"))
        casts_us, sums_us = (float(np.median(half) - np.median(whole)) for whole, half in (worker, server))
        added = setting.sent_bytes * (_RANKS - 1) / _RANKS  # by a server: half of the bytes, of all workers but the first
        cells = (
            f"{setting.arrays} x {setting.elements:,} ({setting.small})",
            f"{setting.scale:g}",
            *map(_spread, worker),
            f"{casts_us / setting.arrays:.0f}",
            f"{casts_us / (2 * setting.sent_bytes) * 1e3:.3f}",
            *map(_spread, server),
            f"{sums_us / added * 1e3:.3f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(times_us: list[float]) -> str:
    return f"{np.median(times_us) / 1e3:.1f} ({min(times_us) / 1e3:.1f}-{max(times_us) / 1e3:.1f})"


def main() -> None:
    """Measure what is not in the file yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.jsonl")
    parser.add_argument("--python", required=True, help="interpreter of an environment with BytePS")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    options.out.touch()
    rows = [msgspec.json.decode(line, type=Used) for line in options.out.read_bytes().splitlines()]
    for setting in (SETTINGS * options.rounds)[len(rows) :]:
        rows.append(measure(setting, options.python))
        with options.out.open("ab") as file:
            file.write(msgspec.json.encode(rows[-1]) + b"\n")
    print(table(rows))


if __name__ == "__main__":
    main()
