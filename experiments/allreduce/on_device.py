"""All-reduces on a GPU that ranks share: additions on the device against staging through the host; and the table of both.

The MPI library must be CUDA-aware between processes of one host (Open MPI on UCX with its CUDA modules).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dpro_search.runtime import ALL_REDUCE

_JOB = Path(__file__).parent / "in_job" / "on_device.py"
_MPIRUN = (
    *("mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "pml", "ucx", "--mca", "osc", "ucx"),
    *("--mca", "opal_common_ucx_tls", "any", "--mca", "opal_common_ucx_devices", "any"),
)
_ASKED = ", asked"


def measure(out: Path, ranks: list[int], seconds: float) -> None:
    """Write ``OUT-RANKS.json`` for each number of ranks; staged ways only where the MPI library takes no memory of the device."""
    path = os.pathsep.join((str(ALL_REDUCE), os.environ.get("PYTHONPATH", "")))
    for count in ranks:
        for places in (["device"], []):
            file = out.with_name(f"{out.name}-{count}.json")
            command = [*_MPIRUN, "-n", str(count), sys.executable, str(_JOB), str(file), str(seconds / len(ranks)), *places]
            done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, timeout=seconds, check=False)
            if done.returncode == 0:
                break
            print(f"{count} ranks, {places or 'staged only'}: mpirun ended with {done.returncode}", file=sys.stderr)


def lines(files: list[Path]) -> Iterator[str]:
    """Markdown of what `measure` wrote: the fastest algorithm of each way, by size; the registry; DDP."""
    for file in files:
        found = json.loads(file.read_text())
        rows = {(way, algorithm, size): float(np.median(values)) for way, algorithm, size, values in found["rows"]}
        on = f"{found['gpu']}, torch {found['torch']}, {found['mpi'].split(',')[0]}"
        yield f"{found['ranks']} ranks on one {on}; us, medians of rounds in turn:"
        yield ""
        columns = (
            "bytes",
            "Gloo",
            "staged, MPI's own",
            "staged, ours",
            "on the device",
            "against the best",
            "device, asked",
            "staged, asked",
        )
        yield f"| {' | '.join(columns)} |"
        yield f"|{'---:|' * len(columns)}"
        for size in sorted({size for _, _, size in rows}):
            yield _row(rows, size)
        yield ""
        for name, reason in found["failed"].items():
            yield f"* {name}: {reason}"
        if "ddp" in found:
            yield from _ddp(found["ddp"])
        yield ""


def _row(rows: dict[tuple[str, str, int], float], size: int) -> str:
    def best(place: str) -> tuple[float, str]:
        ours = {name: us for (way, name, at), us in rows.items() if (way, at) == (place, size) and not name.endswith(_ASKED)}
        return min(((us, name) for name, us in ours.items() if name != "native"), default=(float("nan"), "-"))

    def asked(way: str) -> str:
        known, forgot = (rows.get((way, "halving-doubling" + end, size), float("nan")) for end in ("", _ASKED))
        return f"{forgot - known:+.0f}"

    gloo, native = rows.get(("gloo", "", size), float("nan")), rows.get(("staged", "native", size), float("nan"))
    (staged, staged_by), (device, device_by) = best("staged"), best("device")
    against = f"{np.nanmin((gloo, native, staged)) / device:.2f}x"
    cells = f"{gloo:,.0f} | {native:,.0f} | {staged:,.0f} ({staged_by}) | {device:,.0f} ({device_by}) | {against}"
    return f"| {size} | {cells} | {asked('device')} | {asked('staged')} |"


def _ddp(found: dict[str, Any]) -> Iterator[str]:
    yield "DistributedDataParallel, 12 layers of 2,048 x 2,048 (201 MB of gradients), ms of a step:"
    yield ""
    for name, values in found["step_ms"].items():
        spread, differ = f"{min(values):.1f} to {max(values):.1f}", found["largest_difference"][name]
        yield f"* {name}: {np.median(values):.1f} ({spread}); parameters differ by {differ:.2g}"
