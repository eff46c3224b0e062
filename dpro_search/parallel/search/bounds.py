"""Bounds on a step: `shape_us` and `cut_us` from its passes alone, `least_us` from all its costs.

Each is a time that no step can be shorter than, with any of the strategies below it in the tree of `Candidates`.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.parallel.schedule import V_SHAPED, Schedule, rounds, stages_on
from dpro_search.parallel.steps.step_costs import StepCosts
from dpro_search.parallel.steps.step_prices import StepPrices
from dpro_search.parallel.strategy import Strategy

_SPLIT = (Schedule.ZERO_BUBBLE, *V_SHAPED)  # Schedules whose backward passes are in two parts.


class PassBounds:
    """Bounds from the passes of blocks, which depend on few settings."""

    def __init__(self, steps: StepPrices) -> None:
        self._steps = steps
        self._times: dict[int, tuple[Floats, Floats]] = {}  # of each block [blocks]: both passes, and of these gradients of weights
        self._forward: dict[int, Floats] = {}
        self._stages: dict[object, Floats] = {}  # how many of each block each stage has, [stages, blocks]

    def shape_us(self, shape: Strategy) -> float:
        """Bound for any pipeline of the shape, from the average work of its ranks."""
        both_us = self._block_times(shape)[1]
        return shape.micro_batches * float((self._counts(shape) @ both_us).sum()) / shape.pp

    def cut_us(self, cut: Strategy) -> float:
        """The rank that has most to do, from the first forward pass on, until the last gradient is back at the first stage."""
        forward_us, both_us, weights_us = (self._counts(cut) @ each for each in self._block_times(cut))
        on_ranks = np.array([stages_on(cut.schedule, rank, cut.pp, cut.virtual_stages) for rank in range(cut.pp)])
        busy_us = cut.micro_batches * both_us[on_ranks].sum(axis=1)
        if cut.schedule not in _SPLIT:
            return float((busy_us + _before(both_us[: cut.pp])).max())
        until_first_us, inputs_us = _before(forward_us[: cut.pp]), both_us - weights_us
        back_us = _before((inputs_us - forward_us)[: cut.pp])
        until_us = cut.micro_batches * inputs_us[on_ranks].sum(axis=1)  # gradients of weights can wait
        return float(np.maximum(until_first_us + busy_us, until_first_us + until_us + back_us + weights_us[0]).max())

    def _block_times(self, strategy: Strategy) -> tuple[Floats, Floats, Floats]:
        """Times of each block, [blocks]: its forward pass, both passes, and the part for gradients of weights."""
        passes = self._steps.passes(strategy)
        key = id(passes)  # they live as long as the steps
        if key not in self._times:
            rows = [(each.forward_us, each.forward_us + each.backward_us, each.weights_us) for each in passes.values()]
            forward_us, both_us, weights_us = np.array(rows).T
            self._times[key], self._forward[key] = (both_us, weights_us), forward_us
        return self._forward[key], *self._times[key]

    def _counts(self, strategy: Strategy) -> Floats:
        key = strategy.stage_layers or strategy.pp * strategy.virtual_stages
        if key not in self._stages:
            block_counts = [Counter(block.name for block in stage) for stage in self._steps.stages(strategy)]
            names = list(self._steps.passes(strategy))
            self._stages[key] = np.array([[stage[name] for name in names] for stage in block_counts], np.float64)
        return self._stages[key]


def _before(values: Floats) -> Floats:
    """Sums of all before each."""
    return np.cumsum(values) - values


def least_us(costs: StepCosts, strategy: Strategy) -> float:
    """A time that a step cannot be shorter than, in a fraction of the time of its replay.

    A pipeline rank runs its passes one after the other. Before the first one a micro-batch goes through the stages before it; after
    the last one its gradient goes back through them (gradients of weights can wait where the schedule splits backward passes).
    Gradients of the last micro-batch are reduced one after the other behind the backward pass of their layers; with ZeRO-2 and 3
    those of all micro-batches are, and with ZeRO-3 all parameters are gathered for them. What comes once in a step follows the
    last.
    """
    ranks, stages = strategy.pp, _stage_bounds(costs)
    send_us = costs.send_us if ranks > 1 else 0.0
    split = strategy.schedule in _SPLIT
    updates = costs.update_us or (0.0,) * ranks
    until_first_us = back_us = 0.0  # until the first pass of a rank, and after its last one until the gradient is at the first rank
    ends: list[float] = []
    after: list[float] = []
    beside = costs.gathers_every_pass or (costs.overlap and costs.overlap_gathers)
    for rank in range(ranks):
        numbers = stages_on(strategy.schedule, rank, ranks, strategy.virtual_stages)
        stages_of_rank = [stages[number] for number in numbers]
        sends_us = 0.0 if costs.overlap_send else strategy.micro_batches * send_us * _sends(numbers, len(stages))
        end_us = until_first_us + sum(stage.passes_us(strategy.micro_batches) for stage in stages_of_rank) + sends_us
        if split:
            until_us = (
                until_first_us
                + strategy.micro_batches * sum(stage.inputs_us for stage in stages_of_rank)
                + back_us
                + stages[0].weights_us
            )
            ends.append(max(end_us, until_us) + min(stage.last_reduce_us for stage in stages_of_rank))
        else:
            ends.append(max(end_us + stages_of_rank[0].exposed_us, end_us + back_us - (sends_us > 0) * send_us))
        if costs.reduces_every_pass:
            ends[-1] = max(ends[-1], strategy.micro_batches * sum(stage.exchanged_us for stage in stages_of_rank))
        elif beside and not split:
            ends[-1] = max(ends[-1], _exchanged_us(stages_of_rank, strategy, until_first_us))
        elif not costs.overlap:
            ends[-1] = max(ends[-1], end_us + sum(stage.reduce_us for stage in stages_of_rank))
        after.append(updates[rank] + (0.0 if beside else sum(stage.gather_us for stage in stages_of_rank)))
        until_first_us += stages_of_rank[0].first_us + send_us
        back_us += (stages_of_rank[0].inputs_us - stages_of_rank[0].forward_us if split else stages_of_rank[0].last_us) + send_us
    if costs.tied_us and ranks > 1 and strategy.schedule not in V_SHAPED:
        ends[0] = ends[-1] = max(ends[0], ends[-1]) + costs.tied_us
    if costs.norm_us:
        return max(ends) + costs.shared_us + costs.norm_us + max(after)
    return max(end_us + after_us for end_us, after_us in zip(ends, after, strict=True)) + costs.shared_us


def _stage_bounds(costs: StepCosts) -> list[_StageBounds]:
    """Bounds of each stage; those of equal stages are computed once."""
    last, bounds = len(costs.stages) - 1, dict[tuple[int, bool], _StageBounds]()
    for number, layers in enumerate(costs.stages):
        key = id(layers), number == last
        if key not in bounds:
            bounds[key] = _StageBounds.of(costs, number)
    return [bounds[id(layers), number == last] for number, layers in enumerate(costs.stages)]


def _exchanged_us(stages_of_rank: list[_StageBounds], strategy: Strategy, until_first_us: float) -> float:
    """A bound from what a rank gathers before its last stage's first pass, and reduces from that stage's last backward pass on.

    Rounds of micro-batches go through the stages of a rank in turn, so that all passes lie between but those of one round through
    the other stages, forward at the start and backward at the end.
    """
    *others, last = stages_of_rank
    count = strategy.micro_batches
    size = count // rounds(strategy.pp, count)
    forward_us = sum(stage.forward_us for stage in others) * size + last.forward_us
    backward_us = sum(stage.pass_us - stage.forward_us for stage in others) * size + last.pass_us - last.forward_us
    all_us = count * sum(stage.pass_us for stage in stages_of_rank)
    gather_us, reduce_us = sum(stage.gather_us for stage in stages_of_rank), sum(stage.reduce_us for stage in stages_of_rank)
    return max(gather_us - forward_us, until_first_us) + all_us + max(reduce_us - backward_us, 0.0)


def _sends(numbers: tuple[int, ...], stages: int) -> int:
    """How often a rank sends for a micro-batch: to the stages before and behind each of its own that are on other ranks."""
    others = [near for number in numbers for near in (number - 1, number + 1) if near not in numbers]
    return sum(0 <= near < stages for near in others)


class _StageBounds(NamedTuple):
    """Least times of a stage."""

    pass_us: float  # Of a micro-batch, forward and backward.
    once_us: float  # What its first forward pass and its last backward pass take in addition.
    forward_us: float
    inputs_us: float  # Of a micro-batch, without the gradients of weights.
    weights_us: float
    first_us: float  # Of the first forward pass.
    last_us: float  # Of the last backward pass.
    exposed_us: float  # From the last backward pass to the last of its gradients.
    last_reduce_us: float  # Of the layer whose gradients are reduced last.
    gather_us: float
    reduce_us: float
    exchanged_us: float  # Of every micro-batch.

    @staticmethod
    def of(costs: StepCosts, number: int) -> _StageBounds:
        layers = costs.stages[number]
        if not layers:  # frameworks that cut by cost may leave a stage without layers
            return _StageBounds(*(0.0,) * len(_StageBounds._fields))
        forward_us, backward_us = sum(layer.forward_us for layer in layers), sum(layer.backward_us for layer in layers)
        gather_us, reduce_us = sum(layer.gather_us for layer in layers), sum(layer.reduce_us for layer in layers)
        weights_us = sum(layer.weights_us for layer in layers)
        kept_us = layers[-1].gather_us if number == len(costs.stages) - 1 else 0.0  # the head, used last and first
        gathers, reduces = costs.gathers_every_pass, costs.reduces_every_pass
        again_us = gather_us - kept_us if gathers and costs.regather else 0.0
        beside_us = gather_us if gathers or (costs.overlap and costs.overlap_gathers) else 0.0
        hidden_us = reduce_us if reduces or costs.overlap else 0.0
        first_us = forward_us + costs.slowed * beside_us
        last_us = backward_us + costs.slowed * (hidden_us + again_us)
        chain_us = hidden_us + layers[-1].backward_us - last_us
        last_reduce_us = layers[0].reduce_us if hidden_us else 0.0
        return _StageBounds(
            pass_us=(first_us if gathers else forward_us) + (last_us if reduces else backward_us),
            once_us=costs.slowed * ((not gathers) * beside_us + (not reduces) * hidden_us),
            forward_us=forward_us,
            inputs_us=forward_us + backward_us - weights_us,
            weights_us=weights_us,
            first_us=first_us,
            last_us=last_us,
            exposed_us=max(chain_us, last_reduce_us) if hidden_us else 0.0,
            last_reduce_us=last_reduce_us,
            gather_us=gather_us,
            reduce_us=reduce_us,
            exchanged_us=gathers * (gather_us + again_us) + reduces * reduce_us,
        )

    def passes_us(self, micro_batches: int) -> float:
        """Time of all micro-batches."""
        return micro_batches * self.pass_us + self.once_us
