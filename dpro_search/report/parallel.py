"""Sections of a parallel job: the described setting and the best plan side by side, the parts of a step, the pipeline, the memory.

All of them show one breakdown of the step: that of the pipeline rank that has most to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dpro_search.kinds import STEP_PARTS, ParallelSetting
from dpro_search.parallel.strategy import DEFAULTS, SETTINGS
from dpro_search.report import units
from dpro_search.report.charts import BarPart, PipelineRow, pipeline, stacked
from dpro_search.report.html import Element, Section, bullets, element, figure, paragraph, table

EFFICIENCY: Mapping[str, tuple[str, Callable[[float], str]]] = {  # keys of `replay`: names for people, and how values are written
    "tokens_per_second": ("tokens a second", units.amount),
    "tokens_per_second_per_device": ("tokens a second and device", units.amount),
    "mfu_pct": ("MFU", units.percent),
    "cost_per_million_tokens": ("price of a million tokens", units.money),
}
_COMPUTED = ("embedding", "convolution", "matmul", "pointwise", "gather", "compute")  # parts that share a colour
_PASSES = {"forward": "forward", "backward": "backward", "update": "optimizer", "comm": "communication", "idle": "bubble"}
MEMORY: Mapping[str, tuple[str, str]] = {  # categories of memory: class of the colour, and name
    "weights": ("attention", "parameters"),
    "gradients": ("mlp", "gradients"),
    "optimizer": ("update", "optimizer state"),
    "activations": ("comm", "activations"),
    "logits": ("head", "logits"),
    "gathered": ("norms", "gathered parameters"),
    "buckets": ("dp", "gradient buckets"),
    "workspace": ("server", "workspace"),
    "fragments": ("host", "fragmentation"),
    "cached": ("wait", "cached blocks"),
    "context": ("computed", "driver and NCCL"),
}
_MOST_STAGES = 16  # of which passes are drawn; more are evenly left out
_MOST_LAYERS = 12  # of stages whose numbers of layers are listed


def setting_tiles(setting: ParallelSetting) -> list[tuple[str, str, str]]:
    """Throughput, memory and price of a setting, for the headline: title, value and note of each."""
    mfu, price = _amount(setting, "mfu_pct"), _amount(setting, "cost_per_million_tokens")
    rows = [
        ("Tokens a second", _amount(setting, "tokens_per_second"), f"{_amount(setting, 'tokens_per_second_per_device')} a device"),
        ("MFU", mfu, "of the device's peak"),
        ("Price", price, "a million tokens"),
        ("Memory", units.size(setting.peak_bytes), _margin(setting)),
    ]
    return [row for row in rows if row[1] != _UNKNOWN]


def comparison_section(settings: Sequence[ParallelSetting]) -> Section:
    """Times, throughput, memory, price and the whole strategy, a column for each setting; what differs comes first."""
    rows = [(title, *values) for title, values in _facts(settings) if any(value != _UNKNOWN for value in values)]
    names = dict.fromkeys(name for setting in settings for name in setting.strategy)
    chosen = [(_label(name), *(_value(setting.strategy, name) for setting in settings)) for name in names]
    chosen = [row for row in chosen if any(value != _NONE for value in row[1:])]
    title = "The usual plan" if settings[0].name == "usual plan" else "The described setting"
    if len(settings) == 1:
        return Section("settings", title, [element("provenance", [*rows, *chosen], ())])
    chosen.sort(key=lambda row: len(set(row[1:])) == 1)
    columns = ("", *(f"{setting.short_name}#" for setting in settings))
    tables = [table("Predictions", columns, rows), table("Strategy", columns, chosen)]
    return Section("settings", f"{title} and the best plan", tables)


def parts_section(settings: Sequence[ParallelSetting], sentences: Sequence[str]) -> Section:
    """The parts of a step, on one time scale for all settings."""
    rows = [
        (
            setting.name,
            units.duration(setting.step_us),
            [
                BarPart(length=us, kind=colour(key), tip=f"{STEP_PARTS[key]}: {units.share(us, setting.step_us)}")
                for key in STEP_PARTS
                if (us := setting.parts_us.get(key, 0.0)) > 0
            ],
        )
        for setting in settings
    ]
    present = [key for key in STEP_PARTS if any(setting.parts_us.get(key) for setting in settings)]
    numbers = table(
        "Parts of a step",
        ("part", *(f"{setting.short_name}#" for setting in settings)),
        ((STEP_PARTS[key], *(_part(setting, key) for setting in settings)) for key in present),
    )
    caption = (
        "One step of the pipeline rank that has most to do. Communication counts only as far as nothing hides it: as the time that "
        "the step would be shorter by without it."
    )
    chart = figure(stacked("Parts of a step", rows), caption, numbers, _legend(present))
    return Section("breakdown", "Where a step goes", [bullets(sentences) if sentences else None, chart])


def pipeline_section(settings: Sequence[ParallelSetting]) -> Section:
    """Stages by time: forward and backward passes, the update, communication between passes, and the bubble."""
    longest_us = max(setting.step_us for setting in settings)
    charts: list[Element] = []
    for setting in settings:
        every = -(-len(setting.stages) // _MOST_STAGES)
        rows = [
            PipelineRow(name=f"stage {number}", value=_busy(stage, setting.step_us), spans=stage)
            for number, stage in enumerate(setting.stages)
            if number % every == 0
        ]
        left_out = f" Every {every}th stage is drawn." if every > 1 else ""
        bubble = f"bubble {units.share(setting.parts_us.get('bubble', 0.0), setting.step_us)}"
        stages = units.count(len(setting.stages), "stage")
        caption = f"{setting.name}: {stages}, {units.duration(setting.step_us)}, {bubble}.{left_out}"
        charts.append(
            figure(
                pipeline(f"Pipeline, {setting.name}", rows, longest_us),
                caption,
                None,
                [(f"part {k}", v) for k, v in _PASSES.items()],
            )
        )
    note = paragraph(
        "Each row is one rank of a stage; the other ranks of the stage do the same at the same time. A pass includes its tensor, "
        "context and expert parallel communication. 'dpro-search replay JOB --perfetto FILE' writes a timeline to zoom into.",
        "quiet",
    )
    return Section("pipeline", "The pipeline", [*charts, note])


def memory_section(settings: Sequence[ParallelSetting]) -> Section:
    """The memory ledger of the rank that needs most, up to what a device has."""
    rows = []
    for setting in settings:
        parts = [
            BarPart(length=size, kind=MEMORY[key][0], tip=f"{MEMORY[key][1]}: {units.size(size)}")
            for key in MEMORY
            if (size := setting.memory_bytes.get(key, 0.0)) > 0
        ]
        if (free := (setting.limit_bytes or 0.0) - setting.peak_bytes) > 0:
            parts.append(BarPart(length=free, kind="idle", tip=f"free: {units.size(free)}"))
        rows.append((setting.name, f"{units.size(setting.peak_bytes)}, {_margin(setting)}", parts))
    present = [key for key in MEMORY if any(setting.memory_bytes.get(key) for setting in settings)]
    columns = ("for", *(f"{setting.short_name}#" for setting in settings))
    numbers = table(
        "Memory by purpose",
        columns,
        ((MEMORY[key][1], *(units.size(setting.memory_bytes.get(key, 0.0)) for setting in settings)) for key in present),
    )
    key = [(f"part {MEMORY[name][0]}", MEMORY[name][1]) for name in present] + [("part idle", "free")]
    caption = "Predicted peak memory of the rank that needs most, and what is left of the device's memory."
    return Section("memory", "Memory", [figure(stacked("Memory", rows), caption, numbers, key)])


def colour(part: str) -> str:
    """The class of a part's colour."""
    if part in _COMPUTED:
        return "computed"
    return _CLASSES.get(part, part)


_CLASSES = {  # of parts whose colour has another name
    "optimizer": "update",
    "exposed_tensor_parallel": "comm",
    "exposed_context_parallel": "cp",
    "exposed_expert_parallel": "ep",
    "exposed_pipeline_sends": "pp",
    "exposed_data_parallel": "dp",
    "bubble": "idle",
}
_UNKNOWN, _NONE = "unknown", "\N{EN DASH}"


def _facts(settings: Sequence[ParallelSetting]) -> list[tuple[str, list[str]]]:
    return [
        ("time of a step", [units.duration(setting.step_us) for setting in settings]),
        ("interval", [units.interval(setting.interval_us) for setting in settings]),
        *((title, [_amount(setting, key) for setting in settings]) for key, (title, _) in EFFICIENCY.items()),
        ("peak memory", [units.size(setting.peak_bytes) for setting in settings]),
        ("free memory", [_margin(setting) for setting in settings]),
    ]


def _amount(setting: ParallelSetting, key: str) -> str:
    value = setting.efficiency.get(key)
    return _UNKNOWN if value is None else EFFICIENCY[key][1](value)


def _margin(setting: ParallelSetting) -> str:
    if setting.limit_bytes is None:
        return _UNKNOWN
    free = setting.limit_bytes - setting.peak_bytes
    return f"{units.size(abs(free))} of {units.size(setting.limit_bytes)} {'free' if free >= 0 else 'too much'}"


def _label(name: str) -> str:
    return (SETTINGS[name].label if name in SETTINGS else "") or name.replace("_", " ")


def _has_effect(strategy: Mapping[str, Any], name: str) -> bool:
    """Whether a setting changes anything in a strategy."""
    if name not in SETTINGS:
        return True
    setting = SETTINGS[name]
    if setting.neutral and strategy[name] == DEFAULTS[name]:
        return False
    return setting.needs is None or (strategy.get(setting.needs[0]) or 0) >= setting.needs[1]


def _value(strategy: Mapping[str, Any], name: str) -> str:
    """A setting of a strategy for people; a dash where it has no effect."""
    value = strategy.get(name)
    if value in (None, (), []) or not _has_effect(strategy, name):
        return _NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        listed = ", ".join(map(str, value[:_MOST_LAYERS]))
        return listed + (f" … ({len(value)} stages)" if len(value) > _MOST_LAYERS else "")
    return str(value)


def _part(setting: ParallelSetting, key: str) -> str:
    us = setting.parts_us.get(key, 0.0)
    return units.share(us, setting.step_us) if us else _NONE


def _busy(stage: Mapping[str, Sequence[tuple[float, float]]], step_us: float) -> str:
    busy_us = sum(end - start for key in ("forward", "backward", "update") for start, end in stage.get(key, ()))
    return f"busy {units.percent(busy_us / step_us * 100)}"


def _legend(present: Sequence[str]) -> list[tuple[str, str]]:
    """Colours with their names; parts that share a colour are named together."""
    kinds = dict.fromkeys(colour(key) for key in present)
    return [(f"part {kind}", ", ".join(STEP_PARTS[key] for key in present if colour(key) == kind)) for kind in kinds]
