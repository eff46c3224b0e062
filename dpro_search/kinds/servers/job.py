"""`ParameterServerJob`: what jobs with parameter servers have in common, KVStore's and BytePS's.

A prediction is one replay with the recorded costs. Listed plans are `reevaluated`: replayed over costs that are drawn anew
(`replay/server_replay.py` says why).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, Literal, Self

from dpro_search.collect.trace import EventKind, TensorInfo, Trace
from dpro_search.deploy.parts.part import Servers
from dpro_search.errors import InputError
from dpro_search.graph.measured import ProfiledSteps
from dpro_search.kinds._answers import Term, link_term
from dpro_search.kinds._job import Job, JobInScenario, JobObjective, ranks_in_turn
from dpro_search.kinds._options import PlanOptions, refuse_compute
from dpro_search.machine import Calibration, calibration, machine_constants
from dpro_search.machine.constants import BytepsConstants, KvstoreConstants
from dpro_search.replay.lowered import ErrorModel, Lowered
from dpro_search.replay.sensitivity import graph_change
from dpro_search.replay.server_replay import ServerJob, ServerReplay
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.describe import describe
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.replay_graph import ReplayGraph
from dpro_search.space.scenario import SCALES, ClusterChange, Scenario
from dpro_search.space.servers.cost_spread import CostSpread
from dpro_search.space.servers.placement import on_workers
from dpro_search.space.servers.recorded_workers import server_hosts
from dpro_search.space.tensor_groups import Group, TensorGroups
from dpro_search.space.transformations import PlanSpace

# Classes of a job of more than twice as many workers. Folding changes predictions of 18 to 64 workers by at most 4 %.
_CLASSES = 8
_SAMPLES = 16  # replays of a plan that is re-evaluated


class ParameterServerJob(Job, Generic[ServerJob]):
    """A recorded job whose gradients go to parameter servers.

    Attributes
    ----------
    recorded_job
        Workers and servers as they were recorded.
    """

    trace: Trace
    error_bar: ClassVar[Literal["kvstore", "byteps"]]  # name of the kind's constants and of its model error

    settings = ("ranks", "rate", *SCALES)

    def __init__(
        self,
        job: ServerJob,
        tensors: Sequence[TensorInfo],
        *,
        rate_bps: float | None = None,
        allow_lossy: bool = False,
        trace: Trace | None = None,
    ) -> None:
        if trace is not None:
            self.trace = trace
        self.recorded_job: ServerJob = job
        self.tensors = tuple(tensors)
        self._recorded_cluster = ClusterSpec(cores=job.worker_core, rate_bps=rate_bps, ranks_per_host=job.workers_per_host)
        self._allow_lossy = allow_lossy
        self._possible_plans = self._plans_of(job, allow_lossy=True)

    @classmethod
    def of(cls, trace: Trace, options: PlanOptions) -> Self:
        """The recorded job; raises `InputError` for options that it does not have."""
        refuse_compute(options, trace, cls.askable)
        job = cls._recorded(trace)
        return cls(job, trace.tensors, rate_bps=trace.meta.rate_bps, allow_lossy=options.allow_lossy, trace=trace)

    @staticmethod
    @abstractmethod
    def _recorded(trace: Trace) -> ServerJob:
        """Workers and servers of a trace."""

    @abstractmethod
    def _plans_of(self, job: ServerJob, *, allow_lossy: bool) -> PlanSpace:
        """The plans that such workers and servers can follow, with `allow_lossy` also those that compress gradients."""

    @staticmethod
    @abstractmethod
    def _under(plan: Plan, job: ServerJob) -> ServerJob:
        """Workers and servers under a legal plan."""

    @staticmethod
    @abstractmethod
    def _built(job: ServerJob) -> ReplayGraph:
        """The graph of workers and servers."""

    @staticmethod
    @abstractmethod
    def _goodput(rate_bps: float | None) -> float | None:
        """Payload on links of a rate, bytes per us; None: without limit."""

    def lower(self, scenario: Scenario, *, steps: ProfiledSteps | None = None) -> Lowered:
        self.check_changes(scenario, steps)
        change = scenario.cluster
        cluster = change.target(self._recorded_cluster)
        known = self._calibration(cluster, on_gpus=change.on_gpus)
        as_recorded = scenario.plan == Plan() and not scenario.scales and cluster == self._recorded_cluster
        return Lowered(
            replayable=self.replay_of(scenario),
            error=ErrorModel(model=known.model_error[0 if as_recorded else 1]),
            as_recorded=as_recorded,
            cluster=cluster,
            calibration=known,
            assumptions=self._assumptions(change, cluster),
            resamples=_SAMPLES,
        )

    def replay_of(self, scenario: Scenario) -> ServerReplay[ServerJob]:
        """The replay of workers and servers in a scenario; raises what `lower` raises."""
        self._possible_plans.check(scenario.plan)
        job = self.unplanned_job(scenario)
        processes = len(job.worker_core) + len(job.server_core)
        changes = tuple(graph_change(scale, processes) for scale in scenario.scales)
        single_ranks = {scale.rank for scale in scenario.scales if scale.rank is not None}
        return ServerReplay(
            job=self._under(scenario.plan, job).folded(_CLASSES, single_ranks),
            workers=len(job.workers),
            build=self._built,
            changes=changes,
            cost_spread=self.cost_spread,
        )

    def _on(self, cluster: ClusterSpec) -> ServerJob:
        """The recorded job with the workers and links of a cluster, and as many servers as recorded.

        Raises
        ------
        InputError
            Hosts have different numbers of workers.
        """
        job, recorded = self.recorded_job, self._recorded_cluster
        if cluster == recorded:
            return job
        if cluster.ranks_per_host is None:
            raise InputError(f"{self.title} needs as many workers on each host: {cluster.ranks} do not fill hosts of one size")
        if cluster.rate_bps != recorded.rate_bps:
            job = replace(job, bytes_per_us=self._goodput(cluster.rate_bps))
        return job.with_workers(cluster.ranks, cluster.ranks_per_host)

    def unplanned_job(self, scenario: Scenario) -> ServerJob:
        """Workers and servers in a scenario, before any plan."""
        return self._on(scenario.cluster.target(self._recorded_cluster))

    def plans(self, scenario: Scenario) -> PlanSpace:
        job = self.unplanned_job(scenario)
        allowed = PlanOptions(allow_lossy=self._allow_lossy).allowing(scenario.plan)
        return self._plans_of(job, allow_lossy=allowed.allow_lossy)

    @property
    def cost_spread(self) -> CostSpread:
        """The spread of costs between recordings of one job, and between iterations."""
        known: KvstoreConstants | BytepsConstants = getattr(machine_constants(), self.error_bar)
        return CostSpread(
            common=known.spread_common,
            worker=known.spread_worker,
            message=known.spread_message,
            server=known.spread_server,
            step=known.spread_step,
        )

    def _calibration(self, cluster: ClusterSpec, *, on_gpus: bool) -> Calibration:
        unlike = "" if cluster.ranks == self._recorded_cluster.ranks else "this number of workers"
        return calibration(machine_constants(), self.error_bar, "gpu" if on_gpus else "cpu", unlike=unlike)

    def _assumptions(self, change: ClusterChange, cluster: ClusterSpec) -> tuple[str, ...]:
        if change == ClusterChange():
            return ()
        servers = len(self.recorded_job.server_core)
        kept = f"{servers} server{'s' if servers > 1 else ''} as recorded, and messages cost a process the core time that they did"
        return (*change.left_out, *ranks_in_turn(cluster.ranks, self._recorded_cluster.ranks), kept)

    def hosts(self, scenario: Scenario) -> tuple[str, ...]:
        """Name of the host of each worker, then of each server: as recorded, or numbered on another cluster."""
        names, numbers = self.trace.meta.hosts, self.unplanned_job(scenario).host.tolist()
        if len(names) == len(numbers) and not scenario.cluster.on_gpus:
            return tuple(names)
        return tuple(f"host {number}" for number in numbers)

    def terms(self, scenario: Scenario) -> tuple[Term, ...]:
        job = self.unplanned_job(scenario)
        costs: list[Term] = [Term(name=name, value=value, meaning=meaning) for name, value, meaning in self._cost_rows(job)]
        return (link_term(job.bytes_per_us), *costs)

    @abstractmethod
    def _cost_rows(self, job: ServerJob) -> tuple[tuple[str, str, str], ...]:
        """Name, value and meaning of each cost of workers and servers."""

    def tensor_groups(self, here: JobInScenario, step: int | None, best: Plan | None) -> TensorGroups | None:
        """Messages by the server that they go to, as recorded and under the best plan."""
        groups: dict[str, tuple[Group, ...]] = {}
        for setting, plan in ({"as recorded": Plan()} | ({} if best is None else {describe(best): best})).items():
            job = self._under(plan, self.unplanned_job(here.scenario))
            of_server: dict[int, list[Group]] = {server: [] for server in range(len(job.server_core))}
            for server, tensor, size_bytes in self._messages(job):
                of_server[server].append(Group(tensors=(self.tensors[tensor].name,), size_bytes=round(size_bytes)))
            groups |= {f"{setting}, server {server}": tuple(messages) for server, messages in of_server.items()}
        return TensorGroups(groups=groups, noun="message", note="A worker sends them to the server, and gets as much back.")

    @abstractmethod
    def _messages(self, job: ServerJob) -> Iterable[tuple[int, int, float]]:
        """Server, tensor and bytes of each message that a worker sends."""

    def objective(self, here: JobInScenario) -> ServerObjective:
        return ServerObjective(here, self)


class ServerObjective(JobObjective[ParameterServerJob[Any]]):
    """A job with parameter servers, as a search asks it."""

    def reevaluated(self, plan: Plan) -> Prediction:
        """The prediction of a plan over costs drawn anew: their mean, with an interval that includes their spread."""
        return self.here.lowered(plan).reported(detailed=False)


def recorded_servers(trace: Trace) -> Servers:
    """Parameter servers of a recorded job: ranks behind those that train, which enqueue no gradient."""
    workers = len(set(trace.events.rank[trace.events.kind == EventKind.COMM].tolist()))
    return Servers(trace.meta.ranks - workers, on_workers(workers, server_hosts(trace, workers)))
