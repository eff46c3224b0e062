"""Devices of a described job: whether predictions can be made for them, and what is missing of a core without a data sheet."""

from __future__ import annotations

import msgspec

from dpro_search.cluster import Cluster, Device, bundled
from dpro_search.cluster.this_machine import core_of_this_machine
from dpro_search.collect.tables.parallel_times import ParallelTimes
from dpro_search.errors import InputError
from dpro_search.parallel.gpu_ops import OpCosts

CPU_FRAMEWORK = "pytorch-gloo"
_USUAL_BYTES_PER_S = 1e10  # that a core moves, before it is measured


def other_device(device: Device, recorded_device: str) -> str | None:
    """A warning where a GPU, as its driver calls it, is not the device of a job; None: it is."""
    return (
        None
        if bundled.is_called(device, recorded_device)
        else f"times are those of {recorded_device}, and the job's cluster has {device.name}"
    )


def with_known_devices(cluster: Cluster, precision: str, framework: str, times: ParallelTimes | None = None) -> Cluster:
    """The cluster with everything about its devices that predictions need.

    Raises
    ------
    InputError
        Hosts have devices of several kinds, the devices are TPUs, or nobody says how fast the device is.
    """
    refuse_tpus(cluster)
    kinds = {group.host.device.name for group in cluster.groups}
    if len(kinds) > 1:
        raise InputError(f"devices of one kind are needed, not {' and '.join(sorted(kinds))}")
    if framework == CPU_FRAMEWORK:
        cluster = _with_peaks(cluster, times)
    OpCosts(cluster.groups[0].host.device, precision)
    return cluster


def refuse_tpus(cluster: Cluster) -> None:
    """Raises `InputError` for a cluster of TPUs, on which prices of kernels and of NCCL's collectives do not hold."""
    if cluster.has_tpus:
        raise InputError(f"{cluster.name} has TPUs: described jobs have no cost model for TPUs yet")


def _with_peaks(cluster: Cluster, times: ParallelTimes | None) -> Cluster:
    """The cluster with what the recording, or else Linux, says of a core without a data sheet: by it other shapes are scaled."""
    (group, *others) = cluster.groups
    device = group.host.device
    if others or device.kind != "cpu" or device.memory_bytes_per_s is not None:
        return cluster
    if times is not None and times.memory_bytes_per_s:
        peak = msgspec.structs.replace(device.peak, fp32=times.flops_per_s, bf16=times.flops_per_s)
        device = msgspec.structs.replace(device, peak=peak, memory_bytes_per_s=times.memory_bytes_per_s, cores=1)
    else:
        core = core_of_this_machine(_USUAL_BYTES_PER_S)
        peak = msgspec.structs.replace(core.peak, bf16=core.peak.fp32)
        device = msgspec.structs.replace(device, peak=peak, memory_bytes_per_s=core.memory_bytes_per_s, cores=1)
    host = msgspec.structs.replace(group.host, device=device)
    return msgspec.structs.replace(cluster, groups=(msgspec.structs.replace(group, host=host),))
