"""Megatron-LM's arguments, and the same as overrides of Megatron-Bridge's ``ConfigContainer``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

from dpro_search.deploy.parts.part import JobFacts, Part, as_json
from dpro_search.parallel.export.workloads import (
    checked_with,
    has_experts,
    planned,
    refuse,
    refuse_details,
    short_run,
    stage_layers,
    torchrun,
    transformer,
)
from dpro_search.parallel.gpu_ops import NARROW
from dpro_search.parallel.schedule import Schedule
from dpro_search.parallel.strategy import Recompute
from dpro_search.parallel.workload import Workload
from dpro_search.space.plan import Plan

_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
_MIXED = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "fp8": "bf16_with_fp8_delayed_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
# Settings of Megatron-Core's configuration classes whose argument has another name.
_ARGUMENTS = {"ddp.overlap_grad_reduce": "overlap-grad-reduce", "model.virtual_stages": "num-virtual-stages-per-pipeline-rank"}


def megatron_part(plan: Plan, facts: JobFacts) -> Part:
    """Arguments, for people and other programs, and as an array of a shell."""
    workload = planned(plan, facts)
    arguments = list(_arguments(settings(workload, "megatron"), workload.precision))
    lines = "\n".join(f"    {' '.join(map(shlex.quote, argument))}" for argument in arguments)
    text = f"# source it with bash: `. ./megatron_arguments.sh`\nMEGATRON_ARGUMENTS=(\n{lines}\n)\n"
    flat = [word for argument in arguments for word in argument]
    start = f'. ./megatron_arguments.sh && {torchrun(workload.strategy, facts)} pretrain_gpt.py "${{MEGATRON_ARGUMENTS[@]}}" ...'
    return Part(
        files={"megatron_arguments.sh": text.encode(), "megatron_arguments.json": as_json(flat)},
        start=start,
        short_run=short_run(
            workload,
            facts,
            '"$SCRIPT" "${MEGATRON_ARGUMENTS[@]}"',
            script="pretrain_gpt.py",
            prepare=("# shellcheck source=/dev/null", '. "$FOLDER/megatron_arguments.sh"'),
            short='--train-iters "$STEPS" --log-interval 1',
        ),
        setup=(
            "In place of `...` come the arguments of the model, its data and its learning rate.",
            *checked_with(workload, "megatron-core"),
        ),
    )


def bridge_part(plan: Plan, facts: JobFacts) -> Part:
    """Overrides for the command line of a recipe, one a line."""
    workload = planned(plan, facts)
    overrides = settings(workload, "megatron-bridge")
    stages = overrides.pop("model.virtual_stages", None)
    if stages is not None:
        overrides["model.virtual_pipeline_model_parallel_size"] = stages
    if "ddp.use_distributed_optimizer" in overrides:
        overrides["optimizer.use_distributed_optimizer"] = True
    if workload.precision in _MIXED:
        overrides["mixed_precision"] = _MIXED[workload.precision]
    lines = "".join(f"{name}={_word(value)}\n" for name, value in overrides.items())
    return Part(
        files={"megatron_bridge_overrides.txt": lines.encode()},
        start=f"{torchrun(workload.strategy, facts)} train.py $(cat megatron_bridge_overrides.txt)",
        short_run=short_run(
            workload,
            facts,
            '"$SCRIPT" "${overrides[@]}"',
            prepare=('mapfile -t overrides < "$FOLDER/megatron_bridge_overrides.txt"',),
            short='train.train_iters="$STEPS" logger.log_interval=1',
        ),
        setup=(
            "`train.py` is a recipe that takes overrides of its `ConfigContainer` on the command line, as those in "
            "Megatron-Bridge's `examples/recipes` do.",
            *checked_with(workload, "megatron-bridge"),
        ),
    )


def settings(workload: Workload, target: str) -> dict[str, int | str | bool]:
    """Settings of a plan, by their place in a ``ConfigContainer``: ``model``, ``ddp`` and ``train`` have Megatron-Core's names.

    Raises
    ------
    InputError
        Megatron cannot do it.
    """
    strategy, model = workload.strategy, transformer(workload)
    refuse(
        target,
        (
            (
                strategy.pp > 1 and strategy.schedule not in (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED),
                f"schedule: {strategy.schedule} is not one of its schedules, 1f1b and interleaved",
            ),
            (
                strategy.dp_replicate > 1 and strategy.zero_stage != 1,
                "dp_replicate: instances of the optimizer go with zero_stage=1",
            ),
            (strategy.zero_stage == 3 and not strategy.reshard, "reshard_after_forward: its FSDP frees parameters"),
            (strategy.zero_stage > 1 and strategy.pp > 1, "zero_stage: its FSDP goes without a pipeline: set zero_stage=1"),
            (
                has_experts(model) and strategy.ep > 1 and strategy.tp > 1 and not strategy.sequence_parallel,
                "sequence_parallel: experts that are shared need it where tp is above 1",
            ),
            (not strategy.cp_balanced and strategy.cp > 1, "cp_balanced: it always gives each rank two parts of the sequence"),
        ),
    )
    refuse_details(target, strategy, recomputes_some=True, sets_gradients=True, also="offload_optimizer")
    values: dict[str, int | str | bool] = {
        "model.tensor_model_parallel_size": strategy.tp,
        "model.pipeline_model_parallel_size": strategy.pp,
        "model.context_parallel_size": strategy.cp,
        "train.micro_batch_size": strategy.micro_batch,
        "train.global_batch_size": strategy.global_batch,
        "model.seq_length": workload.sequence,
    }
    if strategy.sequence_parallel:
        values["model.sequence_parallel"] = True
    if strategy.cp > 1:
        values["model.cp_comm_type"] = "p2p" if strategy.cp_ring else "all_gather"
    if has_experts(model):
        values |= {"model.expert_model_parallel_size": strategy.ep, "model.expert_tensor_parallel_size": strategy.etp}
    if strategy.recompute is Recompute.FULL:
        some = strategy.recompute_layers
        values |= {
            "model.recompute_granularity": "full",
            "model.recompute_method": "block" if some else "uniform",  # block: the first layers of each stage
            "model.recompute_num_layers": some or 1,
        }
    elif strategy.recompute is Recompute.SELECTIVE:
        values["model.recompute_granularity"] = "selective"  # Recomputes the attention's core, which is the default.
    if strategy.offload_optimizer:
        values |= {"optimizer.optimizer_cpu_offload": True, "optimizer.use_precision_aware_optimizer": True}
    if strategy.gradient_dtype is not None:
        values["ddp.grad_reduce_in_fp32"] = strategy.gradient_dtype == "fp32"
    return {**values, **_pipeline(workload), **_sharding(workload)}


def _pipeline(workload: Workload) -> Mapping[str, int | str | bool]:
    """Stages; where they have different numbers of layers, a layout names the parts of each, in the order of the forward pass."""
    strategy, layers = workload.strategy, stage_layers(workload)
    if strategy.pp == 1:
        return {}
    if len({*layers}) == 1:
        return {"model.virtual_stages": strategy.virtual_stages} if strategy.virtual_stages > 1 else {}
    parts = [f"t*{count}" if count else "" for count in layers]
    parts[0], parts[-1] = f"E{parts[0]}", f"{parts[-1]}L"
    return {"model.pipeline_model_parallel_layout": "|".join(parts)}


def _sharding(workload: Workload) -> Mapping[str, int | str | bool]:
    strategy, runtime = workload.strategy, workload.runtime
    if strategy.dp * strategy.cp == 1:
        return {}
    values: dict[str, int | str | bool] = {}
    if strategy.zero_stage:
        values["ddp.use_distributed_optimizer"] = True
    if strategy.zero_stage > 1:
        values |= {"ddp.use_megatron_fsdp": True, "ddp.data_parallel_sharding_strategy": _SHARDING[strategy.zero_stage]}
    if strategy.dp_replicate > 1:
        values["ddp.num_distributed_optimizer_instances"] = strategy.dp_replicate
    if runtime.overlap_gradients:
        values["ddp.overlap_grad_reduce"] = True
    if runtime.overlap_gathers and strategy.zero_stage:
        values["ddp.overlap_param_gather"] = True
    return values


def _arguments(values: Mapping[str, int | str | bool], precision: str) -> Iterator[tuple[str, ...]]:
    """Megatron-LM's names: those of the classes, with dashes."""
    for place, value in values.items():
        if place == "ddp.grad_reduce_in_fp32":  # as Megatron-LM does with bf16, unless it is told otherwise
            if value is False:
                yield ("--grad-reduce-in-bf16",)
            continue
        name = "--" + _ARGUMENTS.get(place, re.sub("_", "-", place.partition(".")[2]))
        yield (name,) if value is True else (name, str(value))
    if precision == "bf16" or precision in NARROW:
        yield ("--bf16",)
    if precision == "fp16":
        yield ("--fp16",)
    if precision == "fp8":
        yield "--fp8-format", "hybrid"
    if precision == "mxfp8":
        yield from (("--fp8-format", "e4m3"), ("--fp8-recipe", "mxfp8"))
    if precision == "nvfp4":
        yield from (("--fp4-format", "e2m1"), ("--fp4-recipe", "nvfp4"))


def _word(value: int | str | bool) -> str:
    """A value in Hydra's grammar, which would read `|` and `*` in a layout."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if re.fullmatch(r"[\w.]+", text) else f"'{text}'"
