"""`job_toml`: the commented text of a ``job.toml`` with a usual strategy, which `dpro-search describe` prints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from dpro_search.cluster import Device, parse_cluster
from dpro_search.errors import InputError
from dpro_search.kinds._kind import Wanted
from dpro_search.parallel.file.description import model_of
from dpro_search.parallel.file.job_devices import CPU_FRAMEWORK, with_known_devices
from dpro_search.parallel.file.keys import PRECISIONS
from dpro_search.parallel.file.usual_strategy import needed_bytes, usual_strategy
from dpro_search.parallel.frameworks import FRAMEWORKS, Attention, attention_of
from dpro_search.parallel.model import Architecture, parameters_of
from dpro_search.parallel.settings import Fixed, resolved, settings_of
from dpro_search.parallel.strategy import SETTINGS, ParallelSettings
from dpro_search.quantities import size_text

SEQUENCES_A_DEVICE = 4  # of the usual batch: enough micro-batches for a pipeline
USUAL_SEQUENCE = 4096


def job_toml(request: Wanted) -> str:
    """A legal description; without a batch `SEQUENCES_A_DEVICE` for each device, of at most `USUAL_SEQUENCE` tokens.

    Raises
    ------
    InputError
        The model or the cluster is not known, or no strategy is legal.
    """
    model, cluster = request.model, request.cluster
    architecture, _ = model_of(model, Path())
    machines = parse_cluster(cluster)
    device = machines.groups[0].host.device
    precision, framework = request.precision or _usual_precision(device), request.framework or _usual_framework(device)
    if precision not in PRECISIONS:
        raise InputError(f"--precision {precision}: use {', '.join(PRECISIONS)}")
    if framework not in FRAMEWORKS:
        raise InputError(f"--framework {framework}: use {', '.join(FRAMEWORKS)}")
    try:
        machines = with_known_devices(machines, precision, framework)
    except InputError as error:
        raise InputError(f"--cluster {cluster}: {error}") from error
    transformer = isinstance(architecture, Architecture)
    longest = (architecture.max_positions or USUAL_SEQUENCE) if isinstance(architecture, Architecture) else 1
    fixed = Fixed(
        model=architecture,
        sequence=min(longest, USUAL_SEQUENCE) if request.sequence is None else request.sequence,
        global_batch=SEQUENCES_A_DEVICE * machines.ranks if request.global_batch is None else request.global_batch,
        devices=machines.ranks,
        zero_stage=FRAMEWORKS[framework].zero_stage,
        splits=FRAMEWORKS[framework].splits,
        stages_by_cost=FRAMEWORKS[framework].runtime.stages_by_cost,
    )
    if fixed.sequence < 1 or fixed.global_batch < 1:
        raise InputError("--global-batch and --seq-len must be above 0")
    runtime = FRAMEWORKS[framework].runtime
    strategy = resolved(usual_strategy(fixed, machines, precision, runtime, framework), fixed)
    needed = needed_bytes(strategy, fixed, machines, precision, runtime)
    has = machines.groups[0].host.device.memory_bytes
    memory = f"# Predicted memory of the rank that needs most: {size_text(needed)}" + (
        "." if has is None else f" of {size_text(has)}{'' if needed <= has else ': it does not fit'}."
    )
    billions = parameters_of(architecture) / 1e9
    head = [
        "# A training job for dpro-search: dpro-search replay job.toml, diagnose job.toml, run job.toml",
        f"model = {json.dumps(model)}  # {billions:.3g} billion parameters; a built-in name, or the path of a config.json",
        f"cluster = {json.dumps(cluster)}  # {machines.ranks} devices: hosts of a bundled machine, devices, or a TOML file",
        f"global_batch = {fixed.global_batch}  # {'sequences' if transformer else 'samples'} of a step, over all replicas",
        *([f"sequence = {fixed.sequence}  # tokens of a sequence"] if transformer else []),
        f'precision = "{precision}"  # {", ".join(PRECISIONS)}',
        'optimizer = "adam"  # two moments and the parameters in fp32',
        f'framework = "{framework}"  # {", ".join(FRAMEWORKS)}',
        *([f'# attention = "{attention_of(runtime, device)}"  # {", ".join(get_args(Attention))}'] if transformer else []),
        *([_tied(architecture)] if isinstance(architecture, Architecture) else []),
        "",
        "# How the job runs today. Without this table a usual strategy that fits in memory is taken.",
        memory,
        "[runs]",
    ]
    return "\n".join([*head, *_runs(settings_of(strategy).settings, has_experts=strategy.ep * strategy.etp > 1)]) + "\n"


def _usual_precision(device: Device) -> str:
    """The 16 bits that a GPU computes in; fp32 for cores and for GPUs that have no units for them."""
    halves = ("bf16", "fp16") if device.kind == "gpu" else ()
    return next((precision for precision in halves if device.peak_flops_per_s(precision)), "fp32")


def _usual_framework(device: Device) -> str:
    return "megatron-core" if device.kind == "gpu" else CPU_FRAMEWORK


def _tied(model: Architecture) -> str:
    return f"# tied_embeddings = {json.dumps(not model.tied)}  # whether the head uses the embedding's matrix; {model.name} " + (
        "does" if model.tied else "does not"
    )


def _runs(settings: Mapping[str, object], *, has_experts: bool) -> list[str]:
    """A line for each setting; those that most jobs leave alone as comments."""
    lines, comments = [], []
    for name in ParallelSettings.__struct_fields__:
        setting = SETTINGS[name]
        if setting.of_experts and not has_experts:
            continue
        if setting.example is not None:
            comments.append(f"# {name} = {setting.example}  # {setting.note}")
        elif settings[name] is not False:
            mark = "# " if name == "dp" else ""  # it follows, also when another degree is changed
            lines.append(f"{mark}{name} = {json.dumps(settings[name])}  # {setting.note}")
    return [*lines, *comments]
