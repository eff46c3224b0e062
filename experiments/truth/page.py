"""`page`: tables and pictures of measured beside predicted steps: one panel for each source, written as Markdown and SVG."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from experiments.truth.contradictions import contradictions
from experiments.truth.score import Scored, figures

PANEL, GAP, COLUMNS, TOP = 132, 18, 5, 24  # pixels: side of a panel, between panels, panels in a row, for its title
ROUNDED = 1  # decimals of a pixel
COLOURS = {"cold": "#0072b2", "contradicts": "#d55e00"}  # told apart also by people who see no red and green
PICTURE = "measured_predicted.svg"
_BAND = 0.2  # around equal, that is shaded

COLUMNS_COLD = ("source", "rows", "cold: mean", "median", "p90", "bias", "consistent: rows", "mean")
COLUMNS_LAST = ("tau", "memory, median")
_HEAD = """# Measured beside predicted steps

Written by `python -m experiments.truth page FOLDER --seeds {seeds}`. Absolute errors of step times in per cent. *Consistent*:
without rows that contradict themselves or others of their network (`contradictions.py`). One factor and calibrated: means
over seeds, of consistent rows of which nothing was learned; in brackets the cold error of the same rows.

![Measured beside predicted step times, by source]({picture})
"""
_STYLE = "text{font:10px sans-serif;fill:#777}path{fill:none;stroke-width:2;stroke-linecap:round;opacity:.55}"

Fit = Callable[[int], list[Scored]]
Learned = Mapping[str, Sequence[Sequence[Scored]]]


def write_page(folder: Path, cold: Sequence[Scored], fits: Mapping[str, Fit], seeds: Sequence[int]) -> None:
    """Page and picture of cold predictions, and of those with what is learned from a fifth of the groups.

    Parameters
    ----------
    fits
        By name, the rows that are not of a seed's fifth, predicted with what is learned from it.
    """
    reasons = {id(cold[place].row): reason for place, reason in contradictions([found.row for found in cold]).items()}
    learned = {name: [fit(seed) for seed in seeds] for name, fit in fits.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PICTURE).write_text(picture(cold, reasons.keys()))
    (folder / "page.md").write_text(_markdown(cold, learned, reasons, len(seeds)))


def _markdown(cold: Sequence[Scored], learned: Learned, reasons: Mapping[int, str], seeds: int) -> str:
    columns = [*COLUMNS_COLD, *(cell for name in learned for cell in (f"{name}: mean", "p90")), *COLUMNS_LAST]
    lines = [_HEAD.format(seeds=seeds, picture=PICTURE), f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for source in ("all", *sorted({found.row.values["source"] for found in cold})):
        own = [found for found in cold if source in ("all", found.row.values["source"])]
        all_of = figures(own, len(own))
        kept = figures([found for found in own if id(found.row) not in reasons], 0)
        cells = [source, *(_cell(all_of, name) for name in ("supported", "mape_pct", "median_ape_pct", "p90_ape_pct", "bias_pct"))]
        cells += [_cell(kept, "supported"), _cell(kept, "mape_pct")]
        for of_seeds in learned.values():
            cells += _learned_cells(own, of_seeds, reasons.keys())
        cells += [_cell(all_of, "kendall_tau"), _cell(all_of, "memory_median_ape_pct")]
        lines.append(f"| {' | '.join(cells)} |")
    named = ((found.row.values, reasons[id(found.row)]) for found in cold if id(found.row) in reasons)
    counts = Counter((row["source"], row["model"], reason) for row, reason in named)
    lines += ["", "Rows that contradict:", ""]
    lines += [f"* {count} of {source}, {model}: {reason}." for (source, model, reason), count in sorted(counts.items())]
    return "\n".join([*lines, ""])


def _learned_cells(own: Sequence[Scored], seeds: Sequence[Sequence[Scored]], wrong: Collection[int]) -> list[str]:
    """Mean and 90 % quantile of errors, means over seeds; in brackets the mean of the same rows before."""
    before = {id(found.row): found for found in own}
    found, cold = [], []
    for rows in seeds:
        kept = [one for one in rows if one.timed and id(one.row) not in wrong and id(one.row) in before]
        if kept:
            found.append(np.abs([one.error for one in kept]))
            cold.append(np.abs([before[id(one.row)].error for one in kept]))
    if not found:
        return ["", ""]
    mean, of_cold = (100 * float(np.mean([each.mean() for each in errors])) for errors in (found, cold))
    return [f"{mean:.1f} ({of_cold:.1f})", f"{100 * float(np.mean([np.quantile(each, 0.9) for each in found])):.0f}"]


def _cell(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    return "" if value is None else f"{value:.1f}" if name.endswith("pct") else str(value)


def picture(scored: Sequence[Scored], wrong: Collection[int]) -> str:
    """An SVG with a panel for each source: predicted over measured step time, both logarithmic."""
    by_source: dict[str, list[Scored]] = defaultdict(list)
    for found in scored:
        if found.timed:
            by_source[found.row.values["source"]].append(found)
    rows = math.ceil(len(by_source) / COLUMNS)
    size = COLUMNS * (PANEL + GAP) + GAP, rows * (PANEL + GAP + TOP) + GAP
    root = ElementTree.Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {size[0]} {size[1]}")
    root.append(_element("title", text="Predicted over measured step times of published runs, by source"))
    root.append(_element("style", text=_STYLE))
    for number, (source, own) in enumerate(sorted(by_source.items())):
        row, column = divmod(number, COLUMNS)
        panel = _element("g", transform=f"translate({GAP + column * (PANEL + GAP)} {TOP + row * (PANEL + GAP + TOP)})")
        _fill(panel, source, own, wrong)
        root.append(panel)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _fill(panel: ElementTree.Element, source: str, found: Sequence[Scored], wrong: Collection[int]) -> None:
    pairs = np.log([[float(one.row.values["step_time_s"]), one.prediction.step_s] for one in found])
    low, high = float(pairs.min()) - 0.3, float(pairs.max()) + 0.3
    places = (pairs - low) / (high - low) * PANEL
    shift = math.log(1 + _BAND) / (high - low) * PANEL
    corners = f"0,{PANEL} 0,{PANEL - shift:.1f} {PANEL - shift:.1f},0 {PANEL},0 {PANEL},{shift:.1f} {shift:.1f},{PANEL}"
    panel.append(_element("rect", width=str(PANEL), height=str(PANEL), fill="none", stroke="#999"))
    panel.append(_element("polygon", points=corners, fill="#888", attrib={"fill-opacity": "0.25"}))
    ends = f"{_seconds(low)} to {_seconds(high)}"
    panel.append(_element("text", text=source, x="0", y="-6"))
    panel.append(_element("text", text=ends, x=str(PANEL), y=str(PANEL + 11), attrib={"text-anchor": "end"}))
    for name, colour in COLOURS.items():
        chosen = [place for place, one in zip(places, found, strict=True) if (id(one.row) in wrong) == (name == "contradicts")]
        dots = {(round(float(x), ROUNDED), round(PANEL - float(y), ROUNDED)) for x, y in chosen}
        if dots:
            panel.append(_element("path", stroke=colour, d="".join(f"M{x:g} {y:g}h0" for x, y in sorted(dots))))


def _seconds(log: float) -> str:
    return f"{math.exp(log):.2g} s"


def _element(tag: str, text: str = "", attrib: Mapping[str, str] | None = None, **more: str) -> ElementTree.Element:
    found = ElementTree.Element(tag, {**(attrib or {}), **more})
    found.text = text or None
    return found
