"""Records and measures jobs for experiments/validation/README.md: four workloads, six ways to communicate, three link rates.

    python -m experiments.validation.frameworks DIR --python mxnet=ENV/bin/python --python pytorch=ENV/bin/python
        [--schemes ps horovod byteps ddp fsdp tensorflow-mpi] [--workloads ...] [--runs N]

Needs root; nothing else may run on the machine meanwhile. Resumable: what is in DIR already is not run again. Each recording stands
between two plain runs of the same job, for the machine's speed drifts; then the changed settings run once each at the base rate.
`python -m experiments.validation.frameworks_report DIR` compares.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from dpro_search.collect.launch.ranks import JobSpec
from dpro_search.collect.launch.step_times import StepSchedule, StepTimes
from dpro_search.collect.launchers import (
    MXNET_BYTEPS,
    MXNET_HOROVOD,
    MXNET_KVSTORE,
    PYTORCH_DDP,
    PYTORCH_FSDP,
    TENSORFLOW_HOROVOD,
    Launcher,
)
from dpro_search.quantities import parse_rate_bps
from experiments.validation.measure import Measured

WORKLOADS = ("bert", "vgg16", "resnet50", "inception_v3")
RATES = ("2gbit", "unlimited", "500mbit")
BASE_RATE, SLOWEST = RATES[0], RATES[-1]
WARMUP = 5
STEPS = {"2gbit": 22, "unlimited": 22, "500mbit": 12}  # of a plain run, after the warm-up; those on a slow link are long and alike
TRAINING = Path(__file__).resolve().parents[1] / "workloads"


@dataclass(frozen=True, kw_only=True)
class Change:
    """A changed setting: what the real job gets, and what `dpro-search replay --set` is told."""

    name: str
    sets: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A framework with one of its ways to communicate; `launcher` is what `collect` and `validate` start its jobs with."""

    name: str
    framework: str
    script: tuple[str, ...]
    launcher: Launcher
    changes: tuple[Change, ...]
    env: dict[str, str] = field(default_factory=dict)


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme(
            name="ps",
            framework="mxnet",
            script=("mxnet_train.py", "--comm", "kvstore"),
            launcher=MXNET_KVSTORE,
            changes=(
                Change(name="1 server", sets=("servers=1",), env={"DMLC_NUM_SERVER": "1"}),
                Change(name="bound 100 k", sets=("bigarray_bound=100000",), env={"MXNET_KVSTORE_BIGARRAY_BOUND": "100000"}),
                Change(
                    name="P3, slices of 400 k",
                    sets=("p3=1", "slice_threshold=400000"),
                    env={"DMLC_PS_VAN_TYPE": "p3", "MXNET_KVSTORE_SLICE_THRESHOLD": "400000"},
                    arguments=("--comm", "p3"),
                ),
            ),
        ),
        Scheme(
            name="horovod",
            framework="mxnet",
            script=("mxnet_train.py", "--comm", "horovod"),
            launcher=MXNET_HOROVOD,
            changes=(
                Change(
                    name="threshold 2 MiB", sets=("fusion_threshold_bytes=2097152",), env={"HOROVOD_FUSION_THRESHOLD": "2097152"}
                ),
                Change(
                    name="threshold 16 MiB", sets=("fusion_threshold_bytes=16777216",), env={"HOROVOD_FUSION_THRESHOLD": "16777216"}
                ),
                Change(name="cycle 20 ms", sets=("cycle_time_us=20000",), env={"HOROVOD_CYCLE_TIME": "20"}),
            ),
        ),
        Scheme(
            name="byteps",
            framework="byteps",
            script=("mxnet_train.py", "--comm", "byteps"),
            launcher=MXNET_BYTEPS,
            changes=(
                Change(name="1 server", sets=("servers=1",), env={"DMLC_NUM_SERVER": "1"}),
                Change(name="partitions of 1 MB", sets=("partition_bytes=1024000",), env={"BYTEPS_PARTITION_BYTES": "1024000"}),
                Change(name="credit 4", sets=("credit=4",), env={"BYTEPS_SCHEDULING_CREDIT": "4"}),
            ),
        ),
        Scheme(
            name="ddp",
            framework="pytorch",
            script=("torch_train.py",),
            launcher=PYTORCH_DDP,
            changes=(
                Change(name="buckets of 1 MiB", sets=("bucket_cap_bytes=1048576",), arguments=("--bucket-cap-mb", "1")),
                Change(name="buckets of 5 MiB", sets=("bucket_cap_bytes=5242880",), arguments=("--bucket-cap-mb", "5")),
                Change(name="buckets of 100 MiB", sets=("bucket_cap_bytes=104857600",), arguments=("--bucket-cap-mb", "100")),
            ),
        ),
        Scheme(
            name="fsdp",
            framework="pytorch",
            script=("torch_train.py", "--fsdp"),
            launcher=PYTORCH_FSDP,
            changes=(
                Change(name="prefetch", sets=("prefetch=1",), arguments=("--prefetch",)),
                Change(name="no reshard", sets=("reshard_after_forward=0",), arguments=("--no-reshard",)),
            ),
        ),
        Scheme(
            name="tensorflow-mpi",
            framework="tensorflow",
            script=("train.py",),
            launcher=TENSORFLOW_HOROVOD,
            changes=(
                Change(
                    name="threshold 2 MiB", sets=("fusion_threshold_bytes=2097152",), env={"HOROVOD_FUSION_THRESHOLD": "2097152"}
                ),
            ),
            env={"HOROVOD_CONTROLLER": "mpi"},
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One job that is still to run: a recording if `number` is None, else that plain run of a setting."""

    scheme: Scheme
    workload: str
    rate: str
    change: Change | None = None
    number: int | None = None

    def path(self, folder: Path) -> Path:
        """Where its result is."""
        name = "base" if self.change is None else self.change.name.replace(" ", "-").replace(",", "")
        kind = "trace" if self.number is None else f"{name}.{self.number}.json"
        return folder / self.scheme.name / self.workload / self.rate / kind

    def spec(self, python: str, steps: int) -> JobSpec:
        """The job."""
        script, *arguments = self.scheme.script
        command = [python, str(TRAINING / script), *arguments, "--model", self.workload, "--steps", str(steps)]
        command += () if self.change is None else self.change.arguments
        env = {"OMP_NUM_THREADS": "1"} | self.scheme.env | ({} if self.change is None else self.change.env)
        return JobSpec(command=tuple(command), ranks=2, cores=(0, 1), env=env)


def runs(scheme: Scheme, workload: str, rates: Sequence[str], rounds: int, changes: bool) -> Iterator[Run]:
    """All runs of a workload, in their order."""
    for rate in rates:
        for number in (0, None, *range(1, rounds if rate != SLOWEST else 1)):
            yield Run(scheme=scheme, workload=workload, rate=rate, number=number)
    for change in scheme.changes if changes else ():
        yield Run(scheme=scheme, workload=workload, rate=BASE_RATE, change=change, number=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--python", action="append", required=True, metavar="FRAMEWORK=PATH", help="mxnet, byteps, pytorch, tensorflow"
    )
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rates", nargs="+", choices=RATES, default=list(RATES), help="of the recorded settings")
    parser.add_argument("--rounds", type=int, default=2, help="plain runs of each recorded setting; one on the slowest link")
    parser.add_argument("--runs", type=int, help="end after so many")
    parser.add_argument("--short", action="store_true", help="half as many steps")
    parser.add_argument("--no-changes", action="store_true", help="leave out the changed settings")
    options = parser.parse_args()
    python = dict(text.split("=", 1) for text in options.python)
    chosen = [(SCHEMES[scheme], workload) for scheme in options.schemes for workload in options.workloads]
    of_each = (options.rates, options.rounds, not options.no_changes)
    wanted = [run for scheme, workload in chosen for run in runs(scheme, workload, *of_each)]
    left = [run for run in wanted if not run.path(options.folder).exists()]
    for run in left[: options.runs]:
        steps = STEPS[run.rate] // (2 if options.short else 1)
        _execute(run, run.path(options.folder), python[run.scheme.framework], steps)
    print(f"{max(len(left) - (options.runs or len(left)), 0)} runs left", flush=True)


def _execute(run: Run, out: Path, python: str, steps: int) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    load, started = os.getloadavg()[0], time.time()
    rate = parse_rate_bps(run.rate)
    if run.number is None:
        schedule = StepSchedule(warmup=WARMUP, untraced=steps // 2, traced=steps * 3 // 4)
        needed = schedule.warmup + schedule.untraced + schedule.traced + 3
        run.scheme.launcher.record(run.spec(python, needed), out, rate_bps=rate, shaped=True, schedule=schedule)
        said = "recorded"
    else:
        times: StepTimes = run.scheme.launcher.time(run.spec(python, WARMUP + steps), rate_bps=rate, shaped=True, warmup=WARMUP)
        out.write_bytes(msgspec.json.encode(Measured.of(times, load, started)))
        said = f"{times.median_us / 1e3:.1f} ms"
    name = "base" if run.change is None else run.change.name
    print(f"{run.scheme.name:14} {run.workload:13} {run.rate:10} {name:20} {said}  ({time.time() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
