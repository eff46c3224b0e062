"""PyTorch's ``fully_shard`` (FSDP2): units gather their parameters and reduce-scatter their gradients."""

from __future__ import annotations

from dpro_search.collect.assemble.torch.files import FSDP_FORMAT
from dpro_search.deploy.parts.pytorch import FSDP
from dpro_search.kinds._kind import Kind


class FsdpKind(Kind):
    """Jobs that were recorded with ``fully_shard``."""

    title = "a fully sharded job"
    formats = (FSDP_FORMAT,)
    targets = (FSDP,)
    job_name = "dpro_search.kinds.fsdp.job:Fsdp"
    launcher_names = ("dpro_search.collect.launchers.torch:PYTORCH_FSDP",)


KIND = FsdpKind()
