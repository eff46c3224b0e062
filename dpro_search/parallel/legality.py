"""`check_strategy`: whether a model can be split as a strategy says; the reason and the nearest legal value where it cannot."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpro_search.errors import InputError
from dpro_search.parallel.model import (
    Architecture,
    Block,
    CapturedModel,
    Experts,
    FeedForward,
    Model,
    Network,
    blocks_of,
    elements,
)
from dpro_search.parallel.schedule import check_schedule
from dpro_search.parallel.strategy import Recompute, Strategy


def check_strategy(plan: Strategy, model: Model, sequence: int) -> None:
    """Raise `InputError` with a reason and the nearest legal value where a model cannot be split like that."""
    per_step = plan.dp * plan.micro_batch
    if plan.global_batch % per_step:
        legal = max(1, round(plan.global_batch / per_step)) * per_step
        raise InputError(
            f"global_batch {plan.global_batch} does not divide into dp {plan.dp} x micro_batch {plan.micro_batch}: use {legal}"
        )
    if plan.cuda_graphs and plan.zero_stage == 3:
        raise InputError("cuda_graphs cannot be true with zero_stage 3: graphs need parameters at fixed addresses")
    if plan.overlap_experts:
        _check_overlapped(plan)
    if plan.cuda_graphs and plan.offload_activations:
        raise InputError("cuda_graphs cannot be true with offload_activations: a graph cannot contain what is offloaded")
    if isinstance(model, Network):
        _check_network(plan, model)
        return
    if isinstance(model, CapturedModel):
        _check_captured(plan, model, sequence)
        return
    for layer in model.layers:
        attention, feed_forward = layer.attention, layer.feed_forward
        _divides("tp", plan.tp, attention.heads, "heads")
        if attention.kv_heads % plan.tp and plan.tp % attention.kv_heads:
            raise InputError(f"tp {plan.tp} neither divides {attention.kv_heads} kv_heads nor is a multiple of them")
        if isinstance(feed_forward, FeedForward):
            _divides("tp", plan.tp, feed_forward.hidden, "the feed-forward width")
        else:
            _divides("ep", plan.ep, feed_forward.count, "experts")
            _divides("etp", plan.etp, feed_forward.hidden, "the experts' width")
    has_experts = any(isinstance(layer.feed_forward, Experts) for layer in model.layers)
    if not has_experts and plan.ep * plan.etp > 1:
        raise InputError(f"ep {plan.ep}: {model.name} has no experts")
    if plan.dp * plan.cp * plan.tp % (plan.ep * plan.etp):
        raise InputError(f"ep {plan.ep} x etp {plan.etp} must divide dp x cp x tp = {plan.dp * plan.cp * plan.tp}")
    ways = plan.cp * (plan.tp if plan.sequence_parallel else 1) * (2 if plan.cp > 1 and model.layers[0].attention.causal else 1)
    _divides("cp (twice, for causal attention) x tp of sequence_parallel", ways, sequence, "tokens of a sequence")
    _check_replicate(plan)
    _check_stages(plan, model)
    _check_recompute(plan, model)


def _check_replicate(plan: Strategy) -> None:
    most = math.gcd(plan.dp * plan.cp, plan.expert_dp)
    if most % plan.dp_replicate:
        whole = f"{plan.dp * plan.cp} replicas (dp x cp)" + (
            "" if most == plan.dp * plan.cp else f" and {plan.expert_dp} of the experts"
        )
        raise InputError(f"dp_replicate {plan.dp_replicate} does not divide {whole}: use {_nearest(plan.dp_replicate, most)}")
    if plan.dp_replicate > 1 and not plan.zero_stage:
        raise InputError(f"dp_replicate {plan.dp_replicate}: zero_stage 0 splits nothing; use zero_stage 1, or dp_replicate 1")


def _check_overlapped(plan: Strategy) -> None:
    """Refuse what Megatron-Core's arguments.py refuses for --overlap-moe-expert-parallel-comm."""
    if plan.ep == 1:
        raise InputError("overlap_experts: with ep 1 no tokens are exchanged; leave it out")
    if plan.micro_batches == 1:
        raise InputError("overlap_experts: exchanges run beside another micro-batch, and there is one; use a smaller micro_batch")
    if plan.recompute is Recompute.FULL:
        raise InputError("overlap_experts cannot be true with recompute full: use selective or none")
    if plan.pp > 1 and plan.virtual_stages == 1 and plan.copies == 1:
        raise InputError("overlap_experts needs virtual_stages above 1 where pp is above 1")


def _check_captured(plan: Strategy, model: CapturedModel, sequence: int) -> None:
    axes = {name: getattr(plan, name) for name in ("tp", "pp", "cp", "ep", "etp", "virtual_stages")}
    model.check(axes, sequence, plan.micro_batch)
    ways = plan.cp * (plan.tp if plan.sequence_parallel else 1)
    if model.sequence is None and ways > 1:
        raise InputError(f"{'cp' if plan.cp > 1 else 'sequence_parallel'}: {model.name} has no sequences")
    _divides("cp x tp of sequence_parallel", ways, sequence, "tokens of a sequence")
    _check_replicate(plan)
    _check_stages(plan, model)
    _check_recompute(plan, model)


def _check_stages(plan: Strategy, model: Architecture | CapturedModel) -> None:
    stages, layers = plan.pp * plan.virtual_stages, model.layer_count
    if stages > max(layers, 1) and not plan.stage_layers:
        said = f"pp {plan.pp} x virtual_stages {plan.virtual_stages} is more than {layers} layers"
        empty = ", or stage_layers with none on the first and the last stage" if stages <= layers + 2 else ""
        raise InputError(f"{said}: use pp {max(layers // plan.virtual_stages, 1)}{empty}")
    if plan.stage_layers:
        said = f"stage_layers {_listed(plan.stage_layers)}: "
        even = f"use {_listed(even_stages(layers, stages))}"
        if len(plan.stage_layers) != stages:
            raise InputError(f"{said}{len(plan.stage_layers)} stages, and pp x virtual_stages is {stages}: {even}")
        if sum(plan.stage_layers) != layers:
            raise InputError(f"{said}{sum(plan.stage_layers)} layers, and {model.name} has {layers}: {even}")
        if 0 in plan.stage_layers[1:-1]:
            raise InputError(f"{said}only the first and the last stage may be without layers: {even}")
    if plan.virtual_stages > 1 and plan.pp == 1:
        raise InputError("virtual_stages needs pp above 1")
    check_schedule(plan.schedule, plan.pp, plan.virtual_stages, plan.micro_batches)


def check_stages_by_cost(plan: Strategy, model: Model) -> None:
    """Raise `InputError` where stages that end by their share of the costs leave a pipeline rank without work.

    nanotron (trainer.py, `build_model`) gives each stage the next of its blocks; behind the head there are two without parameters,
    the cast of the logits to fp32 and the loss (models/llama.py), each of which ends a stage.
    """
    stages = plan.pp * plan.virtual_stages
    if stages == 1 or not isinstance(model, Architecture):
        return
    _, *layers, head = blocks_of(model)
    costs = stage_costs([block for layer in layers for block in (layer,) * layer.count], head)
    spent, stage = 0.0, 0
    for cost in costs[:-1]:
        spent += cost
        stage += spent >= sum(costs) * (stage + 1) / stages and stage < stages - 1
    if stage + 2 < stages - 1:
        raise InputError(
            f"pp {plan.pp} leaves the last rank without work: layers and head are shared by their costs; use a lower pp"
        )


def stage_costs(layers: Sequence[Block], head: Block) -> list[float]:
    """Multiply-adds with weights, for a token, of each layer and of the head."""
    costs = [sum(elements(op.weight, block.sizes) for op in block.ops if op.rows) for block in layers]
    return [*costs, sum(elements(op.columns, head.sizes) * elements(op.reduction, head.sizes) for op in head.ops if op.rows)]


def _check_recompute(plan: Strategy, model: Architecture | CapturedModel) -> None:
    if not plan.recompute_layers:
        return
    if plan.recompute is Recompute.NONE:
        raise InputError(f"recompute_layers {plan.recompute_layers} needs recompute full or selective, not none")
    most = max(plan.stage_layers or even_stages(model.layer_count, plan.pp * plan.virtual_stages))
    if plan.recompute_layers > most:
        raise InputError(f"recompute_layers {plan.recompute_layers}: stages have {most} layers at most; use {most}, or 0 for all")


def _check_network(plan: Strategy, model: Network) -> None:
    """Networks are split over data parallel ranks, and embedding tables over ranks as experts are."""
    split = [name for name in ("tp", "pp", "cp", "etp", "virtual_stages") if getattr(plan, name) > 1]
    if split:
        raise InputError(f"{split[0]} {getattr(plan, split[0])}: {model.name} is split over dp only")
    if plan.stage_layers or plan.recompute_layers:
        name = "stage_layers" if plan.stage_layers else "recompute_layers"
        raise InputError(f"{name}: {model.name} has no layers of one kind; leave it out")
    if plan.offload_activations:
        raise InputError(f"offload_activations: {model.name} has no layers of one kind; leave it out")
    if plan.ep > 1:
        if not model.tables:
            raise InputError(f"ep {plan.ep}: {model.name} has no embedding tables")
        if plan.dp % plan.ep:
            raise InputError(f"ep {plan.ep} must divide dp = {plan.dp}")


def _divides(name: str, ways: int, size: int, what: str) -> None:
    if size % ways:
        below = next(number for number in range(min(ways, size), 0, -1) if not size % number)
        raise InputError(f"{name} {ways} does not divide {size} {what}: use {below}")


def even_stages(layers: int, stages: int) -> tuple[int, ...]:
    """As many layers on each stage; the first ones have those that are left over."""
    each, more = divmod(layers, stages)
    return (each + 1,) * more + (each,) * (stages - more)


def _nearest(value: int, whole: int) -> int:
    """The divisor of a number that is nearest to a value."""
    return min((each for each in range(1, whole + 1) if whole % each == 0), key=lambda each: abs(each - value))


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))
