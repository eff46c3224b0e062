"""What BytePS's fp16 gradients cost in training jobs: core time of workers with and without them, in turn.

    python -m experiments.costmodel.byteps_halves_in_jobs OUT.jsonl --python ENV/bin/python [--workload resnet50 ...] [--rounds 2]

Two workers and two servers on two cores, no links, two samples a worker: nothing but the casts makes the threads of MXNet and of
the script take more. Adds to OUT and prints what a step takes more in each workload, beside what is in
`costmodel/compressed_gradients.py`. Needs root; nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import msgspec
import numpy as np

from dpro_search.collect.launch.ranks import JobSpec, default_cores
from dpro_search.collect.launch.step_times import Schedule
from dpro_search.collect.launchers import MXNET_BYTEPS
from dpro_search.deploy.export import export_plan
from dpro_search.deploy.jobs import PLAN_VARIABLE
from dpro_search.deploy.parts.part import JobFacts
from dpro_search.deploy.parts.stores import BYTEPS
from dpro_search.machine import machine_constants
from dpro_search.space.plan import Plan
from dpro_search.space.servers.recorded_workers import untraced_us
from experiments.search.testbed_jobs import SCHEMES

_RANKS, _STEPS = 2, 21
_SCHEDULE = Schedule(warmup=4, untraced=12, traced=2)
_KINDS = {"whole": Plan(), "half": Plan(compression="fp16")}


class Used(msgspec.Struct, frozen=True, kw_only=True):
    """Core time of a step, us: of MXNet and the script, the workers' mean."""

    workload: str
    kind: str
    tensors: int
    gradient_bytes: int
    worker_us: float


def measure(workload: str, kind: str, python: str) -> Used:
    """Record the job of a workload, with gradients of a kind."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = {"DMLC_NUM_SERVER": str(_RANKS)}
        if _KINDS[kind] != Plan():
            env[PLAN_VARIABLE] = str(export_plan(_KINDS[kind], folder / "plan", (BYTEPS,), JobFacts()).folder)
        command = (*SCHEMES["byteps"].command(python, workload, _STEPS), "--batch", "2")
        spec = JobSpec(command=command, ranks=_RANKS, cores=default_cores(_RANKS), env=env)
        trace = MXNET_BYTEPS.record(spec, folder / "trace", schedule=_SCHEDULE)
    return Used(
        workload=workload,
        kind=kind,
        tensors=len(trace.tensors),
        gradient_bytes=sum(tensor.size_bytes for tensor in trace.tensors),
        worker_us=float(np.mean([untraced_us(trace, rank, trace.steps.compute_cpu_us) for rank in range(_RANKS)])),
    )


def table(rows: list[Used]) -> str:
    """What each workload takes more by halves, the mean over the rounds, and what the costs say."""
    lines = [
        "| workload | gradients | MB | worker, ms: whole | half | more by halves | said |",
        "|---|---:|---:|---|---|---:|---:|",
    ]
    known = machine_constants().byteps
    for workload in dict.fromkeys(row.workload for row in rows):
        whole, half = ([row for row in rows if (row.workload, row.kind) == (workload, kind)] for kind in _KINDS)
        more_us = np.mean([one.worker_us - other.worker_us for one, other in zip(half, whole, strict=True)])
        said_us = half[0].tensors * known.cast_call_us + half[0].gradient_bytes * known.cast_us_per_byte
        times = (", ".join(f"{row.worker_us / 1e3:.0f}" for row in ran) for ran in (whole, half))
        size = f"{half[0].gradient_bytes / 1e6:.1f}"
        cells = (workload, str(half[0].tensors), size, *times, f"{more_us / 1e3:.0f}", f"{said_us / 1e3:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, round by round, and print the table of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.jsonl")
    parser.add_argument("--python", required=True, help="interpreter of an environment with BytePS")
    parser.add_argument("--workload", nargs="+", default=["resnet50"])
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    options.out.touch()
    rows = [msgspec.json.decode(line, type=Used) for line in options.out.read_bytes().splitlines()]
    for _ in range(options.rounds):
        for workload in options.workload:
            for kind in _KINDS:
                rows.append(measure(workload, kind, options.python))
                with options.out.open("ab") as file:
                    file.write(msgspec.json.encode(rows[-1]) + b"\n")
    print(table(rows))


if __name__ == "__main__":
    main()
