"""Times of ops in float32 and in mixed bfloat16: measures models in both, and judges the ratios on models left out.

    python -m experiments.costmodel.precision measure --python ENV/bin/python --out DIR [--cores 0 1] [--seconds 140]
    python -m experiments.costmodel.precision table DIR TABLE.json.gz
    python -m experiments.costmodel.precision score TABLE.json.gz

Measuring is resumable, runs float32 and bfloat16 in turns, one model at a time on each core, and needs a quiet machine and a
processor with bfloat16 instructions.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import msgspec
import numpy as np

from dpro_search.collect._files import write_file
from dpro_search.collect.readers.tensorflow.xplane import read_xplane, tensor_types
from dpro_search.collect.this_machine import machine
from dpro_search.costmodel.fused.op_classes import kind_of
from dpro_search.costmodel.precision import (
    CastRow,
    PrecisionModel,
    PrecisionRow,
    PrecisionScore,
    PrecisionTable,
    WorkloadTime,
    family_of,
    left_out_scores,
)
from experiments.costmodel.bfloat16 import has_instructions, measure_parser, save_table

MODELS = (
    "resnet50", "vgg16", "inception_v3", "bert", "mobilenet", "densenet", "efficientnet", "gpt", "lstm", "mlp_mixer",
    "mobilenet_v3", "xception", "convnext", "unet",
)  # fmt: skip
POLICIES = ("float32", "mixed_bfloat16")
_STEP = Path(__file__).with_name("precision_step.py")
_LONGEST_S = 300
_MOST_PROFILED = 1.15  # ops of a profiled step over a timed step; beyond that, something else ran meanwhile


class MeasuredOp(msgspec.Struct, frozen=True, array_like=True):
    """An op of a run: type, median time of a step, and types and shapes of its inputs as the profiler writes them."""

    type: str
    us: float
    inputs: str

    @property
    def reads_bfloat16(self) -> bool:
        """Whether it computes with such a tensor, or makes float32 of it."""
        return "bfloat16[" in self.inputs

    @property
    def elements(self) -> int:
        """Of its first input; 0 where that is not known."""
        found = tensor_types(self.inputs)
        return found[0].elements if found and found[0] is not None else 0


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One model in one precision."""

    batch: int
    step_us: list[float]
    loss: float
    versions: dict[str, str]
    machine: str
    ops: dict[str, MeasuredOp] = {}

    @property
    def profiled_share(self) -> float:
        """Time of a profiled step's ops over that of a step without the profiler, which is a little longer than its ops."""
        return sum(op.us for op in self.ops.values()) / statistics.median(self.step_us)


class Pairs(msgspec.Struct, frozen=True, kw_only=True):
    """A model's ops in both precisions, and the float32 time of those that bfloat16 does not change."""

    rows: list[PrecisionRow]
    casts: list[CastRow]
    unchanged_us: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    measure = measure_parser(verbs, "TensorFlow", MODELS)
    measure.add_argument("--rounds", type=int, default=2)
    measure.add_argument("--cores", type=int, nargs="+", default=[0])
    measure.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after this time")
    table = verbs.add_parser("table")
    table.add_argument("runs", type=Path)
    table.add_argument("table", type=Path)
    score = verbs.add_parser("score")
    score.add_argument("table", type=Path)
    options = parser.parse_args()
    if options.verb == "measure":
        _measure(options)
    elif options.verb == "table":
        save_table(table_of(options.runs), options.table)
    else:
        _print_scores(PrecisionTable.load(options.table))


def _measure(options: argparse.Namespace) -> None:
    if not has_instructions():
        return
    cores: SimpleQueue[int] = SimpleQueue()
    for core in options.cores:
        cores.put(core)
    until = time.monotonic() + options.seconds
    with ThreadPoolExecutor(len(options.cores)) as pool:
        for done in [pool.submit(_measure_model, options, model, cores, until) for model in options.models]:
            done.result()


def _measure_model(options: argparse.Namespace, model: str, cores: SimpleQueue[int], until: float) -> None:
    """All runs of a model that are not there yet, on the next core that is free."""
    core = cores.get()
    try:
        for number in range(options.rounds):
            for policy in POLICIES:
                out = options.out / f"{model}.{policy}.{number}.json"
                if out.exists() or time.monotonic() > until:
                    continue
                run = _run(options.python, core, model, policy, options.out / f"scratch-{core}")
                write_file(out, msgspec.json.encode(run))
                print(f"{model:13} {policy:15} {statistics.median(run.step_us) / 1e3:8.1f} ms", flush=True)
    finally:
        cores.put(core)


def _run(python: str, core: int, model: str, policy: str, scratch: Path) -> Run:
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    command = ["taskset", "--cpu-list", str(core), python, str(_STEP), model, policy, str(scratch)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    subprocess.run(command, check=True, env=env, timeout=_LONGEST_S)
    fields = msgspec.json.decode((scratch / "step.json").read_bytes())
    profile = read_xplane(scratch / "xplane.pb")
    times: dict[str, list[float]] = defaultdict(list)
    for node, start, end in zip(profile.ops.node.tolist(), profile.ops.start_us, profile.ops.end_us, strict=True):
        times[profile.nodes[node]].append(float(end - start))
    details = {
        name: (kind, shapes) for name, kind, shapes in zip(profile.nodes, profile.op_types, profile.input_shapes, strict=True)
    }
    ops = {
        name: MeasuredOp(details[name][0], round(statistics.median(found), 2), details[name][1]) for name, found in times.items()
    }
    shutil.rmtree(scratch)
    return Run(**fields, machine=machine(), ops=ops)


def table_of(folder: Path) -> PrecisionTable:
    """The table of a folder of runs; of several rounds, an op's least time. Runs that were disturbed are left out, and named."""
    runs = {
        path.name.removesuffix(".json"): msgspec.json.decode(path.read_bytes(), type=Run) for path in sorted(folder.glob("*.json"))
    }
    if not runs:
        raise SystemExit(f"{folder}: no runs; measure first")
    for name in [name for name, run in runs.items() if run.profiled_share > _MOST_PROFILED]:
        share = runs.pop(name).profiled_share
        print(f"{name}: left out; its profiled ops took {share:.2f} times a whole step without the profiler", file=sys.stderr)
    rows: list[PrecisionRow] = []
    casts: list[CastRow] = []
    workloads = []
    for model in sorted({name.partition(".")[0] for name in runs}):
        plain, mixed = ([run for name, run in runs.items() if name.startswith(f"{model}.{policy}.")] for policy in POLICIES)
        if plain and mixed:
            found = paired(model, _least(plain), _least(mixed))
            rows += found.rows
            casts += found.casts
            totals = [sum(op.us for op in _least(runs_).values()) for runs_ in (plain, mixed)]
            workloads.append(WorkloadTime(model, plain[0].batch, totals[0], totals[1], found.unchanged_us))
    some = next(iter(runs.values()))
    measured_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return PrecisionTable(
        machine=some.machine,
        versions=some.versions,
        measured_at=measured_at,
        workloads=tuple(workloads),
        rows=tuple(rows),
        casts=tuple(casts),
    )


def paired(model: str, plain: dict[str, MeasuredOp], mixed: dict[str, MeasuredOp]) -> Pairs:
    """A model's ops with their times in both precisions.

    An op is found again by its name and kind; a cast that only the run in bfloat16 has stands for itself. Another op that is not
    found (one that was fused in one precision only) is added to the longest op of the innermost scope that has one which is;
    together they count as the type of the longest.
    """
    same = {name for name in plain.keys() & mixed.keys() if mixed[name].reads_bfloat16 and _kind(plain[name]) == _kind(mixed[name])}
    times = {name: [plain[name].us, mixed[name].us] for name in same if family_of(plain[name].type) is not None}
    longest: dict[str, str] = {}
    for name in times:
        for scope in _scopes(name):
            if scope not in longest or plain[name].us > plain[longest[scope]].us:
                longest[scope] = name
    casts = {name for name, op in mixed.items() if op.type == "Cast" and name not in plain}
    unchanged, name_of = 0.0, {name: name for name in times}
    for column, ops, others in ((0, plain, mixed), (1, mixed, plain)):
        for name, op in ops.items():
            if name in times or (column == 1 and name in casts):
                continue
            touched = name not in others or mixed[name].reads_bfloat16
            anchor = next((longest[scope] for scope in _scopes(name) if scope in longest), None) if touched else None
            if anchor is not None:
                times[anchor][column] += op.us
                if column == 0 and op.us > plain[name_of[anchor]].us:
                    name_of[anchor] = name
            elif column == 0:
                unchanged += op.us
    rows = [PrecisionRow(model, plain[name_of[name]].type, *(round(us, 2) for us in times[name])) for name in sorted(times)]
    found_casts = [CastRow(model, mixed[name].elements, mixed[name].us) for name in sorted(casts)]
    return Pairs(rows=rows, casts=found_casts, unchanged_us=unchanged)


def _least(runs: list[Run]) -> dict[str, MeasuredOp]:
    names = set.intersection(*(set(run.ops) for run in runs))
    return {name: min((run.ops[name] for run in runs), key=lambda op: op.us) for name in names}


def _kind(op: MeasuredOp) -> str:
    return kind_of(op.type)


def _scopes(name: str) -> list[str]:
    """Enclosing scopes, from the innermost; not the outermost, which says nothing."""
    parts = name.split("/")
    return ["/".join(parts[:length]) for length in range(len(parts) - 1, 1, -1)]


def _print_scores(table: PrecisionTable) -> None:
    model = PrecisionModel.fit(table)
    print(f"{table.machine}; {len(table.rows)} ops and {len(table.casts)} casts of {len(table.workloads)} models\n")
    print("| kind | ratio | 90 % interval |\n|---|---:|---:|")
    for kind in sorted({kind_of(row.type) for row in table.rows}):
        ratio = model.ratio_of_kind(kind)
        print(f"| {kind} | " + (f"{ratio[0]:.2f} | {ratio[1]:.2f}-{ratio[2]:.2f} |" if ratio else "unknown | |"))
    for family, size in model.sizes.items():
        ends = f"{size.least_us:.0f} to {size.most_us:.0f} us"
        print(f"\n{family}: ratio times (us / {size.usual_us:.0f})^{size.exponent:+.3f}, {ends}")
    print(f"\na cast: {model.call_us:.1f} us and {model.element_us * 1e3:.3f} ns an element\n")
    scores = left_out_scores(table)
    columns: dict[str, Callable[[PrecisionScore], str]] = {
        "left out": lambda score: score.workload,
        "float32 ms": lambda score: f"{score.float32_us / 1e3:.1f}",
        "bfloat16 ms": lambda score: f"{score.bfloat16_us / 1e3:.1f}",
        "predicted ms": lambda score: f"{score.predicted_us / 1e3:.1f}",
        "90 % interval": lambda score: "-".join(f"{us / 1e3:.0f}" for us in score.interval_us),
        "error": lambda score: f"{score.error_pct:+.1f} %",
        "casts ms": lambda score: f"{score.casts_us / 1e3:.1f}",
        "predicted casts": lambda score: f"{score.predicted_casts_us / 1e3:.1f}",
        "kinds inside": lambda score: f"{score.inside} of {score.kinds}",
        "of kinds measured": lambda score: f"{score.known:.0%}",
    }
    print("| " + " | ".join(columns) + " |\n|---|" + "---:|" * (len(columns) - 1))
    for score in scores:
        print("| " + " | ".join(cell(score) for cell in columns.values()) + " |")
    errors = np.abs([score.error_pct for score in scores])
    inside, kinds = sum(score.inside for score in scores), sum(score.kinds for score in scores)
    whole = sum(score.interval_us[0] <= score.bfloat16_us <= score.interval_us[1] for score in scores)
    print(f"\nmean error {errors.mean():.1f} %, largest {errors.max():.1f} %")
    print(f"inside their 90 % interval: {inside} of {kinds} ratios, {whole} of {len(scores)} steps")


if __name__ == "__main__":
    main()
