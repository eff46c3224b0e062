"""`priced_plans`: plans of a described job with their time, their memory and where both go, for a page that compares them all.

A search prices few plans, because bounds rule out the others. A planner also asks why the others are not better, so further plans
are priced: those that differ from the best or the baseline in one setting, then plans drawn at random over all shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from dpro_search.errors import InputError
from dpro_search.kinds._job import JobInScenario
from dpro_search.parallel.answers.breakdown import computation_us
from dpro_search.parallel.job import ParallelJob
from dpro_search.parallel.prepared import PreparedJob
from dpro_search.parallel.schedule import stages_on
from dpro_search.parallel.search.changes import single_changes
from dpro_search.parallel.settings import strategy_text
from dpro_search.parallel.steps.pipeline import pipeline_orders
from dpro_search.parallel.strategy import Strategy
from dpro_search.space.plan import Plan, Prediction

Origin = Literal["search", "change", "sample"]
MOST_DETAILED = 2000  # plans whose step is broken down, which takes 10 to 20 ms each
_ATTEMPTS = 4  # drawn strategies for each plan that is needed: some are known already, or do not fit on the cluster
_DRAWN_ROUNDS = 3  # micro-batches of a drawn pipeline for each of its ranks: it fills, runs and drains
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_DIRECTIONS = "FBIW"


class EqualStages(NamedTuple):
    """Stages in a row whose passes take equally long, in us for one micro-batch."""

    stages: int
    forward_us: float
    backward_us: float
    weights_us: float  # The part of `backward_us` for gradients of weights.


@dataclass(frozen=True, kw_only=True)
class PricedPlan:
    """A plan, its prediction, and where its time and its memory go.

    Attributes
    ----------
    origin
        "search": the search priced it; "change": it differs from the best or the baseline in one setting; "sample": drawn.
    memory_bytes
        Memory of the rank that needs most, by purpose.
    parts_us
        The step by the keys of `kinds.STEP_PARTS`; empty: not computed.
    stages, send_us
        Durations of passes by stage, and of sending a micro-batch to the next stage.
    """

    plan: Plan
    strategy: Strategy
    text: str
    origin: Origin
    prediction: Prediction
    memory_bytes: Mapping[str, float]
    parts_us: Mapping[str, float]
    stages: tuple[EqualStages, ...]
    send_us: float


def priced_plans(
    here: JobInScenario,
    searched: Sequence[tuple[Plan, Prediction]],
    starts: Sequence[Plan],
    least: int,
    on_plan: Callable[[int], None] = lambda done: None,
) -> list[PricedPlan]:
    """All plans of a search and, if they are fewer than `least`, further ones; the fastest first, each strategy once.

    Parameters
    ----------
    searched
        Plans of the search with their predictions.
    starts
        Plans whose single changes are priced first.
    on_plan
        Called with the number of plans that are done.
    """
    job = here.job
    assert isinstance(job, ParallelJob)
    prepared = job.prepared(here.scenario)
    predictions: dict[Strategy, tuple[Plan, Prediction, Origin]] = {}
    for plan, prediction in searched:
        predictions.setdefault(prepared.space.strategy(plan), (plan, prediction, "search"))
    for plan, origin in _further(prepared, starts, least):
        if len(predictions) >= least:
            break
        try:
            strategy = prepared.space.strategy(plan)
            if strategy not in predictions:
                predictions[strategy] = plan, here.predict(plan), origin
                on_plan(len(predictions))
        except InputError:  # a change is not legal, or a group does not fit on the cluster
            continue
    in_order = sorted(predictions.items(), key=lambda item: (item[1][1].infeasible is not None, item[1][1].iteration_us))
    detailed = {strategy for strategy, _ in in_order[:MOST_DETAILED]} | {prepared.space.strategy(plan) for plan in starts}
    priced: list[PricedPlan] = []
    for strategy, (plan, prediction, origin) in in_order:
        priced.append(_priced(prepared, strategy, plan, prediction, origin, detailed=strategy in detailed))
        on_plan(len(priced))
    return sorted(priced, key=lambda one: one.prediction.iteration_us)


def _further(prepared: PreparedJob, starts: Sequence[Plan], least: int) -> Iterator[tuple[Plan, Origin]]:
    """Single changes of some plans, then drawn plans; they may be impossible, and known already."""
    for start in starts:
        for values in single_changes(prepared.space.strategy(start)):
            yield start.changed(**values), "change"
    drawn = prepared.space.candidates.drawn(np.random.default_rng(0))
    for strategy in itertools.islice(drawn, _ATTEMPTS * least):
        yield prepared.space.plan(strategy), "sample"


def _priced(
    prepared: PreparedJob, strategy: Strategy, plan: Plan, prediction: Prediction, origin: Origin, *, detailed: bool
) -> PricedPlan:
    costs = prepared.prices.costs(strategy)
    return PricedPlan(
        plan=plan,
        strategy=strategy,
        text=strategy_text(strategy),
        origin=origin,
        prediction=prediction,
        memory_bytes=prepared.memory_bytes(strategy),
        parts_us=_parts_us(prepared, plan, strategy) if detailed else {},
        stages=tuple(
            EqualStages(len(list(equal)), *passes_us)
            for passes_us, equal in itertools.groupby(
                (
                    round(sum(layer.forward_us for layer in layers), 1),
                    round(sum(layer.backward_us for layer in layers), 1),
                    round(sum(layer.weights_us for layer in layers), 1),
                )
                for layers in costs.stages
            )
        ),
        send_us=costs.send_us,
    )


def _parts_us(prepared: PreparedJob, plan: Plan, strategy: Strategy) -> dict[str, float]:
    """The parts of a step with the computation in its parts; they add up to the step."""
    parts_us = prepared.parts_us(plan)
    return {**parts_us, "compute": 0.0, **computation_us(prepared.prices, strategy, parts_us["compute"])}


def drawn_micro_batches(strategy: Strategy) -> int:
    """Micro-batches with which the pipeline of a strategy is drawn: all, or as many as fill it, let it run and drain it."""
    return min(strategy.micro_batches, _DRAWN_ROUNDS * strategy.pp)


def order_texts(strategy: Strategy) -> tuple[str, ...]:
    """The passes of each pipeline rank in order, a letter each, with `drawn_micro_batches`; empty: there is no pipeline to draw.

    Letter number 4 c + d is a pass in direction d of "FBIW" (see `Direction`) through the c-th stage of the rank. Passes through
    one stage in one direction take the micro-batches in their order, so that numbers need not be written.
    """
    if strategy.pp == 1:
        return ()
    orders = pipeline_orders(strategy.schedule, strategy.pp, strategy.virtual_stages, drawn_micro_batches(strategy))
    stages_of_rank = [stages_on(strategy.schedule, rank, strategy.pp, strategy.virtual_stages) for rank in range(strategy.pp)]
    if 4 * max(map(len, stages_of_rank)) > len(_LETTERS):
        return ()
    return tuple(
        "".join(_LETTERS[4 * stages.index(one.stage) + _DIRECTIONS.index(one.direction)] for one in order)
        for stages, order in zip(stages_of_rank, orders, strict=True)
    )
