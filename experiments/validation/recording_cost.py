"""What recording costs a job, setting by setting: the default and the best plan of a case, with the recorder and without, in turn.

    python -m experiments.validation.recording_cost run DIR --case CASE [--rounds 6] [--steps 26]
    python -m experiments.validation.recording_cost table DIR --case CASE

CASE is a folder of `experiments.search.testbed`, of TensorFlow with Horovod. Each setting runs in three ways: bare; with Horovod's
timeline alone; under `collect`, of whose steps only those without the profiler count. A recording that slows one setting more than
another predicts a gain that no run without it shows; `table` also gives what each recording of the default predicts. Needs root;
nothing else may run on the machine. Resumable: what DIR holds is not run again. The recordings stay in DIR.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from dpro_search.collect._files import write_file
from dpro_search.collect.launch.ranks import JobSpec
from dpro_search.collect.launch.step_times import Schedule, StepTimes
from dpro_search.collect.launchers import TENSORFLOW_HOROVOD
from dpro_search.collect.launchers._base import Launcher
from dpro_search.collect.trace import Trace
from dpro_search.deploy.jobs import RecordedJob
from dpro_search.deploy.validate import typical_us
from dpro_search.kinds import job_of
from dpro_search.space.plan import Plan
from experiments.search.testbed_case import DEFAULT, PLAN, Case, open_case

BARE, TIMELINE, RECORDED = WAYS = ("bare", "timeline", "recorded")
_WARMUP, _TRACED = 5, 6


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """One run: its steps behind the warm-up, and the mean over the ranks of the CPU time in each; us."""

    iteration_us: tuple[float, ...]
    compute_cpu_us: tuple[float, ...]
    comm_cpu_us: tuple[float, ...]


@dataclass(frozen=True)
class _Recorder:
    """A launcher that records a job in place of timing it, and gives the times of the steps without the profiler."""

    out: Path
    steps: int

    def time(self, spec: JobSpec, *, rate_bps: float | None, shaped: bool, warmup: int, **_: Any) -> StepTimes:
        untraced = self.steps - warmup - _TRACED - 2
        schedule = Schedule(warmup=warmup, untraced=untraced, traced=_TRACED)
        trace = TENSORFLOW_HOROVOD.record(spec, self.out, rate_bps=rate_bps, shaped=shaped, schedule=schedule)
        own = ~trace.steps.traced & (trace.steps.index >= warmup)
        cpu = {name: getattr(trace.steps, name)[own] for name in ("compute_cpu_us", "comm_cpu_us")}
        return StepTimes(iteration_us=trace.iterations_us(), **cpu)


def main() -> None:
    """Run, or print what was run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "table"))
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--case", type=Path, required=True, help="a folder of experiments.search.testbed")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=26)
    options = parser.parse_args()
    case = open_case(options.case)
    if options.action == "table":
        print("\n".join([*costs(options.folder), "", *predictions(options.folder, case.best())]))
        return
    for number in range(options.rounds):
        for name, plan in ((DEFAULT, Plan()), (PLAN, case.best())):
            for way in WAYS:
                _run(options.folder / f"{name}-{way}.{number}.json", case, plan, way, options.steps)


def _run(path: Path, case: Case, plan: Plan, way: str, steps: int) -> None:
    """Run a setting in one of the ways, unless its file is there."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    timeline = {"HOROVOD_TIMELINE": str(path.with_suffix(".timeline").resolve()), "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    job = case.job(steps, env=timeline if way == TIMELINE else None)
    if way == RECORDED:
        job = _recording(job, path.with_suffix(".trace"), steps)
    times = job.run(plan, warmup=_WARMUP, timeout_s=case.limit_s(steps)).times
    columns = {name: tuple(getattr(times, name).tolist()) for name in Steps.__struct_fields__}
    write_file(path, msgspec.json.encode(Steps(**columns)))
    print(f"{path.name:28} {typical_us([times.iteration_us]) / 1e3:8.1f} ms", flush=True)


def _recording(job: RecordedJob, out: Path, steps: int) -> RecordedJob:
    return replace(job, launcher=cast(Launcher, _Recorder(out, steps)))


def costs(folder: Path) -> list[str]:
    """Every setting's runs in each way, and what they differ by from the bare ones, as a table."""
    lines = [
        "| setting | way | iterations, ms | median | against bare | CPU ms a step: computing | communication |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for name in (DEFAULT, PLAN):
        bare_us = float("nan")
        for way in WAYS:
            runs = list(_runs(folder, name, way))
            each_us = [typical_us([np.array(run.iteration_us)]) for run in runs]
            if way == BARE:
                bare_us = float(np.median(each_us))
            cpu = [np.median([np.median(getattr(run, what)) for run in runs]) / 1e3 for what in ("compute_cpu_us", "comm_cpu_us")]
            listed = ", ".join(f"{time_us / 1e3:.0f}" for time_us in each_us)
            typical = float(np.median(each_us))
            change = "" if way == BARE else f"{(typical / bare_us - 1) * 100:+.1f} %"
            lines.append(f"| {name} | {way} | {listed} | {typical / 1e3:.0f} | {change} | {cpu[0]:.0f} | {cpu[1]:.0f} |")
    return lines


def predictions(folder: Path, plan: Plan) -> list[str]:
    """What each recording of the default predicts of itself and of the plan, as a table."""
    lines = ["| recording of the default | own steps, ms | predicted: default | plan | gain |", "|---:|---:|---:|---:|---:|"]
    for path in sorted(folder.glob(f"{DEFAULT}-{RECORDED}.*.trace")):
        trace = Trace.load(path)
        prices = job_of(trace)
        default_us, plan_us = (prices.predict(one).iteration_us for one in (Plan(), plan))
        own_us = typical_us([trace.iterations_us()])
        lines.append(
            f"| {path.suffixes[0][1:]} | {own_us / 1e3:.0f} | {default_us / 1e3:.0f} | {plan_us / 1e3:.0f} "
            f"| {(1 - plan_us / default_us) * 100:+.1f} % |"
        )
    return lines


def _runs(folder: Path, name: str, way: str) -> Iterator[Steps]:
    for path in sorted(folder.glob(f"{name}-{way}.*.json")):
        yield msgspec.json.decode(path.read_bytes(), type=Steps)


if __name__ == "__main__":
    main()
