"""``describe(plan)``: a plan in a few words for tables: "12 groups, cycle 2.5 ms"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dpro_search.space.plan import Plan
from dpro_search.space.schemes import counted


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
