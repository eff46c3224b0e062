"""PyTorch's ``fully_shard`` (FSDP2): units gather their parameters and reduce-scatter their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpro_search.collect.torch_files import FSDP_FORMAT
from dpro_search.deploy.parts.pytorch import FSDP
from dpro_search.kinds._base import Job, Kind

if TYPE_CHECKING:
    from dpro_search.collect.launchers._base import Launcher


class FsdpKind(Kind):
    """Jobs that were recorded with ``fully_shard``."""

    title = "a fully sharded job"
    formats = (FSDP_FORMAT,)
    targets = (FSDP,)

    @property
    def job_type(self) -> type[Job]:
        from dpro_search.kinds.fsdp.job import Fsdp

        return Fsdp

    @property
    def launchers(self) -> tuple[Launcher, ...]:
        from dpro_search.collect.launchers.torch import PYTORCH_FSDP

        return (PYTORCH_FSDP,)


KIND = FsdpKind()
