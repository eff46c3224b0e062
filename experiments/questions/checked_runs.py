"""AUC with which `expect` tells the playbook's runs that checked their collectives from those that did not.

``python -m experiments.questions.checked_runs FOLDER [--rows N] [--json]``: each row is described without checks, and judged by
its step time and memory; tokens a second, MFU and TFLOP/s of a row are the same number as its step time. Which rows checked is told
in ``experiments/truth/README.md``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from sklearn.metrics import roc_auc_score

from dpro_search.analysis.expect.causes import Situation
from dpro_search.analysis.expect.hypotheses import beliefs_of, by_cause
from dpro_search.analysis.expect.measured import Reading
from dpro_search.analysis.expect.quantities import Quantity
from dpro_search.analysis.expect.signals import signals
from dpro_search.errors import DproSearchError
from dpro_search.parallel.answers.accuracy import accuracy
from dpro_search.parallel.costs.domain import domain_of
from experiments.truth.jobs import workload_of
from experiments.truth.rows import Row, read

CAUSE = "debug-checks"


def scores(rows: Sequence[Row]) -> tuple[list[bool], list[float]]:
    """Whether each row checked its collectives, and the probability that it did; rows that cannot be predicted are left out."""
    checked, probabilities = [], []
    for row in rows:
        try:
            workload = workload_of(row)
            is_checked = workload.runtime.host.check_rank_us > 0
            runtime = replace(workload.runtime, host=replace(workload.runtime.host, check_rank_us=0.0))
            workload = replace(workload, runtime=runtime)
            ratio = accuracy().interval_us(1.0, domain_of(workload))
            probabilities.append(_probability(row, Situation(workload=workload, framework="nanotron", step_ratio=ratio)))
            checked.append(is_checked)
        except DproSearchError:
            continue
    return checked, probabilities


def _probability(row: Row, situation: Situation) -> float:
    """The probability that a row checked its collectives, if it either did or nothing is wrong with it."""
    step_s, memory = row.number("step_time_s"), row.number("memory_gb")
    assert step_s is not None, "only measured rows are judged"
    readings = [Reading(name="step_time", text="", number=step_s * 1e6, value=step_s * 1e6)]
    if memory:
        readings.append(Reading(name="memory", text="", number=memory * 2**30, value=memory * 2**30))
    beliefs = beliefs_of(situation, readings, signals(situation.workload, [Quantity.STEP, Quantity.MEMORY]))
    probabilities = by_cause(beliefs)
    cause = sum(probability for causes, probability in probabilities.items() if CAUSE in causes)
    return cause / (cause + probabilities[()])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.questions.checked_runs", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=300, help="random rows")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [row for row in read(options.folder) if "playbook" in row.text("source") and row.measured and row.text("tier") in "ab"]
    chosen = np.random.default_rng(0).permutation(len(rows))[: options.rows]
    checked, probabilities = scores([rows[place] for place in chosen])
    figures = {"rows": len(checked), "checked": sum(checked), "auc": round(float(roc_auc_score(checked, probabilities)), 3)}
    print(json.dumps(figures) if options.json else "\n".join(f"{name}: {value}" for name, value in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
