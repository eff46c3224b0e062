"""How well the replay of imported profiles holds, and their intervals: python -m experiments.validation.imported_traces T...

Each `T` is a folder of `dpro-search import` with several steps. Every measured step is predicted from all others; the interval of
that prediction should hold it in nine of ten cases.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from dpro_search.collect.trace import Trace
from dpro_search.kinds.imported.pipeline import recorded_predictor


def main(folders: list[str]) -> None:
    """Print a row for each profile, and for all steps together."""
    held: list[tuple[float, bool]] = []
    print("| profile | measured steps | iteration, ms | own, % | held out, % | spread, % | in the interval |")
    print("|---|---|---|---|---|---|---|")
    for folder in map(Path, folders):
        trace = Trace.load(folder)
        predictor = recorded_predictor(trace)
        measured = predictor.iterations_us
        own = [abs(replayed / true - 1) * 100 for true, replayed in predictor.own_durations().values()]
        rows = []
        for step, true in measured.items():
            found = recorded_predictor(trace, without=(step,)).predict()
            low, high = found.interval_us
            rows.append((abs(found.iteration_us / true - 1) * 100, low <= true <= high))
        held += rows
        values = np.array(list(measured.values()))
        errors, inside = zip(*rows, strict=True)
        print(
            f"| {folder.name} | {len(values)} | {np.median(values) / 1e3:.2f} | {max(own):.3f} | {np.mean(errors):.2f} "
            f"| {values.std(ddof=1) / np.median(values) * 100:.2f} | {sum(inside)} of {len(inside)} |"
        )
    errors, inside = zip(*held, strict=True)
    print(f"| all steps | {len(held)} | | | {np.mean(errors):.2f} | | {100 * np.mean(inside):.0f} % |")


if __name__ == "__main__":
    main(sys.argv[1:])
