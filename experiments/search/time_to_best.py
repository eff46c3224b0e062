"""How soon a search is within 1 % of the best that long searches find: BERT-base, 5,000 ops, 16 workers, all transformations.

    python -m experiments.search.time_to_best search OUT [--job JOB] [--sampler auto] [--seed 0] [--seconds 60]
    python -m experiments.search.time_to_best reference OUT [--job JOB] [--sampler auto] [--seed 1000] [--seconds 3600]
    python -m experiments.search.time_to_best report OUT [--json]

A search writes a better plan down at once, and every few seconds how far it is: one that is stopped counts as far as it came. Its
time is processor time from the start of the process, imports and preparation of the job included, so that what else runs on the
machine does not matter. A reference is the same for longer, out of the way of others: on one core, and last in its queue. The
report holds all searches in OUT against the best of all of them, and against the best of the other samplers' searches.

JOB is "bert" (`benchmarks/search_bert.py`), "ring" (`benchmarks/search_jobs.py`: tensor fusion only, rings message by message), or
the folder of a recording of TensorFlow with Horovod, which then runs on 16 workers.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.fusion_objective import FusionObjective
from benchmarks.measure import machine
from benchmarks.search_bert import bert_plans, recorded_plans
from benchmarks.search_jobs import bert, ring
from dpro_search.collect.trace import Trace
from dpro_search.kinds.horovod.job import Horovod
from dpro_search.search.samplers import SAMPLERS, sampler_for
from dpro_search.space.plan import Plan

_CLOSE = 1.01
_SAID_EVERY_S = 5.0


class Point(NamedTuple):
    """How far a search was after some processor time."""

    seconds: float
    plans: int
    best_us: float


def job_of(name: str) -> Horovod | FusionObjective:
    """The job to search."""
    match name:
        case "bert":
            return bert_plans()
        case "ring":
            return FusionObjective(ring(bert()))
    return recorded_plans(Trace.load(Path(name)))


def search(out: Path, job: str, sampler_name: str, seed: int, seconds: float) -> Point:
    """Search until the process has taken so much processor time; points go to OUT as they come, and so does the best plan."""
    out.mkdir(parents=True, exist_ok=True)
    prices = job_of(job)
    sampler = sampler_for(prices.space, sampler_name, seed, None if isinstance(prices, FusionObjective) else prices)
    prediction = prices.predict(Plan())
    sampler.observe(Plan(), prediction)
    said = Point(time.process_time(), 1, prediction.iteration_us)
    with (out / f"{sampler_name}-{seed}.jsonl").open("w", buffering=1) as file:
        print(json.dumps(said), file=file)
        plans, best_us = 1, said.best_us
        while (now := time.process_time()) < seconds:
            proposal = sampler.ask()
            prediction = prices.predict(proposal.plan)
            sampler.tell(proposal, prediction)
            plans += 1
            better = prediction.iteration_us < best_us
            if better:
                best_us = prediction.iteration_us
                (out / f"{sampler_name}-{seed}.plan.json").write_bytes(proposal.plan.to_json())
            if better or now - said.seconds > _SAID_EVERY_S:
                said = Point(time.process_time(), plans, best_us)
                print(json.dumps(said), file=file)
    return said


def keep_out_of_the_way() -> None:
    """One core of those that the process may use, after everybody else."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.nice(19)


def report(out: Path) -> dict[str, Any]:
    """All searches of a folder, against the best of all and the best of the other samplers."""
    searches = {path.stem: points for path in sorted(out.glob("*.jsonl")) if (points := _points(path))}
    best_us = {name: points[-1].best_us for name, points in searches.items()}
    rows = []
    for name, points in searches.items():
        sampler = name.rpartition("-")[0]
        others_us = min((us for other, us in best_us.items() if other.rpartition("-")[0] != sampler), default=None)
        rows.append(
            {
                "search": name,
                "seconds": points[-1].seconds,
                "plans": points[-1].plans,
                "best_us": points[-1].best_us,
                "gap_pct": (points[-1].best_us / min(best_us.values()) - 1) * 100,
                "within_1_pct_s": _when(points, min(best_us.values())),
                "within_1_pct_of_other_samplers_s": None if others_us is None else _when(points, others_us),
            }
        )
    recorded_us = max((points[0].best_us for points in searches.values()), default=0.0)
    return {"recorded_us": recorded_us, "best_us": min(best_us.values(), default=0.0), "searches": rows, "machine": machine()}


def _points(path: Path) -> list[Point]:
    """The whole lines of a search's file."""
    lines = path.read_text().split("\n")[:-1]
    return [Point(*json.loads(line)) for line in lines]


def _when(points: list[Point], reference_us: float) -> float | None:
    """Processor time until a search was within 1 % of a reference; None if it never was."""
    return next((point.seconds for point in points if point.best_us <= _CLOSE * reference_us), None)


def main() -> None:
    """Search, or compare searches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    searching = parts.add_parser("search", help="one search")
    long = parts.add_parser("reference", help="one long search, on one core and with the lowest priority")
    for part, seed, seconds in ((searching, 0, 60.0), (long, 1000, 3600.0)):
        part.add_argument("--job", default="bert", help="default: %(default)s")
        part.add_argument("--sampler", choices=SAMPLERS, default="auto")
        part.add_argument("--seed", type=int, default=seed, help="default: %(default)s")
        part.add_argument("--seconds", type=float, default=seconds, help="of processor time (default: %(default)s)")
    reporting = parts.add_parser("report", help="compare the searches of a folder")
    reporting.add_argument("--json", action="store_true", help="print one JSON object")
    for part in (searching, long, reporting):
        part.add_argument("out", metavar="OUT", type=Path)
    arguments = parser.parse_args()
    if arguments.part == "reference":
        keep_out_of_the_way()
    if arguments.part != "report":
        ended = search(arguments.out, arguments.job, arguments.sampler, arguments.seed, arguments.seconds)
        print(f"{ended.best_us / 1e3:.2f} ms after {ended.plans} plans and {ended.seconds:.0f} s of processor time")
        return
    result = report(arguments.out)
    print(json.dumps(result) if arguments.json else _table(result))


def _table(result: dict[str, Any]) -> str:
    lines = ["| search | processor time | plans | best, ms | above the best of all | within 1 % of it | of the other samplers' |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for row in sorted(result["searches"], key=lambda row: row["best_us"]):
        times = [
            "-" if row[name] is None else f"{row[name]:.1f} s" for name in ("within_1_pct_s", "within_1_pct_of_other_samplers_s")
        ]
        lines.append(
            f"| {row['search']} | {row['seconds']:.0f} s | {row['plans']:,} | {row['best_us'] / 1e3:.2f}"
            f" | {row['gap_pct']:.2f} % | {times[0]} | {times[1]} |"
        )
    return "\n".join([*lines, f"recorded: {result['recorded_us'] / 1e3:.2f} ms; {result['machine']}"])


if __name__ == "__main__":
    main()
