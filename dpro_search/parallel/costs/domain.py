"""`domain_of`: what a predicted step's error depends on, so that intervals can be wide where they must be."""

from __future__ import annotations

from enum import StrEnum

from dpro_search.parallel.costs.pricer import Pricer
from dpro_search.parallel.model import Architecture, Experts, Network
from dpro_search.parallel.workload import SharedResults, Workload, stages_of


class Domain(StrEnum):
    """Kinds of steps, the first that fits."""

    NETWORK = "no transformer"
    TENSOR_BETWEEN_HOSTS = "tensor parallel between hosts"
    EXPERTS = "experts"
    HOST = "bound by the host"  # The host takes longer to start most blocks than the device to compute them.
    PIPELINE_BETWEEN_HOSTS = "pipeline between hosts"
    DEVICE = "bound by the device"


def domain_of(workload: Workload, known: SharedResults | None = None) -> Domain:
    """The domain of a workload."""
    model = workload.model
    if isinstance(model, Network):
        return Domain.NETWORK
    pricer = Pricer(workload, known)
    if pricer.groups.placements["tp"].nodes > 1:
        return Domain.TENSOR_BETWEEN_HOSTS
    if isinstance(model, Architecture) and any(isinstance(layer.feed_forward, Experts) for layer in model.layers):
        return Domain.EXPERTS
    blocks = [block for stage in stages_of(workload, known) for block in stage]
    distinct = {block.name: pricer.is_bound_by_host(block) for block in {block.name: block for block in blocks}.values()}
    if sum(distinct[block.name] for block in blocks) > len(blocks) / 2:
        return Domain.HOST
    return Domain.PIPELINE_BETWEEN_HOSTS if pricer.groups.placements["pp"].nodes > 1 else Domain.DEVICE


def harder(one: Domain, other: Domain) -> Domain:
    """The first of two domains, which decides the error of a comparison."""
    return min(one, other, key=list(Domain).index)
