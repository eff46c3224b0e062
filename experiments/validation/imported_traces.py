"""How well the replay of imported profiles holds, and their intervals: python -m experiments.validation.imported_traces T...

Each `T` is a folder of `dpro-search import` with several steps. Every measured step is predicted from all others; the interval of
that prediction should hold it in nine of ten cases. Beside it, how much of the error is that the step loaded its input for longer
or shorter than the others: the error if that time is taken from the step itself, which is no prediction.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from dpro_search.collect.trace import Trace
from dpro_search.kinds import PlanOptions
from dpro_search.kinds.imported.job import Imported
from dpro_search.kinds.recorded.replay import RecordedReplay
from dpro_search.kinds.recorded.steps import RecordedSteps
from dpro_search.space.scenario import Scale


def main(folders: list[str]) -> None:
    """Print a row for each profile, and for all steps together."""
    held: list[tuple[float, bool]] = []
    print("| profile | measured steps | iteration, ms | own, % | held out, % | loading known, % | spread, % | in the interval |")
    print("|---|---|---|---|---|---|---|---|")
    for folder in map(Path, folders):
        job = Imported.of(Trace.load(folder), PlanOptions())
        measured = job.recorded_steps.measured.iterations_us
        own = [abs(step.error_pct) for step in job.compared(None).steps]
        rows, known = [], []
        for step, true in measured.items():
            found = job.compared(step).prediction
            low, high = found.interval_us
            rows.append((abs(found.iteration_us / true - 1) * 100, low <= true <= high))
            known.append(abs(_with_its_loading_us(job.recorded_steps, step) / true - 1) * 100)
        held += rows
        values = np.array(list(measured.values()))
        errors, inside = zip(*rows, strict=True)
        print(
            f"| {folder.name} | {len(values)} | {np.median(values) / 1e3:.2f} | {max(own):.3f} | {np.mean(errors):.2f} "
            f"| {np.mean(known):.2f} | {values.std(ddof=1) / np.median(values) * 100:.2f} | {sum(inside)} of {len(inside)} |"
        )
    errors, inside = zip(*held, strict=True)
    print(f"| all steps | {len(held)} | | | {np.mean(errors):.2f} | | | {100 * np.mean(inside):.0f} % |")


def _with_its_loading_us(recorded: RecordedSteps, step: int) -> float:
    """The median iteration of the other steps, each replayed with the time that this step loaded its input for."""
    ops = recorded.ops
    loading_us = {one: float(ops.loading_us[ops.step == one].sum()) for one in ops.steps}
    replayed_us = []
    for other in recorded.measured.iterations_us:
        if other == step:
            continue
        factor = loading_us[step] / loading_us[other] if loading_us[other] > 0 else 1.0
        scales = (Scale.parse(f"loading={factor:.6f}"),) if loading_us[other] > 0 else ()
        replayed_us.append(RecordedReplay(steps=recorded, scales=scales, only=(other,)).iteration_us)
    return float(np.median(replayed_us))


if __name__ == "__main__":
    main(sys.argv[1:])
