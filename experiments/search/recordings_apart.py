"""How far recordings of one job are apart, and what that makes of a plan's price: jobs with KVStore and BytePS.

    python -m experiments.search.recordings_apart costs TRACE,TRACE,... [TRACE,TRACE,... ...]
    python -m experiments.search.recordings_apart plan PLAN.json TRACE ...

`costs` takes recordings of one job in each argument, and prints by how much their costs differ: standard deviations of logarithms,
pooled over the jobs of a kind, which `dpro_search.replay.server_replay` draws from. `plan` prices the recorded setting and a plan
(a `plan.json` of an export) from each of several recordings, by one replay and re-evaluated over resampled costs, beside what the
recording measured: its own setting. A recording that was made under the plan is named with a plan of no changes.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np

from dpro_search.collect.trace import SETTLING_STEPS, Floats, Trace
from dpro_search.kinds import job_of
from dpro_search.kinds.byteps.job import Byteps
from dpro_search.kinds.kvstore.job import Kvstore
from dpro_search.space.plan import Plan
from dpro_search.space.servers.byteps_job import BytepsJob
from dpro_search.space.servers.kvstore_job import KvstoreJob

_COSTS = ("all workers", "each worker", "messages", "servers", "steps")


def store_plans(trace: Trace) -> Kvstore | Byteps:
    """Prices of a recorded job with servers."""
    prices = job_of(trace)
    if not isinstance(prices, Kvstore | Byteps):
        raise SystemExit(f"a trace of {trace.meta.format}: recordings of KVStore or BytePS are compared here")
    return prices


def compute_us(job: KvstoreJob | BytepsJob) -> Floats:
    """Core time of each worker's operators in an iteration, [workers]."""
    found = np.array([sum(segment.work_us for segment in segments) for segments in job.workers])
    if isinstance(job, BytepsJob):
        return found + job.scale_us.sum(axis=1) + job.update_us.sum(axis=1)
    return found + np.array(job.beside_us_per_byte) * job.tensor_bytes.sum()


def costs_of(job: KvstoreJob | BytepsJob) -> tuple[float, float]:
    """Core time of a byte in a message, and of one that a server adds up (BytePS's recordings tell one number for both)."""
    if isinstance(job, BytepsJob):
        return job.cpu_us_per_byte, job.cpu_us_per_byte
    return job.comm_us_per_byte, job.sum_us_per_byte


def step_deviation(trace: Trace, workers: int) -> float:
    """Standard deviation of the logarithm of a worker's core time in a step, profiled steps and others apart."""
    found = []
    for rank in range(workers):
        for traced in (False, True):
            steps = trace.steps.select(
                (trace.steps.rank == rank) & (trace.steps.traced == traced) & (trace.steps.index >= SETTLING_STEPS)
            )
            if len(steps) > 2 and steps.compute_cpu_us.all():
                found.append(np.log(steps.compute_cpu_us).std(ddof=1))
    return float(np.median(found)) if found else float("nan")


def squares(jobs: list[KvstoreJob] | list[BytepsJob]) -> Floats:
    """Sums of squares of the logarithms of costs around their means, in the order of `_COSTS`."""
    compute = np.log([compute_us(job) for job in jobs])
    common = compute.mean(axis=1)
    own = compute - common[:, None]
    own -= own.mean(axis=0)
    others = np.log([costs_of(job) for job in jobs])
    # Of w workers' deviations from their mean, w - 1 are free.
    each = (own**2).sum() / max(compute.shape[1] - 1, 1)
    return np.array([((common - common.mean()) ** 2).sum(), each, *((others - others.mean(axis=0)) ** 2).sum(axis=0)])


def print_costs(groups: list[str]) -> None:
    """Standard deviations of each job, and pooled over those of a kind."""
    pooled: dict[str, list[tuple[int, Floats]]] = defaultdict(list)
    for group in groups:
        traces = [Trace.load(Path(name)) for name in group.split(",")]
        prices = [store_plans(trace) for trace in traces]
        jobs = [each.recorded_job for each in prices]
        free, found = max(len(jobs) - 1, 1), squares(jobs)  # type: ignore[arg-type]
        steps = np.median([step_deviation(trace, len(jobs[0].workers)) for trace in traces])
        found = np.append(found, steps**2 * free)
        pooled[type(prices[0]).__name__].append((free, found))
        print(f"{group.split(',')[0]}: {len(jobs)} recordings; {_said(np.sqrt(found / free))}")
    for kind, rows in pooled.items():
        free = sum(count for count, _ in rows)
        print(f"{kind}, pooled: {_said(np.sqrt(sum(found for _, found in rows) / free))}")


def _said(deviations: Floats) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in zip(_COSTS, deviations, strict=True))


def print_plan(plan: Plan, folders: list[Path]) -> None:
    """A plan's prices from each recording."""
    for folder in folders:
        trace = Trace.load(folder)
        prices = store_plans(trace)
        measured_us = trace.iterations_us()
        print(
            f"{folder.name}: workers compute {', '.join(f'{us / 1e3:.0f}' for us in compute_us(prices.recorded_job))} ms;"
            f" measured {measured_us.mean() / 1e3:.0f} ms (median {np.median(measured_us) / 1e3:.0f})"
        )
        for name, asked in {"as recorded": Plan(), "plan": plan}.items():
            if name == "plan" and plan == Plan():
                continue
            one_replay_ms = prices.predict(asked).iteration_us / 1e3
            over_draws, times_us = prices.reevaluated(asked), prices.sampled(asked, samples=32)
            low, high = over_draws.interval_us
            print(
                f"  {name}: one replay {one_replay_ms:.0f} ms, re-evaluated {over_draws.iteration_us / 1e3:.0f}"
                f" ({low / 1e3:.0f}-{high / 1e3:.0f}), replays {times_us.min() / 1e3:.0f}-{times_us.max() / 1e3:.0f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("costs").add_argument("groups", nargs="+")
    priced = commands.add_parser("plan")
    priced.add_argument("plan", type=Path)
    priced.add_argument("traces", type=Path, nargs="+")
    options = parser.parse_args()
    if options.command == "costs":
        print_costs(options.groups)
    else:
        print_plan(Plan.load(options.plan), options.traces)


if __name__ == "__main__":
    main()
