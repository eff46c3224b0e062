"""``render(facts) -> str``: the whole page, with its style, its script and its data inside."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from dpro_search.report import units
from dpro_search.report.charts import legend
from dpro_search.report.facts import Facts
from dpro_search.report.groups import groups_section
from dpro_search.report.headline import headline, plans_section
from dpro_search.report.html import Element, paragraph, raw_text, section, table, tag, to_text
from dpro_search.report.progress import search_section
from dpro_search.report.quality import quality_section
from dpro_search.report.sections import breakdown_section, path_section, provenance_section
from dpro_search.report.timeline import StepTimeline

_OF_WHAT = ("framework", "ranks", "link rate")  # of the provenance, below the title
_KINDS = {
    "compute": "compute, forward",
    "backward": "backward",
    "update": "update",
    "comm": "communication",
    "wait": "waiting",
    "copy": "copies, input",
    "server": "server",
    "host": "host",
}


def render(facts: Facts) -> str:
    """The report as HTML.

    It loads nothing, and a policy inside it forbids that it ever does; every text from a file stays text.
    """
    parts = [
        plans_section(facts),
        breakdown_section(facts.diagnosis, facts.timeline),
        _timeline_section(facts.timeline),
        path_section(facts.diagnosis),
        groups_section(facts.groups),
        search_section(facts.trials),
        quality_section(facts.held_out, facts.terms, facts.validation, facts.corrected_pct),
        provenance_section(facts.provenance, facts.notes),
    ]
    present = [part for part in parts if part is not None]
    links = (tag("a", part[0].text, href=f"#{part.get('id')}") for part in present)
    style, script = _asset("report.css"), _asset("report.js")
    policy = f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; base-uri 'none'; form-action 'none'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        _meta("Content-Security-Policy", policy, "http-equiv"),
        _meta("viewport", "width=device-width, initial-scale=1"),
        _meta("color-scheme", "light dark"),
        _meta("referrer", "no-referrer"),
        tag("title", f"{facts.name}: dpro-search report"),
        raw_text("style", style),
    )
    body = tag(
        "body",
        tag("a", "Skip to the report", href="#report", class_="skip"),
        tag(
            "header",
            tag("p", "dpro-search report", class_="brand"),
            tag("h1", tag("bdi", facts.name)),
            _of_what(facts.provenance),
            tag("nav", *links, aria_label="Sections"),
        ),
        tag("main", headline(facts), *present, id="report"),
        tag("div", id="tip", role="status", hidden="hidden"),
        raw_text("script", embedded(facts.timeline.compact()), type="application/json", id="timeline-data"),
        raw_text("script", script),
    )
    return "<!DOCTYPE html>\n" + to_text(tag("html", head, body, lang="en")) + "\n"


def _of_what(provenance: Sequence[tuple[str, str]]) -> Element | None:
    """One line on the job, for a folder's name says little."""
    said = [value for title, value in provenance if title in _OF_WHAT]
    return tag("p", tag("bdi", " \N{MIDDLE DOT} ".join(said)), class_="quiet") if said else None


def embedded(value: Any) -> str:
    """JSON that cannot end the element that holds it."""
    raw = msgspec.json.encode(value).decode()
    for character in "<>&\u2028\u2029":
        raw = raw.replace(character, f"\\u{ord(character):04x}")
    return raw


def _timeline_section(timeline: StepTimeline) -> Element:
    if not timeline.lanes:
        return section("timeline", "One step", paragraph("No step was recorded op by op: there is nothing to draw.", "quiet"))
    kinds = {kind for lane in timeline.lanes for kind in lane.kinds}
    ranks = timeline.ranks
    chosen = str(ranks[0]) if len(ranks) > 2 else ""
    options = [("", "all ranks"), *((str(rank), f"rank {rank}") for rank in ranks)]
    choice = tag(
        "label",
        "Show ",
        tag(
            "select",
            *(tag("option", text, value=value, selected="selected" if value == chosen else None) for value, text in options),
            id="timeline-rank",
        ),
    )
    buttons = (tag("button", text, type="button", data_act=act, aria_label=label) for text, act, label in _BUTTONS)
    help_text = "Drag to move, pinch or Ctrl + wheel to zoom, double-click to see all; arrow keys, + and - work too."
    title, said = _sides(timeline)
    canvas = tag(
        "canvas",
        "The table below holds the busy time of every lane.",
        id="timeline-canvas",
        tabindex="0",
        role="img",
        aria_label="Timeline of one step: for each rank the predicted lanes above the measured ones",
        aria_describedby="timeline-help",
    )
    lanes = (
        (f"rank {lane.rank}", "measured" if lane.measured else "predicted", lane.name, *_busy(lane.length_us))
        for lane in timeline.lanes
    )
    return section(
        "timeline",
        title,
        tag(
            "figure",
            tag("figcaption", said),
            legend([(f"part {kind}", name) for kind, name in _KINDS.items() if kind in kinds]),
            tag("div", choice, *buttons, class_="tools"),
            tag("div", canvas, id="timeline-frame"),
            tag("p", help_text, id="timeline-help", class_="quiet"),
            tag("p", id="timeline-left-out", class_="quiet", hidden="hidden"),
            tag("noscript", paragraph("The timeline needs JavaScript; all other charts and tables do not.", "quiet")),
            tag("details", tag("summary", "Numbers"), table("Busy time by lane", ("rank", "", "lane", "slices#", "busy#"), lanes)),
        ),
    )


_BUTTONS = (
    ("\N{MINUS SIGN}", "out", "zoom out"),
    ("+", "in", "zoom in"),
    ("←", "left", "move left"),
    ("→", "right", "move right"),
    ("All", "all", "show the whole step"),
)


def _sides(timeline: StepTimeline) -> tuple[str, str]:
    """Title and caption, by what the timeline has."""
    if all(lane.measured for lane in timeline.lanes):
        return (
            "One step, as measured",
            f"The recorded step {timeline.step}; this kind of job has no replay op by op to set above it.",
        )
    if timeline.step is None:
        return "One step, as predicted", "A settled iteration of the replay; no step was recorded op by op to set below it."
    said = f"A settled iteration of the replay above the recorded step {timeline.step}, on one scale."
    return "One step, predicted over measured", said


def _busy(length_us: list[float]) -> tuple[str, str]:
    return str(len(length_us)), units.duration(sum(length_us))


def _meta(name: str, content: str, key: str = "name") -> Element:
    element = tag("meta")
    element.set(key, name)
    element.set("content", content)
    return element


@cache
def _asset(name: str) -> str:
    return (files("dpro_search.report") / "assets" / name).read_text("utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
