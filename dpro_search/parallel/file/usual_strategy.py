"""`usual_strategy`: how a practitioner runs a job with a framework where the job's file does not say it.

Each framework has a `UsualOrder`: which strategies are tried, the first one that fits in memory is taken. It is what a search
without ``[runs]`` compares with, so it follows what the framework's own guides advise.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Literal, NamedTuple

from dpro_search.cluster import Cluster
from dpro_search.errors import InputError
from dpro_search.parallel.frameworks import FRAMEWORKS, Framework
from dpro_search.parallel.memory.peak import peak_memory
from dpro_search.parallel.model import CapturedModel
from dpro_search.parallel.runtime import Runtime
from dpro_search.parallel.schedule import Schedule
from dpro_search.parallel.settings import Fixed, resolved
from dpro_search.parallel.strategy import ParallelSettings, Strategy
from dpro_search.parallel.workload import Workload

MEMORY_HEADROOM = 0.085
"""Part of a device's memory that plans leave free: by so much the predicted memory of 1,438 published runs is off, on average
(experiments/truth/README.md, "Memory")."""
_LONG_SEQUENCE = 8192  # tokens, from which on Megatron-Core's guide names context parallelism
_MOST_VIRTUAL = 8  # groups of layers on a pipeline rank: published recipes of Megatron have 5 to 8 (Llama 3 70B and 405B)


class UsualOrder(StrEnum):
    """Which parts of a job are split first."""

    MODEL = "model"
    DATA = "data"


class Usual(NamedTuple):
    """The usual layout of a framework's jobs, in words, with its source."""

    order: UsualOrder
    words: str
    source: str


_MEGATRON = Usual(
    UsualOrder.MODEL,
    "tensor parallel within a host, then as many pipeline stages as memory needs, interleaved; context parallel for long "
    "sequences and full recomputation only where nothing else fits; micro-batch 1",
    "Narayanan et al. 2021, sections 2.2 and 3; Korthikanti et al. 2022; Megatron-Core's Parallelism Strategies Guide",
)
_FSDP = Usual(
    UsualOrder.DATA,
    "DDP where a device holds the model, else FSDP over all devices with one micro-batch, activation checkpointing where memory "
    "needs it, and tensor parallel within a host where memory or the batch force it",
    "PyTorch's Distributed Overview; torchtitan's docs and its Llama 3 recipes",
)


def usual_of(framework: Framework) -> Usual:
    """The usual layout of a framework: those that split parameters (FSDP) by default or on request split the data first."""
    return _FSDP if 3 in framework.zero_stages else _MEGATRON


def usual_strategy(fixed: Fixed, cluster: Cluster, precision: str, runtime: Runtime, framework: str) -> ParallelSettings:
    """The first strategy in the framework's usual order that fits in memory with `MEMORY_HEADROOM`.

    Returns
    -------
    ParallelSettings
        Where nothing fits, the one that needs least memory.

    Raises
    ------
    InputError
        No strategy is legal; the reason of the simplest one.
    """
    has = cluster.groups[0].host.device.memory_bytes
    least: tuple[float, ParallelSettings] | None = None
    refused: InputError | None = None
    for settings in _simplest_first(fixed, cluster, FRAMEWORKS[framework], runtime):
        try:
            strategy = resolved(settings, fixed)
        except InputError as error:
            refused = refused or error
            continue
        needed = needed_bytes(strategy, fixed, cluster, precision, runtime)
        if has is None or needed <= has * (1 - MEMORY_HEADROOM):
            return settings
        if least is None or needed < least[0]:
            least = needed, settings
    if least is not None:
        return least[1]
    assert refused is not None, "one strategy at least was tried"
    raise refused


def needed_bytes(strategy: Strategy, fixed: Fixed, cluster: Cluster, precision: str, runtime: Runtime) -> float:
    """Memory of the rank that needs most under a strategy."""
    workload = Workload(
        model=fixed.model, sequence=fixed.sequence, strategy=strategy, cluster=cluster, precision=precision, runtime=runtime
    )
    return peak_memory(workload).total_bytes


def _simplest_first(fixed: Fixed, cluster: Cluster, framework: Framework, runtime: Runtime) -> Iterator[ParallelSettings]:
    """Strategies in the order in which they are tried."""
    if isinstance(fixed.model, CapturedModel) and not fixed.micro_batches:
        yield ParallelSettings(micro_batch=fixed.model.batch)
        return
    if not fixed.layer_count:  # a network: a rank's part of the batch at once, or as much as fits
        replica_batch = max(fixed.global_batch // fixed.devices, 1)
        yield from (
            ParallelSettings(micro_batch=replica_batch // parts)
            for parts in (2**power for power in range(replica_batch.bit_length()))
        )
        return
    if usual_of(framework).order is UsualOrder.DATA:
        yield from _data_first(fixed, cluster, framework)
    yield from _model_first(fixed, cluster, framework, runtime)


def _data_first(fixed: Fixed, cluster: Cluster, framework: Framework) -> Iterator[ParallelSettings]:
    """DDP, then FSDP, then both with tensor parallelism within a host; the largest micro-batch that fits."""
    within = min(cluster.ranks_per_host or 1, fixed.devices)
    for tp in (each for each in _powers_of_two(within) if fixed.heads % each == 0 and fixed.devices % each == 0):
        sequences = max(fixed.global_batch * tp // fixed.devices, 1)
        if 0 in framework.zero_stages and tp == 1:
            yield ParallelSettings(zero_stage=0, micro_batch=sequences)
        for parts in _powers_of_two(sequences):
            if sequences % parts == 0:
                yield ParallelSettings(tp=tp, zero_stage=3, micro_batch=sequences // parts, recompute="none")
                yield ParallelSettings(tp=tp, zero_stage=3, micro_batch=sequences // parts, recompute="full")


def _model_first(fixed: Fixed, cluster: Cluster, framework: Framework, runtime: Runtime) -> Iterator[ParallelSettings]:
    """Degrees of model parallelism in powers of two, tensor parallelism within a host first."""
    within = min(cluster.ranks_per_host or 1, fixed.devices)
    experts = fixed.experts or 1
    least: Literal["none", "selective"] = "none" if runtime.flash_attention else "selective"
    long = fixed.sequence >= _LONG_SEQUENCE and fixed.has_context
    tried: list[tuple[Literal["none", "selective", "full"], int]] = [(least, 1), *([(least, 2)] if long else []), ("full", 1)]
    for recompute, cp in tried:
        for parts in _powers_of_two(fixed.devices // cp):
            tp = max(tp for tp in (1, 2, 4, 8) if tp <= min(parts, within) and parts % tp == 0 and fixed.heads % tp == 0)
            ways = fixed.devices * tp // parts
            ep = max(ep for ep in (1, 2, 4, 8) if ep <= experts and experts % ep == 0 and ways % ep == 0)
            settings = ParallelSettings(tp=tp, pp=parts // tp, cp=cp if cp > 1 else None, ep=ep, recompute=recompute)
            if parts > tp:
                yield from _interleaved(settings, fixed, framework)
            yield settings


def _interleaved(settings: ParallelSettings, fixed: Fixed, framework: Framework) -> Iterator[ParallelSettings]:
    """The pipeline with as many virtual stages as divide the layers, embedding and head counted as a layer each if they do not."""
    pp, layers = settings.pp or 1, fixed.layer_count
    replicas = fixed.devices // ((settings.tp or 1) * pp * (settings.cp or 1))
    if Schedule.INTERLEAVED not in framework.schedules or fixed.global_batch // replicas % pp:
        return
    for count in range(min(_MOST_VIRTUAL, layers // pp), 1, -1):
        stages = pp * count
        if layers % stages == 0:
            yield _with_stages(settings, count)
            return
        if framework.uneven_stages and (layers + 2) % stages == 0:
            each = (layers + 2) // stages
            yield _with_stages(settings, count, (each - 1, *[each] * (stages - 2), each - 1))
            return


def _with_stages(settings: ParallelSettings, virtual_stages: int, stage_layers: tuple[int, ...] | None = None) -> ParallelSettings:
    return ParallelSettings(**{**settings.settings, "virtual_stages": virtual_stages, "stage_layers": stage_layers})


def _powers_of_two(most: int) -> Iterator[int]:
    yield from (2**power for power in range(most.bit_length()))
