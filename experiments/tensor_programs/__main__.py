"""Collects times of tensor programs, packs them as a table, and scores predictors of them.

    python -m experiments.tensor_programs collect OUT [--programs N] [--pause-while FILE] [--share 0/2]   (environment tvm)
    python -m experiments.tensor_programs table OUT FILE
    python -m experiments.tensor_programs score [FILE ...] [--seeds 0,1,2,3,4] [--parts PART,PART] [--json]

The parts `paper` and `paper-model` of `score` need PyTorch; the others need no framework.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dpro_search.errors import DproSearchError


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.tensor_programs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    collecting = verbs.add_parser("collect")
    collecting.add_argument("out", type=Path)
    collecting.add_argument("--programs", type=int, default=5000)
    collecting.add_argument("--pause-while", type=Path, metavar="FILE", help="waits between chunks while this file exists")
    collecting.add_argument("--share", default="0/1", help="which of how many processes that work on OUT together this is")
    packing = verbs.add_parser("table")
    packing.add_argument("out", type=Path)
    packing.add_argument("file", type=Path)
    scoring = verbs.add_parser("score")
    scoring.add_argument("files", type=Path, nargs="*", help="tables; those of the repository where none is given")
    scoring.add_argument("--seeds", default="0,1,2,3,4", help="with commas between them")
    scoring.add_argument(
        "--parts", default="target,model", help="target, model, machine, curve, paper, paper-model (with commas between them)"
    )
    scoring.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        return _run(options)
    except DproSearchError as error:
        print(f"experiments.tensor_programs: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    if options.verb == "collect":
        from experiments.tensor_programs.collect import collect

        place, _, of = options.share.partition("/")
        for line in collect(options.out, options.programs, options.pause_while, (int(place), int(of))):
            print(line, flush=True)
    elif options.verb == "table":
        from experiments.tensor_programs.table import pack

        print(pack(options.out, options.file))
    else:
        from experiments.tensor_programs.score import noise, score
        from experiments.tensor_programs.table import BUNDLED, load

        files = options.files or BUNDLED
        tables = {file.stem: load(file) for file in files}  # Each machine alone, but for the part that compares them.
        results: dict[str, Any] = {f"{name} noise of times": {"all": noise(table)} for name, table in tables.items()}
        for part in options.parts.split(","):
            for seed in map(int, options.seeds.split(",")):
                judged = {"all": load(*files)} if part == "machine" else tables
                results |= {f"{name} {part}/{seed}": score(table, part, seed) for name, table in judged.items()}
        if options.json:
            print(json.dumps(results, indent=2))
            return 0
        for key, rows in results.items():
            for name, values in rows.items():
                print(f"{key:36} {name:46} " + "  ".join(f"{one} {value:.1f}" for one, value in values.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
