"""DeepSpeed: its JSON, for ``deepspeed.initialize(config=...)``."""

from __future__ import annotations

from dpro_search.deploy.parts.part import JobFacts, Part, as_json
from dpro_search.parallel.export.workloads import (
    checked_with,
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
from dpro_search.space.plan import Plan


def deepspeed_part(plan: Plan, facts: JobFacts) -> Part:
    """ZeRO, AutoTP, batch and precision; a pipeline is made by the script."""
    workload = planned(plan, facts)
    strategy, _ = workload.strategy, transformer(workload)
    refuse(
        "deepspeed",
        (
            (strategy.cp > 1, "cp: its sequence parallelism exchanges heads (Ulysses), which is another strategy"),
            (strategy.ep * strategy.etp > 1, "ep: the model's own code sets it (`deepspeed.moe.layer.MoE`)"),
            (strategy.sequence_parallel, "sequence_parallel: AutoTP keeps norms and residuals whole: set sequence_parallel=false"),
            (strategy.tp > 1 and strategy.pp > 1, "tp: AutoTP goes without a pipeline: set tp=1 or pp=1"),
            (strategy.tp > 1 and strategy.zero_stage == 3, "zero_stage: AutoTP goes with at most ZeRO-2: set zero_stage=2"),
            (strategy.pp > 1 and strategy.zero_stage > 1, "zero_stage: its pipelines go with at most ZeRO-1: set zero_stage=1"),
            (
                strategy.pp > 1 and (strategy.schedule is not Schedule.ONE_F_ONE_B or strategy.virtual_stages > 1),
                f"schedule: its pipelines run 1f1b with one stage on each rank, not {strategy.schedule}",
            ),
            (
                strategy.pp > 1 and len({*stage_layers(workload)}) > 1,
                "stage_layers: its partition 'type:...' gives each stage as many layers",
            ),
            (strategy.dp_replicate > 1 and strategy.zero_stage != 3, "dp_replicate: MiCS is ZeRO-3: set zero_stage=3"),
            (strategy.zero_stage == 3 and not strategy.reshard, "reshard_after_forward: ZeRO-3 frees parameters"),
            (workload.precision in NARROW, "precision: it has bf16, fp16 and fp32"),
        ),
    )
    refuse_details("deepspeed", strategy, also="offload_optimizer")
    zero: dict[str, object] = {"stage": strategy.zero_stage, "overlap_comm": workload.runtime.overlap_gradients}
    if strategy.dp_replicate > 1:
        zero["mics_shard_size"] = strategy.zero_ways
    if strategy.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    content: dict[str, object] = {
        "train_batch_size": strategy.global_batch,
        "train_micro_batch_size_per_gpu": strategy.micro_batch,
        "gradient_accumulation_steps": strategy.micro_batches,
        "zero_optimization": zero,
    }
    if workload.precision in ("bf16", "fp16"):
        content[workload.precision] = {"enabled": True}
    if strategy.tp > 1:
        content["tensor_parallel"] = {"autotp_size": strategy.tp}
    script = ["`deepspeed.initialize(model=model, config='deepspeed.json', ...)`."]
    again = strategy.recompute is Recompute.FULL
    if strategy.pp > 1:
        interval = ", activation_checkpoint_interval=1" if again else ""
        script.append(
            f"The model is a `PipelineModule(layers, num_stages={strategy.pp}, partition_method='type:BLOCK'{interval})`, where "
            "BLOCK is the class of its layers, and a step is `engine.train_batch(data)`."
        )
    elif again:
        script.append("Every layer runs under `deepspeed.checkpointing.checkpoint` (`model.gradient_checkpointing_enable()`).")
    if strategy.dp_replicate > 1:
        script.append("The model is made under `deepspeed.zero.MiCS_Init`.")
    return Part(
        files={"deepspeed.json": as_json(content)},
        start=f"{torchrun(strategy, facts)} train.py",
        short_run=short_run(
            workload, facts, '"$SCRIPT"', prepare=('SCRIPT=$(realpath -- "$SCRIPT")', 'cd -- "$FOLDER"  # of deepspeed.json')
        ),
        script=tuple(script),
        setup=checked_with(workload, "deepspeed"),
    )
