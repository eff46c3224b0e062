"""Times of ops in float32 and in mixed bfloat16: measures models in both, and judges the ratios on models left out.

    python -m experiments.costmodel.precision measure --python ENV/bin/python --out DIR [--models bert ...] [--rounds 2]
    python -m experiments.costmodel.precision table DIR TABLE.json.gz
    python -m experiments.costmodel.precision score TABLE.json.gz

Measuring is resumable, runs float32 and bfloat16 in turns, and needs a quiet machine and a processor with bfloat16 instructions.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np

from dpro_search.collect._files import write_file
from dpro_search.collect.job import machine
from dpro_search.collect.readers.xplane import read_xplane
from dpro_search.costmodel.learned.op_classes import OTHER, kind_of
from dpro_search.costmodel.precision import PrecisionModel, PrecisionRow, PrecisionTable, WorkloadTime, left_out_scores

MODELS = ("resnet50", "vgg16", "inception_v3", "bert", "mobilenet", "densenet", "efficientnet", "gpt", "lstm", "mlp_mixer")
POLICIES = ("float32", "mixed_bfloat16")
INSTRUCTIONS = ("avx512_bf16", "amx_bf16")
_STEP = Path(__file__).with_name("precision_step.py")
_LONGEST_S = 300


class MeasuredOp(msgspec.Struct, frozen=True, array_like=True):
    """An op of a run: type, median time of a step, and whether it reads or makes bfloat16."""

    type: str
    us: float
    is_bfloat16: bool


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One model in one precision."""

    batch: int
    step_us: list[float]
    loss: float
    versions: dict[str, str]
    machine: str
    ops: dict[str, MeasuredOp] = {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    measure = verbs.add_parser("measure")
    measure.add_argument("--python", required=True, help="interpreter of the TensorFlow environment")
    measure.add_argument("--out", type=Path, required=True)
    measure.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    measure.add_argument("--rounds", type=int, default=2)
    measure.add_argument("--core", type=int, default=0)
    table = verbs.add_parser("table")
    table.add_argument("runs", type=Path)
    table.add_argument("table", type=Path)
    score = verbs.add_parser("score")
    score.add_argument("table", type=Path)
    options = parser.parse_args()
    if options.verb == "measure":
        _measure(options)
    elif options.verb == "table":
        found = table_of(options.runs)
        found.save(options.table)
        print(
            f"{options.table}: {len(found.rows)} ops of {len(found.workloads)} models, {options.table.stat().st_size / 1e3:.0f} KB"
        )
    else:
        _print_scores(PrecisionTable.load(options.table))


def _measure(options: argparse.Namespace) -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    if not any(name in flags for name in INSTRUCTIONS):
        print(f"skipped: this processor has none of {', '.join(INSTRUCTIONS)}; bfloat16 would be emulated", file=sys.stderr)
        return
    for model in options.models:
        for number in range(options.rounds):
            for policy in POLICIES:
                out = options.out / f"{model}.{policy}.{number}.json"
                if not out.exists():
                    run = _run(options.python, options.core, model, policy, options.out / "scratch")
                    options.out.mkdir(parents=True, exist_ok=True)
                    write_file(out, msgspec.json.encode(run))
                    print(f"{model:13} {policy:15} {statistics.median(run.step_us) / 1e3:8.1f} ms", flush=True)


def _run(python: str, core: int, model: str, policy: str, scratch: Path) -> Run:
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    command = [python, str(_STEP), model, policy, str(scratch)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    subprocess.run(command, check=True, env=env, timeout=_LONGEST_S, preexec_fn=lambda: os.sched_setaffinity(0, {core}))
    fields = msgspec.json.decode((scratch / "step.json").read_bytes())
    profile = read_xplane(scratch / "xplane.pb")
    times: dict[str, list[float]] = defaultdict(list)
    for node, start, end in zip(profile.ops.node.tolist(), profile.ops.start_us, profile.ops.end_us, strict=True):
        times[profile.nodes[node]].append(float(end - start))
    details = {
        name: (kind, shapes) for name, kind, shapes in zip(profile.nodes, profile.op_types, profile.input_shapes, strict=True)
    }
    ops = {
        name: MeasuredOp(details[name][0], round(statistics.median(found), 2), "bfloat16[" in details[name][1])
        for name, found in times.items()
    }
    shutil.rmtree(scratch)
    return Run(**fields, machine=machine(), ops=ops)


def table_of(folder: Path) -> PrecisionTable:
    """The table of a folder of runs; of several rounds, an op's least time."""
    runs = {
        path.name.removesuffix(".json"): msgspec.json.decode(path.read_bytes(), type=Run) for path in sorted(folder.glob("*.json"))
    }
    if not runs:
        raise SystemExit(f"{folder}: no runs; measure first")
    rows: list[PrecisionRow] = []
    workloads = []
    for model in sorted({name.partition(".")[0] for name in runs}):
        plain, mixed = ([run for name, run in runs.items() if name.startswith(f"{model}.{policy}.")] for policy in POLICIES)
        if plain and mixed:
            found, unchanged = paired(model, _least(plain), _least(mixed))
            rows += found
            totals = [sum(op.us for op in _least(runs_).values()) for runs_ in (plain, mixed)]
            workloads.append(WorkloadTime(model, plain[0].batch, totals[0], totals[1], unchanged))
    some = next(iter(runs.values()))
    measured_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return PrecisionTable(
        machine=some.machine, versions=some.versions, measured_at=measured_at, workloads=tuple(workloads), rows=tuple(rows)
    )


def paired(model: str, plain: dict[str, MeasuredOp], mixed: dict[str, MeasuredOp]) -> tuple[list[PrecisionRow], float]:
    """The ops that bfloat16 changes, with their times in both precisions; and the float32 time of the others.

    An op is found again by its name and kind. One that is not (a cast; an op that was fused in one precision only) is added to the
    longest op of the innermost scope that has one which is; together they count as the type of the longest.
    """
    same = {name for name in plain.keys() & mixed.keys() if mixed[name].is_bfloat16 and _kind(plain[name]) == _kind(mixed[name])}
    times = {name: [plain[name].us, mixed[name].us, 0.0] for name in same if _kind(plain[name]) not in ("free", "variable", OTHER)}
    longest: dict[str, str] = {}
    for name in times:
        for scope in _scopes(name):
            if scope not in longest or plain[name].us > plain[longest[scope]].us:
                longest[scope] = name
    unchanged, name_of = 0.0, {name: name for name in times}
    for column, ops, others in ((0, plain, mixed), (1, mixed, plain)):
        for name, op in ops.items():
            if name in times:
                continue
            touched = name not in others or mixed[name].is_bfloat16
            anchor = next((longest[scope] for scope in _scopes(name) if scope in longest), None) if touched else None
            if anchor is not None:
                times[anchor][2 if column == 1 and op.type == "Cast" else column] += op.us
                if column == 0 and op.us > plain[name_of[anchor]].us:
                    name_of[anchor] = name
            elif column == 0:
                unchanged += op.us
    rows = [PrecisionRow(model, plain[name_of[name]].type, *(round(us, 2) for us in times[name])) for name in sorted(times)]
    return rows, unchanged


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
    print(f"{table.machine}; {len(table.rows)} ops of {len(table.workloads)} models\n\nkind | ratio | 90 % interval\n---|---|---")
    for kind in sorted({kind_of(row.type) for row in table.rows}):
        ratio = model.ratios.get(kind)
        print(f"{kind} | " + (f"{ratio[0]:.2f} | {ratio[1]:.2f}-{ratio[2]:.2f}" if ratio else "unknown | "))
    print("\nleft out | float32 ms | bfloat16 ms | predicted ms | error | kinds inside | known\n---|---|---|---|---|---|---")
    scores = left_out_scores(table)
    for score in scores:
        times = " | ".join(f"{us / 1e3:.1f}" for us in (score.float32_us, score.bfloat16_us, score.predicted_us))
        print(f"{score.workload} | {times} | {score.error_pct:+.1f} % | {score.inside} of {score.kinds} | {score.known:.0%}")
    errors = np.abs([score.error_pct for score in scores])
    inside, kinds = sum(score.inside for score in scores), sum(score.kinds for score in scores)
    print(
        f"\nmean error {errors.mean():.1f} %, largest {errors.max():.1f} %; {inside} of {kinds} ratios inside their 90 % interval"
    )


if __name__ == "__main__":
    main()
