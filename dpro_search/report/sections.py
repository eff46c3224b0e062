"""Sections on the parts of a step, its critical path, gains of changes, and the sources of the numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

from msgspec import UNSET

from dpro_search.graph.event_names import short_names
from dpro_search.kinds import Diagnosis
from dpro_search.kinds._diagnosis import CriticalOp, PredictedGain, RankFacts
from dpro_search.replay.path.segments import PathSegment
from dpro_search.report import units
from dpro_search.report.charts import BarPart, bars, stacked
from dpro_search.report.html import Element, Section, bullets, element, figure, name_of, paragraph, table
from dpro_search.report.timeline import Lane, StepTimeline
from dpro_search.search.run_folder import ClusterFacts

_TOP_GAINS, _TOP_OPS = 10, 10
_SHOWN = 0.0005  # of a step or path; less is 0.0 %
_SAME_US = 1.0  # instants closer than this are one
_PARTS = {
    "compute": ("compute", "compute"),
    "contention": ("contention", "compute, slowed by contention"),
    "exposed_communication": ("comm", "exposed communication"),
    "waiting_for_ranks": ("wait", "waiting for other ranks"),
    "unknown": ("unknown", "unknown"),
    "idle": ("idle", "idle"),
}
_REASONS = {
    "start": "it is the first op",
    "dependency": "an op whose result it needs",
    "device": "the op before it on its stream or thread",
    "collective": "the last rank had called it",
}
_TERMS = {  # of kinds in the JSON of 'diagnose' that are called otherwise
    "agreement": "negotiation",
    "comm": "communication",
    "io": "copies and input",
    "host": "host (CPU)",
}
_SCALE = re.compile(r"(?:rank(?P<rank>\d+)\.)?(?P<what>compute|communication|bandwidth)=(?P<factor>[0-9.]+)")
_SCALED = {"compute": "computation", "communication": "communication", "bandwidth": "links"}
_MOST_IN_WORDS = 4  # kinds of the critical path that its caption names
_PATH_KINDS = {
    "collective": "comm",
    "communication": "comm",
    "agreement": "wait",
    "negotiation": "wait",
    "late_rank": "wait",
    "update": "update",
    "compute": "compute",
    "forward": "compute",
    "backward": "backward",
    "comm": "comm",
    "server": "server",
    "io": "copy",
    "host": "host",
    "contention": "contention",
    "exposed_communication": "comm",
    "unknown": "unknown",
}


def cluster_section(cluster: ClusterFacts | None, job_cluster: str) -> Section | None:
    """The cluster that predictions are for, and assumptions about it; None for the job's cluster without assumptions."""
    if cluster is None or (cluster.name == job_cluster and not cluster.assumed):
        return None
    assumptions = bullets([f"{each}." for each in cluster.assumed]) if cluster.assumed else None
    if cluster.name == job_cluster:
        return Section("cluster", "Assumptions", [assumptions])
    ranks = units.count(cluster.ranks, "rank")
    sentence = f"All predictions on this page are for {cluster.name}, {ranks}. Nothing was measured there."
    assumed = None if assumptions is None else paragraph("Assumptions:")
    return Section("cluster", "Cluster", [paragraph(sentence), assumed, assumptions])


def breakdown_section(
    diagnosis: Diagnosis,
    findings: Sequence[str],
    timeline: StepTimeline,
    efficiency: tuple[Sequence[tuple[str, str]], Sequence[str]],
    origin: str = "recorded",
) -> Section:
    """A bar a rank, from the diagnosis, or from the lanes of the timeline if it has none; `origin`: of the setting."""
    rows = {row.rank: _rank_parts(row) for row in diagnosis.ranks}
    note = None
    if not any(rows.values()):
        rows = {rank: _lane_parts([lane for lane in timeline.lanes if lane.rank == rank]) for rank in timeline.ranks}
        note = paragraph("Added up from the lanes of the timeline below.", "quiet")
    rows = {rank: parts for rank, parts in rows.items() if parts}
    known = {row.rank: row for row in diagnosis.ranks}
    bars_of_ranks = [_bar(_rank_name(known.get(rank, RankFacts(rank=rank))), parts) for rank, parts in rows.items()]
    caption = f"What each rank does in one step of the {origin} setting."
    shown = list(rows.values())
    present = [key for key in _PARTS if any(parts.get(key, 0.0) >= _SHOWN * sum(parts.values()) for parts in shown)]
    columns = ("rank", *(f"{_PARTS[key][1]}#" for key in present), "came last to a collective#", "waited for other ranks#")
    numbers = table(
        "A step by rank",
        columns,
        (
            (str(rank), *(units.duration(parts.get(key, 0.0)) for key in present), *_lateness(known.get(rank)))
            for rank, parts in rows.items()
        ),
    )
    chart = figure(stacked("Time of each rank", bars_of_ranks), caption, numbers, [_PARTS[name] for name in present])
    return Section(
        "breakdown",
        "Where a step goes",
        [bullets(findings) if findings else None, *_warnings(diagnosis), note, chart, _efficiency(*efficiency)],
    )


def path_section(diagnosis: Diagnosis) -> Section:
    """The critical path: its parts, the ops with the largest shares and why they started no earlier, and gains of changes."""
    path = diagnosis.critical_path
    total_us = sum(row.duration_us for row in path) or 1.0
    in_order = _follow_each_other(path)
    pieces = [
        BarPart(
            length=row.duration_us,
            kind=_path_kind(row),
            tip=f"{_path_name(row)}: {units.share(row.duration_us, total_us)}",
        )
        for row in path
    ]
    shares: dict[str, float] = {}
    for row in path:
        shares[row.kind] = shares.get(row.kind, 0.0) + row.duration_us
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    numbers = table(
        "Critical path by kind", ("kind", "time#", "share#"), ((_words(kind), *_time_share(us, total_us)) for kind, us in ordered)
    )
    large = [(kind, us) for kind, us in ordered if us >= _SHOWN * total_us][:_MOST_IN_WORDS]
    named = ", ".join(f"{_words(kind)} {units.percent(us / total_us * 100)}" for kind, us in large)
    caption = "The chain of ops that decides how long a step takes, " + (
        f"from start to end: {named}." if in_order else f"grouped by rank and kind, longest first: {named}."
    )
    colours: dict[str, list[str]] = {}
    for kind in (kind for kind, us in ordered if us >= _SHOWN * total_us):
        colours.setdefault(_PATH_KINDS.get(kind.lower(), "host"), []).append(_words(kind))
    key = [(f"part {colour}", ", ".join(kinds)) for colour, kinds in colours.items()]
    chart = figure(stacked("Critical path", [("critical path", units.duration(total_us), pieces)]), caption, numbers, key)
    gains = _gains(diagnosis.gains, diagnosis.iteration_us)
    return Section("path", "Critical path", [chart, _critical_ops(diagnosis.critical_ops), gains])


def gains_section(diagnosis: Diagnosis) -> Section | None:
    """Gains of single changes; None where no change gains anything."""
    gains = _gains(diagnosis.gains, diagnosis.iteration_us)
    return None if gains is None else Section("gains", "What would make it faster", [gains])


def provenance_section(rows: Sequence[tuple[str, str]], notes: Sequence[str]) -> Section:
    """The sources of all numbers, and what is missing."""
    return Section("provenance", "Where the numbers come from", [element("provenance", rows, notes)])


def _critical_ops(ops: Sequence[CriticalOp]) -> Element | None:
    if not ops:
        return None
    several = any(row.count > 1 for row in ops)
    traced = [row.origin for row in ops[:_TOP_OPS]]
    columns = (
        ("op",) + (("called by",) if any(traced) else ()) + ("rank#", "kind") + (("ops#", "time#") if several else ())
        + ("share#", "could not start before")
    )  # fmt: skip
    names = [row.op.removesuffix(f"@{row.rank}") for row in ops[:_TOP_OPS]]
    rows = (
        (name_of(name, row.op),)
        + ((name_of(origin),) if any(traced) else ())
        + (str(row.rank), _words(row.kind))
        + ((str(row.count), units.duration(row.total_us)) if several else ())
        + (units.percent(row.share_pct), _REASONS.get(row.reason, "unknown"))
        for name, origin, row in zip(short_names(names), traced, ops, strict=False)
    )
    return table("Ops with the largest share of the critical path", columns, rows)


def _gains(gains: Sequence[PredictedGain], iteration_us: float) -> Element | None:
    if not gains:
        return None
    shown = [gain for gain in gains if abs(gain.gain_us) >= _SHOWN * iteration_us][:_TOP_GAINS] or gains[:1]
    rows = [
        (
            _question(gain),
            units.share(gain.gain_us, iteration_us),
            gain.gain_us,
            f"a step would take {units.duration(gain.predicted_iteration_us)}",
        )
        for gain in shown
    ]
    numbers = table(
        "What-if questions",
        ("what if", "step#", "gain#"),
        ((name_of(gain.what_if), units.duration(gain.predicted_iteration_us), units.duration(gain.gain_us)) for gain in gains),
    )
    caption = (
        "The time that a step would save if one thing changed. No optimisation of that thing can gain more. "
        "A bar to the left means that the change costs time. 'dpro-search replay JOB --what-if CHANGE' answers further questions."
    )
    return figure(bars("Gains", rows, "part update", below="part wait"), caption, numbers)


def _question(gain: PredictedGain) -> str:
    """A what-if question in words, with its text on the command line."""
    text, meaning = gain.what_if, "" if gain.meaning is UNSET else gain.meaning
    match = _SCALE.fullmatch(text)
    if match is not None and (not meaning or meaning.startswith("--")):
        what, factor = _SCALED[match["what"]], float(match["factor"])
        if match["what"] == "bandwidth":
            meaning = f"{what} {factor:g} times as fast"
        else:
            meaning = f"{what} takes " + ("no time" if factor == 0 else f"{factor:g} times as long")
        meaning += f" on rank {match['rank']}" if match["rank"] else ""
    if not meaning or meaning.startswith("--"):
        return short_names([text])[0]
    return f"{meaning} ({text})"


def _efficiency(known: Sequence[tuple[str, str]], unknown: Sequence[str]) -> Element | None:
    """Tokens a second, MFU, price and energy, and which of them are not known."""
    if not known:
        return None
    rows = [*known, *(("not known", reason) for reason in unknown)]
    return table("Efficiency", ("", "value"), rows)


def _warnings(diagnosis: Diagnosis) -> list[Element]:
    """Warnings about the recording, beside the numbers that they concern."""
    return [paragraph(f"Note: {text}.", "quiet") for text in diagnosis.warnings]


def _bar(name: str, parts: Mapping[str, float]) -> tuple[str, str, list[BarPart]]:
    total_us = sum(parts.values())
    pieces = [
        BarPart(length=us, kind=_PARTS[key][0], tip=f"{_PARTS[key][1]}: {units.share(us, total_us)}") for key, us in parts.items()
    ]
    return name, units.duration(total_us), pieces


def _rank_name(row: RankFacts) -> str:
    return row.title + (f" on {row.host}" if row.host and row.host != f"host of rank {row.rank}" else "")


def _rank_parts(row: RankFacts) -> dict[str, float]:
    """Parts of a rank's iteration that the page has a colour for."""
    return {key: us for key in _PARTS if (us := row.parts_us.get(key))}


def _lane_parts(lanes: Sequence[Lane]) -> dict[str, float]:
    """Time of a rank by activity in the replayed step, or else in the measured one. Compute comes first in overlaps."""
    chosen = [lane for lane in lanes if not lane.measured] or list(lanes)
    spans: dict[str, list[tuple[float, float]]] = {
        "compute": [],
        "exposed_communication": [],
        "waiting_for_ranks": [],
        "unknown": [],
    }
    key_of = {"comm": "exposed_communication", "wait": "waiting_for_ranks", "unknown": "unknown"}
    for lane in chosen:
        for kind, start, length in zip(lane.kinds, lane.start_us, lane.length_us, strict=True):
            if kind != "host":
                spans[key_of.get(kind, "compute")].append((start, start + length))
    part_us, taken, covered_us = {}, list[tuple[float, float]](), 0.0
    for key, intervals in spans.items():
        taken += intervals
        length_us = _union_us(taken)
        part_us[key], covered_us = length_us - covered_us, length_us
    if taken:
        part_us["idle"] = max(end for _, end in taken) - min(start for start, _ in taken) - covered_us
    return {key: us for key, us in part_us.items() if us > 0}


def _union_us(spans: list[tuple[float, float]]) -> float:
    """Length of the time in which at least one span lasts."""
    total_us, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total_us += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total_us


def _lateness(row: RankFacts | None) -> tuple[str, str]:
    if row is None or not isinstance(row.last_pct, float) or not isinstance(row.waited_us, float):
        return "unknown", "unknown"
    return units.percent(row.last_pct), units.duration(row.waited_us)


def _follow_each_other(path: Sequence[PathSegment]) -> bool:
    """Whether rows are stretches in order of time; others are sums by rank and kind."""
    return all(abs(after.start_us - before.start_us - before.duration_us) <= _SAME_US for before, after in pairwise(path))


def _path_kind(row: PathSegment) -> str:
    return _PATH_KINDS.get(row.kind.lower(), "host")


def _path_name(row: PathSegment) -> str:
    words = _words(row.kind) + (f" of rank {row.rank}" if row.rank >= 0 else "")
    return f"{words}, {row.name}" if row.name else words


def _words(kind: str) -> str:
    kind = kind.lower()
    return _TERMS.get(kind, kind.replace("_", " "))


def _time_share(us: float, total_us: float) -> tuple[str, str]:
    return units.duration(us), units.percent(us / total_us * 100)
