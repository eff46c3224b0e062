"""PyTorch: a module that splits the user's model (``fully_shard``, ``parallelize_module``, ``torch.distributed.pipelining``)."""

from __future__ import annotations

from dpro_search.deploy.parts.part import JobFacts, Part, as_json, helper_file
from dpro_search.parallel.export.torchtitan import SCHEDULES
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
from dpro_search.parallel.runtime import Selective
from dpro_search.parallel.schedule import stages_on
from dpro_search.parallel.strategy import Recompute
from dpro_search.space.plan import Plan

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def pytorch_part(plan: Plan, facts: JobFacts) -> Part:
    """The module, and what it does to the model."""
    workload = planned(plan, facts)
    strategy, model = workload.strategy, transformer(workload)
    refuse(
        "pytorch",
        (
            (strategy.cp > 1, "cp: it changes the attention of the model's own code: export to torchtitan"),
            (strategy.ep * strategy.etp > 1, "ep: experts are in the model's own code: export to torchtitan"),
            (strategy.zero_stage > 1 and strategy.pp > 1, "zero_stage: FSDP2 reduces once for a pipeline: set zero_stage=1"),
            (workload.precision not in _DTYPES, f"precision: {workload.precision} needs layers or a scaler of its own"),
            (bool(strategy.dp % strategy.dp_replicate), "dp_replicate: it must divide dp"),
        ),
    )
    refuse_details("pytorch", strategy, recomputes_some=True, sets_gradients=True)
    sharded = strategy.zero_stage > 0
    selective = strategy.recompute is Recompute.SELECTIVE and workload.runtime.selective is Selective.EVERY_SECOND_MATMUL
    content = {
        "version": 1,
        "ranks": strategy.devices,
        "degrees": {
            "pp": strategy.pp,
            "dp_replicate": strategy.dp_replicate if sharded else strategy.dp,
            "dp_shard": strategy.dp // strategy.dp_replicate if sharded else 1,
            "tp": strategy.tp,
        },
        "sequence_parallel": strategy.sequence_parallel,
        "zero_stage": strategy.zero_stage,
        "reshard_after_forward": strategy.zero_stage == 3 and strategy.reshard,
        "parameter_dtype": _DTYPES[workload.precision],
        "reduce_dtype": "float32" if workload.gradient_bytes >= 4 else _DTYPES[workload.precision],
        "recompute": strategy.recompute is Recompute.FULL or selective,
        "recompute_selective": selective,
        "recompute_layers": strategy.recompute_layers,
        "micro_batch": strategy.micro_batch,
        "micro_batches": strategy.micro_batches,
        "layers": model.layer_count,
        "stage_layers": stage_layers(workload),
        "stages": [stages_on(strategy.schedule, rank, strategy.pp, strategy.virtual_stages) for rank in range(strategy.pp)],
        "schedule": SCHEDULES[strategy.schedule],
    }
    each = strategy.micro_batch * strategy.micro_batches
    script: tuple[str, ...] = (
        "`from parallel_plan import apply`, `planned = apply(model, loss_function)` before the optimizer, which takes "
        f"`planned.parameters()`, and `loss = planned.step(inputs, targets)` with the {each} sequences of "
        "`planned.data_rank` of `planned.data_ranks` (the file's first lines have an example, and what it needs of a model).",
    )
    if strategy.recompute is Recompute.SELECTIVE and not selective:
        script += ("Selective recomputation is of the attention's scores: `scaled_dot_product_attention` never stores them.",)
    return Part(
        files={"parallel_plan.json": as_json(content), "parallel_plan.py": helper_file("parallel_plan.py")},
        start=f"{torchrun(strategy, facts)} train.py",
        short_run=short_run(workload, facts, '"$SCRIPT"', logs_steps=False),
        script=script,
        setup=checked_with(workload, "torch"),
    )
