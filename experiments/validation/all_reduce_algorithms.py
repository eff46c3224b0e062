"""Whether other algorithms of Open MPI's all-reduce do to a real job what is predicted: tables, a recording, and runs in turn.

    python -m experiments.validation.all_reduce_algorithms run DIR --python ENV/bin/python [--workload vgg16] [--rate 2gbit]
        [--ranks 2] [--ranks-per-host 1] [--longest 0.6] [--algorithms ring,hierarchy] [--rounds 3] [--steps 14]
    python -m experiments.validation.all_reduce_algorithms table DIR

TensorFlow with Horovod on MPI. Its all-reduces are first measured by themselves, by each algorithm, on as many shaped hosts with
the same links; the job is recorded with Open MPI's own choice; then it runs as recorded, with each algorithm for all sizes, and
with whichever is the fastest by itself, size by size. Needs root; nothing else may run on the machine. Resumable: what DIR holds
is not made again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from dpro_search.collect._files import write_file
from dpro_search.collect.launch.ranks import JobSpec, default_cores
from dpro_search.collect.launch.step_times import Schedule
from dpro_search.collect.launchers import TENSORFLOW_HOROVOD
from dpro_search.collect.tables.all_reduces import read_comm_table
from dpro_search.collect.trace import Trace
from dpro_search.costmodel.collectives.model_file import CommunicationModel
from dpro_search.costmodel.collectives.series import table_series
from dpro_search.deploy.validate import typical_us
from dpro_search.kinds import recorded_job
from dpro_search.kinds.horovod.job import Horovod
from dpro_search.measure.all_reduces import CommRequest, collect_communication
from dpro_search.quantities import parse_rate_bps
from dpro_search.space.plan import Plan

_TRAIN = Path(__file__).parents[1] / "workloads" / "train.py"
_WARMUP = 4
RECORDED, FASTEST = "as recorded", "fastest by size"


def main() -> None:
    """Run, or print what was run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "table"))
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--python", help="interpreter of TensorFlow's environment")
    parser.add_argument("--workload", default="vgg16")
    parser.add_argument("--rate", default="2gbit")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--longest", type=float, default=0.6, help="seconds of an all-reduce that is measured by itself")
    parser.add_argument("--algorithms", help="that all sizes run with, comma-separated (default: all that are known)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=14)
    options = parser.parse_args()
    if options.action == "run":
        if options.python is None:
            parser.error("run needs --python")
        _measure(options)
    print("\n".join(table(options.folder)))


def _measure(options: argparse.Namespace) -> None:
    folder, rate_bps, per_host = options.folder, parse_rate_bps(options.rate), options.ranks_per_host
    request = CommRequest(
        backends=("mpi",), ranks=(options.ranks,), rates_bps=(rate_bps,), longest_s=options.longest, ranks_per_host=per_host
    )
    collect_communication(request, _all_reduces(folder))
    trace = folder / "trace"
    if not trace.exists():
        command = (options.python, str(_TRAIN.resolve()), "--model", options.workload, "--steps", "28")
        cores = default_cores(options.ranks, per_host)
        env = {"OMP_NUM_THREADS": "1", "HOROVOD_CONTROLLER": "mpi"}
        spec = JobSpec(command=command, ranks=options.ranks, ranks_per_host=per_host, cores=cores, env=env)
        TENSORFLOW_HOROVOD.record(spec, trace, rate_bps=rate_bps, shaped=True, schedule=Schedule(warmup=5, untraced=12, traced=8))
    job = recorded_job(
        Trace.load(trace), (options.python, str(_TRAIN.resolve()), "--model", options.workload, "--steps", str(options.steps))
    )
    for number in range(options.rounds):
        for name, plan in _plans(_prices(folder), options.algorithms).items():
            path = folder / "runs" / f"{name.replace(' ', '-')}.{number}.json"
            if not path.exists():
                times = job.run(plan, warmup=_WARMUP).times
                write_file(path, msgspec.json.encode(times.iteration_us.tolist()))
                print(f"{name:24} {typical_us([times.iteration_us]) / 1e3:8.1f} ms", flush=True)


def table(folder: Path) -> list[str]:
    """Every setting, predicted and measured."""
    prices = _prices(folder)
    recorded_us = prices.predict(Plan()).iteration_us
    base_us = float(np.median(list(_runs(folder, RECORDED))))
    lines = [
        "| algorithm | predicted, ms | measured, ms | error | against as recorded: predicted | measured |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for name, plan in _plans(prices).items():
        predicted_us, runs_us = prices.predict(plan).iteration_us, list(_runs(folder, name))
        if not runs_us:
            continue
        typical = float(np.median(runs_us))
        listed = ", ".join(f"{run_us / 1e3:.0f}" for run_us in runs_us)
        lines.append(
            f"| {name} | {predicted_us / 1e3:.0f} | {listed} | {(predicted_us / typical - 1) * 100:+.1f} % "
            f"| {(predicted_us / recorded_us - 1) * 100:+.1f} % | {(typical / base_us - 1) * 100:+.1f} % |"
        )
    fastest = prices.all_reduce_choice(prices.cluster).fastest()
    return [*lines, "", "fastest by itself: " + ", ".join(f"from {start} bytes {name}" for start, name in fastest)]


def _prices(folder: Path) -> Horovod:
    series = table_series(read_comm_table(_all_reduces(folder)))
    model = CommunicationModel.train(series, (str(_all_reduces(folder)),))
    trace = Trace.load(folder / "trace")
    return Horovod(Horovod.measured_step(trace), trace.horovod_settings, trace=trace, all_reduces=model)


def _plans(prices: Horovod, algorithms: str | None = None) -> dict[str, Plan]:
    choice = prices.all_reduce_choice(prices.cluster)
    wanted = choice.algorithms if algorithms is None else algorithms.split(",")
    alone = {name: Plan.of(allreduce_algorithms=((0, name),)) for name in choice.algorithms if name in wanted}
    return {RECORDED: Plan(), **alone, FASTEST: Plan.of(allreduce_algorithms=choice.fastest())}


def _all_reduces(folder: Path) -> Path:
    return folder / "all-reduces.jsonl"


def _runs(folder: Path, name: str) -> Iterator[float]:
    for path in sorted((folder / "runs").glob(f"{name.replace(' ', '-')}.*.json")):
        yield typical_us([np.array(msgspec.json.decode(path.read_bytes()))])


if __name__ == "__main__":
    main()
