"""The best plan of a search against the alternatives, on real jobs: the default, HOROVOD_AUTOTUNE, XLA's own clusters, a grid.

    python -m experiments.search.testbed run DIR --scheme ps --workload vgg16 --rate 2gbit --python ENV/bin/python [--seconds 240]
    python -m experiments.search.testbed table DIR

`run` records the job, searches (500 trials) and exports with the commands of `dpro-search`; runs the grid, each setting for a few
steps; and then runs all contenders in turn, in rounds (A B C D A B C D), the best of the grid among them, so that it is not the
luckiest one. What the autotuner chose in a run of its own takes part in the rounds like the others. A contender that is a third
slower than the default in its first run leaves. Needs root; nothing else may run on the machine meanwhile (but for a search).
Resumable: what DIR holds is not run again, and `--seconds` ends between two runs. `table` compares (`testbed_report`).
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from dpro_search.deploy.jobs import RecordedJob
from dpro_search.deploy.validate import typical_us
from dpro_search.errors import DproSearchError, JobError
from dpro_search.space.plan import Plan
from experiments.search.testbed_case import AUTOTUNE, Case, Contender, Measured, Setup, open_case
from experiments.search.testbed_jobs import SCHEMES

STAGES = ("record", "search", "measure")
_FIXED_KNOBS = ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME")  # the autotuner leaves alone what is set
_WARMUP, _GRID_WARMUP = 5, 3


def record(case: Case) -> None:
    """Record the job."""
    if case.trace.exists():
        return
    command = case.scheme.command(case.setup.python, case.setup.workload, 25)
    options = ("--framework", case.scheme.framework, "--comm", case.scheme.comm, "--rate", case.setup.rate)
    _dpro_search("collect", *options, "--untraced", "6", "--traced", "10", "--out", str(case.trace), "--", *command)


def search(case: Case) -> None:
    """Search, and export the best plan."""
    if not (case.search / "result.json").exists():
        _dpro_search("run", str(case.trace), "--trials", str(case.setup.trials), "--quiet", "--out", str(case.search))
    if case.best() != Plan() and not (case.folder / "export").exists():
        _dpro_search("export", str(case.search), "--out", str(case.folder / "export"))


def measure(case: Case, grid: int, rounds: int, seconds: float) -> bool:
    """Run what is missing, as far as the time goes; whether nothing is left."""
    started = time.monotonic()
    for run in missing(case, grid, rounds):
        if time.monotonic() - started > seconds:
            return False
        run()
    return True


def missing(case: Case, grid: int, rounds: int) -> Iterator[Callable[[], None]]:
    """The runs that are still to be made, in their order; each is to be made before the next is asked for."""
    wanted = range(min(grid, len(case.scheme.grid)))
    open_numbers = [number for number in wanted if not case.grid_file(number).exists()]
    for first in range(0, len(open_numbers), case.scheme.at_once):
        yield partial(_run_grid, case, open_numbers[first : first + case.scheme.at_once])
    if case.setup.scheme == "tensorflow" and case.setup.autotune_steps and not case.autotune_file.exists():
        yield partial(_run_autotune, case)
    for number in range(rounds):
        for contender in case.contenders():
            path = case.round_file(contender.name, number)
            if not path.exists() and case.in_the_race(contender.name):
                yield partial(_run_contender, case, contender, path)


def _run_grid(case: Case, numbers: Sequence[int]) -> None:
    """Settings of the grid: one in a job, or all in one process."""
    plans = [case.scheme.grid[number] for number in numbers]
    if case.scheme.at_once == 1:
        steps = _GRID_WARMUP + case.setup.grid_steps + 1
        found = [_measured(case.job(steps), plan, warmup=_GRID_WARMUP, limit_s=case.limit_s(steps)) for plan in plans]
    else:
        found = _switched(case, plans)
    for number, run in zip(numbers, found, strict=True):
        _write(case.grid_file(number), run, f"grid {number}")


def _switched(case: Case, plans: Sequence[Plan]) -> list[Measured]:
    """Settings that one process goes through; a setting's last step is left out, for the change to the next lies within it."""
    steps = _GRID_WARMUP + case.setup.grid_steps + 1
    told = {"steps": steps, "settings": [case.scheme.setting(plan) for plan in plans]}
    path = case.folder / "grid" / "settings"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(told))
    all_steps = steps * len(plans) + 2
    whole = _measured(case.job(all_steps, switched=path), Plan(), warmup=0, limit_s=case.limit_s(all_steps))
    parts = [whole.iteration_us[i * steps + _GRID_WARMUP : (i + 1) * steps - 1] for i in range(len(plans))]
    return [
        msgspec.structs.replace(whole, plan=plan, iteration_us=part, losses=(), seconds=whole.seconds / len(plans))
        for plan, part in zip(plans, parts, strict=True)
    ]


def _run_autotune(case: Case) -> None:
    """Let the autotuner choose; what it chose is in a log, a row for each of its samples."""
    log = case.folder / "autotune.csv"
    log.unlink(missing_ok=True)
    tuned = {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": str(log.resolve())}
    if case.setup.autotune_sample:
        tuned["HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE"] = str(case.setup.autotune_sample)
    steps = case.setup.autotune_steps
    job = case.job(steps, env=tuned)
    env = {name: value for name, value in job.spec.env.items() if name not in _FIXED_KNOBS}
    job = replace(job, spec=replace(job.spec, env=env))
    run = _measured(job, Plan(), warmup=_WARMUP, limit_s=case.limit_s(steps))
    chosen = autotuned(log.read_text()) if log.exists() else None
    if chosen is not None:
        run = msgspec.structs.replace(run, plan=chosen[0], env=chosen[1])
    elif not run.failed:
        run = msgspec.structs.replace(run, failed=f"the autotuner ended no sample within {steps} steps")
    _write(case.autotune_file, run, AUTOTUNE)


def autotuned(log: str) -> tuple[Plan, dict[str, str]] | None:
    """What HOROVOD_AUTOTUNE_LOG says was best: the row with the highest score as a plan and variables; None if there is no row."""
    rows = [row for row in csv.DictReader(log.splitlines()) if row.get("score")]
    if not rows:
        return None
    best = max(rows, key=lambda row: float(row["score"]))
    threshold_bytes = int(float(best["tensor_fusion_threshold"]) * 2**20)
    plan = Plan.of(fusion_threshold_bytes=threshold_bytes, cycle_time_us=float(best["cycle_time_ms"]) * 1000)
    return plan, {"HOROVOD_CACHE_CAPACITY": "0"} if best.get("cache_enabled") == "0" else {}


def _run_contender(case: Case, contender: Contender, path: Path) -> None:
    steps = _WARMUP + case.setup.steps + 2
    run = _measured(case.job(steps, env=contender.env), contender.plan, warmup=_WARMUP, limit_s=case.limit_s(steps))
    _write(path, msgspec.structs.replace(run, env=dict(contender.env)), contender.name)


def _measured(job: RecordedJob, plan: Plan, *, warmup: int, limit_s: float) -> Measured:
    """One run; why there is none if it fails."""
    started, started_at = time.monotonic(), time.time()
    try:
        run = job.run(plan, warmup=warmup, timeout_s=limit_s)
    except DproSearchError as error:
        return Measured(plan=plan, failed=str(error), seconds=time.monotonic() - started, started_at=started_at)
    return Measured(
        plan=plan,
        iteration_us=tuple(run.times.iteration_us.tolist()),
        cpu_us=tuple((run.times.compute_cpu_us + run.times.comm_cpu_us).tolist()),
        losses=tuple((str(loss.value), loss.resolution) for loss in run.losses),
        seconds=time.monotonic() - started,
        started_at=started_at,
    )


def _dpro_search(*arguments: str) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "dpro_search.cli", *arguments], env=env, check=False)
    if done.returncode:
        raise JobError(f"dpro-search {arguments[0]} ended with code {done.returncode}")


def _write(path: Path, run: Measured, name: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".tmp").write_bytes(msgspec.json.encode(run))
    path.with_suffix(".tmp").replace(path)
    what = run.failed or f"{typical_us([run.times_us]) / 1e3:.1f} ms"
    what += f", {np.median(run.cpu_us) / 1e3:.1f} ms of a core" if run.cpu_us else ""
    print(f"{name:9} {what}  {msgspec.json.encode(run.plan).decode()[:100]}  ({run.seconds:.0f} s)", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="run what is missing of one case")
    run.add_argument("folder", type=Path, help="of all cases; this one's is below it")
    run.add_argument("--scheme", choices=SCHEMES, required=True)
    run.add_argument("--workload", required=True)
    run.add_argument("--rate", required=True, help="of every link: 500mbit, 2gbit, unlimited")
    run.add_argument("--python", required=True, help="interpreter of the framework's environment")
    run.add_argument("--trace", default="", help="a recording of this job, in place of a new one")
    run.add_argument("--grid", type=int, default=30, help="settings of the grid to run (default: %(default)s)")
    run.add_argument("--rounds", type=int, default=3)
    run.add_argument("--steps", type=int, default=16, help="counted steps of a run in the rounds (default: %(default)s)")
    run.add_argument("--grid-steps", type=int, default=7, help="counted steps of a setting of the grid (default: %(default)s)")
    run.add_argument("--autotune-steps", type=int, default=270, help="steps that the autotuner has; 0: it does not run")
    run.add_argument("--autotune-sample", type=int, default=0, help="steps of one of its samples (default: Horovod's own, 10)")
    run.add_argument("--trials", type=int, default=500)
    run.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    run.add_argument("--seconds", type=float, default=float("inf"), help="start no run after this time")
    table = verbs.add_parser("table", help="compare what ran")
    table.add_argument("folder", type=Path)
    options = parser.parse_args()
    try:
        return _table(options.folder) if options.verb == "table" else _run(options)
    except DproSearchError as error:
        print(f"testbed: error: {error}", file=sys.stderr)
        return error.exit_code


def _run(options: argparse.Namespace) -> int:
    setup = Setup(**{name: getattr(options, name) for name in Setup.__struct_fields__})
    setup.check()
    case = open_case(options.folder / f"{setup.scheme}-{setup.workload}-{setup.rate}", setup)
    if "record" in options.stages:
        record(case)
    if "search" in options.stages:
        search(case)
    if "measure" in options.stages and not measure(case, options.grid, options.rounds, options.seconds):
        print("time is up: the same command continues", flush=True)
    return 0


def _table(folder: Path) -> int:
    from experiments.search.testbed_report import report

    print(report(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
