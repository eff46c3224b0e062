"""Charts as SVG with positions in per cent: they fit any width, need no script, and take their colours from the page's style.

The functions here find the positions; the macros of ``templates/charts.html.j2`` draw them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from dpro_search.report.html import Element, element
from dpro_search.report.units import time_scale

_ACROSS = 10_000  # units of a pipeline's width
_EDGED_PCT = 0.5  # narrower parts would vanish behind their edges
_LEAST_SPAN = 1e-9  # of an axis, in its units
_SAME = 1e-9  # relative difference of values that are drawn as one


@dataclass(frozen=True, kw_only=True)
class BarPart:
    """A piece of a stacked bar: its length, the class of its colour, and the text of its tooltip."""

    length: float
    kind: str
    tip: str


@dataclass(frozen=True, kw_only=True)
class IntervalMark:
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


@dataclass(frozen=True, kw_only=True)
class PipelineRow:
    """A row of a pipeline: when it does what, as spans of (start, end) by the class of their colour."""

    name: str
    value: str
    spans: Mapping[str, Sequence[tuple[float, float]]]


def stacked(label: str, rows: Sequence[tuple[str, str, Sequence[BarPart]]]) -> Element:
    """Bars of parts on one scale: (name, value in words, parts) each."""
    longest = max((sum(part.length for part in parts) for _, _, parts in rows), default=0.0) or 1.0
    drawn = []
    for name, value, parts in rows:
        widths = [part.length / longest * 100 for part in parts]
        starts = accumulate(widths, initial=0.0)
        drawn.append(
            (name, value, [(p, _pct(x), _pct(w), w <= _EDGED_PCT) for p, x, w in zip(parts, starts, widths, strict=False)])
        )
    return element("stacked", label, drawn, of="charts")


def pipeline(label: str, rows: Sequence[PipelineRow], length: float) -> Element:
    """Spans of time in rows from 0 to `length`; one path for each colour, so that thousands of spans stay small."""
    scale = _ACROSS / (length or 1.0)
    drawn = []
    for row in rows:
        end = max((end for spans in row.spans.values() for _, end in spans), default=0.0)
        drawn.append(
            (row.name, row.value, round(end * scale), [(kind, _joined(spans, scale)) for kind, spans in row.spans.items()])
        )
    return element("pipeline", label, drawn, _ACROSS, of="charts")


def _joined(spans: Sequence[tuple[float, float]], scale: float) -> list[tuple[int, int]]:
    """Start and length of spans in whole units; spans that touch are one."""
    joined: list[list[int]] = []
    for start, end in sorted((round(start * scale), round(end * scale)) for start, end in spans):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    return [(start, max(end - start, 1)) for start, end in joined]


def bars(label: str, rows: Sequence[tuple[str, str, float, str]], kind: str, below: str | None = None) -> Element:
    """Bars from zero: (name, value in words, length, tip) each; negative ones go to the left, in the colour `below` if given."""
    lengths = [length for _, _, length, _ in rows]
    low, high = min([0.0, *lengths]), max([0.0, *lengths])
    scale = 100 / ((high - low) or 1.0)
    drawn = []
    for name, value, length, tip in rows:
        chosen = below if below is not None and length < 0 else kind
        drawn.append((name, value, tip, _pct((min(length, 0.0) - low) * scale), _pct(abs(length) * scale), chosen))
    return element("bars", label, drawn, _pct((0.0 - low) * scale), of="charts")


def whiskers(label: str, marks: Sequence[IntervalMark], axis: str) -> Element:
    """Intervals of time on a common scale: a line from low to high, a disc in its middle, a diamond for what was measured."""
    values = [value for mark in marks for value in (mark.low, mark.high, mark.measured) if value is not None]
    low, high = min(values, default=0.0), max(values, default=1.0)
    low, high = low - 0.04 * (high - low), high + 0.04 * (high - low)
    name, unit = time_scale(values)

    def at(value: float) -> str:
        return _pct((value - low) / ((high - low) or 1.0) * 100)

    drawn = [
        (mark, at(mark.low), at(mark.middle), at(mark.high), None if mark.measured is None else at(mark.measured)) for mark in marks
    ]
    margin = 0.03 * (high - low)
    shown = [tick for tick in ticks(low / unit, high / unit) if low + margin <= tick * unit <= high - margin]
    return element("whiskers", label, drawn, [(_number(tick), at(tick * unit)) for tick in shown], f"{axis}, {name}", of="charts")


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
    points = [*((dot.x, dot.y) for dot in dots), *steps]
    across = [x / units[0] for x, _ in points]
    up = [y / units[1] for _, y in points] + ([] if line is None else [line[0] / units[1]])
    y_ticks = ticks(min(up), max(up))
    left, width = min(across), max(across) - min(across) or 1.0
    x_ticks = [tick for tick in ticks(left, left + width) if left <= tick <= left + width]

    def x_at(value: float) -> str:
        return f"{(value / units[0] - left) / width * 100:.3f}%"

    def y_at(value: float) -> str:
        return f"{100 - (value / units[1] - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * 100:.3f}%"

    return element(
        "plot",
        label,
        axes,
        [(dot, x_at(dot.x), y_at(dot.y)) for dot in dots],
        [(x_at(x), y_at(y), x_at(next_x), y_at(next_y)) for (x, y), (next_x, next_y) in pairwise(steps)],
        None if line is None else (line[1], y_at(line[0])),
        [(_number(x), x_at(x * units[0])) for x in x_ticks],
        [(_number(y), y_at(y * units[1])) for y in y_ticks],
        of="charts",
    )


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers from at most `low` to at least `high`."""
    same = high - low <= _SAME * abs(high)  # no ticks lie between them
    span = max((abs(high) or 1.0) if same else high - low, _LEAST_SPAN)
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= span / count)
    first = math.floor(low / step)
    last = max(math.ceil(high / step), first + 1)
    return [number * step for number in range(first, last + 1)]


def _number(value: float) -> str:
    return f"{value:,.6g}".replace("-", "\N{MINUS SIGN}")


def _pct(value: float) -> str:
    return f"{value:.4f}%"
