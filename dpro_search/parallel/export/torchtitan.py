"""torchtitan: a recipe function that returns a ``Trainer.Config``."""

from __future__ import annotations

from dpro_search.deploy.parts.part import JobFacts, Part, as_json, helper_file
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
from dpro_search.parallel.runtime import Selective
from dpro_search.parallel.schedule import Schedule
from dpro_search.parallel.strategy import Recompute, Strategy
from dpro_search.parallel.workload import Workload
from dpro_search.space.plan import Plan

# torchtitan's own recipes of published models, by our names.
_BASES = {
    "llama3-8b": "torchtitan.models.llama3.config_registry:llama3_8b",
    "llama3-70b": "torchtitan.models.llama3.config_registry:llama3_70b",
    "qwen3-30b-a3b": "torchtitan.models.qwen3.config_registry:qwen3_30b_a3b",
    "deepseek-v3": "torchtitan.models.deepseek_v3.config_registry:deepseek_v3_671b",
    "gpt-oss-20b": "torchtitan.models.gpt_oss.config_registry:gpt_oss_20b",
    "gpt-oss-120b": "torchtitan.models.gpt_oss.config_registry:gpt_oss_120b",
}
# Their orders are those of our schedules, pass by pass (tests/integration/test_pipeline_orders.py): no plan needs a CSV of its own.
SCHEDULES = {
    Schedule.GPIPE: "GPipe",
    Schedule.ONE_F_ONE_B: "1F1B",
    Schedule.INTERLEAVED: "Interleaved1F1B",
    Schedule.ZERO_BUBBLE: "InterleavedZeroBubble",
    Schedule.ZERO_BUBBLE_V: "ZBVZeroBubble",
    Schedule.DUAL_PIPE_V: "DualPipeV",
}


def torchtitan_part(plan: Plan, facts: JobFacts) -> Part:
    """The recipe's module, and what it sets."""
    workload = planned(plan, facts)
    strategy, model = workload.strategy, transformer(workload)
    reshard = _reshard(strategy)
    refuse(
        "torchtitan",
        (
            (workload.precision not in ("bf16", "fp32"), f"precision: {workload.precision} needs converters in the model's recipe"),
            (strategy.zero_stage == 0 and strategy.cp > 1, "zero_stage: it shards parameters over cp"),
            (reshard is None, f"zero_stage: FSDP2 is ZeRO-3, {_LOWER}"),
            (strategy.cp_ring, "cp_ring: its FlexAttention gathers keys and values"),
            (bool(strategy.dp % strategy.dp_replicate), "dp_replicate: it must divide dp"),
            (strategy.ep > 1 and strategy.etp > 1, "etp: experts that are shared are not split"),
            (
                has_experts(model) and strategy.ep == 1 and strategy.etp != strategy.tp,
                f"etp: experts that are not shared are split over tp: set etp={strategy.tp}",
            ),
        ),
    )
    refuse_details("torchtitan", strategy)
    sharded = strategy.zero_stage > 0
    parallelism: dict[str, object] = {
        "data_parallel_replicate_degree": strategy.dp_replicate if sharded else strategy.dp,
        "data_parallel_shard_degree": strategy.dp // strategy.dp_replicate if sharded else 1,
        "fsdp_reshard_after_forward": reshard,
        "tensor_parallel_degree": strategy.tp,
        "enable_sequence_parallel": strategy.sequence_parallel,
        "context_parallel_degree": strategy.cp,
        "expert_parallel_degree": strategy.ep,
        "pipeline_parallel_degree": strategy.pp,
    }
    if strategy.cp > 1 and not strategy.cp_balanced:
        parallelism["context_parallel_load_balancer"] = None
    training: dict[str, object] = {
        "global_batch_size": strategy.global_batch,
        "seq_len": workload.sequence,
        "mixed_precision_param": {"bf16": "bfloat16", "fp32": "float32"}[workload.precision],
    }
    local = strategy.micro_batch
    if strategy.pp > 1:
        parallelism |= {
            "module_fqns_per_model_part": _parts(stage_layers(workload)),
            "pipeline_parallel_schedule": SCHEDULES[strategy.schedule],
            "pipeline_parallel_microbatch_size": strategy.micro_batch,
        }
        local *= strategy.micro_batches
        training["disable_cuda_graphs"] = True  # torchtitan refuses them with a pipeline
    content = {
        "version": 1,
        "base": _BASES.get(model.name),
        "layers": model.layer_count,
        "parallelism": parallelism,
        "training": {"local_batch_size": local, **training},
        "activation_checkpoint": _recomputed(workload),
    }
    return Part(
        files={"torchtitan_plan.json": as_json(content), "torchtitan_plan.py": helper_file("torchtitan_plan.py")},
        start=f"{torchrun(strategy, facts)} -m torchtitan.train --module torchtitan_plan --config planned",
        on_path=True,
        short_run=short_run(
            workload,
            facts,
            "-m torchtitan.train --module torchtitan_plan --config planned",
            script="",
            short='--training.steps "$STEPS" --metrics.log_freq 1',
        ),
        setup=(*_base(model.name), *_selective(workload), *checked_with(workload, "torchtitan")),
    )


_LOWER = "or with reshard_after_forward 'never' ZeRO-2 of one micro-batch, or ZeRO-1 of a pipeline: set zero_stage=3"


def _reshard(strategy: Strategy) -> str | None:
    """When FSDP2 frees parameters; None where it cannot do the strategy's ZeRO stage.

    Without resharding, parameters stay whole from the forward to the backward pass. In a pipeline they stay for all micro-batches,
    whose gradients are reduced once (`torch.distributed.pipelining.stage`): that is ZeRO-1; without one each micro-batch reduces.
    """
    if strategy.zero_stage == 3:
        return "always" if strategy.reshard else "never"
    if strategy.zero_stage == 2:
        return "never" if strategy.pp == 1 and strategy.micro_batches == 1 else None
    if strategy.zero_stage == 1 and strategy.dp * strategy.cp > 1:
        return "never" if strategy.pp > 1 else None
    return "default"


def _parts(layers: tuple[int, ...]) -> list[list[str]]:
    """Modules of each stage, as torchtitan names those of its decoders."""
    parts, first = [], 0
    for count in layers:
        parts.append([f"layers.{number}" for number in range(first, first + count)])
        first += count
    parts[0] = ["tok_embeddings", *parts[0]]
    parts[-1] = [*parts[-1], "norm", "lm_head"]
    return parts


def _base(model: str) -> tuple[str, ...]:
    if model in _BASES:
        return (f"The recipe changes torchtitan's own `{_BASES[model].rpartition(':')[2]}`; `plan(config)` changes yours.",)
    return (f"torchtitan has no recipe of {model}: name yours in `base` of `torchtitan_plan.json`, as `module:function`.",)


def _recomputed(workload: Workload) -> str | None:
    """Its `FullAC` or `SelectiveAC`, which computes every second matmul again."""
    has_policy = workload.runtime.selective is Selective.EVERY_SECOND_MATMUL
    names = {Recompute.FULL: "full", Recompute.SELECTIVE: "selective" if has_policy else None}
    return names.get(workload.strategy.recompute)


def _selective(workload: Workload) -> tuple[str, ...]:
    if workload.strategy.recompute is not Recompute.SELECTIVE or _recomputed(workload):
        return ()
    return ("Selective recomputation is of the attention's scores, which FlexAttention never stores: nothing is computed again.",)
