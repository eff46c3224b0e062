"""`candidates`: the legal strategies that a search may propose, and `least_us`, a bound on what each takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dpro_search.errors import InputError
from dpro_search.graph.model import Experts
from dpro_search.kinds.mesh.settings import Fixed
from dpro_search.space.mesh import Recompute, Runtime, Schedule, StepCosts, Strategy

LEAST_CONTEXT = 1024  # tokens of a sequence on a rank, below which a split over cp leaves kernels too small to be worth a look
MOST_VIRTUAL = 8  # groups of layers on a pipeline rank
MOST_MICRO_BATCH = 64
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
        for micro_batch in _powers_of_two(min(MOST_MICRO_BATCH, fixed.global_batch // dp)):
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
                    yield from _with_memory_settings(shape, choices)


def _with_memory_settings(shape: Strategy, choices: Choices) -> Iterator[Strategy]:
    """A shape with each ZeRO stage and each recomputation."""
    values = {name: getattr(shape, name) for name in shape.__dataclass_fields__}
    for zero_stage in choices.zero_stages:
        if (zero_stage >= 2 and shape.pp > 1) or (zero_stage and shape.dp * shape.cp == 1):
            continue
        for recompute in choices.recompute:
            yield Strategy(**values | {"zero_stage": zero_stage, "recompute": recompute})


def _shapes(fixed: Fixed, choices: Choices) -> Iterator[tuple[int, int, int]]:
    """Degrees (tp, pp, cp) whose product divides the devices."""
    most_tp = MOST_HOSTS_OF_TP * choices.ranks_per_host
    for tp in _divisors(fixed.devices):
        heads = fixed.model.layers[0].attention.heads
        if tp > most_tp or heads % tp:
            continue
        for pp in _divisors(fixed.devices // tp):
            if pp > fixed.model.layer_count:
                break
            for cp in _divisors(fixed.devices // (tp * pp)):
                if cp > 1 and fixed.sequence // cp < LEAST_CONTEXT:
                    break
                if fixed.devices // (tp * pp * cp) <= fixed.global_batch:
                    yield tp, pp, cp


def _virtual(fixed: Fixed, pp: int, micro_batches: int) -> Iterator[int]:
    """Numbers of virtual stages that cut the layers evenly."""
    yield 1
    layers = fixed.model.layer_count
    if pp > 1 and micro_batches % pp == 0 and layers % pp == 0:
        yield from (count for count in _divisors(layers // pp) if 1 < count <= MOST_VIRTUAL)


def _experts(fixed: Fixed, ranks: int, tp: int) -> Iterator[tuple[int, int]]:
    """Degrees (ep, etp) of experts on the ranks of a pipeline stage."""
    counts = [layer.feed_forward.count for layer in fixed.model.layers if isinstance(layer.feed_forward, Experts)]
    if not counts:
        yield 1, 1
        return
    for ep in _divisors(min(counts)):
        for etp in sorted({1, tp}):
            if ranks % (ep * etp) == 0:
                yield ep, etp


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(each for each in range(1, number + 1) if number % each == 0)


def _powers_of_two(most: int) -> Iterator[int]:
    value = 1
    while value <= most:
        yield value
        value *= 2


def least_us(costs: StepCosts, strategy: Strategy) -> float:
    """A time that a step cannot be shorter than, in a fraction of the time of its replay.

    A pipeline rank runs its passes one after the other. Before the first one a micro-batch goes through the stages before it; after
    the last one its gradient goes back through them. Gradients of the last micro-batch are reduced one after the other behind the
    backward pass of their layers, or, with ZeRO-3, those of all micro-batches and all parameters gathered for them.
    """
    forward = [sum(layer.forward_us for layer in stage) for stage in costs.stages]
    backward = [sum(layer.backward_us for layer in stage) for stage in costs.stages]
    count, ranks = strategy.micro_batches, strategy.pp
    updates = costs.update_us or (0.0,) * ranks
    send_us = costs.send_us if ranks > 1 else 0.0
    first = costs.stages[0]
    there_us = 0.0  # until the first pass of a rank
    if costs.overlap and not costs.every_pass:
        there_us = max(sum(layer.gather_us for layer in first) + first[-1].forward_us - forward[0], 0.0)
    back_us = 0.0  # after the last pass of a rank, until the gradient is back at the first one
    least = 0.0
    for rank in range(ranks):
        stages = range(rank, len(costs.stages), ranks)
        busy_us = count * sum(forward[stage] + backward[stage] for stage in stages)
        own_us = 0.0 if costs.overlap_send else count * send_us * (2 * len(stages) - (rank == 0) - (rank == ranks - 1))
        passes_us = there_us + busy_us + own_us
        least = max(least, passes_us + max(back_us - (own_us > 0) * send_us + updates[0], updates[rank]))
        least = max(least, passes_us + updates[rank] + _exposed_us(costs, stages, backward[rank]))
        if costs.every_pass:
            layers = [layer for stage in stages for layer in costs.stages[stage]]
            exchanged_us = sum(layer.reduce_us + layer.gather_us * (1 + costs.regather) for layer in layers)
            least = max(least, count * exchanged_us + updates[rank])
        there_us += forward[rank] + send_us
        back_us += backward[rank] + send_us
    return least


def _exposed_us(costs: StepCosts, stages: range, backward_us: float) -> float:
    """Exchanges of a rank behind its last pass, the backward pass of its first stage, at least."""
    own = costs.stages[stages[0]]
    if not own:  # a stage without layers
        return 0.0
    if costs.every_pass:
        return own[0].reduce_us
    if not costs.overlap:
        return sum(layer.reduce_us + layer.gather_us for stage in stages for layer in costs.stages[stage])
    rest_us = sum(layer.reduce_us for layer in own) + own[-1].backward_us - backward_us
    return max(rest_us, own[0].reduce_us)
