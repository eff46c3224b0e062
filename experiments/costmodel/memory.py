"""Predicted peak memory of a step against the framework's own count, and that of batches which were not recorded.

    python -m experiments.costmodel.memory --python ENV/bin/python --out DIR [--workloads bert ...] [--batches 8 16 32]

Records what is not in DIR yet: two ranks on this machine. The truth is the allocator's count of bytes in use in the profiled steps
(TensorFlow's BFC allocator, "mklcpu" on a CPU, which is asked for whatever has 256 KiB or more): as the pieces that it handed out
("in use"), and as what was asked for, for a piece is up to twice as large as what it is wanted for. Pieces are predicted twice:
with what the predicting recording counted of them, and all played. "Stays" is the least that it counted.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from dpro_search.collect.launch.ranks import JobSpec
from dpro_search.collect.launch.step_times import StepSchedule
from dpro_search.collect.launchers import TENSORFLOW_HOROVOD
from dpro_search.collect.trace import Trace
from dpro_search.costmodel.memory import peak_bytes
from dpro_search.graph.build import build_graph
from dpro_search.graph.dataflow import StepMemory
from experiments.costmodel.best_fit import allocator_peak_bytes

WORKLOADS = ("resnet50", "vgg16", "inception_v3", "bert")
BATCHES = (8, 12, 16, 24, 32)
COUNTED_FROM_BYTES = 2**18
MIB = 2**20
WHAT = ("in use", "played", "asked for")
_TITLES = ("workload", "batch", "of batch", "stays MiB", "in use MiB", "predicted", "error", "played", "error")
_TRAIN = Path(__file__).resolve().parents[1] / "workloads" / "train.py"
_STEPS = 16
SCHEDULE = StepSchedule(warmup=3, untraced=3, traced=5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="interpreter of the TensorFlow + Horovod environment; without it, nothing is recorded")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    options = parser.parse_args()
    if options.python:
        for workload in options.workloads:
            for batch in options.batches:
                _record(options.python, workload, batch, options.out / workload / str(batch))
    titles = (*_TITLES, "asked for MiB", "predicted", "error")
    print(" | ".join(titles) + "\n" + "|".join(["---"] * len(titles)))
    errors: dict[bool, list[tuple[float, ...]]] = {True: [], False: []}
    for workload in options.workloads:
        folders = {batch: options.out / workload / str(batch) for batch in options.batches}
        traces = {batch: Trace.load(folder) for batch, folder in folders.items() if folder.exists()}
        steps = {batch: build_graph(trace).memory for batch, trace in traces.items()}
        for batch, trace in traces.items():
            for of, step in steps.items():
                if step is not None:
                    errors[of == batch].append(_compare(workload, trace, traces[of], step, batch / of))
    for own, found in errors.items():
        for what, column in zip(WHAT, np.abs(np.reshape(found, (-1, len(WHAT)))).T, strict=True):
            if len(column):
                kind = "recorded batch" if own else "other batches"
                within = f"{(column <= 5).sum()} of {len(column)} within 5 %"
                print(f"{kind}, {what}: mean {column.mean():.1f} %, largest {column.max():.1f} %, {within}")


def _record(python: str, workload: str, batch: int, out: Path) -> None:
    if out.exists():
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    command = (python, str(_TRAIN), "--model", workload, "--batch", str(batch), "--steps", str(_STEPS))
    TENSORFLOW_HOROVOD.record(JobSpec(command=command, ranks=2, cores=(0, 1), env={"OMP_NUM_THREADS": "1"}), out, schedule=SCHEDULE)
    print(f"recorded {workload}, batch {batch}", flush=True)


def _compare(workload: str, judge: Trace, recorded: Trace, step: StepMemory, factor: float) -> tuple[float, ...]:
    """Print what a recording, with its `step`, predicts of one with so many times its batch; errors in per cent, as in `WHAT`."""
    truth, own = judge.meta.allocator, recorded.meta.allocator
    assert truth is not None, "a recording with shapes has the allocator's events, too"
    assert own is not None
    buffer = recorded.horovod_settings.fusion_threshold_bytes
    pieces = allocator_peak_bytes(
        step, counted=own, smallest_bytes=COUNTED_FROM_BYTES, batch_factor=factor, fusion_buffer_bytes=buffer
    )
    played = allocator_peak_bytes(step, smallest_bytes=COUNTED_FROM_BYTES, batch_factor=factor, fusion_buffer_bytes=buffer)
    asked = peak_bytes(step, smallest_bytes=COUNTED_FROM_BYTES, batch_factor=factor, fusion_buffer_bytes=buffer).bytes
    pairs = ((truth.peak_bytes, pieces), (truth.peak_bytes, played), (truth.requested_peak_bytes, asked))
    errors = [(predicted / true - 1) * 100 for true, predicted in pairs]
    cells = [
        *(workload, f"{step.batch * factor:.0f}", f"{step.batch}", f"{own.least_bytes / MIB:.0f}", f"{truth.peak_bytes / MIB:.0f}"),
        *(f"{pieces / MIB:.0f}", f"{errors[0]:+.1f} %", f"{played / MIB:.0f}", f"{errors[1]:+.1f} %"),
        *(f"{truth.requested_peak_bytes / MIB:.0f}", f"{asked / MIB:.0f}", f"{errors[2]:+.1f} %"),
    ]
    print(" | ".join(cells))
    return tuple(errors)


if __name__ == "__main__":
    main()
