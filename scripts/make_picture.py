"""Draw predicted over measured step times: python scripts/make_picture.py [PAGE]

``docs/predicted_over_measured.svg`` shows the validated jobs of ``experiments/results``. PAGE is the page of all published runs,
``accuracy.html`` of ``python -m experiments.truth table``: ``docs/published_gpu_runs.svg`` shows its runs on GPUs.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "experiments" / "results").glob("validation-*.json"))

_SIZE, _LEFT, _TOP, _ROW = 480, 64, 16, 20  # of the square, its margins, a line of the legend; in pixels

_DATA = re.compile(r'<script id="data" type="application/json">(.*?)</script>', re.DOTALL)

_STYLE = (
    "text{fill:#222}.page{fill:#fff}.band{fill:#e4e4e4}.grid{stroke:#ccc}.equal{stroke:#666}@media(prefers-color-scheme:dark)"
    "{text{fill:#e6e4dc}.page{fill:#161616}.band{fill:#333}.grid{stroke:#444}.equal{stroke:#999}}"
)

Point = tuple[str, float, float]  # Group, measured and predicted step in seconds.


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A scatter plot with two logarithmic axes of the same range."""

    path: Path
    title: str
    groups: Mapping[str, tuple[str, str]]  # Name in the legend and colour; the colours are told apart without red and green.
    ticks: Mapping[float, str]  # Labels by time in seconds.
    range_s: tuple[float, float]
    band: float  # The shaded band reaches from 1 / band to band.
    radius: float  # Radius of a point, in pixels.


VALIDATED = Chart(
    path=ROOT / "docs" / "predicted_over_measured.svg",
    title="Predicted over measured step time of validated jobs",
    groups={
        "tensorflow": ("TensorFlow, Horovod", "#0072b2"),
        "ddp": ("PyTorch DDP", "#d55e00"),
        "ps": ("MXNet KVStore", "#009e73"),
        "horovod": ("MXNet, Horovod", "#cc79a7"),
        "byteps": ("MXNet BytePS", "#7a5c00"),
    },
    ticks={0.02: "20 ms", 0.05: "50 ms", 0.1: "100 ms", 0.2: "200 ms", 0.5: "500 ms", 1: "1 s", 2: "2 s", 4: "4 s"},
    range_s=(0.02, 5.0),
    band=1.1,
    radius=3.2,
)
PUBLISHED = Chart(
    path=ROOT / "docs" / "published_gpu_runs.svg",
    title="Predicted over measured step time of published GPU runs",
    groups={
        "V100": ("V100", "#7a5c00"),
        "A100": ("A100", "#0072b2"),
        "H": ("H100, H200", "#d55e00"),
        "B": ("Blackwell GPUs", "#009e73"),
        "other": ("other GPUs", "#cc79a7"),
    },
    ticks={0.01: "10 ms", 0.1: "100 ms", 1: "1 s", 10: "10 s", 100: "100 s"},
    range_s=(0.006, 400.0),
    band=1.2,
    radius=1.6,
)
_GENERATIONS = (("V100", ("V100",)), ("A100", ("A100",)), ("H", ("H100", "H200")), ("B", ("B200", "B300", "Blackwell")))


def validated_jobs() -> Iterator[Point]:
    """Every row of the results of validations."""
    for path in RESULTS:
        results = json.loads(path.read_bytes())
        if isinstance(results, dict):
            for row in (*results["recorded"], *(row for rows in results.get("what_if", {}).values() for row in rows)):
                yield "tensorflow", row["measured_us"] / 1e6, row["predicted_us"] / 1e6
            continue
        for row in results:
            yield row.get("scheme", "ddp"), median(row["measured_us"]) / 1e6, row["predicted_us"] / 1e6


def published_runs(page: Path) -> Iterator[Point]:
    """Runs of the page on GPUs that do not contradict themselves or others, predicted from public specifications."""
    embedded = _DATA.search(page.read_text("utf-8"))
    if embedded is None:
        raise SystemExit(f"{page}: no page of published runs; python -m experiments.truth table FOLDER --out DIR writes it")
    for run in json.loads(embedded[1])["runs"]:
        if "TPU" not in run["gpu"] and not run["contradicts"]:
            group = next((name for name, words in _GENERATIONS if any(word in run["gpu"] for word in words)), "other")
            yield group, run["measured"], run["predicted"]


def drawn(chart: Chart, points: Sequence[Point]) -> str:
    """The picture as SVG."""
    within = sum(1 / chart.band <= predicted / measured <= chart.band for _, measured, predicted in points) / len(points)
    height = _TOP + _SIZE + 56
    svg = ElementTree.Element(
        "svg",
        {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {_LEFT + _SIZE + 230} {height}", "font-family": "sans-serif"},
    )
    svg.set("font-size", "13")
    _add(svg, "title").text = chart.title
    _add(svg, "style").text = _STYLE
    _add(svg, "rect", width="100%", height="100%", **{"class": "page"})
    low, high = chart.range_s
    corners = [(low, low), (low, low * chart.band), (high / chart.band, high)]
    corners += [(predicted, measured) for measured, predicted in reversed(corners)]
    outline = " ".join(f"{_x(chart, measured):.1f},{_y(chart, predicted):.1f}" for measured, predicted in corners)
    _add(svg, "polygon", points=outline, **{"class": "band"})
    for tick_s, label in chart.ticks.items():
        x, y = _x(chart, tick_s), _y(chart, tick_s)
        _add(svg, "line", x1=x, x2=x, y1=_TOP, y2=_TOP + _SIZE, **{"class": "grid"})
        _add(svg, "line", x1=_LEFT, x2=_LEFT + _SIZE, y1=y, y2=y, **{"class": "grid"})
        _text(svg, x, _TOP + _SIZE + 18, label, "middle")
        _text(svg, _LEFT - 6, y + 4, label, "end")
    _add(svg, "line", x1=_x(chart, low), y1=_y(chart, low), x2=_x(chart, high), y2=_y(chart, high), **{"class": "equal"})
    for group, (_, colour) in chart.groups.items():
        places = sorted({(_x(chart, measured), _y(chart, predicted)) for name, measured, predicted in points if name == group})
        dots = "".join(f"M{x:g} {y:g}h0" for x, y in places)
        style = {"stroke-width": 2 * chart.radius, "stroke-linecap": "round", "stroke-opacity": 0.6}
        _add(svg, "path", d=dots, stroke=colour, fill="none", **style)
    _text(svg, _LEFT + _SIZE / 2, _TOP + _SIZE + 42, "measured step", "middle")
    label = _text(svg, 0, 0, "predicted step", "middle")
    label.set("transform", f"translate(14 {_TOP + _SIZE / 2}) rotate(-90)")
    present = [name for name in chart.groups if any(point[0] == name for point in points)]
    for number, group in enumerate(present):
        name, colour = chart.groups[group]
        count = sum(point[0] == group for point in points)
        _add(svg, "circle", cx=_LEFT + _SIZE + 20, cy=_TOP + 8 + _ROW * number, r=4, fill=colour)
        _text(svg, _LEFT + _SIZE + 30, _TOP + 12 + _ROW * number, f"{name} ({count})", "start")
    share = f"{within:.0%} of {len(points):,} within {chart.band - 1:.0%}"
    _text(svg, _LEFT + _SIZE + 14, _TOP + 24 + _ROW * len(present), share, "start")
    ElementTree.indent(svg)
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def _position(chart: Chart, seconds: float) -> float:
    low, high = chart.range_s
    return math.log(min(max(seconds, low), high) / low) / math.log(high / low)


def _x(chart: Chart, seconds: float) -> float:
    return round(_LEFT + _SIZE * _position(chart, seconds), 1)


def _y(chart: Chart, seconds: float) -> float:
    return round(_TOP + _SIZE * (1 - _position(chart, seconds)), 1)


def _add(parent: ElementTree.Element, name: str, **attributes: str | float) -> ElementTree.Element:
    return ElementTree.SubElement(parent, name, {key: str(value) for key, value in attributes.items()})


def _text(parent: ElementTree.Element, x: float, y: float, text: str, anchor: str) -> ElementTree.Element:
    element = _add(parent, "text", x=x, y=y, **{"text-anchor": anchor})
    element.text = text
    return element


if __name__ == "__main__":
    for chart, points in [(VALIDATED, validated_jobs()), *((PUBLISHED, published_runs(Path(page))) for page in sys.argv[1:2])]:
        chart.path.write_text(drawn(chart, list(points)))
        print(chart.path)
