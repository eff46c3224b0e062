"""``diagnose(job)``: why an iteration takes as long as it does, where it was recorded or on another cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from dpro_search.analysis.efficiency import efficiency_of, split_options
from dpro_search.kinds import Diagnosis, JobInScenario
from dpro_search.kinds._answers import fields_of
from dpro_search.kinds._job_on_cluster import job_on_cluster, repeated
from dpro_search.kinds._work import Efficiency
from dpro_search.space.scenario import Scenario


class Diagnosed(NamedTuple):
    """A diagnosis, the first of its gains that `replay` predicts again (None: none), and the efficiency of the job, if known."""

    diagnosis: Diagnosis
    repeated: str | None
    efficiency: Efficiency | None


def diagnose(recorded: JobInScenario, cluster: str | None = None, changes: Sequence[str] = ()) -> Diagnosed:
    """Diagnose a job on a named cluster (None: the recorded one) at other speeds, with its efficiency.

    Parameters
    ----------
    changes
        Changes as ``--set`` takes them, of cluster and speeds, and facts like ``tokens=8192``.

    Raises
    ------
    InputError
        The job does not have a change, or it is one of the plan.
    """
    given, speeds = split_options(changes)
    job, _, place = job_on_cluster(recorded, cluster, speeds, verb="diagnose")
    diagnosis = job.diagnose()
    efficiency = efficiency_of(recorded, Scenario().on(cluster), given, diagnosis.iteration_us)
    diagnosis = msgspec.structs.replace(
        diagnosis,
        cluster=UNSET if place is None else place.facts,
        recording_doubt=recorded.recording_doubt,
        **fields_of(efficiency),
    )
    what_if = next((gain.what_if for gain in diagnosis.gains if repeated(job.job, gain.what_if)), None)
    return Diagnosed(diagnosis, what_if, efficiency)
