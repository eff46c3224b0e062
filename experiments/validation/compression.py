"""Compressed gradients in jobs of DistributedDataParallel or of MXNet with BytePS: predicted beside real runs in turn.

    python -m experiments.validation.compression DIR --python ENV/bin/python --workload vgg16 --rate 500mbit
        [--scheme ddp] [--compress powersgd-1 ...] [--steps 20] [--rounds 2]

Records the job into DIR where that was not done, runs it as recorded and under each compression (A B A B), adds the runs to those
that DIR holds, and prints the table of all. Nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import numpy as np

from dpro_search.collect.launch.ranks import JobSpec, default_cores
from dpro_search.collect.launch.step_times import Schedule
from dpro_search.collect.launchers import MXNET_BYTEPS, PYTORCH_DDP
from dpro_search.collect.trace import Trace
from dpro_search.kinds import Job, PlanOptions, job_of, recorded_job
from dpro_search.quantities import parse_rate_bps
from dpro_search.space.plan import Plan
from experiments.search.testbed_jobs import SCHEMES
from experiments.validation.turns import in_turn

LAUNCHERS = {"ddp": PYTORCH_DDP, "byteps": MXNET_BYTEPS}
WARMUP = 4
_RECORDED = "none"


class Measured(msgspec.Struct):
    """One run of a setting."""

    compression: str
    iteration_us: list[float]
    peak_rss_bytes: int
    losses: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--python", required=True)
    parser.add_argument("--scheme", choices=sorted(LAUNCHERS), default="ddp")
    parser.add_argument("--workload", default="vgg16")
    parser.add_argument("--rate", default="500mbit")
    parser.add_argument("--compress", nargs="+", default=["powersgd-1"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    folder: Path = options.folder
    command = SCHEMES[options.scheme].command(options.python, options.workload, options.steps)
    if not (folder / "trace").exists():
        folder.mkdir(parents=True, exist_ok=True)
        spec = JobSpec(command=command, ranks=2, cores=default_cores(2), env={})
        schedule = Schedule(warmup=WARMUP, untraced=6, traced=8)
        LAUNCHERS[options.scheme].record(
            spec, folder / "trace", schedule=schedule, rate_bps=parse_rate_bps(options.rate), shaped=True
        )
    trace = Trace.load(folder / "trace")
    job = recorded_job(trace, command)
    settings = {name: _plan(name) for name in (_RECORDED, *options.compress)}
    path = folder / "runs.json"
    runs = msgspec.json.decode(path.read_bytes(), type=list[Measured]) if path.exists() else []
    for name, run, verdict in in_turn(job, settings, options.rounds, WARMUP):
        last = f", ends at {run.losses[-1].value:.4g}" if run.losses else ""
        runs.append(Measured(name, run.times.iteration_us.tolist(), run.times.peak_rss_bytes, verdict + last))
        path.write_bytes(msgspec.json.encode(runs))
    print(table(job_of(trace, PlanOptions(allow_lossy=True)), runs))


def table(prices: Job, runs: list[Measured]) -> str:
    """Predicted and measured step times and peaks, a line for each setting that ran."""
    heads = (
        *("compression", "predicted, ms (interval)", "measured, ms", "error"),
        *("of the ratio to as recorded", "peak: predicted, MiB", "measured, MiB", "losses"),
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    base_us = prices.predict(Plan()).iteration_us
    of_base = float(np.median([np.median(run.iteration_us) for run in runs if run.compression == _RECORDED]))
    for name in dict.fromkeys(run.compression for run in runs):
        own = [run for run in runs if run.compression == name]
        medians_us = [float(np.median(run.iteration_us)) for run in own]
        found = prices.predict(_plan(name))
        measured, (low, high) = float(np.median(medians_us)), found.interval_us
        ratio = (found.iteration_us / base_us) / (measured / of_base) - 1
        cells = (
            name,
            f"{found.iteration_us / 1e3:.0f} ({low / 1e3:.0f}-{high / 1e3:.0f})",
            ", ".join(f"{us / 1e3:.0f}" for us in medians_us),
            f"{(found.iteration_us / measured - 1) * 100:+.1f} %",
            "" if name == _RECORDED else f"{ratio * 100:+.1f} %",
            "-" if found.peak_memory_bytes is None else f"{found.peak_memory_bytes / 2**20:.0f}",
            ", ".join(f"{run.peak_rss_bytes / 2**20:.0f}" for run in own),
            own[-1].losses,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _plan(compression: str) -> Plan:
    return Plan() if compression == _RECORDED else msgspec.convert({"compression": compression}, Plan)


if __name__ == "__main__":
    main()
