"""Faults injected into real jobs: does `expect` name them from five numbers?

    python -m experiments.injected_faults measure OUT --python ENV/bin/python [--seed 100] [--only CAUSE]
    python -m experiments.injected_faults table OUT

`measure` needs root and an idle machine; it goes on where it stopped. ENV is the environment of ``scripts/make_env.sh torch``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.injected_faults.cases import cases
from experiments.injected_faults.measure import Testbed, measure, rows_of
from experiments.injected_faults.table import lines
from experiments.parallel.measure import tell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    measuring = actions.add_parser("measure")
    measuring.add_argument("out", type=Path)
    measuring.add_argument("--python", required=True)
    measuring.add_argument("--seed", type=int, default=100)
    measuring.add_argument("--only", default="", help="a cause; default: all")
    actions.add_parser("table").add_argument("out", type=Path)
    options = parser.parse_args()
    if options.action == "measure":
        options.out.mkdir(parents=True, exist_ok=True)
        chosen = [case for case in cases(options.seed) if options.only in ("", case.cause)]
        measure(options.out, chosen, options.python, tell)
    else:
        print("\n".join(lines(rows_of(options.out), Testbed(options.out, "", tell).job_file)))


if __name__ == "__main__":
    main()
