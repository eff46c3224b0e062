"""Table: predicted peak memory of a step beside the framework's own count.

    python -m experiments.dpro.memory RESULTS --memory DIR

DIR is what `experiments.costmodel.memory` recorded; that module says what is counted, and compares other batch sizes as well.
"""

from __future__ import annotations

import msgspec
import numpy as np

from dpro_search.collect.trace import Trace
from dpro_search.errors import InputError
from dpro_search.graph.build import build_graph
from experiments.costmodel.best_fit import allocator_peak_bytes
from experiments.costmodel.memory import BATCHES, COUNTED_FROM_BYTES, MIB, WORKLOADS
from experiments.dpro.parts import Options, Section, gathered, script, table
from experiments.dpro.published import MEMORY_ERROR_PCT, SOURCE

NAME = "memory"


class Row(msgspec.Struct, kw_only=True):
    """One recording: bytes that the allocator counted in use at most, and that were predicted."""

    workload: str
    batch: int
    counted_bytes: int
    predicted_bytes: int

    @property
    def error_pct(self) -> float:
        """Signed."""
        return (self.predicted_bytes / self.counted_bytes - 1) * 100


def memory(options: Options) -> Section:
    """The section."""
    text = "Not measured here: no recordings were named (--memory).\n"
    if options.memory is not None:
        folders = {(name, batch): options.memory / name / str(batch) for name in WORKLOADS for batch in BATCHES}
        jobs = {
            f"{name}/{batch}": lambda one=(name, batch): row_of(options, *one)
            for (name, batch), folder in folders.items()
            if folder.is_dir()
        }
        if not jobs:
            raise InputError(f"{options.memory}: no recording of experiments.costmodel.memory")
        text = _table(list(gathered(options.results / f"{NAME}.json", Row, jobs).values()))
    return Section(name=NAME, title="Peak memory", text=text)


def row_of(options: Options, workload: str, batch: int) -> Row:
    """Predict a recording's own peak."""
    assert options.memory is not None
    trace = Trace.load(options.memory / workload / str(batch))
    step, truth = build_graph(trace).memory, trace.meta.allocator
    if step is None or truth is None:
        raise InputError(f"{options.memory / workload / str(batch)}: its tensors' shapes were not recorded; record it again")
    predicted = allocator_peak_bytes(
        step, fusion_buffer_bytes=trace.horovod_settings.fusion_threshold_bytes, smallest_bytes=COUNTED_FROM_BYTES
    )
    return Row(workload=workload, batch=batch, counted_bytes=truth.peak_bytes, predicted_bytes=predicted)


def _table(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        sizes = (f"{size / MIB:.0f}" for size in (row.counted_bytes, row.predicted_bytes))
        lines.append([row.workload, str(row.batch), *sizes, f"{row.error_pct:+.1f} %"])
    errors = np.abs([row.error_pct for row in rows])
    said = (
        f"Mean {errors.mean():.1f} %, largest {errors.max():.1f} % over {len(rows)} recordings; theirs: largest "
        f"{MEMORY_ERROR_PCT} % ({SOURCE}).\n"
    )
    return table(("workload", "batch#", "counted, MiB#", "predicted, MiB#", "error#"), lines) + "\n" + said


if __name__ == "__main__":
    script(memory, __doc__)
