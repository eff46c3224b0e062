"""Which systems follow a plan, and what each takes of it: `targets_for` chooses them, `parts_of` asks each, or says why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from dpro_search.deploy.parts.horovod import horovod_part
from dpro_search.deploy.parts.part import JobFacts, Part, Servers
from dpro_search.deploy.parts.pytorch import ddp_part, pytorch_part
from dpro_search.deploy.parts.stores import byteps_part, kvstore_part
from dpro_search.deploy.parts.tensorflow_step import tensorflow_part, xla_part
from dpro_search.errors import InputError
from dpro_search.space.plan import Plan


class Target(StrEnum):
    """Systems that follow a plan, or a part of it."""

    HOROVOD = "horovod"
    XLA = "xla"
    TENSORFLOW = "tensorflow"
    DDP = "ddp"
    PYTORCH = "pytorch"
    MXNET = "mxnet"
    BYTEPS = "byteps"


FIELDS: Mapping[Target, tuple[str, ...]] = {
    Target.HOROVOD: ("fusion_threshold_bytes", "cycle_time_us", "tensor_groups", "allreduce_algorithms", "compression"),
    Target.XLA: ("op_clusters",),
    Target.TENSORFLOW: ("bfloat16_ops", "recomputed_ops", "micro_batches"),
    Target.DDP: ("bucket_cap_bytes", "tensor_groups", "compression"),
    Target.PYTORCH: ("recomputed_modules", "bfloat16_modules", "micro_batches"),
    Target.MXNET: ("servers", "servers_on_workers", "bigarray_bound", "p3", "slice_threshold", "compression"),
    Target.BYTEPS: ("servers", "servers_on_workers", "partition_bytes", "credit", "compression"),
}
_COMMUNICATE = (Target.HOROVOD, Target.DDP, Target.MXNET, Target.BYTEPS)  # a job has one of these
_FRAMEWORK = {  # Horovod has several
    Target.XLA: "tensorflow",
    Target.TENSORFLOW: "tensorflow",
    Target.DDP: "pytorch",
    Target.PYTORCH: "pytorch",
    Target.MXNET: "mxnet",
    Target.BYTEPS: "mxnet",
}
_WHY_NOT = {
    (Target.PYTORCH, "bfloat16_ops"): "autocast takes modules (bfloat16_modules), and the plan names single ops",
    (Target.PYTORCH, "recomputed_ops"): "checkpointing takes modules (recomputed_modules), and the plan names single ops",
    (Target.PYTORCH, "op_clusters"): "torch.compile chooses what it fuses by itself",
    (Target.MXNET, "micro_batches"): "MXNet's Trainer has no line that accumulates without a change of the gradients' grad_req",
}
_PARTS: Mapping[Target, Callable[[Plan, JobFacts], Part]] = {
    Target.HOROVOD: horovod_part,
    Target.XLA: xla_part,
    Target.TENSORFLOW: tensorflow_part,
    Target.DDP: ddp_part,
    Target.PYTORCH: pytorch_part,
    Target.MXNET: kvstore_part,
    Target.BYTEPS: byteps_part,
}


def targets_for(plan: Plan, available: Sequence[Target] | None = None) -> tuple[Target, ...]:
    """The targets that together follow a plan, out of those that the job has (None: not known, any; where several can, Horovod).

    Raises
    ------
    InputError
        A field of the plan is nobody's, or several could be meant.
    """
    known = available is not None
    available = tuple(Target) if available is None else available
    fields = set_fields(plan)
    able = {name: [target for target in available if name in FIELDS[target]] for name in fields}
    chosen = {targets[0] for targets in able.values() if len(targets) == 1}
    for name, targets in able.items():
        if not targets:
            raise InputError(f"{name}: {_reason(name, available)}")
        frameworks = {_FRAMEWORK[target] for target in chosen if target in _FRAMEWORK}
        fitting = [target for target in targets if _FRAMEWORK.get(target) in frameworks]
        if not chosen & set(targets) and len(fitting) == 1:
            chosen.add(fitting[0])
        if not chosen & set(targets) and not known and Target.HOROVOD in targets:
            chosen.add(Target.HOROVOD)
        if not chosen & set(targets):
            raise InputError(f"{name}: say which of {', '.join(targets)} is meant with --target")
    if not chosen and known:
        chosen = set(available[:1])  # the empty plan
    return tuple(target for target in Target if target in chosen)


def set_fields(plan: Plan) -> list[str]:
    """Names of the fields that a plan changes."""
    return [name for name in plan.__struct_fields__ if getattr(plan, name) is not None]


def more_servers(plan: Plan, recorded: Servers) -> int:
    """Parameter servers of a plan that need hosts of their own beyond the recorded ones; 0 where no servers were recorded."""
    on_workers = recorded.on_workers if plan.servers_on_workers is None else plan.servers_on_workers
    if not recorded.count or on_workers:
        return 0
    count = recorded.count if plan.servers is None else plan.servers
    return max(count - (0 if recorded.on_workers else recorded.count), 0)


def parts_of(plan: Plan, targets: Sequence[Target], facts: JobFacts | None = None) -> dict[Target, Part]:
    """What each target needs.

    Raises
    ------
    InputError
        A field that none of the targets can express, or not in this job; or targets that no job has together.
    """
    facts = facts or JobFacts()
    several = [target for target in targets if target in _COMMUNICATE]
    if len(several) > 1:
        raise InputError(f"--target {several[0]} and {several[1]}: a job communicates with one of them; leave out the others")
    of_framework = {_FRAMEWORK[target]: target for target in targets if target in _FRAMEWORK}
    if len(of_framework) > 1:
        one, other = list(of_framework.values())[:2]
        raise InputError(f"--target {one} and {other}: a job has one framework; leave out one of them")
    for name in set_fields(plan):
        if not any(name in FIELDS[target] for target in targets):
            raise InputError(f"{name}: {_reason(name, targets)}")
    return {target: _PARTS[target](plan, facts) for target in targets}


def _reason(name: str, targets: Sequence[Target]) -> str:
    reasons = [why for (target, field_name), why in _WHY_NOT.items() if field_name == name and target in targets]
    able = [target for target in Target if name in FIELDS[target]]
    told = f"; {reasons[0]}" if reasons else ""
    return f"{' and '.join(targets) or 'this job'} cannot express it{told} (known to: {', '.join(able)}; choose with --target)"
