"""``plan_names(plans)``: each plan in a few words, and different words for different plans of one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from dpro_search.space.describe import describe
from dpro_search.space.plan import Plan

_MOST_SIZES = 3  # groups whose sizes are listed


def plan_names(plans: Sequence[Plan]) -> list[str]:
    """Descriptions of plans. Where several are equal, the fields in which these plans differ are told in more detail."""
    names = [describe(plan) for plan in plans]
    for more in (_sizes, _first_difference):
        counts = Counter(names)
        names = [_apart(i, names, plans, more) if counts[name] > 1 else name for i, name in enumerate(names)]
    counts, seen = Counter(names), Counter[str]()
    for i, name in enumerate(names):
        if counts[name] > 1:
            seen[name] += 1
            names[i] = f"{name} (variant {seen[name]})"
    return names


def _apart(i: int, names: Sequence[str], plans: Sequence[Plan], more: Callable[[Any, Sequence[Any]], str]) -> str:
    """A plan's name and what `more` tells of the fields in which it differs from plans of the same name."""
    alike = [plan for name, plan in zip(names, plans, strict=True) if name == names[i]]
    details = []
    for name, own in plans[i].settings.items():
        values = [plan.get(name) for plan in alike]
        if any(value != values[0] for value in values):
            details.append(more(own, values))
    found = "; ".join(filter(None, details))
    return f"{names[i]} ({found})" if found else names[i]


def _sizes(value: Any, _: Sequence[Any]) -> str:
    """Sizes of groups, the exact value of a number."""
    if not isinstance(value, tuple):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if not value or not isinstance(value[0], tuple):
        return ""
    sizes = [len(group) for group in value]
    return "of " + " + ".join(map(str, sizes)) if len(sizes) <= _MOST_SIZES else f"of {min(sizes)} to {max(sizes)}"


def _first_difference(value: Any, values: Sequence[Any]) -> str:
    """The first name that not all of these values hold in this place."""
    flat = [_flat(other) for other in values]
    own = _flat(value)
    return next((f"with {own[k]}" for k in range(len(own)) if any(other[k : k + 1] != own[k : k + 1] for other in flat)), "")


def _flat(value: Any) -> tuple[str, ...]:
    """Names in a value; where a group ends, as well."""
    if not isinstance(value, tuple):
        return ()
    return tuple(str(name) for part in value for name in (part if isinstance(part, tuple) else (part,)))
