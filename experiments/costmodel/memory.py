"""Predicted peak memory of a step against the framework's own count, and that of batches which were not recorded.

    python -m experiments.costmodel.memory --python ENV/bin/python --out DIR [--workloads bert ...] [--batches 8 16 32]

Records what is not in DIR yet: two ranks on this machine. The truth is the allocator's count of bytes in use in the profiled steps
(TensorFlow's BFC allocator, "mklcpu" on a CPU, which is asked for whatever has 256 KiB or more): as the pieces that it handed out
("in use"), and as what was asked for, for a piece is up to twice as large as what it is wanted for.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from dpro_search.collect.job import Schedule, record_job
from dpro_search.collect.launch.ranks import JobSpec
from dpro_search.collect.trace import Trace
from dpro_search.costmodel.memory import allocator_peak_bytes, peak_bytes
from dpro_search.graph.build import build_graph
from dpro_search.graph.step_memory import StepMemory

WORKLOADS = ("resnet50", "vgg16", "inception_v3", "bert")
BATCHES = (8, 16, 32)
COUNTED_FROM_BYTES = 2**18
MIB = 2**20
_TRAIN = Path(__file__).resolve().parents[1] / "workloads" / "train.py"
_STEPS = 16
_SCHEDULE = Schedule(warmup=3, untraced=3, traced=5)


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
    print("workload | batch | of batch | in use MiB | predicted | error | asked for MiB | predicted | error\n" + "---|" * 8 + "---")
    errors: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for workload in options.workloads:
        folders = {batch: options.out / workload / str(batch) for batch in options.batches}
        traces = {batch: Trace.load(folder) for batch, folder in folders.items() if folder.exists()}
        steps = {batch: build_graph(trace).memory for batch, trace in traces.items()}
        for batch, trace in traces.items():
            for of, step in steps.items():
                if step is not None and trace.meta.allocator is not None:
                    errors[of == batch].append(_compare(workload, batch, of, trace, step))
    for own, found in errors.items():
        for column, what in enumerate(("in use", "asked for")):
            values = np.abs([pair[column] for pair in found])
            if len(values):
                kind = "recorded batch" if own else "other batches"
                print(f"{kind}, {what}: mean {values.mean():.1f} %, largest {values.max():.1f} %")


def _record(python: str, workload: str, batch: int, out: Path) -> None:
    if out.exists():
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    command = (python, str(_TRAIN), "--model", workload, "--batch", str(batch), "--steps", str(_STEPS))
    record_job(JobSpec(command=command, ranks=2, cores=(0, 1), env={"OMP_NUM_THREADS": "1"}), out, schedule=_SCHEDULE)
    print(f"recorded {workload}, batch {batch}", flush=True)


def _compare(workload: str, batch: int, of: int, trace: Trace, step: StepMemory) -> tuple[float, float]:
    """Print what a recording of one batch size predicts for another, beside what was counted there; both errors in per cent."""
    truth = trace.meta.allocator
    assert truth is not None
    buffer = trace.horovod_settings.fusion_threshold_bytes
    asked = peak_bytes(step, batch_factor=batch / of, fusion_buffer_bytes=buffer, smallest_bytes=COUNTED_FROM_BYTES).bytes
    in_use = allocator_peak_bytes(step, batch_factor=batch / of, fusion_buffer_bytes=buffer, smallest_bytes=COUNTED_FROM_BYTES)
    pairs = ((truth.peak_bytes, in_use), (truth.requested_peak_bytes, asked))
    errors = [(predicted / true - 1) * 100 for true, predicted in pairs]
    cells = [f"{t / MIB:.0f} | {p / MIB:.0f} | {e:+.1f} %" for (t, p), e in zip(pairs, errors, strict=True)]
    print(f"{workload} | {batch} | {of} | " + " | ".join(cells))
    return errors[0], errors[1]


if __name__ == "__main__":
    main()
