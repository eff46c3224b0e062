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

PANEL, COLUMNS = 150, 4  # pixels: side of a panel; panels in a row
LEFT, RIGHT, TOP, BOTTOM = 58, 30, 22, 36  # pixels around a panel, for labels of ticks, titles of axes, and its name
LEGEND = 26  # pixels, above all panels
TICKS = (1.0, 2.0, 5.0)  # of a decade; only the first where there are enough decades
FEWEST_TICKS, MOST_TICKS = 2, 4
ROUNDED = 1  # decimals of a pixel
COLOURS = {"cold": "#0072b2", "contradicts": "#d55e00"}  # told apart also by people who see no red and green
LEGENDS = {"cold": "a run", "contradicts": "a run that contradicts itself or others"}
LETTER = 5.5  # pixels, about, of a letter
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
_STYLE = (
    "text{font:10px sans-serif;fill:#666}text.name{font-weight:bold}path{fill:none;stroke-width:2;stroke-linecap:round;opacity:.55}"
    "path.tick{stroke-width:1;stroke:#999;opacity:1}path.key{stroke-width:6}"
)

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
    """An SVG with a panel for each source: predicted over measured step time, both logarithmic and of the same range."""
    by_source: dict[str, list[Scored]] = defaultdict(list)
    for found in scored:
        if found.timed:
            by_source[found.row.values["source"]].append(found)
    wide, high = LEFT + PANEL + RIGHT, TOP + PANEL + BOTTOM
    size = COLUMNS * wide, LEGEND + math.ceil(len(by_source) / COLUMNS) * high
    root = ElementTree.Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {size[0]} {size[1]}")
    root.append(_element("title", text="Predicted over measured step times of published runs, by source"))
    root.append(_element("style", text=_STYLE))
    root.append(_legend())
    for number, (source, own) in enumerate(sorted(by_source.items())):
        row, column = divmod(number, COLUMNS)
        panel = _element("g", transform=f"translate({LEFT + column * wide} {LEGEND + TOP + row * high})")
        _fill(panel, source, own, wrong)
        root.append(panel)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _legend() -> ElementTree.Element:
    found = _element("g", transform=f"translate({LEFT} {LEGEND - 10})")
    x = 0.0
    for name, text in LEGENDS.items():
        found.append(_element("path", stroke=COLOURS[name], d=f"M{x + 4} -4h0", attrib={"class": "key"}))
        found.append(_element("text", text=text, x=str(x + 12), y="0"))
        x += 32 + LETTER * len(text)
    found.append(_element("rect", x=str(x), y="-9", width="12", height="10", fill="#888", attrib={"fill-opacity": "0.25"}))
    found.append(_element("text", text=f"within a factor of {1 + _BAND:g}", x=str(x + 16), y="0"))
    return found


def _fill(panel: ElementTree.Element, source: str, found: Sequence[Scored], wrong: Collection[int]) -> None:
    pairs = np.log([[float(one.row.values["step_time_s"]), one.prediction.step_s] for one in found])
    low, high = float(pairs.min()) - 0.3, float(pairs.max()) + 0.3
    places = (pairs - low) / (high - low) * PANEL
    shift = math.log(1 + _BAND) / (high - low) * PANEL
    corners = f"0,{PANEL} 0,{PANEL - shift:.1f} {PANEL - shift:.1f},0 {PANEL},0 {PANEL},{shift:.1f} {shift:.1f},{PANEL}"
    panel.append(_element("rect", width=str(PANEL), height=str(PANEL), fill="none", stroke="#999"))
    panel.append(_element("polygon", points=corners, fill="#888", attrib={"fill-opacity": "0.25"}))
    panel.append(_element("text", text=source, x="0", y="-7", attrib={"class": "name"}))
    middle = {"text-anchor": "middle"}
    panel.append(_element("text", text="measured step", x=str(PANEL / 2), y=str(PANEL + 26), attrib=middle))
    turned = {"transform": f"translate(-46 {PANEL / 2:g}) rotate(-90)", **middle}
    panel.append(_element("text", text="predicted step", attrib=turned))
    for seconds in _ticks(math.exp(low), math.exp(high)):
        at = (math.log(seconds) - low) / (high - low) * PANEL
        marks = f"M{at:.1f} {PANEL}v4M0 {PANEL - at:.1f}h-4"
        panel.append(_element("path", d=marks, attrib={"class": "tick"}))
        label = _time(seconds)
        panel.append(_element("text", text=label, x=f"{at:.1f}", y=str(PANEL + 14), attrib=middle))
        panel.append(_element("text", text=label, x="-6", y=f"{PANEL - at + 3:.1f}", attrib={"text-anchor": "end"}))
    for name, colour in COLOURS.items():
        chosen = [place for place, one in zip(places, found, strict=True) if (id(one.row) in wrong) == (name == "contradicts")]
        dots = {(round(float(x), ROUNDED), round(PANEL - float(y), ROUNDED)) for x, y in chosen}
        if dots:
            panel.append(_element("path", stroke=colour, d="".join(f"M{x:g} {y:g}h0" for x, y in sorted(dots))))


def _ticks(low: float, high: float) -> list[float]:
    """Whole decades between two times, parts of decades where there are too few, every second one or fewer where too many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = [[part * 10.0**decade for decade in decades for part in of_decade] for of_decade in (TICKS[:1], TICKS)]
    inside = [[tick for tick in ticks if low <= tick <= high] for ticks in every]
    whole, parts = inside
    return whole[:: math.ceil(len(whole) / MOST_TICKS)] if len(whole) >= FEWEST_TICKS else parts


def _time(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms"


def _element(tag: str, text: str = "", attrib: Mapping[str, str] | None = None, **more: str) -> ElementTree.Element:
    found = ElementTree.Element(tag, {**(attrib or {}), **more})
    found.text = text or None
    return found
