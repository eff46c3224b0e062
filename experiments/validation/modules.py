"""Recomputation, or bfloat16, by module in DistributedDataParallel jobs: predicted beside real runs in turn.

    python -m experiments.validation.modules DIR --python ENV/bin/python --workload bert [--batch 16] [--rounds 1]
        [--change precision]

Records the job into DIR where that was not done, runs it as recorded and with half, then all, of its rows of blocks changed (A B C
A B C), adds the runs to those that DIR holds, and prints the table of all. Nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import numpy as np

from dpro_search.collect.launch.ranks import JobSpec, default_cores
from dpro_search.collect.launch.step_times import Schedule
from dpro_search.collect.launchers import PYTORCH_DDP
from dpro_search.collect.trace import Trace
from dpro_search.costmodel.precision import BUNDLED_TORCH_TABLE
from dpro_search.kinds import Job, PlanOptions, job_of, recorded_job
from dpro_search.space.plan import Plan
from experiments.validation.turns import in_turn

TRAIN = Path(__file__).resolve().parents[1] / "workloads" / "torch_train.py"
WARMUP = 4
_GRIDS = {"recomputation": ("recomputed_modules", "first"), "precision": ("bfloat16_modules", "blocks")}


class Measured(msgspec.Struct):
    """One run of a setting."""

    setting: str
    iteration_us: list[float]
    compute_cpu_us: list[float]
    peak_rss_bytes: int
    same_losses: str


def plans(prices: Job, change: str) -> dict[str, Plan]:
    """The settings, by name."""
    field, grid = _GRIDS[change]
    blocks = next(choice for choice in prices.space.choices if choice.name == change).grids[grid][-1][field]
    return {
        "as recorded": Plan(),
        "half of the blocks": Plan.of(**{field: blocks[: len(blocks) // 2]}),
        "all blocks": Plan.of(**{field: blocks}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--python", required=True)
    parser.add_argument("--workload", default="bert")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--change", choices=sorted(_GRIDS), default="recomputation")
    parser.add_argument("--precision-table", type=Path, default=BUNDLED_TORCH_TABLE)
    options = parser.parse_args()
    folder: Path = options.folder
    command = (
        options.python,
        str(TRAIN),
        "--model",
        options.workload,
        "--batch",
        str(options.batch),
        "--steps",
        str(options.steps),
    )
    spec = JobSpec(command=command, ranks=2, cores=default_cores(2), env={})
    if not (folder / "trace").exists():
        folder.mkdir(parents=True, exist_ok=True)
        PYTORCH_DDP.record(spec, folder / "trace", schedule=Schedule(warmup=WARMUP, untraced=7, traced=6))
    trace = Trace.load(folder / "trace")
    prices = job_of(trace, PlanOptions(compute=frozenset({options.change}), precision_table=options.precision_table))
    settings, job, path = plans(prices, options.change), recorded_job(trace, command), folder / f"{options.change}.json"
    runs = msgspec.json.decode(path.read_bytes(), type=list[Measured]) if path.exists() else []
    for name, run, verdict in in_turn(job, settings, options.rounds, WARMUP):
        times = run.times
        runs.append(Measured(name, times.iteration_us.tolist(), times.compute_cpu_us.tolist(), times.peak_rss_bytes, verdict))
        path.write_bytes(msgspec.json.encode(runs))
    print(table(prices, settings, runs))


def table(prices: Job, settings: dict[str, Plan], runs: list[Measured]) -> str:
    """Predicted and measured step times and peaks, a line for each setting."""
    base = prices.predict(Plan())
    cpu_us = {name: [float(np.median(run.compute_cpu_us)) for run in runs if run.setting == name] for name in settings}
    heads = (
        "setting", "modules", "predicted, ms (interval)", "measured, ms", "error", "error of the ratio", "processor time, measured",
        "peak: predicted, MiB", "measured, MiB", "losses",
    )  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    medians = {name: [float(np.median(run.iteration_us)) for run in runs if run.setting == name] for name in settings}
    for name, plan in settings.items():
        if not medians[name]:
            continue
        found, measured = prices.predict(plan), float(np.median(medians[name]))
        ratio = (found.iteration_us / base.iteration_us) / (measured / float(np.median(medians["as recorded"]))) - 1
        low, high = found.interval_us
        own = [run for run in runs if run.setting == name]
        cells = (
            name,
            str(len(plan.recomputed_modules or plan.bfloat16_modules or ())),
            f"{found.iteration_us / 1e3:.0f} ({low / 1e3:.0f}-{high / 1e3:.0f})",
            ", ".join(f"{us / 1e3:.0f}" for us in medians[name]),
            f"{(found.iteration_us / measured - 1) * 100:+.1f} %",
            f"{ratio * 100:+.1f} %",
            f"{np.median(cpu_us[name]) / np.median(cpu_us['as recorded']):.3f}",
            "-" if found.peak_memory_bytes is None else f"{found.peak_memory_bytes / 2**20:.0f}",
            ", ".join(f"{run.peak_rss_bytes / 2**20:.0f}" for run in own),
            own[-1].same_losses,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
