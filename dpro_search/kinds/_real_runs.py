"""``validated(run, ...)``: real runs of a search's plans, where they can be made here: what the verb `validate` and the API do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpro_search.cluster.this_machine import this_machine
from dpro_search.deploy.jobs import RecordedJob
from dpro_search.deploy.of_run import validate_run
from dpro_search.deploy.validate import Validation
from dpro_search.errors import InputError
from dpro_search.kinds import Job, job_of, load_source, recorded_job
from dpro_search.kinds._base import Description
from dpro_search.kinds._elsewhere import searched_job
from dpro_search.search.calibration import Calibration
from dpro_search.search.run_folder import RunInfo, SearchedCluster, read_run
from dpro_search.space.scenario import SCALES, Scenario


def validated(run: Path, trace: Path | None = None, command: Sequence[str] = (), **how: Any) -> tuple[Validation, Calibration]:
    """Run the best plans of a search for real.

    Parameters
    ----------
    trace
        Path of the search's trace, if it has moved.
    command
        Of the job; empty: the recorded one.
    how
        Of `deploy.of_run.validate_run`.

    Raises
    ------
    InputError
        The job cannot be started here, or the search was for another cluster.
    JobError
        The recorded setting or every plan failed.
    """
    info = read_run(run)
    recording = load_source(trace or Path(info.trace))
    job = recorded_job(recording, command)
    assert not isinstance(recording, Description), "has no command"
    predicted = searched_job(job_of(recording), info)
    if info.cluster is not None:
        job = _here(job, job_of(recording), run, info, info.cluster)
    return validate_run(run, recording, job, predicted.space.job.values, elsewhere=info.cluster is not None, **how)


def _here(recorded: RecordedJob, job: Job, run: Path, info: RunInfo, cluster: SearchedCluster) -> RecordedJob:
    """The job on the cluster of its search; raises `InputError` where that is neither the recorded one nor this machine."""
    scaled = [change for change in cluster.changes if change.partition("=")[0].rpartition(".")[2] in SCALES]
    on_gpus = Scenario().on(cluster.machines).cluster.on_gpus
    if not scaled and not on_gpus and searched_job(job, info).cluster == job.cluster:
        return recorded
    ranks = len(os.sched_getaffinity(0))
    if not cluster.changes and cluster.machines == this_machine() and cluster.ranks == ranks:
        spec = replace(recorded.spec, ranks=ranks, ranks_per_host=ranks, cores=tuple(sorted(os.sched_getaffinity(0))))
        return replace(recorded, spec=spec, rate_bps=None, shaped=False)
    why = f"with other speeds ({', '.join(scaled)})" if scaled else f"for {cluster.name}, which is not here"
    raise InputError(
        f"{run}: the search was {why}: its plans cannot be measured here. Export one with 'dpro-search export' and time it there "
        "beside the recorded setting, or search without that option and validate that run"
    )
