"""The snapshot of predictions and of commands' outputs: how it is kept, and what counts as drift."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from dpro_search.collect._files import write_file

FOLDER = Path(__file__).parent
TOLERANCE = 1e-6  # of a number; refactorings change none by more
NEGLIGIBLE = 1e-6  # absolute: differences of nearly equal numbers are rounding errors
DRAWN_US = 1.001e-3  # likewise, of `start_us` and `length_us` of a drawn timeline, which are rounded to a nanosecond
DIGITS = 7
MOST_LINES = 12  # of one case that a failure shows
HOW = (
    "If the change is meant: `python -m tests.drift.update --reason 'WHY'`, and commit tests/drift/*.json together with"
    " what moved it, the reason in the commit's message."
)


class Snapshot(msgspec.Struct, forbid_unknown_fields=True):
    """Values of earlier: of each job the predictions by case, or of each command the output by key."""

    reason: str  # The reason of the last change.
    values: dict[str, dict[str, Any]]


def path_of(name: str) -> Path:
    """The file of "predictions" or "commands"."""
    return FOLDER / f"{name}.json"


def read(name: str) -> Snapshot:
    """A snapshot of this checkout; an empty one if there is none yet."""
    if not path_of(name).is_file():
        return Snapshot(reason="", values={})
    return msgspec.json.decode(path_of(name).read_bytes(), type=Snapshot)


def write(name: str, snapshot: Snapshot) -> None:
    """Write a snapshot, one line for each case of a job or key of an output."""
    jobs = []
    for job, cases in sorted(snapshot.values.items()):
        lines = [f"  {json.dumps(case)}: {json.dumps(rounded(value), separators=(',', ':'))}" for case, value in cases.items()]
        jobs.append(f" {json.dumps(job)}: {{\n" + ",\n".join(lines) + "\n }")
    text = f'{{"reason": {json.dumps(snapshot.reason)}, "values": {{\n' + ",\n".join(jobs) + "\n}}\n"
    write_file(path_of(name), text.encode())


def rounded(value: Any) -> Any:
    """The value with numbers of `DIGITS` significant digits, as snapshots keep them."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: rounded(entry) for name, entry in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def drift(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> list[str]:
    """The differences between a snapshot's values of a job or command and those of today, in a line each; empty: none."""
    if before is None:
        return ["is new"]
    return [f"{place}: {change}" for case in {**before, **now} for place, change in _differences(case, before, now)]


def shown(differences: list[str]) -> str:
    """Differences as a failure shows them: the first ones, and how many more there are."""
    more = len(differences) - MOST_LINES
    return "\n  ".join(differences[:MOST_LINES] + ([f"and {more} more"] if more > 0 else []))


def _differences(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Places below an entry of two mappings, and how they differ."""
    if key not in now:
        yield key, f"was {_short(before[key])}, is gone"
    elif key not in before:
        yield key, f"is new: {_short(now[key])}"
    else:
        yield from _changes(key, before[key], now[key])


def _changes(place: str, before: Any, now: Any) -> Iterator[tuple[str, str]]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            for below, change in _differences(key, before, now):
                yield f"{place} / {below}", change
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (was, value) in enumerate(zip(before, now, strict=True)):
            yield from _changes(f"{place}[{index}]", was, value)
    elif not _equal(before, now, DRAWN_US if place.startswith(("start_us[", "length_us[")) else NEGLIGIBLE):
        yield place, f"was {_short(before)}, is {_short(now)}{_relative(before, now)}"


def _equal(before: Any, now: Any, negligible: float) -> bool:
    if type(before) is not type(now):
        return False
    if isinstance(now, bool) or not isinstance(now, int | float):
        return bool(before == now)
    return before == now or abs(before - now) <= max(TOLERANCE * abs(before), negligible)


def _relative(before: Any, now: Any) -> str:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (before, now))
    return f" ({now / before - 1:+.3g} of it)" if numbers and before else ""


def _short(value: Any) -> str:
    text = json.dumps(rounded(value))
    return text if len(text) <= 120 else text[:117] + "..."
