"""Jobs whose workers commit by a synchronisation scheme, from short runs that `runtime.synchronisation` recorded.

An iteration of such a job is a whole training to its target loss: all times are those from the start to that loss.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dpro_search.deploy.parts.part import JobFacts
from dpro_search.deploy.parts.synchronisation import MXNET_SYNCHRONISATION, SYNCHRONISATION
from dpro_search.errors import InputError
from dpro_search.kinds._job import JobInScenario
from dpro_search.kinds._kind import DescribedKind
from dpro_search.kinds.synchronised.recording import ShortRuns, recorded_runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpro_search.deploy.jobs import RecordedJob
    from dpro_search.deploy.parts.part import Target


class SynchronisedKind(DescribedKind[ShortRuns]):
    """Files of `synchronise(..., record=PATH)`."""

    title = "a job of workers of unequal speed"
    targets = (SYNCHRONISATION, MXNET_SYNCHRONISATION)
    job_name = "dpro_search.kinds.synchronised.job:SynchronisedJob"
    source_type = ShortRuns

    def read(self, path: Path) -> ShortRuns | None:
        return recorded_runs(path)

    def targets_of(self, framework: str) -> tuple[Target, ...]:
        return tuple(target for target in self.targets if target.framework == framework)

    def facts(self, source: ShortRuns) -> JobFacts:
        return JobFacts(framework=source.framework, ranks=source.workers)

    def real_job(
        self, here: JobInScenario, source: ShortRuns, run: Path, command: Sequence[str], *, paced: bool = False
    ) -> RecordedJob:
        if paced:
            raise InputError("--paced: only of parallel jobs; workers are paced by their script, with synchronise(..., pace=...)")
        from dpro_search.kinds.synchronised.real_runs import trained_job

        return trained_job(source, self.facts(source), self.targets_of(source.framework), run, command)


KIND = SynchronisedKind()
