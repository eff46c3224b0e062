"""All plans of a described job on one page: a scatter, filters, a table, and for each plan its time, memory and pipeline.

`planner_data` packs the plans in columns (indices into lists of values, and binary numbers as base64), which ``assets/planner.js``
unpacks: ten thousand plans take less than 2 MB. Without JavaScript the section shows the fastest plans as a table.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from dpro_search.kinds import STEP_PARTS
from dpro_search.parallel.answers.priced import MOST_DETAILED, PricedPlan, drawn_micro_batches, order_texts
from dpro_search.parallel.setting import plain
from dpro_search.parallel.strategy import SETTINGS
from dpro_search.report import units
from dpro_search.report.html import Section, element, name_of, paragraph, table
from dpro_search.report.parallel import MEMORY, colour
from dpro_search.space.plan import Plan

PLANNER_VERSION = 1
_SHARES = 65_535  # of a step, or of a plan's memory, in a packed column
_MOST_LISTED = 20  # rows of the table without JavaScript
_MOST_ORDERS = 700_000  # letters of the orders of passes that are embedded; pipelines with further orders are not drawn
_ORIGINS = {"search": "by the search", "change": "by one change", "sample": "at random"}  # how plans were chosen to be priced
_FITTING = ("does not fit", "fits tightly", "fits")
_FITS = 2  # the place of the last one
Value = TypeVar("Value", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Priced plans of a job.

    Attributes
    ----------
    plans
        The fastest first.
    best
        The plan that the search found best; None: it found none that is better than the baseline.
    unchanged
        The name of the baseline, which is the empty plan.
    limit_bytes, searched_bytes
        Memory that a rank may use, and what plans of a search may take of it; None: not known.
    tokens, flops_us, usd_per_us
        Of a step: its tokens, the time of its FLOPs at the peak of a device, and the price of a microsecond; None: not known.
    command
        The beginning of the command that replays a plan, as words.
    """

    plans: Sequence[PricedPlan]
    best: Plan | None
    unchanged: str
    limit_bytes: int | None
    searched_bytes: int | None
    tokens: float | None
    flops_us: float | None
    usd_per_us: float | None
    command: Sequence[str]


def planner_section(planner: Planner | None) -> Section | None:
    """The section; None without plans."""
    if planner is None or not planner.plans:
        return None
    counts = {origin: sum(one.origin == origin for one in planner.plans) for origin in _ORIGINS}
    origins = ", ".join(f"{count} chosen {_ORIGINS[origin]}" for origin, count in counts.items() if count)
    spare = (
        f" A search leaves some memory free: its plans take at most {units.size(planner.searched_bytes)}; others that the device "
        "could hold fit tightly."
        if planner.searched_bytes is not None and planner.searched_bytes != planner.limit_bytes
        else ""
    )
    sentence = f"{units.count(len(planner.plans), 'plan')} with their predicted times: {origins}.{spare}"
    feasible = [one for one in planner.plans if _fit(planner, one) == _FITS]
    rows = [
        (name_of(one.text), units.duration(one.prediction.iteration_us), _peak(one), _named(planner, one))
        for one in (feasible or planner.plans)[:_MOST_LISTED]
    ]
    fastest = table("The fastest plans", ("plan", "step#", "peak memory#", "note"), rows)
    return Section("planner", "All plans", [paragraph(sentence), element("planner", fastest, of="planner")])


def _fit(planner: Planner, one: PricedPlan) -> int:
    """Place of a plan's fit in `_FITTING`."""
    if one.prediction.infeasible is not None:
        return 0
    peak, searched = one.prediction.peak_memory_bytes, planner.searched_bytes
    return 1 if peak is not None and searched is not None and peak > searched else _FITS


def _peak(one: PricedPlan) -> str:
    peak = one.prediction.peak_memory_bytes
    return "unknown" if peak is None else units.size(peak)


def _named(planner: Planner, one: PricedPlan) -> str:
    if one.plan == planner.best:
        return "best plan"
    return planner.unchanged if one.plan == Plan() else ""


def planner_data(planner: Planner) -> dict[str, Any]:
    """The plans for ``assets/planner.js``: JSON whose long columns are base64 of little-endian numbers."""
    plans = planner.plans
    detailed = [one for one in plans if one.parts_us]
    places = {id(one): place for place, one in enumerate(detailed, 1)}
    named = {name for one in plans for name in one.plan.settings}
    names = [name for name in SETTINGS if name in named or len({plain(getattr(one.strategy, name)) for one in plans}) > 1]
    pipelines, order_column = _orders(plans)
    stages = _Indexed(plans, lambda one: tuple((equal[0], *map(_few_digits, equal[1:])) for equal in one.stages))
    parts = [key for key in STEP_PARTS if any(one.parts_us.get(key) for one in detailed)]
    purposes = [key for key in MEMORY if any(one.memory_bytes.get(key) for one in plans)]
    step_us = np.array([one.prediction.iteration_us for one in plans])
    intervals_us = np.array([one.prediction.interval_us for one in plans]).reshape(-1, 2)
    return {
        "version": PLANNER_VERSION,
        "count": len(plans),
        "command": [shlex.quote(word) for word in planner.command],
        "limit_bytes": planner.limit_bytes,
        "searched_bytes": planner.searched_bytes,
        "best": _place(plans, planner.best),
        "baseline": _place(plans, Plan()),
        "unchanged": planner.unchanged,
        "tokens": planner.tokens,
        "flops_us": planner.flops_us,
        "usd_per_us": planner.usd_per_us,
        "origins": list(_ORIGINS.values()),
        "origin": _packed([list(_ORIGINS).index(one.origin) for one in plans], np.uint8),
        "settings": [_setting(name, plans) for name in names],
        # The settings of each plan that differ from the baseline's, as bits: those that its `--set` line names.
        "named": _packed(
            [sum(1 << bit for bit, name in enumerate(names) if name in one.plan.settings) for one in plans], np.uint32
        ),
        "words": _words([one.text.split(", ") for one in plans]),
        "step_us": _packed(step_us, np.float64),
        "intervals": _packed(intervals_us / step_us[:, None], np.float32),
        "peak_bytes": _packed([one.prediction.peak_memory_bytes or 0 for one in plans], np.float64),
        "fitting": _FITTING,
        "fit": _packed([_fit(planner, one) for one in plans], np.uint8),
        "most_detailed": MOST_DETAILED,
        "detail": _packed([places.get(id(one), 0) for one in plans], np.uint16),
        "parts": [(key, STEP_PARTS[key], colour(key)) for key in parts],
        "shares": _packed(_shares([[one.parts_us.get(key, 0.0) for key in parts] for one in detailed]), np.uint16),
        "purposes": [(MEMORY[key][1], MEMORY[key][0]) for key in purposes],
        "memory": _packed(_shares([[one.memory_bytes.get(key, 0.0) for key in purposes] for one in plans]), np.uint16),
        "stages": stages.values,
        "stage": _packed(stages.column, np.uint32),
        "send_us": _packed([one.send_us for one in plans], np.float32),
        "pipelines": pipelines,
        "order": _packed(order_column, np.uint16),
        "micro_batches": _packed([one.strategy.micro_batches for one in plans], np.uint32),
    }


class _Indexed(Generic[Value]):
    """The distinct values of a column in the order of their first plans, and the place of each plan's value among them."""

    def __init__(self, plans: Sequence[PricedPlan], value_of: Callable[[PricedPlan], Value]) -> None:
        places: dict[Value, int] = {}
        self.column = [places.setdefault(value_of(one), len(places)) for one in plans]
        self.values = list(places)


def _few_digits(us: float) -> float:
    """A duration in microseconds, to four digits."""
    rounded = float(f"{us:.4g}")
    return int(rounded) if rounded.is_integer() else rounded


def _setting(name: str, plans: Sequence[PricedPlan]) -> dict[str, Any]:
    """A setting in which the plans differ, with its values in order and a column of places among them."""
    indexed = _Indexed(plans, lambda one: plain(getattr(one.strategy, name)))
    order = sorted(range(len(indexed.values)), key=lambda place: (indexed.values[place] is not None, indexed.values[place]))
    places = {old: new for new, old in enumerate(order)}
    setting = SETTINGS[name]
    return {
        "name": name,
        "label": setting.label or name.replace("_", " "),
        "note": setting.note,
        "values": [indexed.values[place] for place in order],
        "column": _packed([places[place] for place in indexed.column], np.uint16),
    }


def _orders(plans: Sequence[PricedPlan]) -> tuple[list[dict[str, Any]], list[int]]:
    """Pipelines with the order of their passes, and the number of each plan's among them; 0: it is not drawn."""
    numbers: dict[Hashable, int] = {}
    pipelines: list[dict[str, Any]] = []
    column, letters = [], 0
    for one in plans:
        strategy = one.strategy
        key = strategy.schedule, strategy.pp, strategy.virtual_stages, drawn_micro_batches(strategy)
        if key not in numbers:
            texts = order_texts(strategy) if letters <= _MOST_ORDERS else ()
            letters += sum(map(len, texts))
            if texts:
                pipelines.append({"schedule": key[0].value, "micro_batches": key[3], "orders": texts})
            numbers[key] = len(pipelines) if texts else 0
        column.append(numbers[key])
    return pipelines, column


def _words(texts: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Texts as places in a list of phrases, [plans, most phrases of a plan], padded with the empty one."""
    places = {"": 0}
    rows = [[places.setdefault(phrase, len(places)) for phrase in phrases] for phrases in texts]
    width = max(map(len, rows))
    return {
        "phrases": list(places),
        "width": width,
        "column": _packed([row + [0] * (width - len(row)) for row in rows], np.uint16),
    }


def _shares(rows: Sequence[Sequence[float]]) -> npt.NDArray[np.float64]:
    """Parts as shares of their sum, [rows, parts]."""
    parts = np.array(rows, np.float64).reshape(len(rows), -1)
    shares: npt.NDArray[np.float64] = np.rint(parts / np.maximum(parts.sum(axis=1, keepdims=True), 1e-9) * _SHARES)
    return shares


def _place(plans: Sequence[PricedPlan], plan: Plan | None) -> int | None:
    return next((place for place, one in enumerate(plans) if one.plan == plan), None)


def _packed(values: npt.ArrayLike, dtype: type[np.generic]) -> str:
    """Numbers as base64 of their little-endian bytes."""
    array = np.asarray(values)
    return base64.b64encode(array.astype(np.dtype(dtype).newbyteorder("<")).tobytes()).decode()
