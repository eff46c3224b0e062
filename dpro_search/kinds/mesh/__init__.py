"""Parallel jobs (data, tensor, pipeline, context, expert parallel, ZeRO) that a ``job.toml`` describes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dpro_search.deploy.parts.part import JobFacts
from dpro_search.kinds._kind import DescribedKind, Wanted
from dpro_search.kinds.mesh.description import MeshDescription, described

if TYPE_CHECKING:
    from dpro_search.collect.capture import CapturedGraph


class MeshKind(DescribedKind[MeshDescription]):
    """Files with a model, a batch and a cluster."""

    title = "a parallel job"
    job_name = "dpro_search.kinds.mesh.job:MeshJob"
    source_type = MeshDescription

    def read(self, path: Path) -> MeshDescription | None:
        return described(path)

    def text(self, wanted: Wanted) -> str:
        from dpro_search.kinds.mesh.template import job_toml

        return job_toml(wanted)

    def captured_text(self, graph: CapturedGraph, name: str, cluster: str | None) -> str:
        from dpro_search.kinds.mesh.captured import captured_job_toml

        return captured_job_toml(graph, name, cluster)

    def facts(self, source: MeshDescription) -> JobFacts:
        hosts = source.cluster.ranks_per_host
        return JobFacts(framework=source.framework, ranks=source.fixed.devices, ranks_per_host=hosts)


KIND = MeshKind()
