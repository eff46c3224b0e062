"""How long `ranks` takes for many ranks and steps: ``python -m experiments.slow_ranks.day FOLDER --ranks 1000 --steps 720``.

Writes files of healthy ranks (equal work with noise, the given number of all-reduces a step), then reads them, with the time and
the most memory of the reading process.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import numpy as np

from dpro_search.analysis.ranks import ranks
from dpro_search.collect.readers.stamps import RECORD
from dpro_search.collect.readers.stamps.files import HEADER_BYTES

_OPERATIONS = ["none", "step", "forward", "update", "allreduce_"]


def write(folder: Path, world: int, steps: int, collectives: int) -> None:
    """Files of a job whose steps take 5 s."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = collectives + 3
    step = np.repeat(np.arange(steps), rows)
    operation = np.tile([2, *[4] * collectives, 3, 1], steps)
    base_ns = np.tile(np.linspace(0.3e9, 4.9e9, rows), steps) + step * 5e9 + 1e9
    for rank in range(world):
        draws = np.random.default_rng(rank)
        table = np.zeros(len(step), RECORD)
        late_ns = np.where(operation == 4, draws.normal(0, 5e6, len(step)), 0)
        table["enqueue_ns"] = base_ns + late_ns
        for name in ("arrived_us", "waiting_us", "resumed_us"):
            table[name] = np.nan
        table["ended_us"] = np.where(operation == 4, 100_000 - late_ns / 1e3, np.nan)
        table["sequence"] = np.where(operation == 4, np.cumsum(operation == 4) - 1, 0)
        table["step"], table["operation"], table["peer"] = step, operation, -1
        table["size_bytes"] = np.where(operation == 4, 25 << 20, 0)
        header = {"dpro_search_stamps": 1, "rank": rank, "world": world, "host": f"h{rank // 8}", "boot": "one", "record_bytes": 48}
        path = folder / f"rank-{rank:05d}.stamps"
        text = json.dumps({**header, "operations": _OPERATIONS}).encode()
        path.write_bytes(text.ljust(HEADER_BYTES - 1) + b"\n" + table.tobytes())
        group = {"group": 0, "name": "0", "ranks": list(range(world)), "backend": "nccl"}
        path.with_suffix(".groups").write_text(json.dumps(group) + "\n")


def main() -> None:
    """Write the files unless they are there, read them, print time and memory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=720)
    parser.add_argument("--collectives", type=int, default=8)
    options = parser.parse_args()
    if not options.folder.exists():
        write(options.folder, options.ranks, options.steps, options.collectives)
    started, used = time.monotonic(), time.process_time()
    answer = ranks(options.folder)
    seconds, core_seconds = time.monotonic() - started, time.process_time() - used
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{answer.steps} steps of {len(answer.ranks)} ranks: {seconds:.1f} s, {core_seconds:.1f} core-s, peak {peak_gib:.2f} GiB")
    print(*answer.lines(), sep="\n")


if __name__ == "__main__":
    main()
