"""``job_on_cluster(job, cluster, changes)``: a job as `diagnose` and `run` ask about it, on a named cluster and at other speeds.

What a search was told about its cluster stays in its run folder (`SearchedCluster`): `export`, `validate` and `report` take it from
there, with no option of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from dpro_search.cluster import Cluster
from dpro_search.cluster.names import THIS_MACHINE, names_file
from dpro_search.errors import InputError
from dpro_search.kinds._job import Job, JobInScenario
from dpro_search.search.run_folder import RunInfo, SearchedCluster
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scenario


class JobOnCluster(NamedTuple):
    """A job on the requested cluster.

    Attributes
    ----------
    job
        The job in the requested scenario.
    named
        Names of the cluster and of the changes, which are part of the options of a search.
    cluster
        The cluster as the run folder keeps it; None: nothing differs from what was recorded.
    """

    job: JobInScenario
    named: dict[str, str]
    cluster: SearchedCluster | None


def job_on_cluster(here: JobInScenario, cluster: str | None, changes: Sequence[str] = (), *, verb: str) -> JobOnCluster:
    """A job on a named cluster (None: the recorded one), with changes as ``--set`` takes them.

    Raises
    ------
    InputError
        The job does not have a change, or it is one of the plan: `verb` is named as what does not take it.
    """
    scenario = Scenario().on(cluster)
    machines = scenario.cluster.machines
    named = {}
    if cluster is not None and machines is not None:
        named["cluster"] = _digest(machines) if names_file(cluster) or cluster == THIS_MACHINE else cluster
    if changes:
        named["set"] = ",".join(changes)
    title = cluster or f"the {here.job.origin} cluster"
    return _in_scenario(here, scenario, tuple(changes), named, title, verb)


def searched_job(here: JobInScenario, info: RunInfo) -> JobInScenario:
    """The job that a search predicted: the recorded one, or that on the cluster that its run folder names."""
    if info.cluster is None:
        return here
    return _in_scenario(here, Scenario().on(info.cluster.machines), info.cluster.changes, {}, info.cluster.name, "run").job


def _in_scenario(
    here: JobInScenario, scenario: Scenario, changes: tuple[str, ...], named: dict[str, str], title: str, verb: str
) -> JobOnCluster:
    job = here.job
    speeds = tuple(name for name in job.settings if name != "groups")
    described = "begins_with" in job.abilities
    for change in changes:
        name = change.partition("=")[0].strip()
        if name in (*job.askable, "groups") and not described:
            raise InputError(
                f"--set {change}: {verb} changes cluster and speeds ({', '.join(speeds)}); 'dpro-search replay' predicts a plan"
            )
    scenario = scenario.changed(changes, known=(*job.askable, *speeds) if described else speeds, job=job.title)
    if scenario == Scenario() and job.origin == "recorded":
        return JobOnCluster(here, named, None)
    if scenario.plan != Plan():  # of a described job, which then begins with it
        scenario = replace(scenario, plan=Plan(), begins_with=scenario.plan)
    moved, _ = here.under(scenario)
    if here.memory_limit_bytes is not None:
        moved = moved.limited_to(here.memory_limit_bytes)
    calibration = moved.calibration
    place = SearchedCluster(
        name=", ".join([title, *changes]),
        machines=scenario.cluster.machines,
        changes=changes,
        ranks=moved.cluster.ranks,
        ranks_per_host=moved.cluster.ranks_per_host,
        assumed=moved.assumptions,
        interval="" if calibration is None else calibration.text,
    )
    return JobOnCluster(moved, named, place)


def repeated(job: Job, what_if: str) -> bool:
    """Whether `replay` takes a row of `diagnose` as ``--what-if``: not words about the graph, but a change that the job has."""
    try:
        job.scenario([what_if])
    except InputError:
        return False
    return True


def _digest(cluster: Cluster) -> str:
    return hashlib.sha256(msgspec.json.encode(cluster)).hexdigest()[:16]
