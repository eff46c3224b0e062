"""``render(facts) -> str``: the whole page, with its style, its script and its data inside."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from dpro_search.report import units
from dpro_search.report.facts import PageFacts
from dpro_search.report.groups import groups_section
from dpro_search.report.headline import plans_section, verdict
from dpro_search.report.html import Section, element, paragraph, table, template, unescaped
from dpro_search.report.parallel import comparison_section, memory_section, parts_section, pipeline_section
from dpro_search.report.progress import search_section
from dpro_search.report.quality import quality_section
from dpro_search.report.sections import breakdown_section, cluster_section, gains_section, path_section, provenance_section
from dpro_search.report.timeline import StepTimeline

_BELOW_TITLE = ("batch", "framework", "ranks", "link rate")  # rows of the provenance that stand below the title
_KINDS = {
    "compute": "compute, forward",
    "backward": "backward",
    "update": "update",
    "comm": "communication",
    "wait": "waiting",
    "copy": "copies, input",
    "server": "server",
    "host": "host",
    "unknown": "unknown",
}


def render(facts: PageFacts) -> str:
    """The report as HTML.

    It loads nothing, and a policy inside it forbids that it ever does; every text from a file stays text.
    """
    parts = [
        plans_section(facts),
        _planner_section(facts),
        cluster_section(facts.cluster, facts.own_cluster),
        *(_of_settings(facts) if facts.settings else _of_ranks(facts)),
        groups_section(facts.groups),
        search_section(facts.trials, facts.unchanged, draws_all=facts.planner is None),
        quality_section(
            facts.held_out,
            facts.terms,
            facts.validation or facts.sample_runs,
            facts.name_of_plan,
            facts.corrected_pct,
            described=facts.described,
            reported=facts.reported,
            calibration=facts.replay.calibration,
        ),
        provenance_section(facts.provenance, facts.notes),
    ]
    title = _title(facts)
    style = _asset("report.css") + (_asset("planner.css") if facts.planner is not None else "")
    scripts = [_asset("report.js"), *([] if facts.planner is None else [_asset("planner.js")])]
    digests = " ".join(map(_digest, scripts))
    return template("page").render(
        name=title,
        job=([facts.name] if title != facts.name else []) + [value for name, value in facts.provenance if name in _BELOW_TITLE],
        verdict=verdict(facts),
        sections=[part for part in parts if part is not None],
        policy=f"default-src 'none'; style-src {_digest(style)}; script-src {digests}; base-uri 'none'; form-action 'none'",
        style=unescaped(style),
        scripts=[unescaped(script) for script in scripts],
        data=unescaped(embedded(facts.timeline.compact())),
        plans=None if facts.planner is None else unescaped(embedded(_plans_data(facts))),
    )


def _planner_section(facts: PageFacts) -> Section | None:
    from dpro_search.report.planner import planner_section

    return planner_section(facts.planner)


def _plans_data(facts: PageFacts) -> dict[str, Any] | None:
    from dpro_search.report.planner import planner_data

    return None if facts.planner is None else planner_data(facts.planner)


def _title(facts: PageFacts) -> str:
    """The model and the cluster of a described job; else the name of what was read."""
    rows = dict(facts.provenance)
    if not {"model", "cluster"} <= rows.keys():
        return facts.name
    moved = facts.cluster is not None and facts.cluster.name != facts.own_cluster
    return f"{rows['model']} on {facts.cluster.name if moved and facts.cluster else rows['cluster']}"


def _of_ranks(facts: PageFacts) -> list[Section]:
    """Sections on the ranks of a job and one of their steps."""
    findings = facts.diagnosis.findings[0 if facts.search is not None else 1 :]  # the headline has the first
    return [
        breakdown_section(facts.diagnosis, findings, facts.timeline, facts.efficiency, facts.origin),
        _timeline_section(facts.timeline),
        path_section(facts.diagnosis),
    ]


def _of_settings(facts: PageFacts) -> list[Section | None]:
    """Sections on the step of a parallel job in each of its settings."""
    return [
        comparison_section(facts.settings),
        parts_section(facts.settings, facts.diagnosis.findings),
        pipeline_section(facts.settings),
        memory_section(facts.settings),
        gains_section(facts.diagnosis),
    ]


def embedded(value: Any) -> str:
    """JSON that cannot end the element that holds it."""
    raw = msgspec.json.encode(value).decode()
    for character in "<>&\u2028\u2029":
        raw = raw.replace(character, f"\\u{ord(character):04x}")
    return raw


def _timeline_section(timeline: StepTimeline) -> Section:
    if not timeline.lanes:
        return Section("timeline", "One step", [paragraph("No step was recorded op by op, so there is nothing to draw.", "quiet")])
    kinds = {kind for lane in timeline.lanes for kind in lane.kinds}
    title, caption = _sides(timeline)
    key = [(f"part {kind}", name) for kind, name in _KINDS.items() if kind in kinds]
    rows = (
        (f"rank {lane.rank}", "measured" if lane.measured else "predicted", lane.name, *_busy(lane.length_us))
        for lane in timeline.lanes
    )
    numbers = table("Busy time by lane", ("rank", "", "lane", "ops#", "busy#"), rows)
    one_sided = [paragraph(sentence, "quiet") for sentence in timeline.one_sided]
    return Section("timeline", title, [element("timeline", caption, key, timeline.ranks, numbers), *one_sided])


def _sides(timeline: StepTimeline) -> tuple[str, str]:
    """Title and caption, by what the timeline has."""
    if all(lane.measured for lane in timeline.lanes):
        return (
            "One step, as measured",
            f"Recorded step {timeline.step}. Jobs of this kind are not replayed op by op.",
        )
    if timeline.step is None:
        return "One step, as predicted", "A replayed step. No step was recorded op by op to compare it with."
    caption = f"For each rank, a replayed step above the recorded step {timeline.step}, on one time scale."
    return "One step, predicted and measured", caption


def _busy(length_us: list[float]) -> tuple[str, str]:
    return str(len(length_us)), units.duration(sum(length_us))


@cache
def _asset(name: str) -> str:
    return (files("dpro_search.report") / "assets" / name).read_text("utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
