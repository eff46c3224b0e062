"""Answers about a step of a compiled program: its parts, its collectives by axis of the mesh, and why it takes so long."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from dpro_search.graph.dataflow import OpKind
from dpro_search.kinds._diagnosis import (
    Diagnosis,
    PredictedGain,
    RankFacts,
    Table,
    critical_ops,
    critical_table,
    gain_table,
    sorted_gains,
)
from dpro_search.kinds._job import JobInScenario
from dpro_search.kinds.xla.lowering import XlaStep, XlaStepOp, source_text
from dpro_search.kinds.xla.program import XlaProgram
from dpro_search.quantities import percent_text, size_text, time_text
from dpro_search.replay.path.segments import path_totals
from dpro_search.replay.timeline import Timeline
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scale, Scenario

_SPEEDS = ("communication=0", "bandwidth=2", "compute=0.9")
_MOST_SENTENCES, _MOST_KINDS = 3, 3
_LITTLE_BESIDE = "the schedule leaves too little to compute beside it"
_NOTHING_BESIDE = "it is synchronous, so that nothing runs beside it"
_WORTH_SAYING = 0.01  # of an iteration


class ExposedCollective(msgspec.Struct, frozen=True, kw_only=True):
    """Equal collectives of one place of the program.

    Attributes
    ----------
    kind
        As HLO names it ("all-gather").
    axes
        Axes of the mesh among which it is, joined by commas; empty: its groups are those of no axes.
    group_size
        Devices of a group.
    source, op_name
        Line of the user's program, and JAX's name of the operation; empty: not known.
    size_bytes
        Bytes of one: of an all-gather its result, of others what a device puts in.
    count
        How often it runs in a step.
    total_us, exposed_us
        How long it takes in a step, and for how much of that nothing else runs.
    is_async
        Whether the schedule lets other instructions run beside it.
    """

    kind: str
    axes: str
    group_size: int
    source: str
    op_name: str
    size_bytes: int
    count: int = 0
    total_us: float = 0.0
    exposed_us: float = 0.0
    is_async: bool


class XlaDiagnosis(Diagnosis, frozen=True, kw_only=True, omit_defaults=True):
    """A diagnosis with the program's collectives, the most exposed first."""

    collectives: tuple[ExposedCollective, ...] = ()

    @property
    def tables(self) -> Sequence[Table]:
        return (critical_table(self.critical_ops), _collective_table(self.collectives), gain_table(self.gains, self.iteration_us))


def breakdown_us(step: XlaStep, timeline: Timeline) -> dict[str, float]:
    """Parts of a step, which add up to it: what the core computes, and what it waits for."""
    waits = _waits_us(step, timeline)
    copies = sum(wait for op, wait in waits.items() if _is_copy(step, op))
    exposed = sum(waits.values()) - copies
    outside = float(step.graph.duration_us[step.graph.op_kind == OpKind.HOST].sum())
    parts = {
        "compute": max(timeline.iteration_us - copies - exposed - outside, 0.0),
        "exposed_communication": exposed,
        "exposed_copies": copies,
    }
    return {**parts, "between_instructions": outside} if outside else parts


def axes_us(step: XlaStep, timeline: Timeline) -> tuple[float, dict[str, float]]:
    """A step without the collectives that nothing hides, and these by axis of the mesh; of several axes each has an equal part."""
    by_axis: dict[str, float] = defaultdict(float)
    for end, wait_us in _waits_us(step, timeline).items():
        awaited = step.ops[end].waits_for
        axes = () if awaited is None else step.ops[awaited].axes
        for axis in axes:
            by_axis[axis] += wait_us / len(axes)
    return timeline.iteration_us - sum(by_axis.values()), dict(by_axis)


def diagnosis(here: JobInScenario, step: XlaStep, source: XlaProgram) -> XlaDiagnosis:
    """Why a step takes as long as it does."""
    timeline, prediction = here.timeline(Plan()), here.replayed(Plan())
    exposed = _exposed(step, timeline, source)
    gains = _gains(here, prediction.iteration_us, exposed)
    return XlaDiagnosis(
        iteration_us=prediction.iteration_us,
        measured_iteration_us=here.measurement.median_us,
        critical_path=path_totals(timeline),
        critical_ops=critical_ops(timeline, origins=[_origin(op, source) for op in step.ops]),
        ranks=(RankFacts(rank=0, alike=source.module.devices, breakdown_us=prediction.breakdown_us),),
        gains=gains,
        findings=tuple(_findings(exposed, prediction.breakdown_us, prediction.iteration_us)),
        warnings=source.warnings,
        collectives=exposed,
    )


def _exposed(step: XlaStep, timeline: Timeline, source: XlaProgram) -> tuple[ExposedCollective, ...]:
    waits, durations = _waits_us(step, timeline), step.graph.duration_us
    sums: dict[ExposedCollective, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    waited_of = {step.ops[end].waits_for: wait for end, wait in waits.items()}
    for number, op in enumerate(step.ops):
        if op.collective is None or op.waits_for is not None:
            continue
        collective = op.collective
        size = collective.output_bytes if collective.kind == "all-gather" else collective.operand_bytes
        origin = _origin(op, source)
        place = ExposedCollective(
            kind=collective.kind,
            axes=",".join(op.axes),
            group_size=collective.group_size,
            source=origin.get("source", ""),
            op_name=origin.get("framework_op", ""),
            size_bytes=size,
            is_async=collective.is_async,
        )
        for index, value in enumerate((op.turns, float(durations[number]), waited_of.get(number, 0.0))):
            sums[place][index] += value
    rows = [
        msgspec.structs.replace(place, count=round(count), total_us=total_us, exposed_us=exposed_us)
        for place, (count, total_us, exposed_us) in sums.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.exposed_us, -row.total_us)))


def _waits_us(step: XlaStep, timeline: Timeline) -> dict[int, float]:
    """How long the core waits at each end of an asynchronous operation, by the op of the end."""
    start_us = timeline.times.start_us[: len(step.graph)]
    end_us = timeline.times.end_us[: len(step.graph)]
    on_core = np.flatnonzero(step.graph.device == 0)
    waits = {}
    for before, op in itertools.pairwise(on_core):
        if step.ops[op].waits_for is not None:
            waits[int(op)] = max(float(start_us[op] - end_us[before]), 0.0)
    if len(on_core) and step.ops[on_core[0]].waits_for is not None:
        waits[int(on_core[0])] = float(start_us[on_core[0]])
    return waits


def _is_copy(step: XlaStep, end: int) -> bool:
    awaited = step.ops[end].waits_for
    return awaited is not None and step.graph.op_kind[awaited] == OpKind.IO


def _origin(op: XlaStepOp, source: XlaProgram) -> dict[str, str]:
    """The operation of the user's program that an op was made from, and its line."""
    origin = {"framework_op": op.instruction.op_name, "source": source_text(source.module, op.instruction)}
    return {name: text for name, text in origin.items() if text}


def _gains(here: JobInScenario, base_us: float, exposed: Sequence[ExposedCollective]) -> tuple[PredictedGain, ...]:
    """Gains of other speeds, and without the collectives of each kind, the most exposed kinds first."""
    kinds = dict.fromkeys(row.kind.replace("-", "_") for row in exposed if row.exposed_us)
    predicted_us = {}
    for text in (*_SPEEDS, *(f"collectives.{kind}=0" for kind in list(kinds)[:_MOST_KINDS])):
        scenario = here.scenario.then(Scenario(scales=(Scale.parse(text),)))
        predicted_us[text] = here.job.lower(scenario).replayable.iterations().iteration_us
    return sorted_gains(base_us, predicted_us)


def _findings(exposed: Sequence[ExposedCollective], parts_us: Mapping[str, float], iteration_us: float) -> list[str]:
    waited_us = parts_us["exposed_communication"]
    sentences = [
        f"Communication that nothing hides takes {time_text(waited_us)} of a step ({percent_text(waited_us / iteration_us * 100)})."
    ]
    for row in exposed[:_MOST_SENTENCES]:
        if row.exposed_us < _WORTH_SAYING * iteration_us:
            break
        place = f" ({row.source})" if row.source else ""
        among = f" over {row.axes}" if row.axes else f" in groups of {row.group_size}"
        times = f"{row.count} times" if row.count > 1 else "once"
        cause = _LITTLE_BESIDE if row.is_async else _NOTHING_BESIDE
        exposed_text = f"exposed for {time_text(row.exposed_us)} of its {time_text(row.total_us)}"
        sentences.append(
            f"The {row.kind} of {size_text(row.size_bytes)}{among}{place} runs {times} and is {exposed_text}: {cause}."
        )
    if parts_us["exposed_copies"] > _WORTH_SAYING * iteration_us:
        sentences.append(f"Copies between memories that nothing hides take {time_text(parts_us['exposed_copies'])} of a step.")
    outside_us = parts_us.get("between_instructions", 0.0)
    if outside_us > _WORTH_SAYING * iteration_us:
        sentences.append(
            f"Starting the step and waiting for other processes, between instructions, take {time_text(outside_us)} of a step."
        )
    return sentences


def _collective_table(rows: Sequence[ExposedCollective]) -> Table:
    cells = [
        (
            row.source or row.op_name or "-",
            row.kind,
            row.axes or str(row.group_size),
            size_text(row.size_bytes),
            str(row.count),
            time_text(row.total_us),
            time_text(row.exposed_us),
        )
        for row in rows[:12]
    ]
    return Table(title="collectives", columns=("source", "kind", "axes", "size", "count", "time", "exposed"), rows=cells)
