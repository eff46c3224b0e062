"""The part that targets of parallel plans share: the job under a plan, layers of stages, start of ranks, tested versions."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dpro_search.deploy.parts.part import JobFacts, ShortRun
from dpro_search.errors import InputError
from dpro_search.parallel.model import Architecture, Experts
from dpro_search.parallel.strategy import DEFAULTS, SETTINGS, Strategy
from dpro_search.parallel.workload import Workload, stages_of
from dpro_search.space.plan import Plan

TESTED = {
    "accelerate": "1.15.0",
    "deepspeed": "0.19.8",
    "megatron-bridge": "0.3.1",
    "megatron-core": "0.16.1",
    "torch": "2.13.0",
    "torchtitan": "0.3.0",
}
"""Versions whose own parsers took exports (``tests/integration/test_parallel_exports.py``)."""


_EXPRESSED = frozenset(
    (
        *("tp", "pp", "cp", "ep", "etp", "dp", "virtual_stages", "schedule", "stage_layers", "sequence_parallel", "zero_stage"),
        *("dp_replicate", "reshard", "prefetch_layers", "recompute", "recompute_layers", "micro_batch", "cp_ring", "cp_balanced"),
        *("gradient_dtype", "expert_load"),
    )
)
"""Settings that targets write or refuse by themselves; each target refuses any other one."""


def planned(plan: Plan, facts: JobFacts) -> Workload:
    """The job under a plan; raises `InputError` where the plan comes without its job."""
    if facts.workload is None:
        raise InputError(
            f"{', '.join(plan.settings) or 'the plan'}: degrees follow from the job: export from the folder of the search"
        )
    workload = facts.workload(plan)
    assert isinstance(workload, Workload)
    return workload


def transformer(workload: Workload) -> Architecture:
    """The model, where it is a transformer; raises `InputError` for another."""
    if not isinstance(workload.model, Architecture):
        raise InputError(f"{workload.model.name} is no transformer: only plans of transformers can be exported")
    return workload.model


def has_experts(model: Architecture) -> bool:
    """Whether any layer has experts."""
    return any(isinstance(layer.feed_forward, Experts) for layer in model.layers)


def stage_layers(workload: Workload) -> tuple[int, ...]:
    """Layers of each pipeline stage in the order of the forward pass, as predicted: without embedding and head."""
    counts = [len(stage) for stage in stages_of(workload)]
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)


def refuse(target: str, reasons: Sequence[tuple[bool, str]]) -> None:
    """Raise `InputError` with the first reason whose condition holds; a reason begins with the setting's name."""
    for condition, reason in reasons:
        if condition:
            name, _, why = reason.partition(": ")
            raise InputError(f"{name}: {target} cannot express it; {why}")


def refuse_details(
    target: str, strategy: Strategy, *, recomputes_some: bool = False, sets_gradients: bool = False, also: str = ""
) -> None:
    """Raise `InputError` for what most frameworks leave to themselves, and for settings that no target knows.

    Parameters
    ----------
    recomputes_some
        Whether the target can have some layers of a stage computed again, and not all.
    sets_gradients
        Whether it can set in which type gradients are summed.
    also
        A setting that it writes beside those that most targets do.
    """
    written = {*_EXPRESSED, also}
    refuse(
        target,
        (
            (
                strategy.recompute_layers > 0 and not recomputes_some,
                "recompute_layers: it computes all layers again or none: set recompute_layers=0",
            ),
            (
                strategy.gradient_dtype is not None and not sets_gradients,
                "gradient_dtype: it sums gradients in a type of its own: leave it out",
            ),
            (strategy.copies > 1, "schedule: DualPipe is DeepSeek's own code: set schedule=dual-pipe-v, its half with one copy"),
            (strategy.prefetch_layers != 1, "prefetch_layers: it gathers one layer ahead: set prefetch_layers=1"),
            *((getattr(strategy, name) != DEFAULTS[name], f"{name}: leave it out") for name in SETTINGS if name not in written),
        ),
    )


def short_run(workload: Workload, facts: JobFacts, program: str, **more: Any) -> ShortRun:
    """How a plan's ranks run a few steps; `more` are fields of `ShortRun`."""
    hosts, each = _hosts(workload.strategy, facts)
    gpus = workload.cluster.groups[0].host.device.kind == "gpu"
    return ShortRun(program=program, hosts=hosts, ranks_per_host=each, gpus=gpus, **more)


def _hosts(strategy: Strategy, facts: JobFacts) -> tuple[int, int]:
    """The number of hosts, and of ranks on each."""
    each = min(facts.ranks_per_host or strategy.devices, strategy.devices)
    return -(-strategy.devices // each), each


def torchrun(strategy: Strategy, facts: JobFacts) -> str:
    """How the ranks of a plan are started, as far as it does not depend on the script."""
    hosts, each = _hosts(strategy, facts)
    where = "" if hosts == 1 else f" --nnodes {hosts} --rdzv-backend c10d --rdzv-endpoint $HEAD:29500"
    return f"torchrun{where} --nproc-per-node {each}"


def checked_with(workload: Workload, *packages: str) -> tuple[str, ...]:
    """Sentences on the assumptions of the prediction and the tested versions, with a warning if an untested one is installed."""
    warnings = [
        f"Times are predicted as {workload.runtime.name} runs a step.",
        f"Checked with {' and '.join(f'{name} {TESTED[name]}' for name in packages)}.",
    ]
    for name in packages:
        here = _installed(name)
        if here is not None and here.split(".")[:2] != TESTED[name].split(".")[:2]:
            warnings.append(
                f"Warning: {name} {here} is installed here, which was not tested: compare what it reports when it starts."
            )
    return tuple(warnings)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
