"""``real_runs(run, ...)``: real runs of a search's plans, where they can be made here: what the verb `validate` and the API do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpro_search.cluster.this_machine import this_machine
from dpro_search.collect.launch.host_limits import NO_LIMITS, HostLimits
from dpro_search.collect.launch.while_running import Watch
from dpro_search.collect.trace import Trace
from dpro_search.deploy.jobs import RecordedJob
from dpro_search.deploy.of_run import validate_run
from dpro_search.deploy.validate import Validation
from dpro_search.errors import InputError
from dpro_search.kinds import JobInScenario, Source, described_job, job_of, load_source, recorded_job
from dpro_search.kinds._job_on_cluster import searched_job
from dpro_search.kinds._kind import Description
from dpro_search.search.calibration import Calibration
from dpro_search.search.run_folder import RunInfo, SearchedCluster, read_run
from dpro_search.space.scenario import SCALES, Scenario

_SPEEDS = (*SCALES, "speeds", "delay")


@dataclass(frozen=True, kw_only=True)
class RunnableSearch:
    """The job of a search, ready to run again."""

    run: Path
    recording: Source
    job: RecordedJob
    predicted: JobInScenario  # As the search priced it.
    elsewhere: bool  # Whether that was on another cluster.
    doubt: str | None  # Why predictions from the recording are not to be trusted.

    def validate(self, **how: Any) -> tuple[Validation, Calibration]:
        """Run the best plans of the search for real; `how` is of `deploy.of_run.validate_run`, which names what it raises."""
        values = self.predicted.space.job.values
        measured_us = (
            self.recording.iterations_us() if isinstance(self.recording, Trace) else self.predicted.measurement.iterations_us
        )
        return validate_run(self.run, measured_us, self.job, values, elsewhere=self.elsewhere, **how)


def real_runs(
    run: Path,
    trace: Path | None = None,
    command: Sequence[str] = (),
    *,
    paced: bool = False,
    limits: HostLimits = NO_LIMITS,
    watch: Watch = lambda progress: None,
) -> RunnableSearch:
    """The job of a search, as it can run here.

    Parameters
    ----------
    trace
        Path of the search's trace, if it has moved.
    command
        Command of the job; empty: the recorded one.
    paced
        Whether ranks wait in place of computing; described jobs alone can.
    limits
        Limits of the job's hosts, in place of the recorded ones.
    watch
        Called while a job runs.

    Raises
    ------
    InputError
        The job cannot be started here, or the search was for another cluster.
    """
    info = read_run(run)
    recording = load_source(trace or Path(info.trace))
    recorded = job_of(recording)
    if isinstance(recording, Description):
        searched = searched_job(recorded, info)
        runs = described_job(recording, searched, run, command, paced=paced)
        return RunnableSearch(
            run=run,
            recording=recording,
            job=replace(_limited(runs, limits), watch=watch),
            predicted=searched,
            elsewhere=False,
            doubt=searched.recording_doubt,
        )
    if paced:
        raise InputError("--paced: only of parallel jobs, whose work on a rank is known apart from what it waits for")
    job = recorded_job(recording, command)
    if info.cluster is not None:
        job = _here(job, recorded, run, info, info.cluster)
    return RunnableSearch(
        run=run,
        recording=recording,
        job=replace(_limited(job, limits), watch=watch),
        predicted=searched_job(recorded, info),
        elsewhere=info.cluster is not None,
        doubt=recorded.recording_doubt,
    )


def _limited(job: RecordedJob, limits: HostLimits) -> RecordedJob:
    return replace(job, spec=replace(job.spec, limits=limits)) if limits else job


def _here(recorded: RecordedJob, job: JobInScenario, run: Path, info: RunInfo, cluster: SearchedCluster) -> RecordedJob:
    """The job on the cluster of its search; raises `InputError` where that is neither the recorded one nor this machine."""
    scaled = [change for change in cluster.changes if change.partition("=")[0].rpartition(".")[2] in _SPEEDS]
    on_gpus = Scenario().on(cluster.machines).cluster.on_gpus
    if not scaled and not on_gpus and searched_job(job, info).cluster == job.cluster:
        return recorded
    ranks = len(os.sched_getaffinity(0))
    if not cluster.changes and cluster.machines == this_machine() and cluster.ranks == ranks:
        cores = tuple(sorted(os.sched_getaffinity(0)))
        spec = replace(recorded.spec, ranks=ranks, ranks_per_host=ranks, cores=cores, limits=NO_LIMITS)
        return replace(recorded, spec=spec, rate_bps=None, shaped=False)
    why = f"with other speeds ({', '.join(scaled)})" if scaled else f"for {cluster.name}, which is not here"
    raise InputError(
        f"{run}: the search was {why}: its plans cannot be measured here. Export one with 'dpro-search export' and time it there "
        "beside the recorded setting, or search without that option and validate that run"
    )
