"""Measures and scores: `python -m experiments.parallel measure|score|grid --out DIR [--paced]`; see the README beside it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dpro_search.deploy.step_split import PARTS
from experiments.parallel.cases import CONFIGS, RATES, cases
from experiments.parallel.grid import job_case, measure_grid, score_grid
from experiments.parallel.measure import measure, tell
from experiments.parallel.score import score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("measure", "score", "grid"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the measurements; the same command continues them")
    parser.add_argument("--paced", action="store_true", help="8 and 16 ranks that wait in place of computing")
    parser.add_argument("--python", default="python", help="interpreter with PyTorch")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="", help="text that the names of jobs have, like gpt-2")
    parser.add_argument("--ranks", default="2,4", help="of grid: numbers of ranks")
    parser.add_argument("--rate", default="500mbit", choices=RATES, help="of grid: of the hosts' links")
    parser.add_argument("--model", default="gpt", choices=tuple(CONFIGS), help="of grid")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.what == "grid":
        _grid(given)
        return
    chosen = [case for case in cases(paced=given.paced) if given.only in case.job]
    if given.what == "measure":
        measure(given.out, chosen, given.python, given.rounds, tell)
    found = score(given.out, chosen)
    if given.json:
        print(json.dumps(found))
        return
    for row in found["rows"]:
        print(
            f"{row['job']:28} {row['strategy']:16} measured {row['measured_us'] / 1e3:8.1f} ms +- {row['noise_pct']:.1f} % "
            f"predicted {row['predicted_us'] / 1e3:8.1f} ms  {row['error_pct']:+.1f} %"
        )
    print_splits(found["rows"])
    for name in ("as_recorded", "from_another", "calibrated", "order", "splits", "losses", "failed"):
        print(name, found[name])


def print_splits(rows: list[dict[str, Any]]) -> None:
    """Of paced runs: measured and predicted shares of the step, in percent, and predicted less measured."""
    names = ("compute", *PARTS)
    found = [row for row in rows if row["split"] is not None]
    if found:
        print(f"{'shares of the step, %':45}" + "".join(f"{name.replace('_', ' '):>28}" for name in names))
    for row in found:
        split = row["split"]
        shares = [(split["measured"][name] * 100, split["predicted"][name] * 100) for name in names]
        cells = "".join(f"{f'{mine:.1f} predicted {theirs:.1f} ({theirs - mine:+.1f})':>28}" for mine, theirs in shares)
        print(f"{row['job']:28} {row['strategy']:16}{cells}")


def _grid(given: argparse.Namespace) -> None:
    jobs = [job_case(given.model, int(ranks), given.rate) for ranks in given.ranks.split(",")]
    measure_grid(given.out, jobs, given.python, given.rounds, tell, only=given.only)
    found = score_grid(given.out, jobs)
    if given.json:
        print(json.dumps(found))
        return
    for row in found:
        print(f"{row['job']}: default {row['default_us'] / 1e3:.1f} ms, picked {row['picked_us'] / 1e3:.1f} ms ({row['picked']})")
        print(f"  gain {row['gain_measured_pct']:+.1f} % measured, {row['gain_predicted_pct']:+.1f} % predicted")
        print(
            f"  best of {row['configurations']}: {row['best_us'] / 1e3:.1f} ms ({row['best']}); picked over best "
            f"{row['picked_over_best']:.3f}, noise {row['noise_pct']:.1f} %, {row['faster_than_picked']} faster than picked"
        )
        print(f"  predictions of the grid: median error {row['median_error_pct']:.1f} %; failed: {row['failed'] or 'none'}")


if __name__ == "__main__":
    main()
