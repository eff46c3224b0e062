"""Records and measures the workloads for experiments/validation/README.md: recordings at three link rates, and the truth of every
configuration.

    python -m experiments.validation.measure --python ENV/bin/python --out DIR [--rounds 2]

Resumable: what is in DIR already is not run again. Needs root. Nothing else may run on the machine meanwhile.
Order: the recordings first; then rounds in which every configuration of a workload runs once (A B C ... A B C ...).
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from pathlib import Path

import msgspec

from dpro_search.collect.launch.ranks import JobSpec
from dpro_search.collect.launch.step_times import StepSchedule, StepTimes
from dpro_search.collect.launchers import TENSORFLOW_HOROVOD
from dpro_search.collect.trace import Trace
from dpro_search.deploy.export import export_plan
from dpro_search.deploy.parts.horovod import HOROVOD, horovod_environment
from dpro_search.quantities import parse_rate_bps
from dpro_search.space.plan import Plan
from dpro_search.space.tensorflow.fusion_moves import contiguous_groups

WORKLOADS = ("bert", "vgg16", "resnet50", "inception_v3")
RATES = ("2gbit", "unlimited", "500mbit")
BASE_RATE = RATES[0]
FOUR_RANKS = ("bert", "vgg16")  # also measured with two ranks on each core
CORES = 2
MIB = 2**20
TRAIN = Path(__file__).resolve().parents[1] / "workloads" / "train.py"


class Measured(msgspec.Struct):
    """One run of one configuration."""

    iteration_us: list[float]
    compute_cpu_us: list[float]
    comm_cpu_us: list[float]
    load_before: float
    started_at: float

    @staticmethod
    def of(times: StepTimes, load_before: float, started_at: float) -> Measured:
        """The times of a run that began at an instant, under the load before it."""
        return Measured(
            iteration_us=times.iteration_us.tolist(),
            compute_cpu_us=times.compute_cpu_us.tolist(),
            comm_cpu_us=times.comm_cpu_us.tolist(),
            load_before=load_before,
            started_at=started_at,
        )


def plans(trace: Trace) -> dict[str, Plan]:
    """The changed configurations, by name; groups are contiguous in posting order and balanced by bytes."""
    tensors = trace.tensors
    found = {f"threshold-{mib}MiB": Plan.of(fusion_threshold_bytes=mib * MIB) for mib in (0, 2, 16)}
    found |= {f"cycle-{ms}ms": Plan.of(cycle_time_us=ms * 1000.0) for ms in (10, 50)}
    return found | {f"groups-{n}": Plan(tensor_groups=contiguous_groups(tensors, n)) for n in (2, 4, 8, 16)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter of the TensorFlow + Horovod environment")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=26)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    options = parser.parse_args()
    for workload in options.workloads:
        for rate in RATES:
            _record(options, workload, rate)
    for number in range(options.rounds):
        for workload in options.workloads:
            _round(options, workload, number)


def _spec(options: argparse.Namespace, workload: str, steps: int, env: dict[str, str], ranks: int = 2) -> JobSpec:
    command = (options.python, str(TRAIN), "--model", workload, "--steps", str(steps))
    cores = tuple(rank % CORES for rank in range(ranks))
    return JobSpec(command=command, ranks=ranks, cores=cores, env={"OMP_NUM_THREADS": "1", **env})


def _record(options: argparse.Namespace, workload: str, rate: str) -> None:
    out = options.out / workload / f"trace-{rate}"
    if out.exists():
        return
    raw = options.out / workload / f"raw-{rate}"
    shutil.rmtree(raw, ignore_errors=True)
    started = time.time()
    schedule = StepSchedule(warmup=5, untraced=8, traced=11)
    TENSORFLOW_HOROVOD.record(
        _spec(options, workload, 32, {}), out, rate_bps=parse_rate_bps(rate), shaped=True, schedule=schedule, keep_raw=raw
    )
    print(f"recorded {workload} at {rate} in {time.time() - started:.0f} s", flush=True)


def _round(options: argparse.Namespace, workload: str, number: int) -> None:
    folder = options.out / workload
    changed = plans(Trace.load(folder / f"trace-{BASE_RATE}"))
    runs: list[tuple[str, str, Plan, int]] = [("base", BASE_RATE, Plan(), 2)]
    runs += [(name, BASE_RATE, plan, 2) for name, plan in changed.items()]
    runs.insert(len(runs) // 2, ("base-again", BASE_RATE, Plan(), 2))
    runs += [("base", rate, Plan(), 2) for rate in RATES[1:]]
    if workload in FOUR_RANKS:
        runs.append(("ranks-4", BASE_RATE, Plan(), 4))
    for name, rate, plan, ranks in runs:
        _measure(options, workload, name, rate, plan, ranks, folder / f"truth-{rate}" / f"{name}.{number}.json")


def _measure(options: argparse.Namespace, workload: str, name: str, rate: str, plan: Plan, ranks: int, out: Path) -> None:
    if out.exists():
        return
    env = horovod_environment(plan)
    export = out.parent / f"plan-{name}"
    if plan.tensor_groups is not None:
        shutil.rmtree(export, ignore_errors=True)
        export_plan(plan, export, (HOROVOD,))
        env["DPRO_SEARCH_PLAN"] = str(export.resolve())
    load, started = os.getloadavg()[0], time.time()
    times = TENSORFLOW_HOROVOD.time(_spec(options, workload, options.steps, env, ranks), rate_bps=parse_rate_bps(rate), shaped=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(msgspec.json.encode(Measured.of(times, load, started)))
    print(f"{workload:13} {rate:10} {name:16} {times.median_us / 1e3:8.1f} ms  ({time.time() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
