"""`single_changes`: what one might change about a strategy, a setting at a time; `remedies`: what makes a plan fit in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dpro_search.errors import InputError
from dpro_search.kinds._answers import Remedy
from dpro_search.parallel.strategy import Recompute, Strategy
from dpro_search.space.plan import Plan, Prediction

_MOST_REMEDIES = 3


def single_changes(strategy: Strategy) -> Iterator[dict[str, Any]]:
    """Settings with one other value: degrees and micro-batch doubled and halved, each recomputation, each ZeRO stage.

    They may be illegal.
    """
    for name in ("tp", "pp", "cp", "ep", "virtual_stages", "micro_batch"):
        value = getattr(strategy, name)
        yield {name: value * 2}
        if value > 1:
            yield {name: value // 2}
    yield from ({"recompute": kind.value} for kind in Recompute if kind is not strategy.recompute)
    yield from ({"zero_stage": stage} for stage in range(4) if stage != strategy.zero_stage)
    if strategy.tp > 1:
        yield {"sequence_parallel": not strategy.sequence_parallel}
    if strategy.cp > 1:
        yield {"cp_ring": not strategy.cp_ring}
        if not strategy.cp_balanced:
            yield {"cp_balanced": True}
    if strategy.zero_stage:
        yield from ({"dp_replicate": copies} for copies in (strategy.dp_replicate * 2, strategy.dp_replicate // 2) if copies)
    if strategy.zero_stage == 3:
        yield {"reshard": not strategy.reshard_after_forward}
    if strategy.stage_layers:
        yield {"stage_layers": ()}


def _saving_changes(strategy: Strategy) -> Iterator[dict[str, Any]]:
    """Changes that need less memory, among them the recomputation of only some layers of each stage."""
    if strategy.recompute is Recompute.NONE:
        yield from ({"recompute": "full", "recompute_layers": layers} for layers in (1, 2, 4, 8, 16, 32))
    elif strategy.recompute_layers:
        yield {"recompute_layers": 0}
    if strategy.dp_replicate > 1:
        yield {"dp_replicate": 1}
    if not strategy.reshard_after_forward:
        yield {"reshard": True}
    yield from ({"recompute": kind.value} for kind in list(Recompute)[list(Recompute).index(strategy.recompute) + 1 :])
    yield from ({"zero_stage": stage} for stage in range(strategy.zero_stage + 1, 4))
    if strategy.micro_batch > 1:
        yield {"micro_batch": 1}
    if strategy.tp > 1 and not strategy.sequence_parallel:
        yield {"sequence_parallel": True}
    for name in ("tp", "pp", "cp"):
        yield from ({name: getattr(strategy, name) * factor} for factor in (2, 4, 8))


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
