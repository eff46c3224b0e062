"""`single_changes`: what one might change about a strategy, a setting at a time; `remedies`: what makes a plan fit in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dpro_search.errors import InputError
from dpro_search.kinds._answers import Remedy
from dpro_search.parallel.setting import plain
from dpro_search.parallel.strategy import SETTINGS, Strategy
from dpro_search.space.plan import Plan, Prediction

_MOST_REMEDIES = 3


def single_changes(strategy: Strategy) -> Iterator[dict[str, Any]]:
    """Settings with one other value, which a diagnosis tries (`Setting.changes`). They may be illegal."""
    for name, setting in SETTINGS.items():
        yield from ({name: plain(value)} for value in setting.changes(strategy))


def _saving_changes(strategy: Strategy) -> Iterator[dict[str, Any]]:
    """Changes that need less memory (`Setting.saves`)."""
    for name, setting in SETTINGS.items():
        for value in setting.saves(strategy):
            yield value if isinstance(value, dict) else {name: plain(value)}


def remedies(predict: Callable[[Plan], Prediction], plan: Plan, strategy: Strategy) -> tuple[Remedy, ...]:
    """At most three of the fastest changes with which a plan fits in memory; empty: none is enough.

    A remedy changes one setting, or two where one is not enough. `predict` raises `InputError` for a plan that is not legal.
    """
    alone = list(_saving_changes(strategy))
    pairs = ({**one, **other} for one, other in itertools.combinations(alone, 2) if not one.keys() & other.keys())
    for settings in (alone, pairs):
        fitting = [remedy for remedy in (_remedy(predict, plan, values) for values in settings) if remedy is not None]
        if fitting:
            return tuple(sorted(fitting, key=lambda remedy: remedy.predicted_iteration_us)[:_MOST_REMEDIES])
    return ()


def _remedy(predict: Callable[[Plan], Prediction], plan: Plan, values: Mapping[str, Any]) -> Remedy | None:
    """A change as a remedy; None: it is not legal, or does not fit."""
    try:
        prediction = predict(plan.changed(**values))
    except InputError:
        return None
    if prediction.infeasible is not None:
        return None
    return Remedy(
        change=change_text(values),
        predicted_iteration_us=prediction.iteration_us,
        peak_memory_bytes=prediction.peak_memory_bytes,
    )


def change_text(values: Mapping[str, Any]) -> str:
    """Settings as ``--set`` takes them."""
    return ",".join(f"{name}={_value_text(value)}" for name, value in values.items())


def _value_text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "even"
    return str(int(value) if isinstance(value, bool) else value)
