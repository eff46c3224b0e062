"""`domain_of`: what a predicted step's error depends on, so that intervals can be wide where they must be."""

from __future__ import annotations

from enum import StrEnum

from dpro_search.graph.model import Architecture, Experts
from dpro_search.space.mesh.costs import Pricer, Workload, stages_of


class Domain(StrEnum):
    """Kinds of steps, the first that fits."""

    TENSOR_BETWEEN_HOSTS = "tensor parallel between hosts"
    EXPERTS = "experts"
    HOST = "bound by the host"  # The host takes longer to start most layers than the device to compute them.
    PIPELINE_BETWEEN_HOSTS = "pipeline between hosts"
    DEVICE = "bound by the device"


def domain_of(workload: Workload) -> Domain:
    """The domain of a workload."""
    pricer = Pricer(workload)
    if pricer.groups.placements["tp"].nodes > 1:
        return Domain.TENSOR_BETWEEN_HOSTS
    model = workload.model
    if isinstance(model, Architecture) and any(isinstance(layer.feed_forward, Experts) for layer in model.layers):
        return Domain.EXPERTS
    layers = [block for stage in stages_of(workload) for block in stage if block.name.startswith("layer")]
    if sum(map(pricer.is_bound_by_host, layers)) > len(layers) / 2:
        return Domain.HOST
    return Domain.PIPELINE_BETWEEN_HOSTS if pricer.groups.placements["pp"].nodes > 1 else Domain.DEVICE
