"""Records the default sample, searches it, and runs its best plans for real: python -m experiments.validation.first_sample OUT

Run it on an otherwise idle machine with 2 cores, as root (for the links). It takes about ten minutes. ``--install`` copies the
trace and the real runs to ``dpro_search/samples``; a run without ``--record`` runs the plans of the installed trace once more.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from dpro_search.collect.sample import DEFAULT_SAMPLE, sample_trace_path

_ROOT = Path(__file__).parents[2]
_TRAINING = ("python", "experiments/workloads/torch_train.py", "--model", "gpt", "--batch", "8", "--steps")
_RECORDED_STEPS, _STEPS = "45", "25"


def main(arguments: list[str] | None = None) -> None:
    """Run what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the trace and the search; must not exist")
    parser.add_argument("--python", type=Path, required=True, help="Python of the environment: scripts/make_env.sh torch")
    parser.add_argument("--record", action="store_true", help="record the trace anew")
    parser.add_argument("--install", action="store_true", help="copy the results to dpro_search/samples")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of real runs (default: %(default)s)")
    parser.add_argument("--top", type=int, default=2, help="plans that run for real (default: %(default)s)")
    options = parser.parse_args(arguments)
    out, trace = options.out.resolve(), sample_trace_path(DEFAULT_SAMPLE)
    out.mkdir(parents=True)
    # The trace holds the command, so Python has no path of this machine in it.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{options.python.parent}:{os.environ['PATH']}"}

    def dpro(*words: object) -> None:
        command = [sys.executable, "-m", "dpro_search.cli", *map(str, words)]
        subprocess.run(command, cwd=_ROOT, env=environment, check=True)

    if options.record:
        trace = out / DEFAULT_SAMPLE
        links = ("--hosts", 2, "--rate", "1gbit")
        dpro("collect", "--framework", "pytorch", "--comm", "ddp", *links, "--out", trace, "--", *_TRAINING, _RECORDED_STEPS)
    dpro("run", trace, "--trials", 500, "--out", out / "run")
    dpro("validate", out / "run", "--top", options.top, "--rounds", options.rounds, "--", *_TRAINING, _STEPS)
    if options.install:
        sample = sample_trace_path(DEFAULT_SAMPLE)
        for file in (trace / "meta.json", trace / "trace.npz", out / "run" / "validation.json"):
            if file.parent != sample:
                shutil.copy(file, sample / file.name)


if __name__ == "__main__":
    main()
