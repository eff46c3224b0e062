"""The job of a search whose plans were measured, and what these measurements say of the speed of other jobs on such devices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dpro_search.deploy.measured_plans import measured_plans
from dpro_search.errors import InputError
from dpro_search.kinds import JobInScenario, job_of, load_source
from dpro_search.kinds._job_on_cluster import searched_job
from dpro_search.search import SearchResult
from dpro_search.search.request import digest_of
from dpro_search.search.result import RankedPlan
from dpro_search.search.run_folder import RunInfo, read_run
from dpro_search.space.plan import Plan, Prediction


@dataclass(frozen=True, kw_only=True)
class SearchedRun:
    """A finished search: its folder, its job as the search priced it, and its result."""

    folder: Path
    info: RunInfo
    job: JobInScenario
    result: SearchResult

    @staticmethod
    def of(folder: Path, trace: Path | None = None) -> SearchedRun:
        """Read a run folder; `trace` is the path of its trace if that has moved.

        Raises
        ------
        InputError
            The folder is no finished search, or the trace is not there or is another one.
        """
        info, result = read_run(folder), SearchResult.load(folder)
        source = trace or Path(info.trace)
        if not source.exists():
            raise InputError(f"{source}: the job of this search is no longer there; give its new path with --trace")
        if digest_of(source) != info.trace_digest:
            raise InputError(f"{source}: not the job of the search in {folder}, or changed since; give that one with --trace")
        return SearchedRun(folder=folder, info=info, job=searched_job(job_of(load_source(source)), info), result=result)

    def plan(self, number: int) -> tuple[Plan, Prediction, str]:
        """A plan by its number, its prediction and name; 0: the setting without a plan. Raises `InputError` if there is none."""
        if number == 0:
            return Plan(), self.result.baseline, f"as {self.job.job.origin}"
        if number > len(self.result.plans):
            count = len(self.result.plans)
            raise InputError(f"--plan {number}: {self.folder} has plans 1 to {count}, and 0 as {self.job.job.origin}")
        ranked: RankedPlan = self.result.plans[number - 1]
        return ranked.plan, ranked.prediction, self.result.names[number - 1]


def learned_changes(folder: Path, calibrate: Path | None, cluster: str | None) -> tuple[str, ...]:
    """Changes of speed that the measured plans of a run folder show, as ``--set`` takes them.

    It is empty without `calibrate`, and where predictions of such jobs are corrected plan by plan (`search.calibration`).

    Parameters
    ----------
    folder
        Trace or description of the job that is to be searched.
    calibrate
        A run folder with measured plans.
    cluster
        Name of the cluster of the coming search; None: the described one.

    Raises
    ------
    InputError
        Nothing was measured there, or the run folder's job cannot be read.
    """
    if calibrate is None or not (calibrate / "result.json").is_file():
        return ()
    info = read_run(calibrate)
    source = Path(info.trace)
    if not source.is_file():  # A recording: its kind corrects plan by plan.
        return ()
    searched = SearchedRun.of(calibrate)
    if not searched.job.job.learns_speeds:
        return ()
    measured_us = {plan: (times.step_us, times.noise) for plan, times in measured_plans(calibrate).items()}
    if not measured_us:
        raise InputError(f"{calibrate}: no plan was measured; do that with 'dpro-search measured' or 'dpro-search validate'")
    same_job = digest_of(folder) == info.trace_digest and info.options.get("cluster") == cluster
    factors = dict(searched.job.job.learned(searched.job, measured_us, same_job=same_job))
    for change in info.cluster.changes if info.cluster is not None else ():
        name, _, factor = change.partition("=")
        if name in factors:
            factors[name] *= float(factor)
    return tuple(f"{name}={factor:.4f}" for name, factor in factors.items())
