"""Measures and scores: `python -m experiments.parallel measure|score --out DIR [--paced]`; see the README beside it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from experiments.parallel.cases import cases
from experiments.parallel.measure import measure, tell
from experiments.parallel.score import score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("measure", "score"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the measurements; the same command continues them")
    parser.add_argument("--paced", action="store_true", help="8 and 16 ranks that wait in place of computing")
    parser.add_argument("--python", default="python", help="interpreter with PyTorch")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="", help="text that the names of jobs have, like gpt-2")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
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
    for name in ("as_recorded", "from_another", "calibrated", "order", "losses", "failed"):
        print(name, found[name])


if __name__ == "__main__":
    main()
