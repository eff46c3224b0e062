"""Core time of PyTorch's PowerSGD hook: measures its stages on synthetic gradients, and fits the table of a machine file.

    python -m experiments.costmodel.powersgd measure --python ENV/bin/python --out ROWS [--core 0]
    python -m experiments.costmodel.powersgd fit ROWS...

Needs a quiet core. `fit` prints the table and, of each bucket, measured core time and what the table says of it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from dpro_search.collect.trace import Floats, TensorInfo
from dpro_search.costmodel.powersgd import RANKS, features

JOB = Path(__file__).with_name("powersgd_job.py")
_BETWEEN_STAGES = 2  # before Qs: the only product whose time depends on the form of its matrix
_SPREAD_US = 100.0  # of a stage's time, beside what is proportional to it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    measure = verbs.add_parser("measure")
    measure.add_argument("--python", required=True)
    measure.add_argument("--out", type=Path, required=True)
    measure.add_argument("--core", type=int, default=0)
    fit = verbs.add_parser("fit")
    fit.add_argument("rows", type=Path, nargs="+")
    options = parser.parse_args()
    if options.verb == "measure":
        command = ["taskset", "-c", str(options.core), options.python, str(JOB)]
        found = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
        options.out.write_bytes(found.stdout)
    else:
        print(report(options.rows))


def report(paths: list[Path]) -> str:
    """The lines of a machine file, and how far they are from the measured buckets."""
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    table, lines, off = ["[powersgd]"], [], []
    for rank in sorted(RANKS):
        own: dict[str, list[list[float]]] = {}
        for row in rows:
            if row["rank"] == rank:
                own.setdefault(json.dumps(row["shapes"]), []).append(row["stages_us"])
        design = np.concatenate([_features(json.loads(shapes), rank) for shapes in own])
        measured = np.array([np.mean(found, axis=0) for found in own.values()])
        weights = _fitted(design, measured)
        stages = ", ".join(f"[{', '.join(_number(value) for value in stage)}]" for stage in weights)
        table.append(f'stages_us_rank{rank} = {{ value = [{stages}], source = "powersgd" }}')
        said = design @ weights.T
        off += (said.sum(axis=1) / measured.sum(axis=1) - 1).tolist()
        for shapes, us, fitted in zip(own, measured, said, strict=True):
            named = json.loads(shapes)
            lines.append(
                f"rank {rank}, {len(named)} gradients like {named[0]}: {us.round().tolist()} us, "
                f"table {(fitted.sum() / us.sum() - 1) * 100:+.0f} %"
            )
    middle, most = np.quantile(np.abs(off), (0.5, 0.9))
    lines.append(f"whole buckets are off by {middle:.0%} (median), {most:.0%} (nine in ten)")
    return "\n".join([*table, *lines])


def _features(shapes: list[list[int]], rank: int) -> Floats:
    tensors = [
        TensorInfo(name=str(i), node="", dtype="float32", shape=tuple(shape), size_bytes=4 * math.prod(shape))
        for i, shape in enumerate(shapes)
    ]
    return features(tensors, np.zeros(len(shapes), dtype=np.int64), rank)


def _fitted(design: Floats, measured: Floats) -> Floats:
    """Core time per unit of each feature, [stages, features]; none is negative."""
    found = np.zeros((measured.shape[1], design.shape[1]))
    for stage, us in enumerate(measured.T):
        used = np.arange(design.shape[1] if stage == _BETWEEN_STAGES else design.shape[1] - 2)
        weight = 1 / (us + _SPREAD_US)
        found[stage, used] = nnls(design[:, used] * weight[:, None], us * weight)[0]
    return found


def _number(value: float) -> str:
    return f"{value:.3g}" if value >= 0.1 else f"{value * 1e3:.3g}e-3" if value >= 0.5e-6 else "0"


if __name__ == "__main__":
    main()
