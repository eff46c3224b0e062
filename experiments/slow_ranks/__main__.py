"""Measure how often `dpro-search ranks` names the right rank and kind: ``python -m experiments.slow_ranks --seed 1 FOLDER``.

Needs root (network namespaces) and the PyTorch environment of ``scripts/make_env.sh torch``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path

from dpro_search.analysis.ranks.watch import Watch, feed_from
from dpro_search.collect.readers.stamps import StampFolder
from experiments.slow_ranks.cases import JOBS, job_of, score
from experiments.slow_ranks.launch import run_job

_HEALTHY = {"kind": "ddp", "ranks": 4, "hosts": 4, "blocks": 2, "block_us": 500, "width": 64, "step_us": 6000, "input_us": 300}


def main() -> None:
    """Run the jobs, or score those that ran."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=17)
    parser.add_argument("--jobs", nargs="*", default=list(JOBS))
    parser.add_argument("--healthy-steps", type=int, default=0)
    parser.add_argument("--score-only", action="store_true")
    options = parser.parse_args()
    totals: Counter[str] = Counter()
    for name in options.jobs:
        folder = options.folder / f"{name}-{options.seed}"
        if not options.score_only:
            started = time.monotonic()
            run_job(job_of(name, options.seed, options.cases), folder, timeout_s=600)
            print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
        totals += report(name, folder)
    if options.healthy_steps:
        folder = options.folder / f"healthy-{options.seed}"
        if not options.score_only:
            run_job({**_HEALTHY, "seed": options.seed, "steps": options.healthy_steps, "schedule": []}, folder, timeout_s=1500)
        changes, steps = changes_of(folder)
        print(f"healthy: {sum(bool(findings) for _, findings in changes)} alarms in {steps} steps: {changes[:12]}", flush=True)
    print(dict(totals))


def report(name: str, folder: Path) -> Counter[str]:
    """Print the score of one job."""
    job = json.loads((folder / "job.json").read_text())
    changes, steps = changes_of(folder)
    rows, alarms = score(job, changes)
    counts: Counter[str] = Counter()
    for row in rows:
        right = row["truth"] == row["answer"]
        counts.update({"periods": 1, "rank and kind right": right, "rank right": row["who"]})
        counts.update({f"{row['title']}: periods": 1, f"{row['title']}: right": right})
        if not right:
            print(f"  {name} step {row['first']}: {row['title']} {sorted(row['truth'])} but {sorted(row['answer'])}")
    counts["alarms in healthy steps"] = len(alarms)
    print(
        f"{name}: {counts['rank and kind right']} of {counts['periods']} right, {len(alarms)} alarms {alarms[:6]} in {steps} steps"
    )
    return counts


def changes_of(folder: Path) -> tuple[list, int]:
    """The answer after each step in which it changed, and the number of steps."""
    watch, stamps = Watch(), StampFolder(path=folder / "stamps")
    while feed_from(watch, stamps):
        pass
    return watch.changes, watch.answer().steps


if __name__ == "__main__":
    main()
