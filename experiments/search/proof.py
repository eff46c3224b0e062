"""Does a plan gain what the replay says? Records a job, searches, runs the best plan beside the recorded setting: in one command.

    python -m experiments.search.proof DIR --python ENV/bin/python --workload vgg16 --rate 500mbit
    python -m experiments.search.proof DIR --python ENV/bin/python --workload bert --rate 2gbit --start HOROVOD_FUSION_THRESHOLD=0
    python -m experiments.search.proof DIR --python ENV/bin/python --workload bert --rate unlimited --clusters "(.*/dense[^/]*)/"
    python -m experiments.search.proof DIR...                       # what is in these folders, as a table

TensorFlow with Horovod, two ranks on hosts with links of the given rate (root). DIR keeps every stage (trace, run, real-runs,
validation.json, proof.json), so that the same command goes on where it stopped, also between two real runs; it stops after a stage
with `--until`, and after some real runs with `--runs`. Nothing else may run on the machine while it records and validates. A gain
is the share of an iteration's time that a plan saves. The same command prices a plan that was run already anew, so that real runs
also judge a model that came after them.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dpro_search.collect._files import write_file
from dpro_search.collect.launch.ranks import JobSpec, default_cores
from dpro_search.collect.launch.step_times import Schedule, StepTimes
from dpro_search.collect.launchers import TENSORFLOW_HOROVOD
from dpro_search.collect.trace import Trace
from dpro_search.costmodel.fused.op_classes import OTHER, kind_of
from dpro_search.deploy.jobs import Run
from dpro_search.deploy.losses import Loss
from dpro_search.deploy.validate import Job, Validation, validate
from dpro_search.errors import JobError
from dpro_search.graph.dataflow import DataflowGraph, OpKind
from dpro_search.kinds import PlanOptions, recorded_job
from dpro_search.kinds.horovod.job import Horovod
from dpro_search.quantities import parse_rate_bps
from dpro_search.search import run_search
from dpro_search.search.request import digest_of
from dpro_search.space.describe import describe
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.plan_json import decoded
from dpro_search.space.transformations import PlanSpace

ALLOWED_POINTS = 5.0
STAGES = ("record", "search", "validate")
_TRAIN = Path(__file__).resolve().parents[1] / "workloads" / "train.py"
_SCHEDULE = Schedule(warmup=5, untraced=8, traced=11)
_NOT_COMPILED = (OTHER, "variable", "gather")


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """A plan's gain as predicted and as measured; times in us, gains in per cent of the recorded setting's iteration."""

    workload: str
    rate: str
    start: dict[str, str]  # Horovod's variables that the job was recorded with.
    machine: str
    recorded_at: str
    trials: int  # Plans that the search priced; 0: the plan was given.
    plan: Plan
    recorded_predicted_us: float
    recorded_measured_us: float
    plan_predicted_us: float
    plan_measured_us: float
    predicted_gain_pct: float
    predicted_interval_pct: tuple[float, float]
    measured_gain_pct: float
    measured_interval_pct: tuple[float, float]  # 95 % of a bootstrap over runs and steps.
    difference_points: float
    agrees: bool
    noise_pct: float  # Half the range of the recorded setting's own runs.
    rounds: int
    losses: str  # Whether the plan trained the same.


class _KeptRun(msgspec.Struct, frozen=True, kw_only=True):
    plan: Plan
    iteration_us: list[float]
    compute_cpu_us: list[float]
    comm_cpu_us: list[float]
    losses: tuple[Loss, ...]
    peak_rss_bytes: int = 0


_COLUMNS = ("iteration_us", "compute_cpu_us", "comm_cpu_us")


class KeptRuns:
    """A job whose real runs are kept: one that is run again in the same order goes on behind the last of them.

    Parameters
    ----------
    most
        Real runs to make before it stops.
    """

    def __init__(self, job: Job, folder: Path, most: float = math.inf) -> None:
        self._job, self._folder, self._left = job, folder, most
        self._count = 0

    def run(self, plan: Plan, *, warmup: int, timeout_s: float | None = None) -> Run:
        """The next run; raises `SystemExit` if the one that was kept is of another plan, or as many were made as it may make."""
        path = self._folder / f"{self._count}.json"
        self._count += 1
        if not path.exists():
            if self._left < 1:
                raise SystemExit(f"{self._folder}: {self._count - 1} real runs are kept; the same command goes on behind them")
            self._left -= 1
            found = self._job.run(plan, warmup=warmup, timeout_s=timeout_s)
            columns = {name: getattr(found.times, name).tolist() for name in _COLUMNS}
            kept = _KeptRun(plan=plan, losses=found.losses, peak_rss_bytes=found.times.peak_rss_bytes, **columns)
            write_file(path, msgspec.json.encode(kept))
        kept = decoded(path.read_bytes(), _KeptRun)
        if kept.plan != plan:
            raise SystemExit(f"{path}: a run of another plan; remove {self._folder} to run everything again")
        columns = {name: np.array(getattr(kept, name)) for name in _COLUMNS}
        return Run(times=StepTimes(**columns, peak_rss_bytes=kept.peak_rss_bytes), losses=kept.losses)


def main() -> None:
    """Make a proof, or print those that were made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    parser.add_argument("--python", help="interpreter of the TensorFlow + Horovod environment; without it, nothing is run")
    parser.add_argument("--workload", default="vgg16")
    parser.add_argument("--rate", default="500mbit")
    parser.add_argument("--start", action="append", default=[], metavar="NAME=VALUE", help="a knob of Horovod's to record with")
    parser.add_argument("--with", dest="compute", action="append", default=[], help="what plans may also change, as in 'run'")
    parser.add_argument("--clusters", metavar="PATTERN", help="no search: clusters of the ops that share what its group matches")
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=28, help="of every run")
    parser.add_argument("--runs", type=float, default=math.inf, help="stop after so many more real runs")
    parser.add_argument("--until", choices=STAGES, default=STAGES[-1], help="the last stage")
    options = parser.parse_args()
    if options.python:
        for folder in options.folders:
            _prove(folder, options)
    made = [folder / "proof.json" for folder in options.folders if (folder / "proof.json").exists()]
    print(table([decoded(path.read_bytes(), Proof) for path in made]))


def _prove(folder: Path, options: argparse.Namespace) -> None:
    start = dict(text.partition("=")[::2] for text in options.start)
    os.environ.update(start, OMP_NUM_THREADS="1")
    trace = _recorded(folder / "trace", options)
    if options.until == "record":
        return
    compute = frozenset([*options.compute, *(["op-fusion"] if options.clusters else [])])
    prices = Horovod.of(trace, PlanOptions(compute=compute))
    path = folder / "validation.json"
    validation = decoded(path.read_bytes(), Validation) if path.exists() else None
    if validation is not None:
        plan = next(row.plan for rows in (validation.plans, validation.refused) for row in rows)
    elif options.clusters:
        plan = named_clusters(prices.measured.graph, prices.space, options.clusters)
    else:
        plan = _searched(folder, prices, options)
    expected, baseline = prices.predict(plan), prices.predict(Plan())
    ends = " instead of ".join(f"{price.iteration_us / 1e3:.1f}" for price in (expected, baseline))
    print(f"{describe(plan)}: predicted {ends} ms", flush=True)
    if options.until == "search":
        return
    if validation is None:
        job = KeptRuns(recorded_job(trace), folder / "real-runs", options.runs)
        validation = validate(job, baseline, [(plan, expected)], rounds=options.rounds, on_run=_tell)
        write_file(path, msgspec.json.format(msgspec.json.encode(validation), indent=1) + b"\n")
    made = proof_of(
        validation,
        (expected, baseline),
        workload=options.workload,
        rate=options.rate,
        start=start,
        machine=trace.meta.machine,
        recorded_at=trace.meta.recorded_at,
        trials=0 if options.clusters else options.trials,
    )
    write_file(folder / "proof.json", msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n")


def _recorded(out: Path, options: argparse.Namespace) -> Trace:
    if out.exists():
        return Trace.load(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    command = (options.python, str(_TRAIN), "--model", options.workload, "--steps", str(options.steps))
    spec = JobSpec(command=command, ranks=2, cores=default_cores(2))
    return TENSORFLOW_HOROVOD.record(spec, out, rate_bps=parse_rate_bps(options.rate), shaped=True, schedule=_SCHEDULE)


def _searched(folder: Path, prices: Horovod, options: argparse.Namespace) -> Plan:
    """The best plan that changes anything."""
    trace = folder / "trace"
    result = run_search(
        prices,
        trials=options.trials,
        seed=1,
        out=folder / "run",
        trace=str(trace.resolve()),
        trace_digest=digest_of(trace),
        options={"with": ",".join(sorted(options.compute))} if options.compute else {},
    )
    best = next((ranked.plan for ranked in result.plans if ranked.plan != Plan()), None)
    if best is None:
        raise SystemExit(f"{trace}: of {result.trials} plans, none is listed beside the recorded setting")
    return best


def named_clusters(graph: DataflowGraph, space: PlanSpace, pattern: str) -> Plan:
    """A plan of op clusters by name: the compiled ops of each text that the pattern's first group matches, where that is legal.

    Raises
    ------
    SystemExit
        No cluster is legal.
    """
    kinds = dict(zip(graph.op_name, zip(graph.op_type, graph.op_kind.tolist(), strict=True), strict=True))
    found: dict[str, list[str]] = defaultdict(list)
    for name, (op_type, kind) in kinds.items():
        match = re.match(pattern, name)
        if match and kind in (OpKind.FORWARD, OpKind.BACKWARD) and kind_of(op_type) not in _NOT_COMPILED:
            found[match[1]].append(name)
    chosen: tuple[tuple[str, ...], ...] = ()
    for where, names in found.items():
        refusal = space.refusal(Plan(op_clusters=(*chosen, tuple(names))))
        if refusal is None:
            chosen = (*chosen, tuple(names))
        else:
            print(f"{where}: left out, {refusal}", flush=True)
    if not chosen:
        raise SystemExit(f"--clusters {pattern}: no such cluster can be made")
    return Plan(op_clusters=chosen)


def _tell(name: str, found: StepTimes | JobError) -> None:
    print(f"{name}: {f'failed, {found}' if isinstance(found, JobError) else f'{found.median_us / 1e3:.1f} ms'}", flush=True)


def proof_of(validation: Validation, prices: tuple[Prediction, Prediction], **setting: Any) -> Proof:
    """What a validation of one plan says of its gain, beside the prices of the plan and of the recorded setting.

    `setting` has those fields of a `Proof` that say what was run. Raises `SystemExit` if the plan trains something else.
    """
    if not validation.plans:
        raise SystemExit(f"the plan trains something else: {validation.refused[0].losses.reason}")
    row = validation.plans[0]
    expected, baseline = prices
    predicted, measured = saved_pct(baseline.iteration_us / expected.iteration_us), saved_pct(row.speedup_measured)
    low_us, high_us = expected.interval_us
    low, high = row.speedup_interval
    return Proof(
        **setting,
        plan=row.plan,
        recorded_predicted_us=baseline.iteration_us,
        recorded_measured_us=validation.baseline_us,
        plan_predicted_us=expected.iteration_us,
        plan_measured_us=row.measured_us,
        predicted_gain_pct=predicted,
        predicted_interval_pct=(saved_pct(baseline.iteration_us / high_us), saved_pct(baseline.iteration_us / low_us)),
        measured_gain_pct=measured,
        measured_interval_pct=(saved_pct(low), saved_pct(high)),
        difference_points=predicted - measured,
        agrees=abs(predicted - measured) <= ALLOWED_POINTS,
        noise_pct=validation.noise_pct,
        rounds=validation.rounds,
        losses=row.losses.verdict if row.losses is not None else "unknown",
    )


def saved_pct(speedup: float) -> float:
    """Share of the time that a speed-up saves."""
    return (1 - 1 / speedup) * 100


def table(proofs: Sequence[Proof]) -> str:
    """Markdown, a row for each proof."""
    titles = ["workload", "link", "recorded with", "plan", "predicted ms", "measured ms", "predicted gain", "measured gain (95 %)"]
    titles += ["points apart", "noise", "losses"]
    lines = ["| " + " | ".join(titles) + " |", "|---|---|---|---|" + "---:|" * (len(titles) - 4)]
    for proof in proofs:
        low, high = proof.measured_interval_pct
        cells = (
            proof.workload,
            proof.rate,
            ", ".join(f"{name}={value}" for name, value in proof.start.items()) or "defaults",
            describe(proof.plan),
            f"{proof.recorded_predicted_us / 1e3:.0f}, {proof.plan_predicted_us / 1e3:.0f}",
            f"{proof.recorded_measured_us / 1e3:.0f}, {proof.plan_measured_us / 1e3:.0f}",
            f"{proof.predicted_gain_pct:.1f} %",
            f"{proof.measured_gain_pct:.1f} % ({low:.1f}-{high:.1f})",
            f"{proof.difference_points:+.1f}",
            f"{proof.noise_pct:.1f} %",
            proof.losses,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
