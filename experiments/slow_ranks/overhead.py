"""Processor time that stamps add to jobs with real compute: ``python -m experiments.slow_ranks.overhead``, runs in turn.

Two ranks train a model over Gloo, with and without stamps in turn. Both are on one core: two cores are often threads of one, and
processor time then depends on what the other one does. Printed for each model: processor time a step of both ranks, without and
with stamps (medians over the runs and their range), collectives a step of both ranks, and the difference.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from dpro_search.collect.readers.stamps import StampFolder
from dpro_search.collect.readers.stamps.records import FIRST_COLLECTIVE
from experiments.slow_ranks.launch import STAMPS_CODE, TORCH_PYTHON

_JOB = Path(__file__).with_name("overhead_job.py")
_RANKS = 2
_STEPS = {"linear": 150, "gpt-ddp": 30, "gpt-fsdp2": 30}


def main() -> None:
    """Run in turn and print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(_STEPS), choices=list(_STEPS))
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    print("| model | collectives a step | without stamps, ms | with stamps, ms | more |\n|---|---:|---:|---:|---:|")
    for model in options.models:
        plain_ms, stamped_ms, collectives = [], [], 0.0
        for _ in range(options.runs):
            plain_ms.append(_run(model, "")[0])
            with tempfile.TemporaryDirectory() as folder:
                ms, collectives = _run(model, folder)
                stamped_ms.append(ms)
        more = median(stamped_ms) / median(plain_ms) - 1
        print(f"| {model} | {collectives:.0f} | {_text(plain_ms)} | {_text(stamped_ms)} | {more:+.1%} |", flush=True)


def _text(values: list[float]) -> str:
    return f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def _run(model: str, stamps: str) -> tuple[float, float]:
    """Processor time of both ranks and their collectives, a step."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "STAMPS": stamps,
        "STAMPS_CODE": str(STAMPS_CODE),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(_RANKS),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            ["taskset", "-c", "0", str(TORCH_PYTHON), "-W", "ignore", str(_JOB), model, str(_STEPS[model])],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(_RANKS)
    ]
    ms = sum(float(rank.communicate()[0]) for rank in ranks)
    return ms, _collectives(Path(stamps)) if stamps else 0.0


def _collectives(folder: Path) -> float:
    steps = count = 0
    for file in StampFolder(path=folder).files:
        records = file.peek(1 << 20)
        count += int((records["operation"] >= FIRST_COLLECTIVE).sum())
        steps = int(records["step"].max()) + 1
    return count / steps


if __name__ == "__main__":
    sys.exit(main())
