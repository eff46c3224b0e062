"""The tables of the characterisation: measured and predicted, and what each loss is made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from dpro_search.quantities import size_text
from experiments.allreduce.cases import BATCH, SIZES_BYTES, VARIED_WORKERS, Case, cases
from experiments.allreduce.characterise import Journal, measured_step
from experiments.allreduce.predicted import exchange_of, loss, predicted_us
from experiments.allreduce.schemes import SCHEMES

_AS_LARGE = 0.02  # efficiencies that differ by less are not told apart


@dataclass(frozen=True, kw_only=True)
class Found:
    """A training: its efficiency (computation over step) as measured, and as predicted; None: not predicted."""

    case: Case
    compute_us: float
    step_us: float
    predicted_us: float | None  # From exchanges of other sizes among as many workers.
    elsewhere_us: float | None  # From exchanges among other numbers of workers.

    def efficiency(self, us: float | None) -> float | None:
        """Of a step that takes so long."""
        return None if us is None else self.compute_us / us

    def error(self, us: float | None) -> float | None:
        """Of the predicted efficiency, relative to the measured one."""
        return None if us is None else abs(self.step_us / us - 1)


def lines(folder: Path) -> Iterator[str]:
    """Markdown."""
    journal = Journal(folder)
    found = [one for name in SCHEMES for case in cases(name) if (one := _found(journal, case)) is not None]
    yield from _accuracy(found)
    yield from _by(found, "workers", lambda case: (case.network, case.batch) == ("resnet-50", BATCH))
    yield from _by(found, "batch", lambda case: (case.network, case.workers) == ("resnet-50", VARIED_WORKERS))
    yield from _by(found, "network", lambda case: (case.batch, case.workers) == (BATCH, VARIED_WORKERS))
    yield from _losses(journal, found)
    yield from _latencies(journal)


def _found(journal: Journal, case: Case) -> Found | None:
    row = journal.rows.get(case.key)
    if row is None or not case.network:
        return None
    step = measured_step(journal, case)
    taken: list[float | None] = []
    for of_others in (False, True):
        exchange = exchange_of(journal, case.scheme, case.workers, of_others=of_others) if case.workers > 1 else None
        taken.append(None if exchange is None else predicted_us(case.scheme, step, exchange))
    step_us = float(np.median(row["steps_us"]))
    return Found(case=case, compute_us=row["compute_us"], step_us=step_us, predicted_us=taken[0], elsewhere_us=taken[1])


def _accuracy(found: Sequence[Found]) -> Iterator[str]:
    yield "| predicted from exchanges of | trainings | error of the efficiency: median | 90 % | worst | pairs of schemes in order |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name, field in (("other sizes", "predicted_us"), ("other numbers of workers", "elsewhere_us")):
        errors = [error for one in found if (error := one.error(getattr(one, field))) is not None]
        if errors:
            numbers = " | ".join(f"{100 * value:.1f} %" for value in (np.median(errors), np.quantile(errors, 0.9), max(errors)))
            right, pairs = _in_order(found, field)
            yield f"| {name} | {len(errors)} | {numbers} | {right} of {pairs} |"
    yield ""


def _in_order(found: Sequence[Found], field: str) -> tuple[int, int]:
    """Pairs of schemes in one setting that differ, and are predicted in the measured order."""
    settings = defaultdict(list)
    for one in found:
        if getattr(one, field) is not None:
            settings[one.case.workers, one.case.network, one.case.batch].append(one)
    right = pairs = 0
    for some in settings.values():
        for a, b in combinations(some, 2):
            measured, predicted = (a.compute_us / getattr(a, us) - b.compute_us / getattr(b, us) for us in ("step_us", field))
            if abs(measured) > _AS_LARGE:
                pairs += 1
                right += predicted * measured > 0
    return right, pairs


def _by(found: Sequence[Found], vector: str, wanted: Any) -> Iterator[str]:
    some = [one for one in found if wanted(one.case)]
    values = list(dict.fromkeys(sorted(getattr(one.case, vector) for one in some)))
    if not values:
        return
    yield f"Images/s of all workers, scaling efficiency (predicted: from other sizes; from other numbers of workers), by {vector}:"
    yield ""
    yield f"| scheme | {' | '.join(map(str, values))} |"
    yield f"|---|{'---:|' * len(values)}"
    for name, scheme in SCHEMES.items():
        cells = []
        for value in values:
            one = next((each for each in some if each.case.scheme == name and getattr(each.case, vector) == value), None)
            cells.append("" if one is None else _cell(one))
        if any(cells):
            yield f"| {scheme.title} | {' | '.join(cells)} |"
    yield ""


def _cell(one: Found) -> str:
    images = one.case.workers * one.case.batch / one.step_us * 1e6
    predicted = [_percent(one.efficiency(us)) for us in (one.predicted_us, one.elsewhere_us)]
    shown = "" if predicted == ["-", "-"] else f" ({'; '.join(predicted)})"
    return f"{images:.2f}, {_percent(one.efficiency(one.step_us))}{shown}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _losses(journal: Journal, found: Sequence[Found]) -> Iterator[str]:
    yield "What a step takes longer than its computation, as predicted, % of the computation:"
    yield ""
    yield "| scheme | workers | network | copies | latency | servers, processors | waiting | bandwidth | in all | measured |"
    yield "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|"
    for one in found:
        case = one.case
        exchange = exchange_of(journal, case.scheme, case.workers, of_others=False) if case.workers > 1 else None
        if case.batch != BATCH or exchange is None:
            continue
        parts = loss(case.scheme, measured_step(journal, case), exchange)
        each = (parts.copies_us, parts.latency_us, parts.server_us, parts.waiting_us, parts.bandwidth_us)
        shown = " | ".join(f"{100 * us / one.compute_us:.0f}" for us in (*each, sum(each), one.step_us - one.compute_us))
        yield f"| {SCHEMES[case.scheme].title} | {case.workers} | {case.network} | {shown} |"
    yield ""


def _latencies(journal: Journal) -> Iterator[str]:
    yield f"us of an exchange of one tensor, {VARIED_WORKERS} workers:"
    yield ""
    yield f"| scheme | {' | '.join(map(size_text, SIZES_BYTES))} |"
    yield f"|---|{'---:|' * len(SIZES_BYTES)}"
    for name, scheme in SCHEMES.items():
        row = journal.rows.get(Case(scheme=name, workers=VARIED_WORKERS).key)
        if row is not None:
            us = dict(zip(row["sizes_bytes"], row["us"], strict=True))
            yield f"| {scheme.title} | {' | '.join(f'{us[size]:.0f}' if size in us else '-' for size in SIZES_BYTES)} |"
