"""Speed of a search, and how near its plans come to the known optimum.

    python benchmarks/search.py [--json] [--only PART,...] [--trace TRACE]

run         ``dpro-search run --trials 500`` as a process of its own: seconds from start to end, peak memory; and plans a second
ring        Metropolis steps a second on ResNet-50's 161 gradients, 16 workers, ring all-reduces message by message
workers     trials a second with 1 and 2 workers, in turn, of three jobs whose plans take ever longer to price; and of two searches
            at once that have nothing to do with each other, which is what the machine has to give. Speed-ups are round by round
any         a small Horovod job, all plans of which are priced: how much slower than the best are what samplers find in 500 trials
contiguous  likewise with more tensors, against the best plan that fuses only neighbours; a sampler may find a better one
small       likewise for the ring: any grouping of 9 tensors, neighbours among 12
serial      161 gradients, all-reduces one after the other: against the best grouping of neighbours, by dynamic programming
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
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import search_jobs
from measure import in_turn, machine, wall_apart_s
from search_bert import bert_plans

from benchmarks.fusion_objective import FusionObjective
from benchmarks.optimum import all_groupings, contiguous_groupings, costs_us, horovod_plans, serial_optimum
from dpro_search.collect.sample import sample_trace_path
from dpro_search.collect.trace import TensorInfo, Trace
from dpro_search.graph.dataflow import DataflowGraph, RankProfile
from dpro_search.kinds import JobInScenario, PlanOptions
from dpro_search.kinds.horovod.job import Horovod
from dpro_search.search import Objective, run_search
from dpro_search.search.samplers import SAMPLERS, sampler_for
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import ClusterChange, Scenario
from dpro_search.space.tensorflow.fusion_moves import canonical, contiguous_groups
from dpro_search.space.transformations import horovod_space

PARTS = ("run", "ring", "workers", "any", "contiguous", "small", "serial")
TRIALS = 500
SEEDS = 5
ROUNDS = 9
TENSORS = {"any": 5, "contiguous": 8}  # 52 and 128 groupings, times 182 cycle times
SMALL = {"any": 9, "contiguous": 12}  # 21,147 and 2,048 groupings
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


def walked(predictor: Objective, plans: int) -> tuple[list[Plan], float]:
    """Plans that a Metropolis walk proposes, and how many a second are proposed and priced in one process."""
    sampler = sampler_for(predictor.space, "mcmc", 0)
    sampler.observe(Plan(), predictor.predict(Plan()))
    proposed = []
    started = time.perf_counter()
    for _ in range(plans):
        proposal = sampler.ask()
        sampler.tell(proposal, predictor.predict(proposal.plan))
        proposed.append(proposal.plan)
    return proposed, plans / (time.perf_counter() - started)


def ring_steps(plans: int = 200) -> dict[str, Any]:
    """Metropolis steps a second on the ring, and how many plans a second the replay alone prices of those that they ask for."""
    job = search_jobs.ring(search_jobs.resnet50())
    predictor = FusionObjective(job)
    proposed, steps_per_s = walked(predictor, plans)
    started = time.perf_counter()
    for plan in proposed:
        predictor.predict(plan)
    priced_per_s = plans / (time.perf_counter() - started)
    return {
        "tensors": len(predictor.tensors),
        "workers": job.ranks,
        "plans": plans,
        "steps_per_s": steps_per_s,
        "priced_per_s": priced_per_s,
    }


def workers(objective: Objective, trials: int) -> dict[str, Any]:
    """Trials a second with one and with two workers, the start of the workers included, and of two searches at once.

    Each search is a fork of its own: one after the other in one process would find what the earlier ones have priced.
    """
    objective.predict(Plan())  # here, because that compiles the replay once for all of them

    def run(count: int, seed: int = 0) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_search(
                objective, trials=trials, sampler="mcmc", seed=seed, out=Path(folder) / "run", trace_digest="-", workers=count
            )

    def run_two() -> None:
        searches = [get_context("fork").Process(target=run, args=(1, seed)) for seed in range(2)]
        for search in searches:
            search.start()
        for search in searches:
            search.join()

    seconds = in_turn({"1": lambda: run(1), "2": lambda: run(2), "two searches": run_two}, ROUNDS, wall_apart_s)
    found = {"1": 1, "2": 1, "two searches": 2}

    def speedup(name: str) -> list[float]:
        """Round by round: first quartile, median, third quartile."""
        ratios = [found[name] * one / time for one, time in zip(seconds["1"].rounds, seconds[name].rounds, strict=True)]
        return np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()

    quartiles = {name: speedup(name) for name in ("2", "two searches")}
    return {
        "trials": trials,
        "trials_per_s": {name: found[name] * trials / value.median for name, value in seconds.items()},
        "spread_pct": {name: value.spread_pct for name, value in seconds.items()},
        "speedup_2_workers": quartiles["2"][1],
        "speedup_two_searches": quartiles["two searches"][1],
        "speedup_quartiles": quartiles,
    }


def gap(job: Horovod, groupings_of: str) -> dict[str, Any]:
    """Price all plans of a job with few tensors, then let each sampler search it."""
    tensors = TENSORS[groupings_of]
    few = Horovod(replace(job.measured, graph=with_few_tensors(job.measured.graph, tensors)), job.recorded)
    small = JobInScenario(few).objective()
    names = tuple(tensor.name for tensor in small.tensors)
    position = {name: i for i, name in enumerate(names)}
    generated = all_groupings(names) if groupings_of == "any" else contiguous_groupings(names)
    groupings = [canonical(grouping, position) for grouping in generated]
    space = horovod_space((), job.recorded)
    all_us = costs_us(small, {space.simplest(plan) for plan in horovod_plans(groupings)}, _PROCESSES)
    optimum_us = min(all_us.values())
    searches = list(itertools.product(SAMPLERS, range(SEEDS)))
    with ProcessPoolExecutor(_PROCESSES, get_context("fork")) as pool:
        found_us = list(pool.map(least_found_us, itertools.repeat(small), *zip(*searches, strict=True)))
    return {
        "job": "Horovod",
        "tensors": tensors,
        "groupings": groupings_of,
        "plans": len(all_us),
        "optimum_us": optimum_us,
        "recorded_gap_pct": (small.predict(Plan()).iteration_us / optimum_us - 1) * 100,
        "median_plan_gap_pct": (float(np.median(list(all_us.values()))) / optimum_us - 1) * 100,
        "gap_pct": _gaps(zip(searches, found_us, strict=True), optimum_us),
    }


def ring_gap(groupings_of: str) -> dict[str, Any]:
    """The same for the ring, whose plans are groupings."""
    tensors = SMALL[groupings_of]
    predictor = FusionObjective(search_jobs.ring(search_jobs.with_few_tensors(search_jobs.resnet50(), tensors)))
    names = tuple(tensor.name for tensor in predictor.tensors)
    generated = all_groupings(names) if groupings_of == "any" else contiguous_groupings(names)
    all_us = costs_us(predictor, (Plan(tensor_groups=grouping) for grouping in generated))
    return {
        "job": "ring",
        "tensors": len(names),
        "groupings": groupings_of,
        "plans": len(all_us),
        "median_plan_gap_pct": (float(np.median(list(all_us.values()))) / min(all_us.values()) - 1) * 100,
        **_searched(predictor, min(all_us.values())),
    }


def serial_gap() -> dict[str, Any]:
    """All of ResNet-50's gradients; a sampler may fuse others than neighbours, and beat the optimum."""
    job = search_jobs.serial(search_jobs.resnet50())
    predictor = FusionObjective(job)
    started = time.perf_counter()
    optimum = serial_optimum(job)
    seconds = time.perf_counter() - started
    np.testing.assert_allclose(predictor.iteration_us(optimum.groups), optimum.iteration_us, rtol=1e-9)
    return {
        "job": "serial",
        "tensors": len(predictor.tensors),
        "groupings": "contiguous",
        "seconds": seconds,
        **_searched(predictor, optimum.iteration_us),
    }


def _searched(predictor: FusionObjective, optimum_us: float) -> dict[str, Any]:
    """Gaps of the recorded setting and of all samplers that need no guide."""
    found: list[tuple[tuple[str, int], float]] = []
    for name, seed in itertools.product((name for name in SAMPLERS if name != "critical-path"), range(SEEDS)):
        sampler = sampler_for(predictor.space, name, seed)
        baseline = predictor.predict(Plan())
        sampler.observe(Plan(), baseline)
        least_us = baseline.iteration_us
        for _ in range(TRIALS - 1):
            proposal = sampler.ask()
            prediction = predictor.predict(proposal.plan)
            sampler.tell(proposal, prediction)
            least_us = min(least_us, prediction.iteration_us)
        found.append(((name, seed), least_us))
    return {
        "optimum_us": optimum_us,
        "recorded_gap_pct": (predictor.predict(Plan()).iteration_us / optimum_us - 1) * 100,
        "gap_pct": _gaps(found, optimum_us),
    }


def _gaps(found: Iterable[tuple[tuple[str, int], float]], optimum_us: float) -> dict[str, dict[str, float]]:
    """Median and worst gap of each sampler over its seeds."""
    gaps: dict[str, list[float]] = {}
    for (name, _), least_us in found:
        gaps.setdefault(name, []).append((least_us / optimum_us - 1) * 100)
    return {name: {"median": float(np.median(values)), "worst": max(values)} for name, values in gaps.items()}


def least_found_us(objective: Objective, sampler: str, seed: int) -> float:
    """The least price that a search finds; its result names the simplest of those within 1 %, so the trials are looked at."""
    found_us: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        run_search(
            objective,
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


def main() -> None:
    """Measure what was asked for, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", default=",".join(PARTS), metavar="PARTS", help="some of: %(default)s")
    parser.add_argument(
        "--trace", type=Path, default=sample_trace_path("resnet50_2ranks_2gbit"), help="instead of the bundled sample"
    )
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only {min(unknown)}: known are {', '.join(PARTS)}")
    result = measured(arguments.trace, parts)
    print(json.dumps(result) if arguments.json else _table(result))


def measured(trace: Path, parts: list[str]) -> dict[str, Any]:
    """The figures of some parts."""
    result: dict[str, Any] = {"machine": machine()}
    if "run" in parts:
        result |= whole_run(trace)
    job = Horovod.of(Trace.load(trace), PlanOptions())
    here = JobInScenario(job)
    here.predict(Plan())
    if "run" in parts:
        result["plans_per_s"] = walked(here.objective(), 300)[1]
    if "ring" in parts:
        result["ring"] = ring_steps()
    if "workers" in parts:
        ranks, cores = SHARED_CORES
        slow, _ = here.under(Scenario(cluster=ClusterChange(ranks=ranks, cores=cores)))
        result["workers"] = {
            "trace": workers(here.objective(), 4000),
            f"{ranks} ranks on {cores} cores": workers(slow.objective(), 2000),
            "BERT-base, all transformations": workers(bert_plans().objective(), 150),
        }
    cases = [gap(job, part) for part in parts if part in TENSORS]
    cases += [ring_gap(groupings_of) for groupings_of in SMALL if "small" in parts]
    cases += [serial_gap()] if "serial" in parts else []
    if cases:
        result["gap_cases"] = cases
        known = {name: [case["gap_pct"][name] for case in cases if name in case["gap_pct"]] for name in SAMPLERS}
        result["gap_pct"] = {
            name: {"median": float(np.median([gap["median"] for gap in gaps])), "worst": max(gap["worst"] for gap in gaps)}
            for name, gaps in known.items()
            if gaps
        }
    return result


def _table(result: dict[str, Any]) -> str:
    lines = []
    if "plans_per_s" in result:
        lines.append(
            f"500 trials in {result['seconds_500_trials']:.1f} s, {result['peak_rss_bytes'] / 2**20:.0f} MiB;"
            f" {result['plans_per_s']:.0f} plans/s on one core"
        )
    if "ring" in result:
        row = result["ring"]
        lines.append(
            f"ring, {row['tensors']} tensors, {row['workers']} workers: {row['steps_per_s']:.0f} Metropolis steps/s,"
            f" {row['priced_per_s']:.0f} plans priced/s on one core"
        )
    for name, row in result.get("workers", {}).items():
        rates = ", ".join(f"{count}: {rate:.1f}" for count, rate in row["trials_per_s"].items())
        lines.append(
            f"{name}: trials/s by workers {rates}; {_between(row['speedup_quartiles']['2'])},"
            f" two searches {_between(row['speedup_quartiles']['two searches'])}"
        )
    for case in result.get("gap_cases", []):
        gaps = ", ".join(f"{name} {value['median']:.2f} ({value['worst']:.2f})" for name, value in case["gap_pct"].items())
        counted = f", {case['plans']} plans" if "plans" in case else ""
        title = f"{case['job']}, {case['tensors']} tensors, {case['groupings']} groupings{counted}"
        lines.append(f"{title}: gap in %, median (worst): {gaps}; recorded {case['recorded_gap_pct']:.2f}")
    return "\n".join([*lines, f"machine: {result['machine']}"])


def _between(quartiles: list[float]) -> str:
    first, median, third = quartiles
    return f"{median:.2f}x ({first:.2f}-{third:.2f})"


if __name__ == "__main__":
    main()
