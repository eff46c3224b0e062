"""Predictions of PyTorch DistributedDataParallel jobs against real runs: link rates and bucket sizes from one recording each.

    python -m experiments.validation.torch_ddp --python ENV/bin/python --out DIR [--rounds 2] [--results FILE]

Resumable: what is in DIR already is not run again. Needs root. Nothing else may run on the machine meanwhile. Order: the recordings
first; then rounds in which every configuration runs once. The table goes to stdout, the numbers to FILE.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import msgspec
import numpy as np

from dpro_search.collect.job import Schedule
from dpro_search.collect.launch.netns import parse_rate
from dpro_search.collect.launch.ranks import JobSpec
from dpro_search.collect.torch_job import record_ddp_job, time_ddp_job
from dpro_search.collect.trace import Trace
from dpro_search.replay.ddp.predictor import DdpPredictor
from dpro_search.space.plan import Plan

WORKLOADS = ("bert", "resnet50", "vgg16")
RATES = ("2gbit", "unlimited", "500mbit")
BASE_RATE = RATES[0]
CAPS_MIB = (None, 1, 5, 25, 100)  # None: PyTorch's own, 25 MiB after a first bucket of 1 MiB
MIB = 2**20
TRAIN = Path(__file__).resolve().parents[1] / "workloads" / "torch_train.py"


class Measured(msgspec.Struct):
    """One run of one configuration."""

    iteration_us: list[float]
    compute_cpu_us: list[float]
    comm_cpu_us: list[float]
    load_before: float
    started_at: float


class Row(msgspec.Struct):
    """One configuration.

    `error_pct` is that of the prediction from the recording at `recorded_rate`, against the median of the runs' medians.
    The machine drifts between runs: `error_at_speed_pct` is the same with the recording's compute scaled to the runs' CPU time.
    """

    workload: str
    recorded_rate: str
    rate: str
    bucket_cap_mib: int | None
    measured_us: list[float]
    predicted_us: float
    error_pct: float
    error_at_speed_pct: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter of the PyTorch environment")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=26)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    for workload in options.workloads:
        for rate in RATES:
            _record(options, workload, rate)
    for number in range(options.rounds):
        for workload in options.workloads:
            for rate, cap in _configurations():
                _measure(options, workload, rate, cap, number)
    rows = [row for workload in options.workloads for row in _rows(options, workload)]
    for row in rows:
        limit = "default" if row.bucket_cap_mib is None else f"{row.bucket_cap_mib} MiB"
        runs = " ".join(f"{value / 1e3:.1f}" for value in row.measured_us)
        at_speed = "" if row.error_at_speed_pct is None else f"  at the runs' speed {row.error_at_speed_pct:+.1f} %"
        print(
            f"{row.workload:12} {row.recorded_rate:>9} -> {row.rate:9} {limit:8} measured {runs:>15} ms, "
            f"predicted {row.predicted_us / 1e3:7.1f} ms  {row.error_pct:+5.1f} %{at_speed}"
        )
    if options.results:
        options.results.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")


def _configurations() -> list[tuple[str, int | None]]:
    return [(BASE_RATE, cap) for cap in CAPS_MIB] + [(rate, None) for rate in RATES[1:]]


def _spec(options: argparse.Namespace, workload: str, steps: int, cap_mib: int | None = None) -> JobSpec:
    command = [options.python, str(TRAIN), "--model", workload, "--steps", str(steps)]
    command += [] if cap_mib is None else ["--bucket-cap-mb", str(cap_mib)]
    return JobSpec(command=tuple(command), ranks=2, cores=(0, 1))


def _trace(options: argparse.Namespace, workload: str, rate: str) -> Path:
    path: Path = options.out / "traces" / f"{workload}-{rate}"
    return path


def _record(options: argparse.Namespace, workload: str, rate: str) -> None:
    out = _trace(options, workload, rate)
    if not out.exists():
        schedule = Schedule(warmup=5, untraced=8, traced=11)
        record_ddp_job(_spec(options, workload, 30), out, rate_bps=parse_rate(rate), shaped=True, schedule=schedule)


def _truth(options: argparse.Namespace, workload: str, rate: str, cap_mib: int | None, number: int) -> Path:
    path: Path = options.out / "truth" / f"{workload}-{rate}-{cap_mib or 'default'}.{number}.json"
    return path


def _measure(options: argparse.Namespace, workload: str, rate: str, cap_mib: int | None, number: int) -> None:
    out = _truth(options, workload, rate, cap_mib, number)
    if out.exists():
        return
    load, started = os.getloadavg()[0], time.time()
    times = time_ddp_job(_spec(options, workload, options.steps, cap_mib), rate_bps=parse_rate(rate), shaped=True)
    measured = Measured(
        iteration_us=times.iteration_us.tolist(),
        compute_cpu_us=times.compute_cpu_us.tolist(),
        comm_cpu_us=times.comm_cpu_us.tolist(),
        load_before=load,
        started_at=started,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(msgspec.json.encode(measured))


def _rows(options: argparse.Namespace, workload: str) -> list[Row]:
    """Every recording against its own unprofiled steps, and what the base recording says of every configuration."""
    found = []
    for rate in RATES:
        trace = Trace.load(_trace(options, workload, rate))
        measured, predicted = float(np.median(trace.iterations_us())), DdpPredictor.from_trace(trace).predict(Plan()).iteration_us
        found.append(Row(workload, rate, "itself", None, [measured], predicted, (predicted / measured - 1) * 100, None))
    predictor = DdpPredictor.from_trace(Trace.load(_trace(options, workload, BASE_RATE)))
    for rate, cap in _configurations():
        paths = sorted((options.out / "truth").glob(f"{workload}-{rate}-{cap or 'default'}.*.json"))
        runs = [msgspec.json.decode(path.read_bytes(), type=Measured) for path in paths]
        medians = [float(np.median(run.iteration_us)) for run in runs]
        cluster = msgspec.structs.replace(predictor.cluster, rate_bps=parse_rate(rate))
        plan = Plan(fusion_threshold_bytes=None if cap is None else cap * MIB)
        compute = float(np.mean([rank["compute"] for rank in predictor.timeline(plan, cluster).rank_breakdown_us]))
        speed = float(np.mean([np.median(run.compute_cpu_us) for run in runs])) / compute
        predicted, at_speed = (p.predict(plan, cluster).iteration_us for p in (predictor, predictor.faster(speed)))
        errors = [(value / float(np.median(medians)) - 1) * 100 for value in (predicted, at_speed)]
        found.append(Row(workload, BASE_RATE, rate, cap, medians, predicted, errors[0], errors[1]))
    return found


if __name__ == "__main__":
    main()
