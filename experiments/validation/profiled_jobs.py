"""Plans of profiled jobs, predicted from PyTorch's own profiles beside real runs: DDP and FSDP on Gloo, two ranks on this machine.

    python -m experiments.validation.profiled_jobs DIR --python ENV/bin/python [--job ddp-bert ...] [--steps 20] [--rounds 3]

Each job is profiled by torch.profiler, imported, searched, and run as profiled and under its plans in turn (A B C A B C). Prints
the iteration time of each plan, predicted and measured, and the gains. The recorded setting is measured without the profiler.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import dpro_search
from dpro_search.collect.launch.ranks import JobSpec
from dpro_search.collect.launch.torch_ranks import run_torch_ranks
from dpro_search.collect.readers.importers import import_trace
from dpro_search.collect.trace import Trace
from dpro_search.kinds import Job, PlanOptions, job_of, recorded_job
from dpro_search.space.describe import describe
from dpro_search.space.plan import Plan
from experiments.validation.turns import in_turn

TRAIN = Path(__file__).parents[1] / "workloads" / "torch_train.py"
JOBS = {
    "ddp-bert": ("--model", "bert", "--bucket-cap-mb", "4"),
    "ddp-resnet50": ("--model", "resnet50", "--batch", "4"),
    "ddp-gpt": ("--model", "gpt", "--bucket-cap-mb", "4"),
    "fsdp-bert": ("--model", "bert", "--fsdp"),
    "fsdp-gpt": ("--model", "gpt", "--fsdp"),
    "fsdp-resnet50": ("--model", "resnet50", "--batch", "4", "--fsdp"),
}
PLANS = {
    "ddp": (
        *(Plan.of(gradient_as_bucket_view=True), Plan.of(bucket_cap_bytes=2**20), Plan.of(bucket_cap_bytes=64 * 2**20)),
        Plan(compression="powersgd-1"),
    ),
    "fsdp": (Plan.of(prefetch=True), Plan.of(reshard_after_forward=False), Plan.of(units_together=2)),
}
WARMUP = 5
RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--python", required=True)
    parser.add_argument("--job", nargs="+", choices=sorted(JOBS), default=sorted(JOBS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print("| job | plan | predicted, ms | measured, ms | runs, ms | predicted gain, % | measured gain, % |")
    print("|---|---|---|---|---|---|---|")
    for name in options.job:
        for line in rows(name, options.folder / name, (options.python, str(TRAIN), *JOBS[name]), options.steps, options.rounds):
            print(line, flush=True)


def rows(name: str, folder: Path, command: tuple[str, ...], steps: int, rounds: int) -> list[str]:
    """A row for each plan of a job; what was profiled or searched before is used again."""
    trace = _profiled(folder, command)
    job = job_of(trace, PlanOptions(allow_lossy=True))
    plans = {"as recorded": Plan()} | {describe(plan): plan for plan in (*PLANS[name.partition("-")[0]], *_recomputed(job))}
    plans |= {f"best of 100: {describe(best)}": best for best in [_best(folder)]}
    measured: dict[str, list[float]] = defaultdict(list)
    losses = ""
    again = recorded_job(trace, (*command, "--steps", str(steps)))
    for plan, run, said in in_turn(again, plans, rounds, WARMUP):
        measured[plan].append(float(np.median(run.times.iteration_us)))
        losses = said
    found = []
    base_us, base_measured_us = job.predict(Plan()).iteration_us, float(np.median(measured["as recorded"]))
    for text, plan in plans.items():
        predicted_us, runs_us = job.predict(plan).iteration_us, measured[text]
        true_us = float(np.median(runs_us))
        gains = [(1 - predicted_us / base_us) * 100, (1 - true_us / base_measured_us) * 100]
        shown = ", ".join(f"{us / 1e3:.0f}" for us in runs_us)
        found.append(
            f"| {name} | {text} | {predicted_us / 1e3:.1f} | {true_us / 1e3:.1f} | {shown} | {gains[0]:+.1f} | {gains[1]:+.1f} |"
        )
    print(f"{name}: {losses}")
    return found


def _recomputed(job: Job) -> Iterator[Plan]:
    """The first half of an FSDP job's units computed again."""
    choice = next((choice for choice in job.space.choices if choice.name == "recomputation"), None)
    points = () if choice is None else choice.grids.get("first", ())
    if points:
        yield Plan.of(**points[(len(points) - 1) // 2])


def _profiled(folder: Path, command: tuple[str, ...]) -> Trace:
    if not (folder / "trace").exists():
        folder.mkdir(parents=True, exist_ok=True)
        spec = JobSpec(command=(*command, "--steps", "11", "--profile", str(folder / "profile")), ranks=RANKS, env={})
        run_torch_ranks(spec, folder / "profiling")
        import_trace([folder / "profile"]).save(folder / "trace")
    return Trace.load(folder / "trace")


def _best(folder: Path) -> Plan:
    run = dpro_search.load_run(folder / "run") if (folder / "run").exists() else dpro_search.load(folder / "trace").search(
        trials=100, out=folder / "run"
    )  # fmt: skip
    return run.best


if __name__ == "__main__":
    main()
