"""`usual_strategy`: how a job is run where nothing else is said: as little of the model is split as memory needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from dpro_search.cluster import Cluster
from dpro_search.errors import InputError
from dpro_search.graph.model import CapturedModel
from dpro_search.kinds.mesh.settings import Fixed, MeshSettings, resolved
from dpro_search.space.mesh import Runtime, Workload, peak_memory

_RECOMPUTE: tuple[Literal["none", "full"], ...] = ("none", "full")


def usual_strategy(fixed: Fixed, cluster: Cluster, precision: str, runtime: Runtime) -> MeshSettings:
    """The first strategy that fits in memory, from none to all of: tensor parallel within a host, then pipeline parallel.

    Megatron-LM's advice (Narayanan et al. 2021, section 3: tensor parallel within a server, then pipeline parallel), with the
    framework's ZeRO stage, one sequence a micro-batch, and activations that are computed again only where nothing else helps.

    Returns
    -------
    MeshSettings
        Where nothing fits, the one that needs least memory.

    Raises
    ------
    InputError
        No strategy is legal; the reason of the simplest one.
    """
    limit = cluster.groups[0].host.device.memory_bytes
    least: tuple[float, MeshSettings] | None = None
    refused: InputError | None = None
    for settings in _simplest_first(fixed, cluster):
        try:
            strategy = resolved(settings, fixed)
        except InputError as error:
            refused = refused or error
            continue
        needed = peak_memory(
            Workload(
                model=fixed.model, sequence=fixed.sequence, strategy=strategy, cluster=cluster, precision=precision, runtime=runtime
            )
        ).total_bytes
        if limit is None or needed <= limit:
            return settings
        if least is None or needed < least[0]:
            least = needed, settings
    if least is not None:
        return least[1]
    assert refused is not None, "one strategy at least was tried"
    raise refused


def _simplest_first(fixed: Fixed, cluster: Cluster) -> Iterator[MeshSettings]:
    """Degrees of model parallelism in powers of two; recomputation before a part of the model spreads over hosts."""
    if isinstance(fixed.model, CapturedModel) and not fixed.micro_batches:
        yield MeshSettings(micro_batch=fixed.model.batch)
        return
    if not fixed.layer_count:  # a network: a rank's part of the batch at once, or as much as fits
        own = max(fixed.global_batch // fixed.devices, 1)
        yield from (MeshSettings(micro_batch=own // parts) for parts in (2**power for power in range(own.bit_length())))
        return
    within = min(cluster.ranks_per_host or 1, fixed.devices)
    experts = fixed.experts or 1
    all_parts = [2**power for power in range(fixed.devices.bit_length())]
    near = [(parts, recompute) for recompute in _RECOMPUTE for parts in all_parts if parts <= within]
    far = [(parts, recompute) for parts in all_parts if parts > within for recompute in _RECOMPUTE]
    for parts, recompute in (*near, *far):
        tp = max(tp for tp in (1, 2, 4, 8) if tp <= min(parts, within) and parts % tp == 0 and fixed.heads % tp == 0)
        ways = fixed.devices * tp // parts
        ep = max(ep for ep in (1, 2, 4, 8) if ep <= experts and experts % ep == 0 and ways % ep == 0)
        yield MeshSettings(tp=tp, pp=parts // tp, ep=ep, recompute=recompute)
