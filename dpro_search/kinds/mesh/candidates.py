"""`candidates`: the legal strategies that a search may propose, and `least_us`, a bound on what each takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dpro_search.errors import InputError
from dpro_search.graph.model import CapturedModel
from dpro_search.kinds.mesh.settings import Fixed
from dpro_search.space.mesh import Recompute, Runtime, Schedule, StepCosts, Strategy

LEAST_CONTEXT = 1024  # tokens of a sequence on a rank, below which a split over cp leaves kernels too small to be worth a look
MOST_VIRTUAL = 8  # groups of layers on a pipeline rank
MOST_MICRO_BATCH = 64  # sequences
MOST_HOSTS_OF_TP = 2  # over which tensor parallel ranks may be spread


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a search may set beside degrees; degrees follow from the model, the batch and the devices."""

    zero_stages: tuple[int, ...]
    recompute: tuple[Recompute, ...]
    ranks_per_host: int


def choices_of(fixed: Fixed, runtime: Runtime, zero_stages: tuple[int, ...], ranks_per_host: int) -> Choices:
    """Those of a framework; selective recomputation only where scores are stored: a fused attention has none."""
    selective = () if runtime.flash_attention else (Recompute.SELECTIVE,)
    stages = tuple(sorted({*zero_stages, fixed.zero_stage}))
    return Choices(zero_stages=stages, recompute=(Recompute.NONE, *selective, Recompute.FULL), ranks_per_host=ranks_per_host)


def candidates(fixed: Fixed, choices: Choices) -> Iterator[Strategy]:
    """Every legal strategy of these choices that uses all devices, in a fixed order.

    Degrees divide the devices. Stages of virtual pipelines have equally many layers. Sequence parallelism goes with tensor
    parallelism. ZeRO's stages 2 and 3 go without pipelines, whose micro-batches would each reduce all gradients.
    """
    for tp, pp, cp in _shapes(fixed, choices):
        dp = fixed.devices // (tp * pp * cp)
        own = fixed.global_batch // dp
        for micro_batch in _micro_batches(fixed, own):
            if fixed.global_batch % (dp * micro_batch):
                continue
            for ep, etp in _experts(fixed, dp * cp * tp, tp):
                for stages in _virtual(fixed, pp, fixed.global_batch // (dp * micro_batch)):
                    shape = Strategy(
                        dp=dp,
                        tp=tp,
                        pp=pp,
                        cp=cp,
                        ep=ep,
                        etp=etp,
                        virtual_stages=stages,
                        sequence_parallel=tp > 1 and fixed.sequence % (2 * cp * tp) == 0,
                        micro_batch=micro_batch,
                        global_batch=fixed.global_batch,
                        schedule=Schedule.INTERLEAVED if stages > 1 else Schedule.ONE_F_ONE_B,
                    )
                    try:
                        shape.check(fixed.model, fixed.sequence)
                    except InputError:
                        continue
                    yield from _with_memory_settings(shape, choices, has_layers=fixed.layer_count > 0)


def _with_memory_settings(shape: Strategy, choices: Choices, *, has_layers: bool) -> Iterator[Strategy]:
    """A shape with each ZeRO stage and each recomputation."""
    values = {name: getattr(shape, name) for name in shape.__dataclass_fields__}
    for zero_stage in choices.zero_stages:
        if (zero_stage >= 2 and shape.pp > 1) or (zero_stage and shape.dp * shape.cp == 1):
            continue
        for recompute in choices.recompute if has_layers else (Recompute.NONE,):
            yield Strategy(**values | {"zero_stage": zero_stage, "recompute": recompute})


def _shapes(fixed: Fixed, choices: Choices) -> Iterator[tuple[int, int, int]]:
    """Degrees (tp, pp, cp) whose product divides the devices."""
    if not fixed.layer_count and fixed.heads == 1 and not fixed.has_context:  # a network, which is split over replicas only
        yield 1, 1, 1
        return
    most_tp, heads = MOST_HOSTS_OF_TP * choices.ranks_per_host, fixed.heads
    count = max(fixed.layer_count, 1)
    for tp in _divisors(fixed.devices):
        if tp > most_tp or heads % tp:
            continue
        for pp in _divisors(fixed.devices // tp):
            if pp > count:
                break
            for cp in _divisors(fixed.devices // (tp * pp)):
                if cp > 1 and (not fixed.has_context or fixed.sequence // cp < LEAST_CONTEXT):
                    break
                if fixed.devices // (tp * pp * cp) <= fixed.global_batch:
                    yield tp, pp, cp


def _virtual(fixed: Fixed, pp: int, micro_batches: int) -> Iterator[int]:
    """Numbers of virtual stages that cut the layers evenly."""
    yield 1
    layers = fixed.layer_count
    if pp > 1 and micro_batches % pp == 0 and layers % pp == 0:
        yield from (count for count in _divisors(layers // pp) if 1 < count <= MOST_VIRTUAL)


def _experts(fixed: Fixed, ranks: int, tp: int) -> Iterator[tuple[int, int]]:
    """Degrees (ep, etp) of experts on the ranks of a pipeline stage."""
    if not fixed.experts:
        yield 1, 1
        return
    for ep in _divisors(fixed.experts):
        for etp in sorted({1, tp}):
            if ranks % (ep * etp) == 0:
                yield ep, etp


def _micro_batches(fixed: Fixed, own: int) -> Iterator[int]:
    """Sizes of a micro-batch for a replica's part of the batch."""
    if isinstance(fixed.model, CapturedModel) and not fixed.micro_batches:
        yield from (size for size in (fixed.model.batch,) if size <= own)
    elif fixed.has_tokens:
        yield from _powers_of_two(min(MOST_MICRO_BATCH, own))
    else:
        yield from _divisors(own)


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(each for each in range(1, number + 1) if number % each == 0)


def _powers_of_two(most: int) -> Iterator[int]:
    value = 1
    while value <= most:
        yield value
        value *= 2


def least_us(costs: StepCosts, strategy: Strategy) -> float:
    """A time that a step cannot be shorter than, in a fraction of the time of its replay.

    Of schedules whose backward passes are whole and whose stage s is on rank s mod pp. A pipeline rank runs its passes one after
    the other. Before the first one a micro-batch goes through the stages before it; after the last one its gradient goes back
    through them. Gradients of the last micro-batch are reduced one after the other behind the backward pass of their layers; with
    ZeRO-3 those of all micro-batches are, and all parameters are gathered for them. What comes once in a step follows the last.
    """
    ranks, stages = strategy.pp, [_Stage.of(costs, number) for number in range(len(costs.stages))]
    send_us = costs.send_us if ranks > 1 else 0.0
    updates = costs.update_us or (0.0,) * ranks
    there_us = back_us = 0.0  # until the first pass of a rank, and after its last one until the gradient is at the first rank
    ends: list[float] = []
    for rank in range(ranks):
        own = stages[rank::ranks]
        sends = 2 * len(own) - (rank == 0) - (rank == ranks - 1)
        own_us = 0.0 if costs.overlap_send else strategy.micro_batches * send_us * sends
        busy_us = sum(stage.passes_us(strategy.micro_batches) for stage in own)
        end_us = there_us + busy_us + own_us
        ends.append(max(end_us + own[0].exposed_us, end_us + back_us - (own_us > 0) * send_us))
        if costs.every_pass:
            ends[-1] = max(ends[-1], strategy.micro_batches * sum(stage.exchanged_us for stage in own))
        elif not costs.overlap:
            ends[-1] = max(ends[-1], end_us + sum(stage.reduce_us for stage in own))
        there_us += own[0].first_us + send_us
        back_us += own[0].last_us + send_us
    if costs.tied_us and ranks > 1:
        ends[0] = ends[-1] = max(ends[0], ends[-1]) + costs.tied_us
    beside = costs.every_pass or (costs.overlap and costs.overlap_gathers)
    after = [
        update_us + (0.0 if beside else sum(stage.gather_us for stage in stages[rank::ranks]))
        for rank, update_us in enumerate(updates)
    ]
    if costs.norm_us:
        return max(ends) + costs.shared_us + costs.norm_us + max(after)
    return max(end_us + after_us for end_us, after_us in zip(ends, after, strict=True)) + costs.shared_us


class _Stage(NamedTuple):
    """Least times of a stage."""

    pass_us: float  # Of a micro-batch, forward and backward.
    once_us: float  # What its first forward pass and its last backward pass take in addition.
    first_us: float  # Of the first forward pass.
    last_us: float  # Of the last backward pass.
    exposed_us: float  # From the last backward pass to the last of its gradients.
    gather_us: float
    reduce_us: float
    exchanged_us: float  # Of a micro-batch, if every pass gathers and reduces.

    @staticmethod
    def of(costs: StepCosts, number: int) -> _Stage:
        layers = costs.stages[number]
        forward_us, backward_us = sum(layer.forward_us for layer in layers), sum(layer.backward_us for layer in layers)
        gather_us, reduce_us = sum(layer.gather_us for layer in layers), sum(layer.reduce_us for layer in layers)
        if not layers:  # frameworks that cut by cost may leave a stage without layers
            return _Stage(*(0.0,) * len(_Stage._fields))
        kept_us = layers[-1].gather_us if number == len(costs.stages) - 1 else 0.0  # the head, used last and first
        again_us = gather_us - kept_us if costs.every_pass and costs.regather else 0.0
        beside_us = gather_us if costs.every_pass or (costs.overlap and costs.overlap_gathers) else 0.0
        hidden_us = reduce_us if costs.every_pass or costs.overlap else 0.0
        first_us = forward_us + costs.slowed * beside_us
        last_us = backward_us + costs.slowed * (hidden_us + again_us)
        chain_us = hidden_us + layers[-1].backward_us - last_us
        return _Stage(
            pass_us=first_us + last_us if costs.every_pass else forward_us + backward_us,
            once_us=0.0 if costs.every_pass else costs.slowed * (beside_us + hidden_us),
            first_us=first_us,
            last_us=last_us,
            exposed_us=max(chain_us, layers[0].reduce_us) if hidden_us else 0.0,
            gather_us=gather_us,
            reduce_us=reduce_us,
            exchanged_us=gather_us + again_us + reduce_us,
        )

    def passes_us(self, micro_batches: int) -> float:
        """Of all micro-batches."""
        return micro_batches * self.pass_us + self.once_us
