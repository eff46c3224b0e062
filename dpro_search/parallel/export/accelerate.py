"""Accelerate: a YAML file for ``accelerate launch --config_file``, with FSDP2 and its parallelism, or Megatron-LM's plugin."""

from __future__ import annotations

from collections.abc import Mapping

from dpro_search.deploy.parts.part import JobFacts, Part
from dpro_search.parallel.export.workloads import (
    checked_with,
    planned,
    refuse,
    refuse_details,
    short_run,
    stage_layers,
    transformer,
)
from dpro_search.parallel.schedule import Schedule
from dpro_search.parallel.strategy import Recompute, Strategy
from dpro_search.parallel.workload import Workload
from dpro_search.space.plan import Plan

_MIXED = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}


def accelerate_part(plan: Plan, facts: JobFacts) -> Part:
    """The file; micro-batches are a variable, which `Accelerator` reads."""
    workload = planned(plan, facts)
    strategy, _ = workload.strategy, transformer(workload)
    refuse(
        "accelerate",
        (
            (workload.precision in ("mxfp8", "nvfp4"), "precision: it has bf16, fp16 and fp8"),
            (strategy.ep * strategy.etp > 1, "ep: it has no setting for it"),
            (
                strategy.tp > 1 and strategy.pp == 1 and strategy.sequence_parallel,
                "sequence_parallel: Transformers' plans keep norms and residuals whole: set sequence_parallel=false",
            ),
        ),
    )
    how = _megatron(workload) if strategy.pp > 1 else _fsdp(strategy)
    refuse_details("accelerate", strategy, recomputes_some=strategy.pp > 1)
    each = min(facts.ranks_per_host or strategy.devices, strategy.devices)
    content = {
        "compute_environment": "LOCAL_MACHINE",
        "num_machines": -(-strategy.devices // each),
        "machine_rank": 0,
        "num_processes": strategy.devices,
        "mixed_precision": _MIXED.get(workload.precision, "no"),
        **how,
    }
    if strategy.pp > 1:
        batches = f"The loader's batches are the {strategy.micro_batch * strategy.micro_batches} sequences of a replica"
    else:
        batches = f"The loader's batches are of {strategy.micro_batch} sequences, under `with accelerator.accumulate(model):`"
    launcher = 'accelerate launch --config_file "$FOLDER/accelerate.yaml"'
    if strategy.devices > each:
        number = "${SLURM_NODEID:-${MACHINE_RANK:?is not set: the number of this host, from 0}}"
        launcher += f' --main_process_ip "$HEAD" --machine_rank "{number}"'
    return Part(
        env={} if strategy.pp > 1 else {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": str(strategy.micro_batches)},
        files={"accelerate.yaml": _yaml(content).encode()},
        start="accelerate launch --config_file accelerate.yaml train.py",
        short_run=short_run(workload, facts, '"$SCRIPT"', launcher=launcher),
        setup=(
            f"{batches}; machine N gets `--machine_rank N --main_process_ip HEAD`.",
            *checked_with(workload, "accelerate"),
        ),
    )


def _fsdp(strategy: Strategy) -> Mapping[str, object]:
    """FSDP2 over dp and cp, tensor parallelism by Transformers' plans, or plain data parallelism."""
    plain = strategy.tp * strategy.cp == 1
    if strategy.zero_stage == 0 and plain:
        return {"distributed_type": "MULTI_GPU" if strategy.devices > 1 else "NO"}
    one = strategy.micro_batches == 1
    refuse(
        "accelerate",
        (
            (strategy.zero_stage == 0, "zero_stage: tensor and context parallelism go with FSDP2: set zero_stage=3"),
            (strategy.zero_stage == 1, "zero_stage: FSDP2 is ZeRO-3, or ZeRO-2 of one micro-batch: set zero_stage=3"),
            (strategy.zero_stage == 2 and not one, "zero_stage: FSDP2 reduces each micro-batch: set zero_stage=3"),
            (bool(strategy.dp % strategy.dp_replicate), "dp_replicate: it must divide dp"),
        ),
    )
    parallelism: dict[str, object] = {
        "parallelism_config_dp_replicate_size": strategy.dp_replicate,
        "parallelism_config_dp_shard_size": strategy.dp // strategy.dp_replicate,
        "parallelism_config_tp_size": strategy.tp,
        "parallelism_config_cp_size": strategy.cp,
    }
    if strategy.cp > 1:
        parallelism["parallelism_config_cp_comm_strategy"] = "alltoall" if strategy.cp_ring else "allgather"
    return {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": strategy.zero_stage == 3 and strategy.reshard,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": strategy.recompute is Recompute.FULL,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
        "parallelism_config": parallelism,
    }


def _megatron(workload: Workload) -> Mapping[str, object]:
    """Pipelines: Megatron-LM's plugin, as far as the file has settings for it."""
    strategy = workload.strategy
    refuse(
        "accelerate",
        (
            (strategy.virtual_stages > 1, "virtual_stages: its file has no setting for them: export to megatron"),
            (strategy.schedule is not Schedule.ONE_F_ONE_B, f"schedule: {strategy.schedule} is not Megatron-LM's"),
            (strategy.cp > 1, "cp: the file of its Megatron-LM plugin has no setting for it: export to megatron"),
            (strategy.zero_stage > 1, "zero_stage: Megatron-LM's distributed optimizer is ZeRO-1: set zero_stage=1"),
            (strategy.dp_replicate > 1, "dp_replicate: the file has no setting for it: export to megatron"),
            (len({*stage_layers(workload)}) > 1, "stage_layers: the file has no setting for them: export to megatron"),
        ),
    )
    config: dict[str, object] = {
        "megatron_lm_tp_degree": strategy.tp,
        "megatron_lm_pp_degree": strategy.pp,
        "megatron_lm_num_micro_batches": strategy.micro_batches,
        "megatron_lm_sequence_parallelism": strategy.sequence_parallel,
        "megatron_lm_use_distributed_optimizer": strategy.zero_stage == 1,
        "megatron_lm_recompute_activations": strategy.recompute is Recompute.SELECTIVE,
        "megatron_lm_gradient_clipping": 1.0,
    }
    if strategy.recompute is Recompute.FULL:
        config |= {
            "megatron_lm_recompute_granularity": "full",
            "megatron_lm_recompute_method": "block" if strategy.recompute_layers else "uniform",
            "megatron_lm_recompute_num_layers": strategy.recompute_layers or 1,
        }
    return {"distributed_type": "MEGATRON_LM", "megatron_lm_config": config}


def _yaml(content: Mapping[str, object], indent: str = "") -> str:
    """Tables of scalars as YAML; texts are words, of which 'no' and 'NO' need quotes."""
    lines = []
    for key, value in content.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key}:\n{_yaml(value, indent + '  ')}")
        else:
            text = str(value).lower() if isinstance(value, bool) else f"'{value}'" if isinstance(value, str) else str(value)
            lines.append(f"{indent}{key}: {text}\n")
    return "".join(lines)
