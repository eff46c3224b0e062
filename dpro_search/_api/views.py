"""Values of the Python API as columns, as a table of pandas, and drawn with matplotlib, where these are installed.

A function of `plot()` draws on `ax`, or on a new figure, and returns the axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dpro_search.errors import InputError, MissingCapabilityError
from dpro_search.report.progress import best_so_far, pareto_front
from dpro_search.report.timeline import Lane

_COLOURS = {
    "compute": "#2a78d6", "backward": "#4a3aa7", "update": "#1baf7a", "comm": "#eb6834", "wait": "#eda100", "copy": "#d66a94",
    "server": "#3c7d22", "host": "#8b8a83", "idle": "#cfcec6", "contention": "#9085e9", "unknown": "#55544e",
}  # fmt: skip
_OF_PART = {"exposed_communication": "comm", "waiting_for_ranks": "wait", "agreement": "wait", "negotiation": "wait"}


class Tabular:
    """A value with rows."""

    def columns(self) -> dict[str, Any]:
        """The columns by name, all of one length; times in us, sizes in bytes."""
        raise NotImplementedError

    def to_frame(self) -> Any:
        """The columns as a ``pandas.DataFrame``.

        Raises
        ------
        MissingCapabilityError
            pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingCapabilityError(
                "to_frame() needs pandas: pip install 'dpro-search[notebook]'; columns() gives the same as a dict"
            ) from error
        return pd.DataFrame(self.columns())


def columns_of(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Columns with these names; None where a row lacks a value."""
    table = list(rows)
    return {name: [row.get(name) for row in table] for name in names}


def timeline(lanes: Sequence[Lane], title: str, ax: Any = None) -> Any:
    """Lanes of slices, the first on top."""
    ax = _axes(ax, height=1 + 0.3 * len(lanes))
    for row, lane in enumerate(lanes):
        spans = [(start / 1e3, length / 1e3) for start, length in zip(lane.start_us, lane.length_us, strict=True)]
        ax.broken_barh(spans, (row - 0.4, 0.8), facecolors=[_COLOURS[kind] for kind in lane.kinds])
    ax.set_yticks(range(len(lanes)), [f"{'measured' if lane.measured else 'predicted'} {lane.name}" for lane in lanes])
    ax.invert_yaxis()
    return _labelled(ax, title, "time, ms", "")


def breakdown(parts: Mapping[str, float], title: str, ax: Any = None) -> Any:
    """One stacked bar."""
    ax, start_us = _axes(ax, height=1.8), 0.0
    for part, length_us in parts.items():
        ax.barh([0], [length_us / 1e3], left=start_us / 1e3, color=_colour(part), label=part.replace("_", " "))
        start_us += length_us
    ax.set_yticks([])
    ax.legend(ncols=len(parts), loc="upper center", bbox_to_anchor=(0.5, -0.35), frameon=False)
    return _labelled(ax, title, "time, ms", "")


def gains(rows: Sequence[Mapping[str, Any]], names: Sequence[str], ax: Any = None) -> Any:
    """A bar for each what-if question, the largest gain on top."""
    ax = _axes(ax, height=1 + 0.3 * len(rows))
    ax.barh(range(len(rows)), [row["gain_us"] / 1e3 for row in rows], color=_COLOURS["update"])
    ax.set_yticks(range(len(rows)), names)
    ax.invert_yaxis()
    return _labelled(ax, "What would it gain" if rows else "No change that was tried gains 0.5 %", "gain, ms", "")


def progress(trials: Sequence[Mapping[str, Any]], ax: Any = None) -> Any:
    """Predicted iteration of each trial, and the best so far."""
    ax, best = _axes(ax), best_so_far(trials)
    ax.plot([t["number"] for t in trials], [t["iteration_us"] / 1e3 for t in trials], ".", color=_COLOURS["idle"], label="trials")
    steps = [*best, {**best[-1], "number": trials[-1]["number"]}] if best else []
    shown = {"where": "post", "color": _COLOURS["compute"], "label": "best so far"}
    ax.step([t["number"] for t in steps], [t["iteration_us"] / 1e3 for t in steps], **shown)
    ax.axhline(trials[0]["iteration_us"] / 1e3, color=_COLOURS["host"], linestyle="--", label="as recorded")
    ax.legend(frameon=False)
    return _labelled(ax, "Progress of the search", "trial", "iteration, ms")


def pareto(trials: Sequence[Mapping[str, Any]], ax: Any = None) -> Any:
    """Iteration time over peak memory, and the front; raises `InputError` where the plans do not differ in memory."""
    known = [trial for trial in trials if trial["peak_memory_bytes"] is not None]
    if len({trial["peak_memory_bytes"] for trial in known}) < 2:
        raise InputError("kind 'pareto': the plans of this search do not differ in memory; choose 'progress'")
    ax, front = _axes(ax), pareto_front(trials)
    for some, style, label in ((known, ".", "trials"), (front, "o-", "Pareto front")):
        at = [t["peak_memory_bytes"] / 2**20 for t in some], [t["iteration_us"] / 1e3 for t in some]
        ax.plot(*at, style, color=_COLOURS["idle" if some is known else "compute"], label=label)
    ax.legend(frameon=False)
    return _labelled(ax, "Time and memory", "peak memory, MiB", "iteration, ms")


def real_runs(names: Sequence[str], predicted_us: Sequence[float], measured_us: Sequence[float | None], ax: Any) -> Any:
    """Two points for each setting, the first on top."""
    ax, rows = _axes(ax, height=1 + 0.4 * len(names)), range(len(names))
    ran = [(row, us / 1e3) for row, us in zip(rows, measured_us, strict=True) if us is not None]
    ax.plot([us / 1e3 for us in predicted_us], rows, "o", color=_COLOURS["compute"], label="predicted")
    ax.plot([us for _, us in ran], [row for row, _ in ran], "D", color=_COLOURS["comm"], label="measured")
    ax.set_yticks(rows, names)
    ax.invert_yaxis()
    ax.legend(frameon=False)
    return _labelled(ax, "Real runs", "iteration, ms", "")


def _axes(ax: Any, height: float = 3.5) -> Any:
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingCapabilityError("plot() needs matplotlib: pip install 'dpro-search[notebook]'") from error
    return pyplot.subplots(figsize=(9, height), layout="constrained")[1]


def _labelled(ax: Any, title: str, across: str, up: str) -> Any:
    ax.set(title=title, xlabel=across, ylabel=up)
    return ax


def _colour(part: str) -> str:
    return _COLOURS[_OF_PART.get(part, part if part in _COLOURS else "host")]
