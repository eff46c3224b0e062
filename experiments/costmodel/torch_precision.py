"""Times of PyTorch's ops in float32 and under bfloat16 autocast: records models in both, and judges the ratios on models left out.

    python -m experiments.costmodel.torch_precision measure --python ENV/bin/python --out DIR [--core 0] [--models NAME ...]
    python -m experiments.costmodel.torch_precision table DIR TABLE.json.gz
    python -m experiments.costmodel.torch_precision score DIR

Each model is a job of one rank with one thread, recorded as it is and with all its modules in bfloat16; an op's time is the median
of a recording's profiled steps. Measuring is resumable, and needs a quiet core and a processor with bfloat16 instructions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpro_search.collect.assemble.common import steps_of
from dpro_search.collect.assemble.torch.autocast import Lowering, ModuleRows
from dpro_search.collect.assemble.torch.files import RawRank, read_rank
from dpro_search.collect.assemble.torch.modules import RankModules
from dpro_search.collect.launch.ranks import JobSpec
from dpro_search.collect.launch.step_times import StepSchedule
from dpro_search.collect.launchers import PYTORCH_DDP
from dpro_search.collect.modules import LoweredOps, ModuleInfo
from dpro_search.collect.recorded_names import AUTOGRAD_FUNCTION
from dpro_search.collect.trace import Floats, Trace
from dpro_search.costmodel.precision import CastRow, PrecisionRow, PrecisionTable, WorkloadTime, fit_torch
from dpro_search.deploy.export import export_plan
from dpro_search.deploy.parts.pytorch import PYTORCH
from dpro_search.space.plan import Plan
from dpro_search.space.transformations.modules import change_of, outermost, together_us
from experiments.costmodel.bfloat16 import has_instructions, measure_parser, save_table

JOB = Path(__file__).with_name("torch_precision_job.py")
MODELS = ("bert", "convnext", "gpt", "inception_v3", "mlp_mixer", "mobilenet", "resnet50", "vgg16")
_SCHEDULE = StepSchedule(warmup=2, untraced=1, traced=7)
_CAST, _CAST_BACK = "aten::to", "ToCopyBackward0"


@dataclass(frozen=True)
class Passes:
    """A module in one precision: names of the ops of both passes, their times and those of the casts in them, and the windows."""

    names: tuple[str, ...]
    us: Floats
    casts_us: tuple[float, float]
    window_us: tuple[float, float]


@dataclass(frozen=True)
class Pair:
    """A module in both precisions."""

    workload: str
    info: ModuleInfo
    float32: Passes
    bfloat16: Passes
    lowering: Lowering

    @property
    def lowered(self) -> LoweredOps:
        """What the recording in float32 says of it."""
        assert self.info.lowered is not None
        return self.info.lowered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    measure_parser(verbs, "PyTorch", MODELS).add_argument("--core", type=int, default=0)
    for verb in ("table", "score"):
        verbs.add_parser(verb).add_argument("runs", type=Path)
    verbs.choices["table"].add_argument("table", type=Path)
    options = parser.parse_args()
    if options.verb == "measure":
        _measure(options)
        return
    pairs = [pair for folder in sorted(options.runs.iterdir()) for pair in pairs_of(folder)]
    if options.verb == "table":
        save_table(table_of(options.runs, pairs), options.table)
    else:
        _print_scores(table_of(options.runs, pairs), pairs)


def _measure(options: argparse.Namespace) -> None:
    if not has_instructions():
        return
    for model in options.models:
        folder: Path = options.out / model
        if (folder / "bfloat16" / "trace").exists():
            continue
        command = (options.python, str(JOB), model)
        trace = _recorded(folder / "float32", JobSpec(command=command, ranks=1, cores=(options.core,), env={}))
        names = outermost([module.name for module in trace.modules if module.lowered is not None])
        export_plan(Plan(bfloat16_modules=names), folder / "plan", (PYTORCH,))
        env = {"DPRO_SEARCH_PLAN": str(folder / "plan")}
        _recorded(folder / "bfloat16", JobSpec(command=command, ranks=1, cores=(options.core,), env=env))
        print(model, flush=True)


def _recorded(folder: Path, spec: JobSpec) -> Trace:
    if (folder / "trace").exists():
        return Trace.load(folder / "trace")
    folder.mkdir(parents=True, exist_ok=True)
    return PYTORCH_DDP.record(spec, folder / "trace", schedule=_SCHEDULE, keep_raw=folder / "raw")


def pairs_of(folder: Path) -> Iterator[Pair]:
    """The modules of a model that ran in bfloat16, in both precisions."""
    infos = {module.name: module for module in Trace.load(folder / "float32" / "trace").modules}
    raw = [read_rank(folder / precision / "raw" / "rank0") for precision in ("float32", "bfloat16")]
    (plain, lowers), (mixed, _) = (_modules_of(rank) for rank in raw)
    for name in outermost([name for name, info in infos.items() if info.lowered is not None]):
        found = [_passes(rank, rows[name]) for rank, rows in zip(raw, (plain, mixed), strict=True)]
        if found[0].names != found[1].names:
            print(f"{folder.name}: module '{name}' ran other ops in bfloat16; left out", file=sys.stderr)
            continue
        yield Pair(folder.name, infos[name], found[0], found[1], lowers[name])


def _modules_of(rank: RawRank) -> tuple[dict[str, list[ModuleRows]], dict[str, Lowering]]:
    """Calls of each module, and what autocast would do to it."""
    base_ns = rank.hook.steps[0][0]
    modules = RankModules(rank, 0, base_ns, steps_of([rank.hook], base_ns))
    calls: dict[str, list[ModuleRows]] = {}
    names = [module.name for module in rank.hook.modules or []]
    for call in modules.calls:
        calls.setdefault(names[call.module], []).append(call.rows)
    return calls, {names[number]: lowers for number, (_, lowers) in modules.lowerings().items()}


def _passes(rank: RawRank, calls: Sequence[ModuleRows]) -> Passes:
    """Medians over the calls but the last, which the execution trace slowed."""
    spans, found = rank.spans, []
    within = np.flatnonzero(spans.is_op & spans.named(_CAST))
    for call in calls[:-1]:
        names = [spans.names[name].removeprefix(AUTOGRAD_FUNCTION) for name in spans.name[[*call.ops, *call.functions]]]
        us, casts_us, kept = [], [0.0, 0.0], []
        for place, (name, row) in enumerate(zip(names, [*call.ops, *call.functions], strict=True)):
            long_us = float(spans.end_us[row] - spans.start_us[row])
            if name in (_CAST, _CAST_BACK):
                casts_us[place >= len(call.ops)] += long_us
                continue
            inner = within[(spans.start_us[within] >= spans.start_us[row]) & (spans.end_us[within] <= spans.end_us[row])]
            cast_us = float((spans.end_us[inner] - spans.start_us[inner]).sum()) if place < len(call.ops) else 0.0
            casts_us[0] += cast_us
            us.append(long_us - cast_us)
            kept.append(name)
        found.append((tuple(kept), us, casts_us, (call.forward_us, call.backward_us)))
    return Passes(
        names=found[0][0],
        us=np.median([us for _, us, _, _ in found], axis=0),
        casts_us=tuple(np.median([casts for _, _, casts, _ in found], axis=0).tolist()),
        window_us=tuple(np.median([window for *_, window in found], axis=0).tolist()),
    )


def table_of(folder: Path, pairs: Sequence[Pair]) -> PrecisionTable:
    """Ops that changed, and casts as the mean of those of a module's pass."""
    rows, casts = [], []
    for pair in pairs:
        for place in np.flatnonzero(pair.lowering.lowers).tolist():
            us = [round(float(passes.us[place]), 2) for passes in (pair.float32, pair.bfloat16)]
            rows.append(PrecisionRow(pair.workload, pair.lowering.types[place], *us))
        count = pair.lowered.casts
        casts += [
            CastRow(pair.workload, round(pair.lowered.cast_elements / count), round(us / count, 2)) for us in pair.bfloat16.casts_us
        ]
    workloads = []
    for model in sorted({pair.workload for pair in pairs}):
        own = [pair for pair in pairs if pair.workload == model]
        float32_us, bfloat16_us = (
            round(sum(sum(passes.window_us) for passes in found), 1)
            for found in ([pair.float32 for pair in own], [pair.bfloat16 for pair in own])
        )
        changed_us = sum(row.float32_us for row in rows if row.workload == model)
        workloads.append(WorkloadTime(model, 0, float32_us, bfloat16_us, round(float32_us - changed_us, 1)))
    meta = Trace.load(folder / pairs[0].workload / "float32" / "trace").meta
    return PrecisionTable(
        machine=meta.machine,
        versions=meta.versions,
        measured_at=meta.recorded_at,
        workloads=tuple(workloads),
        rows=tuple(rows),
        casts=tuple(casts),
    )


def _print_scores(table: PrecisionTable, pairs: Sequence[Pair]) -> None:
    """Each model's modules as predicted from the other models, beside what they took."""
    print(f"{table.machine}; {len(table.rows)} ops of {len(table.workloads)} models\n")
    print("| left out | modules | float32 ms | bfloat16 ms | predicted ms | interval | error | mean error of a module |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    errors, inside = [], 0
    for model in sorted({pair.workload for pair in pairs}):
        own, ratios = [pair for pair in pairs if pair.workload == model], fit_torch(table, without=model)
        changes = [change_of(pair.lowered, ratios) for pair in own]
        plain = np.array([sum(pair.float32.window_us) for pair in own])
        mixed = np.array([sum(pair.bfloat16.window_us) for pair in own])
        predicted = plain + [change.forward_us + change.backward_us for change in changes]
        uncertainty_us = together_us(changes)
        total_us, error = predicted.sum(), predicted.sum() / mixed.sum() - 1
        errors.append(abs(error))
        inside += abs(total_us - mixed.sum()) <= uncertainty_us
        cells = (
            model,
            str(len(own)),
            *(f"{us / 1e3:.1f}" for us in (plain.sum(), mixed.sum(), total_us)),
            f"{(total_us - uncertainty_us) / 1e3:.0f}-{(total_us + uncertainty_us) / 1e3:.0f}",
            f"{error:+.1%}",
            f"{np.abs(predicted / mixed - 1).mean():.1%}",
        )
        print(f"| {' | '.join(cells)} |")
    print(f"\nmean error {np.mean(errors):.1%}, largest {np.max(errors):.1%}; {inside} of {len(errors)} inside their intervals")
    model = fit_torch(table)
    print(f"a cast: {model.call_us:.1f} us and {model.element_us * 1e3:.3f} ns an element")
    for type_ in sorted({row.type for row in table.rows}, key=lambda t: -sum(r.float32_us for r in table.rows if r.type == t)):
        found, own = model.ratio(type_), [row for row in table.rows if row.type == type_]
        sums = [sum(getattr(row, name) for row in own) / 1e3 for name in ("float32_us", "bfloat16_us")]
        shown = "unknown" if found is None else f"{found[0]:.2f} ({found[1]:.2f}-{found[2]:.2f})"
        print(f"  {type_}: {len(own)} ops, {sums[0]:.1f} -> {sums[1]:.1f} ms, ratio {shown}")


if __name__ == "__main__":
    main()
