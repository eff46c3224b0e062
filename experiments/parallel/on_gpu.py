"""Blocks, update and memory of one rank on a GPU, measured by `fit --collect parallel` and predicted.

    python -m experiments.parallel.on_gpu measure OUT.json [--seconds 150]    # on a machine with a GPU and PyTorch
    python -m experiments.parallel.on_gpu score OUT.json [--json]             # anywhere

A decoder of Llama-3-8B's widths with four layers, and GPT-2 medium, in bf16 with FSDP2's mixed precision. Each case is one process
on a fake process group of eight ranks: exchanges take no time, so that what is measured is a rank's own work. Results are written
after each case, and a case that fails leaves its error.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from dpro_search.cluster import bundled
from dpro_search.collect.tables.parallel_times import BlockTime, ParallelTimes
from dpro_search.kinds import job_of, load_source, timed_job
from dpro_search.parallel.answers.breakdown import BETWEEN_PASSES, IN_PASSES
from dpro_search.parallel.costs.recorded import RecordedTimes
from dpro_search.parallel.costs.scales import Scales
from dpro_search.parallel.gpu_ops import slowest
from dpro_search.parallel.job import ParallelJob
from dpro_search.parallel.model import blocks_of
from dpro_search.parallel.prepared import PreparedJob
from dpro_search.parallel.steps.step_prices import StepPrices
from dpro_search.parallel.timed.recording import alone_job, beside_passes
from dpro_search.space.scenario import Scenario

TRAIN = Path(__file__).with_name("train_on_gpu.py")
STEPS = 100  # at most: the observer ends the script
LONGEST_CASE_S = 75
LEAST_LEFT_S = 12.0  # that a case is begun with
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "gpt": {
        "model_type": "gpt2",
        "n_embd": 1024,
        "n_layer": 24,
        "n_head": 16,
        "n_positions": 1024,
        "vocab_size": 50304,
        "tie_word_embeddings": False,
    },
}
BATCHES = {"llama": 96, "gpt": 384}  # three of the largest micro-batches on each of eight replicas
CASES = (  # the first of a model is the one that others are predicted from
    ("llama", "micro_batch=1"),
    ("gpt", "micro_batch=1"),
    ("llama", "tp=2"),
    ("llama", "zero_stage=3"),
    ("llama", "tp=4"),
    ("llama", "tp=8"),
    ("llama", "micro_batch=2"),
    ("llama", "recompute=full"),
    ("llama", "tp=2,zero_stage=3"),
    ("gpt", "micro_batch=4"),
    ("gpt", "micro_batch=4,tp=2"),
    ("gpt", "micro_batch=4,zero_stage=3"),
    ("llama", "micro_batch=4,zero_stage=3"),
    ("llama", "tp=8,sequence_parallel=false"),
    ("llama", "tp=2,sequence_parallel=false"),
    ("gpt", "micro_batch=16"),
    ("gpt", "micro_batch=4,recompute=full"),
    ("gpt", "micro_batch=4,tp=4,sequence_parallel=false"),
    ("llama", "tp=4,sequence_parallel=false"),
    ("llama", "micro_batch=4,zero_stage=3,recompute=full"),
)


class Prediction(NamedTuple):
    """Of a case; blocks have forward and backward pass in us."""

    blocks: dict[str, tuple[float, float]]
    update_us: float
    step_us: float
    allocated_bytes: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "score"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=150.0, help="of measure: no case begins that would end later")
    parser.add_argument("--only", default="", help="of measure: text that the names of cases have, like 'llama tp=2'")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.what == "measure":
        measure(given.file, given.seconds, given.only)
        return
    found = score(json.loads(given.file.read_text()))
    print(json.dumps(found, indent=1) if given.json else "\n".join(_tables(found)))


# Measured.


def measure(out: Path, seconds: float, only: str = "") -> None:
    """Run the cases in turn; adds to the file, where cases that were measured before are kept and not run again."""
    began = time.monotonic()
    found = json.loads(out.read_text()) if out.exists() else {"cases": []}
    found["cases"] = kept = [case for case in found["cases"] if "times" in case]
    done = {(case["model"], case["settings"]) for case in kept}
    signal.signal(signal.SIGALRM, _too_long)
    for model, settings in CASES:
        if (model, settings) in done or only not in f"{model} {settings}":
            continue
        left_s = seconds - (time.monotonic() - began)
        row: dict[str, Any] = {"model": model, "settings": settings}
        if left_s < LEAST_LEFT_S:
            row["error"] = "not begun: no time was left"
        else:
            started = time.monotonic()
            row |= _measured(model, settings, min(LONGEST_CASE_S, left_s + LEAST_LEFT_S))
            row["wall_s"] = round(time.monotonic() - started, 1)
        kept.append(row)
        temporary = out.with_suffix(".tmp")
        temporary.write_text(json.dumps(found))
        temporary.replace(out)
        print(f"{time.monotonic() - began:6.1f} s  {model} {settings}: {row.get('error') or 'measured'}", flush=True)


def _measured(model: str, settings: str, most_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        traceback = Path(folder) / "traceback"
        os.environ["TRACEBACK"] = str(traceback)
        path = write_job(Path(folder), model, "hgx-h100")
        signal.setitimer(signal.ITIMER_REAL, most_s)
        try:
            command = (sys.executable, str(TRAIN), str(path.with_name("config.json")), str(STEPS))
            return {"times": msgspec.to_builtins(timed_job(path, [settings], command, Path(folder) / "times.json"))}
        except Exception as error:  # whatever it is, the next case runs
            text = traceback.read_text()[-3000:] if traceback.exists() else ""
            return {"error": f"{type(error).__name__}: {error}", "traceback": text}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _too_long(*_: object) -> None:
    raise TimeoutError("the case took too long")


def write_job(folder: Path, model: str, cluster: str) -> Path:
    """The files that describe a model's job; returns its ``job.toml``."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[model]))
    sequence = CONFIGS[model].get("n_positions") or CONFIGS[model]["max_position_embeddings"]
    lines = ['model = "config.json"', f'cluster = "{cluster}"', f"global_batch = {BATCHES[model]}", f"sequence = {sequence}"]
    lines += ['precision = "bf16"', 'framework = "pytorch-2"', "[runs]", "micro_batch = 1", "zero_stage = 0"]
    path = folder / "job.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


# Predicted.


def score(measured: dict[str, Any]) -> dict[str, Any]:
    """Each measured case beside predictions: cold, and from the first recording of its model."""
    times = {
        (case["model"], case["settings"]): msgspec.convert(case["times"], ParallelTimes)
        for case in measured["cases"]
        if "times" in case
    }
    rows = [row for model in CONFIGS for row in _scored(model, {key[1]: one for key, one in times.items() if key[0] == model})]
    failed = {f"{case['model']} {case['settings']}": case["error"] for case in measured["cases"] if "error" in case}
    first = next(iter(times.values()), ParallelTimes())
    facts = {name: getattr(first, name) for name in ("device", "torch", "flops_per_s", "memory_bytes_per_s")}
    return {**facts, "rows": rows, "failed": failed}


def _scored(model: str, recorded: dict[str, ParallelTimes]) -> Iterator[dict[str, Any]]:
    base = next(settings for name, settings in CASES if name == model)
    for settings, times in recorded.items():
        (step,) = times.steps
        sources = {"cold": None}
        if base in recorded and settings != base:
            sources["first"] = recorded[base]
        found = {name: predicted(model, settings, times.device, source) for name, source in sources.items()}
        updates = {"cold": found["cold"].update_us}
        if "first" in sources:  # in proportion to the rank's parameters
            first = recorded[base]
            updates["first"] = first.steps[0].update_us * times.updates[0].elements / first.updates[0].elements
        beside_us = beside_passes(_alone(model, settings, times.device), step, times.updates[0].elements).us - step.update_us
        yield {
            "model": model,
            "settings": settings,
            "finite": step.finite,
            "blocks": [_block(row, found) for row in step.blocks],
            "update_us": {"measured": step.update_us, **updates},
            "step_us": {"measured": step.step_us + step.update_us, **{name: one.step_us for name, one in found.items()}},
            "beside_us": beside_us,
            "peak_bytes": {"measured": step.peak_bytes, "cold": found["cold"].allocated_bytes},
        }


def _block(row: BlockTime, found: dict[str, Prediction]) -> dict[str, Any]:
    passes = {
        name: {"measured": us, **{source: one.blocks[row.block][place] for source, one in found.items()}}
        for place, (name, us) in enumerate((("forward_us", row.forward_us), ("backward_us", row.backward_us)))
    }
    return {"block": row.block, **passes}


def predicted(model: str, settings: str, gpu: str, times: ParallelTimes | None) -> Prediction:
    """A rank's own work under a plan on one GPU, which waits for no slower one; exchanges take no time."""
    job = _alone(model, settings, gpu)
    alone = job.description
    strategy = alone.strategy
    free = frozenset[str]().union(*BETWEEN_PASSES.values(), *IN_PASSES.values())
    alike = 1 / slowest(strategy.devices)
    workload = replace(alone.workload(strategy), scales=Scales(free=free, matmul=alike, attention=alike))
    if times is not None:
        update = beside_passes(job, times.steps[0], times.updates[0].elements)
        blocks = tuple(msgspec.structs.replace(row, spread=0.0, reduce_us=0.0) for row in times.blocks)
        even = msgspec.structs.replace(times, blocks=blocks, updates=(update,))
        workload = replace(workload, times=RecordedTimes(even, None, strategy.devices))
    steps = StepPrices(workload)
    passes = steps.passes(strategy)
    return Prediction(
        blocks={block.name: (passes[block.name].forward_us, passes[block.name].backward_us) for block in blocks_of(workload.model)},
        update_us=steps.costs(strategy).update_us[0],
        step_us=steps.step_us(strategy),
        allocated_bytes=steps.memory(strategy).allocated_bytes,
    )


def _alone(model: str, settings: str, gpu: str) -> PreparedJob:
    known = bundled.aliases("device").get(bundled.plain(gpu), "h100-sxm")
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(load_source(write_job(Path(folder), model, bundled.usual_machine(known) or "hgx-h100"))).job
    assert isinstance(job, ParallelJob)
    prepared, plan = job.prepared(Scenario()), job.scenario([settings]).plan
    return alone_job(prepared.description, prepared.workload(plan).strategy, on_gpu=True)


# Tables.


def _tables(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['device']}, PyTorch {found['torch']}: a large product reaches {found['flops_per_s'] / 1e12:.0f} TFLOP/s, "
    yield f"a copy {found['memory_bytes_per_s'] / 1e12:.2f} TB/s"
    yield "\n| case | block | forward, ms | cold | from first | backward, ms | cold | from first |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in found["rows"]:
        for block in row["blocks"]:
            passes = " | ".join(_cells(block[name], 1e3) for name in ("forward_us", "backward_us"))
            yield f"| {row['model']} {row['settings']} | {block['block']} | {passes} |"
    yield "\n| case | update, ms | cold | from first | step, ms | beside passes | cold | from first | peak, GiB | cold |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in found["rows"]:
        step, peak = row["step_us"], row["peak_bytes"]
        errors = " | ".join(_error(step, source) for source in ("cold", "first"))
        beside = f"{row['beside_us'] / step['measured'] * 100:.1f} %"
        numbers = f"{_cells(row['update_us'], 1e3)} | {step['measured'] / 1e3:.2f} | {beside} | {errors}"
        losses = "" if row["finite"] else " (losses not finite)"
        gibibytes = f"{peak['measured'] / 2**30:.2f} | {_error(peak, 'cold')}"
        yield f"| {row['model']} {row['settings']}{losses} | {numbers} | {gibibytes} |"
    yield "\n| what | rows | cold: median, worst | from first: median, worst |\n|---|---|---|---|"
    for name, values in _groups(found["rows"]).items():
        yield f"| {name} | {len(values)} | {_summary(values, 'cold')} | {_summary(values, 'first')} |"
    for name, error in found["failed"].items():
        yield f"failed: {name}: {error}"


def _groups(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {}
    for row in rows:
        for block in row["blocks"]:
            for name in ("forward", "backward"):
                found.setdefault(f"{row['model']}: {block['block']}, {name}", []).append(block[f"{name}_us"])
    for name in ("update", "step"):
        found[name] = [row[f"{name}_us"] for row in rows]
    found["peak memory"] = [row["peak_bytes"] for row in rows]
    return found


def _cells(values: dict[str, float], unit: float) -> str:
    return f"{values['measured'] / unit:.2f} | {_error(values, 'cold')} | {_error(values, 'first')}"


def _error(values: dict[str, float], source: str) -> str:
    return f"{(values[source] / values['measured'] - 1) * 100:+.1f} %" if source in values else ""


def _summary(values: list[dict[str, float]], source: str) -> str:
    errors = [abs(value[source] / value["measured"] - 1) * 100 for value in values if source in value]
    return f"{np.median(errors):.1f} %, {max(errors):.1f} %" if errors else ""


if __name__ == "__main__":
    main()
