"""Bar charts as SVG, on white so that they can be read on light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # told apart also by people who see no red and green

_HEIGHT, _LEFT, _TOP, _LEGEND, _LABELS, _TITLE = 150, 52, 12, 26, 104, 20  # pixels: of a panel, and around it
_BAR, _GAP, _RIGHT = 8, 12, 16  # of a bar: at least; few groups have wider ones
_WIDEST_BAR = 24
_TICKS = 4


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Groups of bars with a title: (label, a value for each series or None) each."""

    title: str
    groups: tuple[tuple[str, tuple[float | None, ...]], ...]


def bars(title: str, series: Sequence[str], panels: Sequence[Panel], *, unit: str, top: float, line: float | None = None) -> str:
    """A chart with a panel below the other.

    Parameters
    ----------
    series
        Names of the bars within each group.
    unit
        Of the vertical axis, which goes from 0 to `top`; a longer bar ends there and its value is written on it.
    line
        Where a horizontal line says what would be right.
    """
    widest = max((len(panel.groups) for panel in panels), default=1)
    width = max(_LEFT + widest * _group_width(len(series), _BAR) + _RIGHT, _LEFT + 190 * len(series))
    bar = min(int(((width - _LEFT - _RIGHT) / max(widest, 1) - _GAP) / len(series)), _WIDEST_BAR)
    block = _TITLE + _HEIGHT + _LABELS
    height = _TOP + _LEGEND + block * len(panels)
    svg = ElementTree.Element(
        "svg",
        {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width} {height}", "font-family": "sans-serif", "font-size": "11"},
    )
    _add(svg, "title").text = title
    _add(svg, "rect", width="100%", height="100%", fill="#ffffff")
    for number, name in enumerate(series):
        _add(svg, "rect", x=_LEFT + 190 * number, y=_TOP, width=10, height=10, fill=COLOURS[number])
        _text(svg, _LEFT + 190 * number + 15, _TOP + 9, name)
    for number, panel in enumerate(panels):
        _draw(svg, panel, _TOP + _LEGEND + block * number, width, len(series), bar, unit=unit, top=top, line=line)
    ElementTree.indent(svg)
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def _draw(
    svg: ElementTree.Element,
    panel: Panel,
    y: float,
    width: float,
    series: int,
    bar: int,
    *,
    unit: str,
    top: float,
    line: float | None,
) -> None:
    _text(svg, _LEFT, y + 12, f"{panel.title}, {unit}", weight="bold")
    base = y + _TITLE + _HEIGHT
    for tick in range(_TICKS + 1):
        at = base - _HEIGHT * tick / _TICKS
        _add(svg, "line", x1=_LEFT, x2=width - _RIGHT, y1=at, y2=at, stroke="#dddddd")
        _text(svg, _LEFT - 6, at + 4, f"{top * tick / _TICKS:g}", anchor="end")
    for number, (label, values) in enumerate(panel.groups):
        left = _LEFT + _GAP / 2 + number * _group_width(series, bar)
        for place, value in enumerate(values):
            if value is None:
                continue
            length = _HEIGHT * min(max(value, 0.0), top) / top
            x = left + place * bar
            drawn = _add(svg, "rect", x=x, y=round(base - length, 1), width=bar - 1, height=round(length, 1), fill=COLOURS[place])
            _add(drawn, "title").text = f"{label}: {value:.3g}"
            if value > top:
                over = _text(svg, 0, 0, f"{value:.3g}")
                over.set("font-size", "9")
                over.set("transform", f"translate({x + bar - 2} {base - _HEIGHT + 34}) rotate(-90)")
                over.set("fill", "#ffffff")
        named = _text(svg, 0, 0, label, anchor="end")
        named.set("transform", f"translate({left + series * bar / 2 + 3} {base + 8}) rotate(-45)")
    if line is not None:
        at = base - _HEIGHT * line / top
        _add(svg, "line", x1=_LEFT, x2=width - _RIGHT, y1=at, y2=at, stroke="#222222")


def _group_width(series: int, bar: int) -> int:
    return max(series * bar + _GAP, 26)


def _add(parent: ElementTree.Element, name: str, **attributes: str | float) -> ElementTree.Element:
    return ElementTree.SubElement(parent, name, {key: str(value) for key, value in attributes.items()})


def _text(
    parent: ElementTree.Element, x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal"
) -> ElementTree.Element:
    element = _add(parent, "text", x=x, y=y, fill="#222222", **{"text-anchor": anchor, "font-weight": weight})
    element.text = text
    return element
