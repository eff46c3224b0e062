"""Time of predictions and searches of described parallel jobs: python benchmarks/parallel.py [--json]

The first prediction counts from the job's file to the time of its step, without imports and without the compilation of the replay,
which a prediction of another job has done; the next plan is another strategy of the same job. The search is that of
`dpro-search run` without its start; its best plan is compared with that of all legal plans, on clusters small enough for that.
Seconds are of the processor.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from dpro_search.kinds import job_of, load_source
from dpro_search.search import run_search
from dpro_search.space.plan import Plan

LLAMA = (
    'model = "llama3-405b"\ncluster = "2048xhgx-h100"\nglobal_batch = 2048\nsequence = 8192\n'
    '[runs]\ntp = 8\npp = 16\nrecompute = "full"\n'
)
GPT2 = 'model = "gpt2-medium"\ncluster = "4xhgx-h100"\nglobal_batch = 256\nsequence = 1024\n[runs]\ntp = 4\n'
LARGE = 'model = "{}"\ncluster = "128xhgx-h100"\nglobal_batch = 1024\nsequence = 8192\n'
SMALL = 'model = "{}"\ncluster = "{}"\nglobal_batch = 64\nsequence = 2048\n'

EXHAUSTIVE = (("gpt2-medium", "1xhgx-h100", 3), ("llama3-8b", "2xhgx-h100", 7), ("mixtral-8x7b", "2xdgx-a100-80", 47))


def clock() -> float:
    """Processor time of this process: what a search takes where no other program runs."""
    return time.process_time()


def job(folder: Path, text: str) -> Any:
    """The job of a description."""
    path = folder / "job.toml"
    path.write_text(text)
    return job_of(load_source(path))


def predictions(folder: Path, text: str, plans: list[Plan]) -> dict[str, float]:
    """Seconds of the first prediction of a job, and the most of the next ones."""
    started = clock()
    found = job(folder, text)
    found.predict(Plan())
    first_s = clock() - started
    next_s = []
    for plan in plans:
        started = clock()
        found.predict(plan)
        next_s.append(clock() - started)
    return {"first_s": first_s, "next_s": max(next_s)}


def search(folder: Path, text: str) -> dict[str, Any]:
    """Seconds of a search, and how many of how many plans it predicted."""
    started = clock()
    found = job(folder, text)
    result = run_search(found.objective(), trials=500, out=folder / "run", trace_digest="")
    seconds = clock() - started
    shapes = sum(1 for _ in found.space.candidates.shapes())
    return {
        "seconds": seconds,
        "trials": result.trials,
        "shapes": shapes,
        "stopped": result.stopped,
        "best_us": result.plans[0].prediction.iteration_us,
    }


def beside_all(folder: Path, text: str, step: int) -> dict[str, Any]:
    """How much slower the best plan of a search is than the best of all legal plans that fit, or of every `step`-th of them."""
    found = job(folder, text)
    result = run_search(found.objective(), trials=500, out=folder / "run", trace_digest="")
    prepared = found.job.prepared(found.scenario)
    every, steps = list(found.space.candidates)[::step], prepared.prices
    best_us = min(steps.step_us(each) for each in every if steps.memory(each).total_bytes <= prepared.device_bytes)
    return {
        "plans": len(every),
        "trials": result.trials,
        "excess_pct": (result.plans[0].prediction.iteration_us / best_us - 1) * 100,
    }


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folders = (Path(name) / str(number) for number in range(99))

        def fresh() -> Path:
            folder = next(folders)
            folder.mkdir()
            return folder

        job(fresh(), SMALL.format("gpt2", "1xhgx-h100")).predict(Plan())  # compiles the replay
        others = [Plan.of(tp=4), Plan.of(pp=32), Plan.of(pp=8, virtual_stages=2), Plan.of(micro_batch=2), Plan.of(recompute="none")]
        found["llama3-405b on 16384 GPUs"] = predictions(fresh(), LLAMA, others)
        found["gpt2-medium on 32 GPUs, tp 4 x dp 8"] = predictions(fresh(), GPT2, [Plan.of(tp=2), Plan.of(pp=2)])
        for model in ("llama3-70b", "llama3-405b", "mixtral-8x7b"):
            found[f"search: {model} on 1024 GPUs"] = search(fresh(), LARGE.format(model))
        for model, cluster, step in EXHAUSTIVE:
            found[f"exhaustive: {model} on {cluster}"] = beside_all(fresh(), SMALL.format(model, cluster), step)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for title, values in found.items():
        print(
            f"{title:45}"
            + "  ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items())
        )


if __name__ == "__main__":
    main()
