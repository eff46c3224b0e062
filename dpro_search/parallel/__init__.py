"""Parallel jobs (data, tensor, pipeline, context, expert parallel, ZeRO) that a ``job.toml`` describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dpro_search.cluster.names import known_names
from dpro_search.cluster.tpu_topologies import generations
from dpro_search.deploy.parts.part import JobFacts, Target
from dpro_search.kinds._job import JobInScenario
from dpro_search.kinds._kind import DescribedKind, Wanted
from dpro_search.parallel.export.targets import parallel_targets
from dpro_search.parallel.file.description import ParallelDescription, described
from dpro_search.parallel.file.job_devices import other_device
from dpro_search.parallel.frameworks import FRAMEWORKS
from dpro_search.parallel.model import NETWORKS, names
from dpro_search.parallel.strategy import ParallelSettings

if TYPE_CHECKING:
    from dpro_search.collect.capture import CapturedGraph
    from dpro_search.collect.tables.parallel_times import ParallelTimes
    from dpro_search.deploy.jobs import RecordedJob
    from dpro_search.space.plan import Plan


class ParallelKind(DescribedKind[ParallelDescription]):
    """Files with a model, a batch and a cluster."""

    title = "a parallel job"
    targets = parallel_targets(ParallelSettings.__struct_fields__)
    job_name = "dpro_search.parallel.job:ParallelJob"
    source_type = ParallelDescription

    def read(self, path: Path) -> ParallelDescription | None:
        return described(path)

    def text(self, request: Wanted) -> str:
        from dpro_search.parallel.file.template import job_toml

        return job_toml(request)

    def names(self) -> Mapping[str, Sequence[str]]:
        clusters = tuple(name for name in known_names() if name not in generations())  # no job is predicted on TPUs
        return {"models": (*names(), *NETWORKS), "clusters": clusters, "frameworks": tuple(FRAMEWORKS)}

    def usual_target(self, framework: str) -> Target | None:
        return next((target for target in self.targets if target.name == FRAMEWORKS[framework].target), None)

    def captured_text(self, graph: CapturedGraph, name: str, cluster: str | None) -> str:
        from dpro_search.parallel.file.captured import captured_job_toml

        return captured_job_toml(graph, name, cluster)

    def facts(self, source: ParallelDescription) -> JobFacts:
        hosts = source.cluster.ranks_per_host
        return JobFacts(framework=source.framework, ranks=source.fixed.devices, ranks_per_host=hosts)

    def real_job(
        self, here: JobInScenario, source: ParallelDescription, run: Path, command: Sequence[str], *, paced: bool = False
    ) -> RecordedJob:
        from dpro_search.parallel.job import ParallelJob
        from dpro_search.parallel.timed.real import real_job

        assert isinstance(here.job, ParallelJob)
        return real_job(here.job.prepared(here.scenario), self.facts(source), self.targets, command, paced=paced)

    def timed(
        self,
        here: JobInScenario,
        source: ParallelDescription,
        plans: Sequence[Plan],
        command: Sequence[str],
        out: Path,
        *,
        on_start: Callable[[str], None] = lambda what: None,
    ) -> ParallelTimes:
        from dpro_search.parallel.job import ParallelJob
        from dpro_search.parallel.timed.real import gpu_of, on_one_gpu, startable
        from dpro_search.parallel.timed.recording import record_times

        assert isinstance(here.job, ParallelJob)
        job = here.job.prepared(here.scenario)
        if source.device.kind == "gpu":
            alone = on_one_gpu(self.facts(source), self.targets, command, gpu_of)
            warning = other_device(source.device, gpu_of(alone.spec.interpreter) or "")
            if warning is not None:
                on_start(f"on another device: {warning}")
            return record_times(job, alone, plans, out, exchanges=False, on_start=on_start)
        return record_times(job, startable(job, self.facts(source), self.targets, command), plans, out, on_start=on_start)


KIND = ParallelKind()
