"""Table: what coarsened view, symmetry and partial replay bring, on two models' jobs of 16 workers.

python -m experiments.search.ablation [--json]
python -m experiments.search.ablation --no-symmetry       # how fast without it, the others on
"""

from __future__ import annotations

import argparse
import json

from benchmarks.measure import machine
from benchmarks.search_jobs import bert, resnet50, ring
from benchmarks.shortcuts import ablation, rate, table, walked
from dpro_search.replay.data_parallel_predictor import DataParallelPredictor
from dpro_search.replay.grouping import GroupingReplay, Shortcuts

JOBS = {"ResNet-50, tensor level": resnet50, "ResNet-50, op level": lambda: resnet50(25), "BERT-base, op level": bert}


def main() -> None:
    """Measure all combinations, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plans", type=int, default=2000, help="length of the walk (default: %(default)s)")
    for name in ("coarsen", "symmetry", "partial"):
        parser.add_argument(f"--no-{name}", action="store_true", help=f"measure without {name} only")
    arguments = parser.parse_args()
    off = {name: getattr(arguments, f"no_{name}") for name in ("coarsen", "symmetry", "partial")}
    result: dict[str, object] = {"machine": machine()}
    lines = []
    for title, step in JOBS.items():
        job = ring(step())
        if any(off.values()):
            groupings, _ = walked(DataParallelPredictor(job), arguments.plans)
            partial = False if off["partial"] else None
            options = Shortcuts(coarsen=not off["coarsen"], symmetry=not off["symmetry"], partial=partial)
            evaluator = GroupingReplay(job, options)
            result[title] = rate(evaluator.iteration_us, groupings)[0]
            lines.append(f"{title}: {result[title]:.1f} plans/s")
        else:
            found = ablation(job, arguments.plans)
            result[title] = found
            lines.append(f"{title}\n{table(found)}")
    print(json.dumps(result) if arguments.json else "\n".join([*lines, f"machine: {result['machine']}"]))


if __name__ == "__main__":
    main()
