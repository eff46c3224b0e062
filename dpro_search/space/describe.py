"""Plans in a few words, for tables: ``describe(plan)`` of one ("12 groups, cycle 2.5 ms"), ``plan_names(plans)`` of several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dpro_search.space.plan import Plan
from dpro_search.space.schemes import counted

_MOST_SIZES = 3  # groups whose sizes are listed


def describe(plan: Plan) -> str:
    """A plan in a few words; "as recorded" for the empty one."""
    scheme_settings = {} if plan.scheme is None else plan.scheme.settings
    words = [
        _WORDS[name](value) if name in _WORDS else f"{name}={value}"
        for name, value in plan.settings.items()
        if name not in scheme_settings
    ]
    return ", ".join([*words, *(() if plan.scheme is None else plan.scheme.phrases())]) or "as recorded"


def _counted_and(one: str, what: str) -> Callable[[Any], str]:
    return lambda names: f"{counted(one)(names)} {what}"


def _compression(value: str) -> str:
    kind, _, rank = value.partition("-")
    return f"gradients by PowerSGD of rank {rank}" if kind == "powersgd" else f"gradients in {kind}"


_WORDS: Mapping[str, Callable[[Any], str]] = {
    "tensor_groups": counted("group"),
    "servers": counted("server"),
    "servers_on_workers": lambda value: "servers on the workers' hosts" if value else "servers on hosts of their own",
    "op_clusters": counted("op cluster"),
    "bfloat16_ops": _counted_and("op", "in bfloat16"),
    "recomputed_ops": _counted_and("op", "recomputed"),
    "recomputed_modules": _counted_and("module", "recomputed"),
    "bfloat16_modules": _counted_and("module", "in bfloat16"),
    "micro_batches": counted("micro-batch", "micro-batches"),
    "compression": _compression,
    "synchronisation": str,
}


def plan_names(plans: Sequence[Plan]) -> list[str]:
    """Descriptions of plans, which differ for the different plans of one table: where needed, with the fields that differ."""
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
    for name, value_here in plans[i].settings.items():
        values = [plan.get(name) for plan in alike]
        if any(value != values[0] for value in values):
            details.append(more(value_here, values))
    text = "; ".join(filter(None, details))
    return f"{names[i]} ({text})" if text else names[i]


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
    parts = _flat(value)
    return next((f"with {parts[k]}" for k in range(len(parts)) if any(other[k : k + 1] != parts[k : k + 1] for other in flat)), "")


def _flat(value: Any) -> tuple[str, ...]:
    """Names in a value; where a group ends, as well."""
    if not isinstance(value, tuple):
        return ()
    return tuple(str(name) for part in value for name in (part if isinstance(part, tuple) else (part,)))
