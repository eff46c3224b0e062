"""PyTorch: buckets and communication hooks of DistributedDataParallel; modules in bfloat16 or computed again; parts of a batch."""

from __future__ import annotations

from collections.abc import Sequence

from dpro_search.costmodel.powersgd import COMPRESSIONS as POWERSGD
from dpro_search.deploy.parts.part import JobFacts, Part, Target, as_json, helper_file, micro_batch_files
from dpro_search.errors import InputError
from dpro_search.graph.sharded_units import ROOT, unit_groups
from dpro_search.space.plan import Plan
from dpro_search.space.schemes import DdpSettings, FsdpSettings
from dpro_search.space.transformations.modules import precision_refusal, refusal

_MIB = 2**20
_DEFAULT_CAP_MB = 25  # PyTorch's
# PyTorch's DDP makes its buckets anew after the first step, and PowerSGD keeps what is left over by bucket. The epsilon keeps a
# gradient that is 0 from becoming NaN.
_POWERSGD_OPTIONS = {"start_powerSGD_iter": 2, "orthogonalization_epsilon": 1e-8}
_POWERSGD_START = (
    "PowerSGD begins at step `start_powerSGD_iter` of `ddp.json`, which is 2, the least that PyTorch takes, so that short runs "
    "measure compressed steps: for training raise it to a tenth of all steps, as PyTorch advises, since early gradients suffer "
    "most. What the hook leaves over of gradients is in no checkpoint: a job that starts again begins without it."
)


def ddp_part(plan: Plan, facts: JobFacts) -> Part:
    """Buckets and compression of DistributedDataParallel."""
    options: dict[str, object] = {}
    settings = DdpSettings.of(plan)
    if plan.tensor_groups is not None and settings.bucket_cap_bytes is not None:
        raise InputError("tensor_groups and bucket_cap_bytes: a bucket's size follows from its group; leave out one of them")
    if plan.tensor_groups is not None and settings.first_bucket_bytes is not None:
        raise InputError("tensor_groups and first_bucket_bytes: a bucket's size follows from its group; leave out one of them")
    if settings.first_bucket_bytes is not None:
        later_mb = _recorded_cap_mb(facts) if settings.bucket_cap_bytes is None else settings.bucket_cap_bytes / _MIB
        options["bucket_cap_mb_list"] = [settings.first_bucket_bytes / _MIB, later_mb]
    elif settings.bucket_cap_bytes is not None:
        options["bucket_cap_mb"] = settings.bucket_cap_bytes / _MIB
    if plan.tensor_groups is not None:
        options["bucket_cap_mb_list"] = [size / _MIB for size in _bucket_sizes(plan.tensor_groups, facts)]
    for name in ("gradient_as_bucket_view", "static_graph"):
        if (value := settings.settings.get(name)) is not None:
            options[name] = value
    if plan.compression not in (None, "fp16", "bf16", *POWERSGD):
        raise InputError(f"compression: DDP has fp16, bf16 and {', '.join(POWERSGD)}, not {plan.compression}")
    content: dict[str, object] = {"version": 1, "options": options, "compression": plan.compression}
    script: tuple[str, ...] = (
        "`from ddp import planned_ddp`, and `model = planned_ddp(model)` in place of `DistributedDataParallel(model)`; it takes "
        "the same arguments.",
    )
    if plan.compression in POWERSGD:
        content["powersgd"] = {**_POWERSGD_OPTIONS, "matrix_approximation_rank": POWERSGD[plan.compression]}
        script += (_POWERSGD_START,)
    return Part(files={"ddp.json": as_json(content), "ddp.py": helper_file("ddp.py")}, script=script)


def _recorded_cap_mb(facts: JobFacts) -> float:
    """DDP's ``bucket_cap_mb`` in the recorded job; PyTorch's own where it named none."""
    return float(facts.knobs.get("bucket_cap_mb") or _DEFAULT_CAP_MB)


def fsdp_part(plan: Plan, facts: JobFacts) -> Part:
    """Prefetching, resharding, units and reductions of ``fully_shard``."""
    settings = FsdpSettings.of(plan)
    units = [tensor.name for tensor in facts.tensors if tensor.name != ROOT and not tensor.node]
    of_units = [
        name
        for name in ("units_together", "kept_last_units", "kept_units", "reduce_dtype", "shard_ranks")
        if getattr(settings, name)
    ]
    if of_units and not units:
        name = of_units[0]
        raise InputError(f"{name}: the units are those of the profile: export from the folder of the search")
    content: dict[str, object] = {
        "version": 1,
        "prefetch": bool(settings.prefetch),
        "reshard_after_forward": settings.reshard_after_forward,
        "prefetch_depth": settings.prefetch_depth,
        "backward_prefetch_depth": settings.backward_prefetch_depth,
        "kept": ["" if name == ROOT else name for name in settings.kept_units or units[::-1][: settings.kept_last_units or 0]],
        "units": units,
        "groups": unit_groups(units, settings.units_together),
        "reduce_dtype": settings.reduce_dtype,
        "shard_ranks": settings.shard_ranks,
    }
    if settings.units_together or settings.reduce_dtype or settings.shard_ranks:
        script: tuple[str, ...] = (
            "`from fsdp import planned_shard`, and `model = planned_shard(model)` in place of all calls of `fully_shard`; it takes "
            "their arguments.",
        )
    else:
        script = ("`from fsdp import planned_fsdp`, and `model = planned_fsdp(model)` after `fully_shard(model)`.",)
    return Part(files={"fsdp.json": as_json(content), "fsdp.py": helper_file("fsdp.py")}, script=script)


def _bucket_sizes(groups: Sequence[Sequence[str]], facts: JobFacts) -> list[int]:
    """Limits under which DDP makes exactly these buckets: it closes one with the gradient that brings it to its limit.

    Raises `InputError` for groups that are not runs of the order in which gradients become ready.
    """
    if not facts.ready_order:
        raise InputError(
            "tensor_groups: DDP's buckets are cut by size, which needs the recording: export from the folder of the search"
        )
    sizes = {tensor.name: tensor.size_bytes for tensor in facts.tensors}
    names = [name for group in groups for name in group]
    if names != list(sizes):
        raise InputError(
            "tensor_groups: DDP's buckets hold every gradient, and are cut from the order in which these become ready; "
            "the plan's groups are not such runs"
        )
    return [sum(sizes[name] for name in group) for group in groups]


def pytorch_part(plan: Plan, facts: JobFacts) -> Part:
    """Modules in bfloat16 or computed again, and parts of a batch."""
    files: dict[str, bytes] = {}
    script: list[str] = []
    if plan.recomputed_modules is not None or plan.bfloat16_modules is not None:
        again, lowered = plan.recomputed_modules or (), plan.bfloat16_modules or ()
        why = (refusal(facts.modules, again) or precision_refusal(facts.modules, lowered)) if facts.modules else None
        if why is not None:
            raise InputError(why)
        content = {"version": 1, "recomputed": again, "bfloat16": lowered}
        files |= {"modules.json": as_json(content), "modules.py": helper_file("modules.py")}
        script.append(
            "`from modules import planned_modules`, and `model = planned_modules(model)` before `DistributedDataParallel(model)` "
            "or `fully_shard`."
        )
    if plan.micro_batches is not None:
        files |= micro_batch_files(plan.micro_batches)
        script.append(
            "`from micro_batches import planned_parts`, and forward and backward pass below "
            "`for inputs, labels in planned_parts(model, inputs, labels):` (the optimizer's step stays behind it)."
        )
    return Part(files=files, script=tuple(script))


_START = "torchrun --nproc-per-node N train.py"
DDP = Target(
    name="ddp",
    fields=(
        *("bucket_cap_bytes", "first_bucket_bytes", "tensor_groups", "compression", "gradient_as_bucket_view", "static_graph"),
    ),
    part=ddp_part,
    framework="pytorch",
    communicates=True,
    start=_START,
)
PYTORCH = Target(
    name="pytorch",
    fields=("recomputed_modules", "bfloat16_modules", "micro_batches"),
    part=pytorch_part,
    framework="pytorch",
    start=_START,
    why_not={
        "bfloat16_ops": "autocast takes modules (bfloat16_modules), and the plan names single ops",
        "recomputed_ops": "checkpointing takes modules (recomputed_modules), and the plan names single ops",
        "op_clusters": "torch.compile chooses what it fuses by itself",
    },
)
FSDP = Target(
    name="fsdp",
    fields=(
        *("prefetch", "prefetch_depth", "backward_prefetch_depth", "reshard_after_forward", "kept_last_units", "kept_units"),
        *("units_together", "reduce_dtype", "shard_ranks"),
    ),
    part=fsdp_part,
    framework="pytorch",
    communicates=True,
    start=_START,
)
