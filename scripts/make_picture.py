"""Draw docs/predicted_over_measured.svg from the measured runs in experiments/results: python scripts/make_picture.py"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "predicted_over_measured.svg"
RESULTS = sorted((ROOT / "experiments" / "results").glob("validation-*.json"))

_SYSTEMS = {  # by the scheme of the results: name and colour (told apart also by people who see no red and green)
    "tensorflow": ("TensorFlow, Horovod", "#0072b2"),
    "ddp": ("PyTorch DDP", "#d55e00"),
    "ps": ("MXNet KVStore", "#009e73"),
    "horovod": ("MXNet, Horovod", "#cc79a7"),
    "byteps": ("MXNet BytePS", "#7a5c00"),
}
_SIZE, _LEFT, _TOP, _ROW = 480, 64, 16, 20  # of the square, its margins, a line of the legend; in pixels
_LOW_MS, _HIGH_MS = 20.0, 5000.0
_TICKS_MS = (20, 50, 100, 200, 500, 1000, 2000, 4000)
_BAND = 1.1


def points() -> Iterator[tuple[str, float, float]]:
    """System, measured and predicted iteration in ms, of every row of the results."""
    for path in RESULTS:
        found = json.loads(path.read_bytes())
        if isinstance(found, dict):
            for row in (*found["recorded"], *(row for rows in found.get("what_if", {}).values() for row in rows)):
                yield "tensorflow", row["measured_us"] / 1e3, row["predicted_us"] / 1e3
            continue
        for row in found:
            yield row.get("scheme", "ddp"), median(row["measured_us"]) / 1e3, row["predicted_us"] / 1e3


def drawn(found: list[tuple[str, float, float]]) -> str:
    """The picture as SVG."""
    within = sum(1 / _BAND <= predicted / measured <= _BAND for _, measured, predicted in found) / len(found)
    height = _TOP + _SIZE + 56
    svg = ElementTree.Element(
        "svg",
        {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {_LEFT + _SIZE + 220} {height}", "font-family": "sans-serif"},
    )
    svg.set("font-size", "13")
    _add(svg, "title").text = "Predicted over measured iteration time"
    _add(svg, "rect", width="100%", height="100%", fill="#ffffff")
    corners = [
        (_LOW_MS, _LOW_MS), (_LOW_MS, _LOW_MS * _BAND), (_HIGH_MS / _BAND, _HIGH_MS),
        (_HIGH_MS, _HIGH_MS), (_HIGH_MS, _HIGH_MS / _BAND), (_LOW_MS * _BAND, _LOW_MS),
    ]  # fmt: skip
    _add(svg, "polygon", points=" ".join(f"{_x(a):.1f},{_y(b):.1f}" for a, b in corners), fill="#e4e4e4")
    for tick in _TICKS_MS:
        _add(svg, "line", x1=_x(tick), x2=_x(tick), y1=_TOP, y2=_TOP + _SIZE, stroke="#cccccc")
        _add(svg, "line", x1=_LEFT, x2=_LEFT + _SIZE, y1=_y(tick), y2=_y(tick), stroke="#cccccc")
        _text(svg, _x(tick), _TOP + _SIZE + 18, str(tick), "middle")
        _text(svg, _LEFT - 6, _y(tick) + 4, str(tick), "end")
    _add(svg, "line", x1=_x(_LOW_MS), y1=_y(_LOW_MS), x2=_x(_HIGH_MS), y2=_y(_HIGH_MS), stroke="#666666")
    for system, measured, predicted in found:
        _add(svg, "circle", cx=_x(measured), cy=_y(predicted), r=3.2, fill=_SYSTEMS[system][1], **{"fill-opacity": 0.65})
    _text(svg, _LEFT + _SIZE / 2, _TOP + _SIZE + 42, "measured iteration, ms", "middle")
    label = _text(svg, 0, 0, "predicted iteration, ms", "middle")
    label.set("transform", f"translate(16 {_TOP + _SIZE / 2}) rotate(-90)")
    present = [system for system in _SYSTEMS if any(row[0] == system for row in found)]
    for number, system in enumerate(present):
        name, colour = _SYSTEMS[system]
        _add(svg, "circle", cx=_LEFT + _SIZE + 20, cy=_TOP + 8 + _ROW * number, r=4, fill=colour)
        _text(svg, _LEFT + _SIZE + 30, _TOP + 12 + _ROW * number, f"{name} ({sum(row[0] == system for row in found)})", "start")
    _text(svg, _LEFT + _SIZE + 14, _TOP + 24 + _ROW * len(present), f"{within:.0%} of {len(found)} within 10 %", "start")
    ElementTree.indent(svg)
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def _position(ms: float) -> float:
    return math.log(min(max(ms, _LOW_MS), _HIGH_MS) / _LOW_MS) / math.log(_HIGH_MS / _LOW_MS)


def _x(ms: float) -> float:
    return round(_LEFT + _SIZE * _position(ms), 1)


def _y(ms: float) -> float:
    return round(_TOP + _SIZE * (1 - _position(ms)), 1)


def _add(parent: ElementTree.Element, name: str, **attributes: str | float) -> ElementTree.Element:
    return ElementTree.SubElement(parent, name, {key: str(value) for key, value in attributes.items()})


def _text(parent: ElementTree.Element, x: float, y: float, text: str, anchor: str) -> ElementTree.Element:
    element = _add(parent, "text", x=x, y=y, fill="#222222", **{"text-anchor": anchor})
    element.text = text
    return element


if __name__ == "__main__":
    PICTURE.write_text(drawn(list(points())))
    print(PICTURE)
