"""Peak memory that a recording predicts for a step under a plan, against the framework's own count in the real step under it.

    python -m experiments.costmodel.memory_plans RECORDED --python ENV/bin/python --out DIR [--kinds accumulation ...]

RECORDED is a folder of `experiments.costmodel.memory` (a workload at a batch size). Records its job again under plans that are not
in DIR yet: the batch in four parts; all products in bfloat16; the set of checkpoints, of those that a search begins with, that is
predicted to need the least. Counts and columns are those of `experiments.costmodel.memory`;
"stays" is what the planned job itself counted.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from dpro_search.collect.launchers import TENSORFLOW_HOROVOD
from dpro_search.collect.trace import AllocatorReport, Trace
from dpro_search.costmodel.memory import allocator_peak_bytes
from dpro_search.costmodel.precision import BUNDLED_TABLE
from dpro_search.deploy.export import export_plan
from dpro_search.deploy.jobs import PLAN_VARIABLE
from dpro_search.deploy.targets import targets_for
from dpro_search.graph.build import build_graph
from dpro_search.graph.dataflow import StepMemory
from dpro_search.kinds import PlanOptions, job_of, recorded_job
from dpro_search.space.plan import Plan
from experiments.costmodel.memory import COUNTED_FROM_BYTES, MIB, SCHEDULE

KINDS_OF_PLANS = ("accumulation", "precision", "recomputation")
_PARTS = 4
_TITLES = ("plan", "stays MiB", "in use MiB", "predicted", "error", "change", "predicted change")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recorded", type=Path)
    parser.add_argument("--python", help="interpreter of the TensorFlow + Horovod environment; without it, nothing is recorded")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", default=KINDS_OF_PLANS, choices=KINDS_OF_PLANS)
    options = parser.parse_args()
    trace = Trace.load(options.recorded)
    print(" | ".join(_TITLES) + "\n" + "|".join(["---"] * len(_TITLES)))
    memory = Recorded.of(trace)
    plain = memory.predicted_bytes(Plan())
    for kind in options.kinds:
        folder = options.out / kind
        if options.python and not (folder / "trace").exists():
            _record(trace, _plan_of(trace, kind, memory), folder)
        if (folder / "trace").exists():
            plan = Plan.load(folder / "plan" / "plan.json")
            _print_row(kind, trace, Trace.load(folder / "trace"), memory.predicted_bytes(plan), plain)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The memory of a recorded step, and what the allocator counted."""

    step: StepMemory
    counted: AllocatorReport
    fusion_buffer_bytes: int

    @staticmethod
    def of(trace: Trace) -> Recorded:
        """Of a recording with shapes."""
        step, counted = build_graph(trace).memory, trace.meta.allocator
        if step is None or counted is None:
            raise SystemExit("the recording says nothing of memory")
        return Recorded(step=step, counted=counted, fusion_buffer_bytes=trace.horovod_settings.fusion_threshold_bytes)

    def predicted_bytes(self, plan: Plan) -> int:
        """Pieces in use at the most under a plan."""
        return allocator_peak_bytes(
            self.step,
            smallest_bytes=COUNTED_FROM_BYTES,
            counted=self.counted,
            fusion_buffer_bytes=self.fusion_buffer_bytes,
            micro_batches=plan.micro_batches or 1,
            bfloat16=plan.bfloat16_ops or (),
            recomputed=plan.recomputed_ops or (),
        )


def _plan_of(trace: Trace, kind: str, memory: Recorded) -> Plan:
    if kind == "accumulation":
        return Plan(micro_batches=_PARTS)
    space = job_of(trace, PlanOptions(compute=frozenset([kind]), precision_table=BUNDLED_TABLE)).space
    choice = next(choice for choice in space.choices if choice.name == kind)
    if kind == "recomputation":
        return min((Plan.of(**point) for point in choice.grids["segments"]), key=memory.predicted_bytes)
    return Plan.of(**choice.grids["set"][0])


def _record(trace: Trace, plan: Plan, folder: Path) -> None:
    job = recorded_job(trace)
    shutil.rmtree(folder, ignore_errors=True)
    exported = export_plan(plan, folder / "plan", targets_for(plan, job.targets), job.facts)
    env = {**job.spec.env, **exported.env, "OMP_NUM_THREADS": "1", PLAN_VARIABLE: str(exported.folder.resolve())}
    TENSORFLOW_HOROVOD.record(replace(job.spec, env=env), folder / "trace", schedule=SCHEDULE)


def _print_row(kind: str, recorded: Trace, planned: Trace, predicted: int, plain: int) -> None:
    truth, before = planned.meta.allocator, recorded.meta.allocator
    assert truth is not None
    assert before is not None
    cells = [
        *(kind, f"{truth.least_bytes / MIB:.0f}", f"{truth.peak_bytes / MIB:.0f}", f"{predicted / MIB:.0f}"),
        f"{(predicted / truth.peak_bytes - 1) * 100:+.1f} %",
        *(f"{(truth.peak_bytes - before.peak_bytes) / MIB:+.0f}", f"{(predicted - plain) / MIB:+.0f}"),
    ]
    print(" | ".join(cells), flush=True)


if __name__ == "__main__":
    main()
