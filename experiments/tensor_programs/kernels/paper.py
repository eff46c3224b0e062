"""The paper's predictor (`transformer`) on tuned kernels: compact ASTs as leaf vectors with pre-order positions (needs PyTorch).

    python -m experiments.tensor_programs.kernels.paper FOLDER [--kernels NAME,...] [--seed 0] [--json]

It is trained on programs of the other devices, and goes on with the measured programs of the device that was left out. Times
of the same program on other devices are no input of it; what it learns of them is in its weights.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search.costmodel.programs.choice import chosen
from dpro_search.costmodel.programs.features import accumulators, bank_conflicts, sectors
from dpro_search.costmodel.programs.kernel import Access, KernelProgram, Leaf, LoopKind, Memory
from dpro_search.costmodel.programs.latency import ProgramLatency
from dpro_search.costmodel.programs.limits import limits_of
from experiments.tensor_programs.kernels.score import USUAL_BUDGET, LeftOut, errors
from experiments.tensor_programs.kernels.tables import KernelTable, read
from experiments.tensor_programs.table import FEATURES

Floats = npt.NDArray[np.float64]
MOST_PROGRAMS = 1500  # of each other device: 60 epochs take a minute on a core then
INNERMOST, ACCESSES = 5, 4  # loops and accesses of a leaf that its vector holds
FINE_TUNED_EPOCHS = 30


def leaf_vectors(program: KernelProgram) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Vectors of a program's leaves, [leaves, 164], and their pre-order positions, closing a loop counted, [leaves]."""
    rows, positions, step = [], [], 0
    for leaf in program.leaves:
        step += len(leaf.loops) + 1
        positions.append(step)
        step += len(leaf.loops)
        vector = [*_of_leaf(leaf), math.log2(1 + program.shared_bytes), program.needed, *program.variant]
        rows.append(np.pad(np.array(vector, dtype=np.float32), (0, FEATURES - len(vector))))
    return np.array(rows), np.array(positions, dtype=np.int64)


def _of_leaf(leaf: Leaf) -> list[float]:
    lanes = tuple(loop.extent for loop in leaf.loops if loop.kind == LoopKind.THREAD)
    vector = [math.log2(1 + leaf.operations * leaf.iterations), math.log2(leaf.iterations), float(leaf.guarded)]
    vector += [math.log2(leaf.extent(kind)) for kind in LoopKind]
    vector.append(math.log2(accumulators(leaf)))
    for place in range(1, INNERMOST + 1):
        loop = leaf.loops[-place] if place <= len(leaf.loops) else None
        vector += [math.log2(loop.extent), float(loop.kind)] if loop else [0.0, -1.0]
    for place in range(ACCESSES):
        vector += _of_access(leaf, leaf.accesses[place], lanes) if place < len(leaf.accesses) else [0.0] * (3 + INNERMOST)
    return vector


def _of_access(leaf: Leaf, access: Access, lanes: tuple[int, ...]) -> list[float]:
    steps = tuple(stride for loop, stride in zip(leaf.loops, access.strides, strict=True) if loop.kind == LoopKind.THREAD)
    served = bank_conflicts(steps, lanes) if access.memory == Memory.SHARED else sectors(steps, lanes, access.element_bytes)
    inner = [math.log2(1 + abs(stride)) for stride in reversed(access.strides[-INNERMOST:])]
    return [1.0 + access.memory, math.log2(served), float(access.element_bytes), *inner, *[0.0] * (INNERMOST - len(inner))]


def device_vector(name: str) -> Floats:
    """Limits of a device's compute units, and its vendor; zeros where they are not known, [5]."""
    limits = limits_of(name)
    if limits is None:
        return np.zeros(5)
    counts = [math.log2(one) for one in (limits.threads, limits.blocks, limits.shared_bytes, limits.warp)]
    return np.array([*counts, float(limits.vendor == "AMD")])


def compared(table: KernelTable, device: str, seed: int) -> dict[str, dict[str, float]]:
    """Errors and training speed of the paper's predictor and of the shipped one, with the same measured programs."""
    from experiments.tensor_programs.transformer import Predictor, Settings

    assert table.programs is not None
    random = np.random.default_rng(seed)
    vectors = [leaf_vectors(program) for program in table.programs]
    samples: list[Any] = []
    source_us: list[float] = []
    for place, other in enumerate(table.devices):
        if other != device:
            runs = np.flatnonzero(~np.isnan(table.us[:, place]))
            for program in random.choice(runs, min(MOST_PROGRAMS, len(runs)), replace=False):
                samples.append((*vectors[program], device_vector(other)))
                source_us.append(float(table.us[program, place]))
    part = LeftOut.of(table, device)
    runs = np.flatnonzero(~np.isnan(table.us[:, table.devices.index(device)]))
    targets = [(*vectors[program], device_vector(device)) for program in runs]
    places = chosen(part.columns, part.others_us, USUAL_BUDGET, seed=seed)
    rest = np.setdiff1d(np.arange(len(runs)), places)
    start = time.process_time()
    predictor = Predictor(Settings(), seed).fit(samples, np.array(source_us))
    unlabelled = [targets[place] for place in random.choice(rest, min(MOST_PROGRAMS, len(rest)), replace=False)]
    predictor.fine_tune([targets[place] for place in places], part.us[places], unlabelled, epochs=FINE_TUNED_EPOCHS)
    took_s = time.process_time() - start
    start = time.process_time()
    fitted = ProgramLatency.fit(part.columns, part.others_us, places, part.us[places], seed=seed).predict()
    ours_s = time.process_time() - start
    return {
        "CDMPP's predictor": errors(predictor.predict(targets), part.us, places) | {"fit_cpu_s": took_s},
        "shipped predictor": errors(fitted.us, part.us, places) | {"fit_cpu_s": ours_s},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.tensor_programs.kernels.paper", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kernels", default="convolution_milo,dedispersion_milo,gemm_clblast")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = {}
    for table in read(options.folder, []):
        for device in table.devices if table.kernel in options.kernels.split(",") else ():
            results[f"{table.kernel}/{device}"] = rows = compared(table, device, options.seed)
            if not options.json:
                for name, values in rows.items():
                    shown = "  ".join(f"{key} {value:.1f}" for key, value in values.items())
                    print(f"{table.kernel}/{device}: {name}: {shown}", flush=True)
    if options.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
