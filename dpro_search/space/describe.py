"""``describe(plan)``: a plan in a few words for tables: "12 groups, cycle 2.5 ms"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dpro_search.quantities import size_text, time_text
from dpro_search.space.plan import Plan


def describe(plan: Plan) -> str:
    """A plan in a few words; "as recorded" for the empty one."""
    ordered = [name for name in _WORDS if name in plan.changes] + [name for name in plan.changes if name not in _WORDS]
    words = [_WORDS.get(name, f"{name}={{}}".format)(getattr(plan, name)) for name in ordered]
    return ", ".join(words) or "as recorded"


def _counted(one: str, many: str | None = None) -> Callable[[Any], str]:
    def words(value: Any) -> str:
        number = value if isinstance(value, int) else len(value)
        return f"{number} {one}" if number == 1 else f"{number} {many or one + 's'}"

    return words


def _counted_and(one: str, what: str) -> Callable[[Any], str]:
    return lambda names: f"{_counted(one)(names)} {what}"


def _algorithms(ranges: tuple[tuple[int, str], ...]) -> str:
    first, *others = ranges
    return f"all-reduces by {', '.join([first[1], *(f'from {size_text(start)} {name}' for start, name in others)])}"


def _compression(value: str) -> str:
    kind, _, rank = value.partition("-")
    return f"gradients by PowerSGD of rank {rank}" if kind == "powersgd" else f"gradients in {kind}"


_WORDS: Mapping[str, Callable[[Any], str]] = {
    "tensor_groups": _counted("group"),
    "fusion_threshold_bytes": lambda value: f"fusion {size_text(value)}" if value else "no fusion",
    "cycle_time_us": lambda value: f"cycle {time_text(value)}",
    "allreduce_algorithms": _algorithms,
    "bucket_cap_bytes": lambda value: f"buckets of {size_text(value)}",
    "first_bucket_bytes": lambda value: f"first bucket of {size_text(value)}",
    "prefetch": lambda value: "prefetched all-gathers" if value else "no prefetching",
    "reshard_after_forward": lambda value: "parameters resharded after forward" if value else "parameters kept after forward",
    "servers": _counted("server"),
    "servers_on_workers": lambda value: "servers on the workers' hosts" if value else "servers on hosts of their own",
    "bigarray_bound": lambda value: f"spread from {value} elements",
    "p3": lambda value: "priority slices" if value else "no priority slices",
    "slice_threshold": lambda value: f"slices of {value} elements",
    "partition_bytes": lambda value: f"partitions of {size_text(value)}",
    "credit": lambda value: f"credit {value}" if value else "no credit",
    "op_clusters": _counted("op cluster"),
    "bfloat16_ops": _counted_and("op", "in bfloat16"),
    "recomputed_ops": _counted_and("op", "recomputed"),
    "recomputed_modules": _counted_and("module", "recomputed"),
    "bfloat16_modules": _counted_and("module", "in bfloat16"),
    "micro_batches": _counted("micro-batch", "micro-batches"),
    "compression": _compression,
}
