"""Charts as SVG with positions in per cent: they fit any width, need no script, and take their colours from the page's style."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dpro_search.report.html import Element, name_of, tag

_BAR, _PLOT, _Y_LABELS = 22, 240, 52  # px
_EDGED_PCT = 0.5  # narrower parts would vanish behind their edges
_LEAST_SPAN = 1e-9  # of an axis, in its units


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of a stacked bar: its length, the class of its colour, and what a pointer on it tells."""

    length: float
    kind: str
    tip: str


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A value with an interval, and what was measured."""

    label: str
    low: float
    middle: float
    high: float
    measured: float | None
    tip: str
    value: str


@dataclass(frozen=True, kw_only=True)
class Dot:
    """A point of a plot."""

    x: float
    y: float
    kind: str
    tip: str


def legend(entries: Sequence[tuple[str, str]]) -> Element:
    """Names of colours: (class, name)."""
    items = (tag("li", tag("span", class_=f"swatch {kind}", aria_hidden="true"), name) for kind, name in entries)
    return tag("ul", *items, class_="legend")


def stacked(label: str, rows: Sequence[tuple[str, str, Sequence[Part]]], *, own_scale: bool = False) -> Element:
    """Bars of parts: (name, value in words, parts) each. All share a scale unless each fills the width."""
    longest = max((sum(part.length for part in parts) for _, _, parts in rows), default=0.0)
    found = []
    for name, value, parts in rows:
        whole = (sum(part.length for part in parts) if own_scale else longest) or 1.0
        pieces, at = [], 0.0
        for part in parts:
            width = part.length / whole * 100
            edge = "" if width > _EDGED_PCT else " narrow"
            pieces.append(
                tag(
                    "rect",
                    x=f"{at:.4f}%",
                    y=0,
                    width=f"{width:.4f}%",
                    height=_BAR,
                    class_=f"part {part.kind}{edge}",
                    data_tip=part.tip,
                )
            )
            at += width
        drawn = tag("svg", *pieces, class_="bar", width="100%", height=_BAR, role="img", aria_label=f"{name}: {value}")
        found.append(_row(name, value, drawn))
    return _rows(label, found)


def bars(label: str, rows: Sequence[tuple[str, str, float, str]], kind: str, below: str | None = None) -> Element:
    """Bars from zero: (name, value in words, length, tip) each; negative ones go to the left, in the colour `below` if given."""
    low = min(0.0, min((length for _, _, length, _ in rows), default=0.0))
    high = max(0.0, max((length for _, _, length, _ in rows), default=0.0))
    span = high - low or 1.0
    zero = -low / span * 100
    found = []
    for name, value, length, tip in rows:
        width = abs(length) / span * 100
        left = zero if length >= 0 else zero - width
        chosen = below if below is not None and length < 0 else kind
        bar = tag("rect", x=f"{left:.4f}%", y=4, width=f"{width:.4f}%", height=_BAR - 8, rx=2, class_=chosen, data_tip=tip)
        axis = tag("line", x1=f"{zero:.4f}%", x2=f"{zero:.4f}%", y1=0, y2=_BAR, class_="axis")
        drawn = tag("svg", bar, axis, class_="bar", width="100%", height=_BAR, role="img", aria_label=f"{name}: {value}")
        found.append(_row(name, value, drawn))
    return _rows(label, found)


def whiskers(label: str, marks: Sequence[Mark], axis: str, unit: float) -> Element:
    """Intervals on a common scale: a line from low to high, a disc in its middle, a diamond for what was measured.

    `axis` is the scale's title, `unit` what one of its units is in the values given.
    """
    values = [value for mark in marks for value in (mark.low, mark.high, mark.measured) if value is not None]
    low, high = min(values, default=0.0), max(values, default=1.0)
    low, high = low - 0.04 * (high - low), high + 0.04 * (high - low)

    def at(value: float) -> str:
        return f"{(value - low) / ((high - low) or 1.0) * 100:.4f}%"

    found = []
    for mark in marks:
        middle = _BAR / 2
        pieces = [
            tag("line", x1="0%", x2="100%", y1=middle, y2=middle, class_="track"),
            tag("line", x1=at(mark.low), x2=at(mark.high), y1=middle, y2=middle, class_="interval", data_tip=mark.tip),
            tag("circle", cx=at(mark.middle), cy=middle, r=5, class_="predicted", data_tip=mark.tip),
        ]
        if mark.measured is not None:
            diamond = tag("rect", x=-5, y=-5, width=10, height=10, transform="rotate(45)", class_="measured", data_tip=mark.tip)
            pieces.append(tag("svg", diamond, x=at(mark.measured), y=middle, overflow="visible", class_="anchor"))
        words = f"{mark.label}: {mark.tip}"
        drawn = tag("svg", *pieces, class_="bar open", width="100%", height=_BAR, role="img", aria_label=words)
        found.append(_row(mark.label, mark.value, drawn))
    texts = [
        tag("text", _number(tick), x=at(tick * unit), y=12, text_anchor="middle")
        for tick in ticks(low / unit, high / unit)
        if low + 0.03 * (high - low) <= tick * unit <= high - 0.03 * (high - low)
    ]
    scale = tag("svg", *texts, class_="open", width="100%", height=16, aria_hidden="true")
    return tag("div", _rows(label, found), scale, tag("span", axis, class_="axis-title below"), class_="whiskers")


def plot(
    label: str,
    dots: Sequence[Dot],
    steps: Sequence[tuple[float, float]],
    axes: tuple[str, str],
    units: tuple[float, float],
    line: tuple[float, str] | None = None,
) -> Element:
    """Dots in a plane, and a falling staircase through `steps`.

    Parameters
    ----------
    axes
        Titles of x and y, with their units.
    units
        What one of these units is in the values given.
    line
        Height and name of a horizontal line.
    """
    across = [dot.x / units[0] for dot in dots] + [x / units[0] for x, _ in steps]
    up = [dot.y / units[1] for dot in dots] + [y / units[1] for _, y in steps] + ([] if line is None else [line[0] / units[1]])
    y_ticks = ticks(min(up), max(up))
    left, width = min(across), max(across) - min(across) or 1.0
    x_ticks = [tick for tick in ticks(left, left + width) if left <= tick <= left + width]

    def x_at(value: float) -> str:
        return f"{(value / units[0] - left) / width * 100:.3f}%"

    def y_at(value: float) -> str:
        return f"{100 - (value / units[1] - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * 100:.3f}%"

    grid = [tag("line", x1="0%", x2="100%", y1=y_at(y * units[1]), y2=y_at(y * units[1]), class_="grid") for y in y_ticks]
    drawn = [tag("circle", cx=x_at(dot.x), cy=y_at(dot.y), r=3, class_=dot.kind, data_tip=dot.tip) for dot in dots]
    stairs = []
    for (x, y), (next_x, next_y) in pairwise(steps):
        stairs.append(tag("line", x1=x_at(x), x2=x_at(next_x), y1=y_at(y), y2=y_at(y), class_="best"))
        stairs.append(tag("line", x1=x_at(next_x), x2=x_at(next_x), y1=y_at(y), y2=y_at(next_y), class_="best"))
    reference = []
    if line is not None:
        reference.append(tag("line", x1="0%", x2="100%", y1=y_at(line[0]), y2=y_at(line[0]), class_="reference"))
        reference.append(tag("text", line[1], x="100%", y=y_at(line[0]), dy=-5, text_anchor="end", class_="note"))
    x_texts = (tag("text", _number(x), x=x_at(x * units[0]), y=14, text_anchor="middle") for x in x_ticks)
    y_texts = (tag("text", _number(y), x="100%", y=y_at(y * units[1]), dy=4, text_anchor="end") for y in y_ticks)
    shapes = (*grid, *reference, *stairs, *drawn)
    return tag(
        "div",
        tag("span", axes[1], class_="axis-title"),
        tag("svg", *y_texts, class_="open", width=_Y_LABELS, height=_PLOT, aria_hidden="true"),
        tag("svg", *shapes, class_="plane open", width="100%", height=_PLOT, role="img", aria_label=label),
        tag("svg", *x_texts, class_="below open", width="100%", height=20, aria_hidden="true"),
        tag("span", axes[0], class_="axis-title below"),
        class_="plot",
    )


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round numbers from at most `low` to at least `high`."""
    span = max(high - low if high > low else abs(high) or 1.0, _LEAST_SPAN)
    power = 10.0 ** math.floor(math.log10(span / wanted))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= span / wanted)
    first = math.floor(low / step)
    last = max(math.ceil(high / step), first + 1)
    return [number * step for number in range(first, last + 1)]


def _number(value: float) -> str:
    return f"{value:,.6g}".replace("-", "\N{MINUS SIGN}").replace(",", " ")


def _row(name: str, value: str, drawn: Element) -> Element:
    return tag("li", tag("div", name_of(name), tag("span", value, class_="value"), class_="row"), drawn)


def _rows(label: str, rows: Sequence[Element]) -> Element:
    return tag("ul", *rows, class_="rows", aria_label=label)
