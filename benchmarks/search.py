"""Speed of a search, and how near its plans come to the known optimum.

    python benchmarks/search.py [--json] [--only run,workers,any,contiguous] [--trace TRACE]

run         ``dpro-search run --trials 500`` as a process of its own: seconds from start to end, peak memory; and plans a second
workers     trials a second with 1 and 2 workers, in turn
any         a small job, all plans of which are priced: how much slower than the best of them is what a sampler finds in 500 trials
contiguous  likewise with more tensors, against the best plan that fuses only neighbours; a sampler may find a better one
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from measure import in_turn, machine

from dpro_search.collect.sample import sample_trace_path
from dpro_search.collect.trace import TensorInfo, Trace
from dpro_search.graph.dataflow import DataflowGraph, RankProfile
from dpro_search.replay import Predictor
from dpro_search.search import run_search
from dpro_search.search.samplers import SAMPLERS, make_sampler
from dpro_search.search.samplers._base import CYCLE_RANGE_US, as_change, rounded_cycle_us
from dpro_search.search.workers import ProcessPricer
from dpro_search.space.moves import Grouping, canonical, contiguous_groups
from dpro_search.space.plan import Plan

PARTS = ("run", "workers", "any", "contiguous")
TRIALS = 500
SEEDS = 5
ROUNDS = 3
TENSORS = {"any": 5, "contiguous": 8}  # 52 and 128 groupings, times 182 cycle times
SHARED_CORES = (16, 5)  # ranks and cores of a job whose replay is slow: ranks that share cores unevenly do not behave alike

_PROCESSES = len(os.sched_getaffinity(0))


def whole_run(trace: Path) -> dict[str, Any]:
    """A search as users start it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "dpro_search.cli", "run", str(trace), "--trials", str(TRIALS), "--out", f"{folder}/run"]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        started = time.perf_counter()
        done = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True, check=True)
        seconds = time.perf_counter() - started
    result = json.loads(done.stdout)
    return {
        "seconds_500_trials": seconds,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "speedup": result["speedup"],
        "gain_certain": result["gain_certain"],
    }


def plans_per_s(predictor: Predictor, plans: int = 300) -> float:
    """Plans that a Metropolis walk proposes and the replay prices in a second, in one process."""
    sampler = make_sampler("mcmc", predictor.tensors, predictor.recorded, 0)
    sampler.observe(Plan(), predictor.predict(Plan()))
    started = time.perf_counter()
    for _ in range(plans):
        proposal = sampler.ask()
        sampler.tell(proposal, predictor.predict(proposal.plan))
    return plans / (time.perf_counter() - started)


def workers(predictor: Predictor, trials: int) -> dict[str, Any]:
    """Trials a second with one and with two workers, the start of the workers included."""

    def run(count: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_search(predictor, trials=trials, sampler="mcmc", out=Path(folder) / "run", trace_digest="-", workers=count)

    seconds = in_turn({str(count): lambda count=count: run(count) for count in (1, 2)}, ROUNDS)
    rate = {name: trials / value.median for name, value in seconds.items()}
    return {
        "trials": trials,
        "trials_per_s": rate,
        "spread_pct": {name: value.spread_pct for name, value in seconds.items()},
        "speedup_2_workers": rate["2"] / rate["1"],
    }


def gap(predictor: Predictor, groupings_of: str) -> dict[str, Any]:
    """Price all plans of a job with few tensors, then let each sampler search it."""
    tensors = TENSORS[groupings_of]
    small = predictor.at(graph=with_few_tensors(predictor.graph, tensors))
    names = tuple(tensor.name for tensor in small.tensors)
    position = {name: i for i, name in enumerate(names)}
    generated = all_groupings(names) if groupings_of == "any" else contiguous_groupings(names)
    groupings = [canonical(grouping, position) for grouping in generated]
    plans = {as_change(plan, small.recorded) for plan in all_plans(groupings)}
    all_us = prices_us(small, plans)
    optimum_us = min(all_us)
    searches = list(itertools.product(SAMPLERS, range(SEEDS)))
    with ProcessPoolExecutor(_PROCESSES, get_context("fork")) as pool:
        found_us = list(pool.map(least_found_us, itertools.repeat(small), *zip(*searches, strict=True)))
    gaps: dict[str, list[float]] = {}
    for (name, _), least_us in zip(searches, found_us, strict=True):
        gaps.setdefault(name, []).append((least_us / optimum_us - 1) * 100)
    return {
        "tensors": tensors,
        "groupings": groupings_of,
        "plans": len(plans),
        "optimum_us": optimum_us,
        "recorded_gap_pct": (small.predict(Plan()).iteration_us / optimum_us - 1) * 100,
        "median_plan_gap_pct": (float(np.median(all_us)) / optimum_us - 1) * 100,
        "gap_pct": {name: {"median": float(np.median(values)), "worst": max(values)} for name, values in gaps.items()},
    }


def least_found_us(predictor: Predictor, sampler: str, seed: int) -> float:
    """The least price that a search finds; its result names the simplest of those within 1 %, so the trials are looked at."""
    found_us: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        run_search(
            predictor,
            trials=TRIALS,
            sampler=sampler,
            seed=seed,
            out=Path(folder) / "run",
            trace_digest="-",
            on_trial=lambda trial: found_us.append(trial.prediction.iteration_us),
        )
    return min(found_us)


def with_few_tensors(graph: DataflowGraph, count: int) -> DataflowGraph:
    """The same job with `count` gradients: neighbours, of about equal bytes together, are one that is there with its last part."""
    groups = contiguous_groups(graph.tensors, count)
    index = {tensor.name: i for i, tensor in enumerate(graph.tensors)}
    members = [[index[name] for name in group] for group in groups]
    unit_of = {tensor: unit for unit, tensors in enumerate(members) for tensor in tensors}

    def profile_of(profile: RankProfile) -> RankProfile:
        releases = tuple(
            replace(release, tensors=tuple(sorted({unit_of[tensor] for tensor in release.tensors}))) for release in profile.releases
        )
        post_us = np.stack([profile.post_us[:, tensors].max(axis=1) for tensors in members], axis=1)
        return replace(profile, post_us=post_us, releases=releases)

    tensors = tuple(
        TensorInfo(
            name=f"part{unit}",
            node=graph.tensors[parts[-1]].node,
            dtype=graph.tensors[parts[-1]].dtype,
            shape=(),
            size_bytes=sum(graph.tensors[part].size_bytes for part in parts),
        )
        for unit, parts in enumerate(members)
    )
    placements = tuple(graph.placements[parts[-1]] for parts in members)
    return replace(graph, tensors=tensors, placements=placements, profiles=tuple(map(profile_of, graph.profiles)))


def all_plans(groupings: list[Grouping]) -> Iterator[Plan]:
    """Everything that the samplers can say: groupings or a threshold, and a cycle time."""
    cycles_us = {None} | {rounded_cycle_us(us) for us in np.arange(CYCLE_RANGE_US[0], CYCLE_RANGE_US[1] + 1, 10.0).tolist()}
    thresholds = [None, 0, *(round(2**power) for power in np.arange(16.0, 28.25, 0.5).tolist())]
    for cycle_us in cycles_us:
        for grouping in groupings:
            yield Plan(tensor_groups=grouping, cycle_time_us=cycle_us)
        for threshold in thresholds:
            yield Plan(fusion_threshold_bytes=threshold, cycle_time_us=cycle_us)


def contiguous_groupings(names: tuple[str, ...]) -> Iterator[Grouping]:
    """All ways to cut a sequence, 2^(n - 1)."""
    for cuts in itertools.product((False, True), repeat=len(names) - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(names)]
        yield tuple(names[a:b] for a, b in itertools.pairwise(edges))


def all_groupings(names: tuple[str, ...]) -> Iterator[Grouping]:
    """All set partitions: Bell's number of them."""
    if not names:
        yield ()
        return
    for rest in all_groupings(names[1:]):
        yield ((names[0],), *rest)
        for i, group in enumerate(rest):
            yield (*rest[:i], (names[0], *group), *rest[i + 1 :])


def prices_us(predictor: Predictor, plans: set[Plan]) -> list[float]:
    """Prices of all plans, in any order, found by as many processes as there are processors."""
    with ProcessPricer(predictor, _PROCESSES) as pricer:
        for plan in plans:
            pricer.submit(plan)
        return [pricer.done()[1].iteration_us for _ in plans]


def main() -> None:
    """Measure what was asked for, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", default=",".join(PARTS), metavar="PARTS", help="some of: %(default)s")
    parser.add_argument("--trace", type=Path, default=sample_trace_path(), help="instead of the bundled sample")
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only {min(unknown)}: known are {', '.join(PARTS)}")
    print(json.dumps(measured(arguments.trace, parts)) if arguments.json else _table(measured(arguments.trace, parts)))


def measured(trace: Path, parts: list[str]) -> dict[str, Any]:
    """The figures of some parts."""
    result: dict[str, Any] = {"machine": machine()}
    if "run" in parts:
        result |= whole_run(trace)
    predictor = Predictor.from_trace(Trace.load(trace))
    predictor.predict(Plan())
    if "run" in parts:
        result["plans_per_s"] = plans_per_s(predictor)
    if "workers" in parts:
        ranks, cores = SHARED_CORES
        slow = predictor.at(cluster=predictor.cluster.with_ranks(ranks, cores))
        result["workers"] = {"trace": workers(predictor, 400), f"{ranks} ranks on {cores} cores": workers(slow, 150)}
    if cases := [gap(predictor, part) for part in parts if part in TENSORS]:
        result["gap_cases"] = cases
        result["gap_pct"] = {
            name: {
                "median": float(np.median([case["gap_pct"][name]["median"] for case in cases])),
                "worst": max(case["gap_pct"][name]["worst"] for case in cases),
            }
            for name in SAMPLERS
        }
    return result


def _table(result: dict[str, Any]) -> str:
    lines = []
    if "plans_per_s" in result:
        lines.append(
            f"500 trials in {result['seconds_500_trials']:.1f} s, {result['peak_rss_bytes'] / 2**20:.0f} MiB;"
            f" {result['plans_per_s']:.0f} plans/s on one core"
        )
    for name, row in result.get("workers", {}).items():
        rates = ", ".join(f"{count}: {rate:.1f}" for count, rate in row["trials_per_s"].items())
        lines.append(f"{name}: trials/s by workers {rates}; {row['speedup_2_workers']:.2f}x")
    for case in result.get("gap_cases", []):
        gaps = ", ".join(f"{name} {value['median']:.2f} ({value['worst']:.2f})" for name, value in case["gap_pct"].items())
        title = f"{case['tensors']} tensors, {case['groupings']} groupings, {case['plans']} plans"
        start = f"recorded {case['recorded_gap_pct']:.2f}, median plan {case['median_plan_gap_pct']:.2f}"
        lines.append(f"{title}: gap in %, median (worst): {gaps}; {start}")
    return "\n".join([*lines, f"machine: {result['machine']}"])


if __name__ == "__main__":
    main()
