"""`StoreJob`: what jobs with parameter servers have in common, KVStore's and BytePS's.

A prediction is one replay with the recorded costs. If servers share the workers' hosts, the critical path may change with a few
per cent of a cost, and a search finds plans that are fast by chance (the winner's curse). Listed plans are therefore
`reevaluated`: replayed over resampled costs, with the spread of costs between recordings of one job and between iterations.
"""

from __future__ import annotations

import copy
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import ClassVar, Generic, Literal, Self, TypeVar

import msgspec
import numpy as np

from dpro_search.cluster import Cluster
from dpro_search.collect.trace import EventKind, Floats, TensorInfo, Trace
from dpro_search.deploy.parts.part import Servers
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.kinds._facts import graph_change
from dpro_search.kinds._job import Job
from dpro_search.kinds._options import PlanOptions, refuse_compute
from dpro_search.kinds._terms import link_term
from dpro_search.machine import Calibration, calibration, machine_constants
from dpro_search.machine.constants import BytepsConstants, KvstoreConstants
from dpro_search.replay.critical_path import path_shares
from dpro_search.replay.replayer import replay, settled_us, varied_us
from dpro_search.replay.sensitivity import Change
from dpro_search.replay.timeline import Timeline
from dpro_search.report.groups import Group, TensorGroups
from dpro_search.report.quality import Term
from dpro_search.space.cluster import ClusterSpec, spec_on
from dpro_search.space.describe import describe
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.replay_graph import ReplayGraph
from dpro_search.space.scenario import SCALES, ClusterChange, Scale
from dpro_search.space.servers.byteps_job import BytepsJob
from dpro_search.space.servers.cost_spread import CostFactors, CostSpread
from dpro_search.space.servers.kvstore_job import KvstoreJob
from dpro_search.space.servers.placement import on_workers
from dpro_search.space.servers.recorded_workers import server_hosts
from dpro_search.space.transformations import PlanSpace

_Job = TypeVar("_Job", KvstoreJob, BytepsJob)
# Classes of a job of more than twice as many workers. Folding changes predictions of 18 to 64 workers by at most 4 %.
_CLASSES = 8
_SAMPLES, _ITERATIONS = 16, 10  # replays of a plan that is re-evaluated, and iterations of each
_OPERATORS = (OpKind.FORWARD, OpKind.BACKWARD, OpKind.UPDATE)
_Z_90 = 1.64  # standard deviations within which nine in ten values of a normal distribution lie
_PART_OF_KIND = {"FORWARD": "compute", "BACKWARD": "compute", "UPDATE": "compute", "COMM": "exposed_communication"}


class StoreJob(Job, Generic[_Job]):
    """Predictions by the op-level replay of the job's graph.

    Attributes
    ----------
    recorded_job
        The job as it was recorded, or on another link.
    """

    trace: Trace
    error_bar: ClassVar[Literal["kvstore", "byteps"]]  # name of the kind's constants and of its model error

    settings = ("ranks", "rate", *SCALES)

    def __init__(self, job: _Job, tensors: Sequence[TensorInfo], space: PlanSpace) -> None:
        self.recorded_job: _Job = job
        self.tensors = tuple(tensors)
        self.space = space
        self._questions: tuple[Change, ...] = ()
        self._apart: frozenset[int] = frozenset()
        self._changed = False
        self._cluster: ClusterSpec | None = None
        self._recorded_workers, self._on_gpus = len(job.workers), False

    @classmethod
    def of(cls, trace: Trace, options: PlanOptions) -> Self:
        """The recorded job; raises `InputError` for options that it does not have."""
        refuse_compute(options, trace, cls.askable)
        return cls.from_trace(trace, allow_lossy=options.allow_lossy)

    @classmethod
    def from_trace(cls, trace: Trace, *, allow_lossy: bool = False) -> Self:
        """The recorded job, with `allow_lossy` also with plans that compress gradients."""
        found = cls.of_job(cls._recorded(trace), trace.tensors, allow_lossy=allow_lossy)
        found.trace = trace
        return found

    @staticmethod
    @abstractmethod
    def _recorded(trace: Trace) -> _Job:
        """The job of a trace."""

    @classmethod
    @abstractmethod
    def of_job(cls, job: _Job, tensors: Sequence[TensorInfo], *, allow_lossy: bool = False) -> Self:
        """Predictions of the plans of a job, with `allow_lossy` also of compressed gradients."""

    @staticmethod
    @abstractmethod
    def _under(plan: Plan, job: _Job) -> _Job:
        """A job under a legal plan."""

    @staticmethod
    @abstractmethod
    def _built(job: _Job) -> ReplayGraph:
        """The graph of a job."""

    @staticmethod
    @abstractmethod
    def _goodput(rate_bps: float | None) -> float | None:
        """Payload on links of a rate, bytes per us; None: without limit."""

    def job(self, plan: Plan) -> _Job:
        """The job under a legal plan."""
        return self._under(plan, self.recorded_job)

    def at_rate(self, rate_bps: float | None) -> Self:
        """Predictions on links of another rate; None: without limit."""
        return self._with_job(replace(self.recorded_job, bytes_per_us=self._goodput(rate_bps)))

    @property
    def cost_spread(self) -> CostSpread:
        """Between recordings of one job, and between iterations."""
        known: KvstoreConstants | BytepsConstants = getattr(machine_constants(), self.error_bar)
        return CostSpread(
            common=known.spread_common,
            worker=known.spread_worker,
            message=known.spread_message,
            server=known.spread_server,
            step=known.spread_step,
        )

    @property
    def calibration(self) -> Calibration:
        more = "" if len(self.recorded_job.workers) == self._recorded_workers else "this number of workers"
        return calibration(machine_constants(), self.error_bar, "gpu" if self._on_gpus else "cpu", unlike=more)

    @property
    def cluster(self) -> ClusterSpec:
        """What the workers run on."""
        if self._cluster is not None:
            return self._cluster
        cores, rate_bps = self.recorded_job.worker_core, self.trace.meta.rate_bps
        return ClusterSpec(cores=cores, rate_bps=rate_bps, ranks_per_host=self.recorded_job.workers_per_host)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Name of the host of each worker, then of each server: as recorded, or numbered on another cluster."""
        names, numbers = self.trace.meta.hosts, self.recorded_job.host.tolist()
        if len(names) == len(numbers) and not self._on_gpus:
            return tuple(names)
        return tuple(f"host {number}" for number in numbers)

    def on(self, cluster: ClusterSpec) -> Self:
        """The same job with other workers, on links of another rate; the servers are as many as recorded.

        Raises
        ------
        InputError
            Hosts have different numbers of workers.
        """
        if cluster == self.cluster:
            return self
        if cluster.ranks_per_host is None:
            raise InputError(f"{self.title} needs as many workers on each host: {cluster.ranks} do not fill hosts of one size")
        changed = self if cluster.rate_bps == self.cluster.rate_bps else self.at_rate(cluster.rate_bps)
        changed = changed._with_job(changed.recorded_job.with_workers(cluster.ranks, cluster.ranks_per_host))
        changed._cluster = cluster
        return changed

    def at_scale(self, cluster: Cluster, ranks: int | None = None) -> Self:
        """A worker on each device; servers, and what messages cost a process, are as recorded."""
        changed = self.on(spec_on(cluster, ranks).spec)
        changed._on_gpus = True
        return changed

    @property
    def recorded_ranks(self) -> int:
        return self._recorded_workers

    def left_out(self, change: ClusterChange) -> tuple[str, ...]:
        if change == ClusterChange():
            return ()
        servers = len(self.recorded_job.server_core)
        kept = f"{servers} server{'s' if servers > 1 else ''} as recorded, and messages cost a process the core time that they did"
        return (*super().left_out(change), kept)

    def scaled(self, scale: Scale) -> Self:
        changed = self.asked(graph_change(scale, len(self.recorded_job.worker_core) + len(self.recorded_job.server_core)))
        if scale.rank is not None:
            changed._apart = self._apart | {scale.rank}
        return changed

    def asked(self, question: Change) -> Self:
        """Predictions of the job with a change of its graph."""
        changed = copy.copy(self)
        changed._questions, changed._changed = (*self._questions, question), True
        return changed

    def allowing(self, plan: Plan, options: PlanOptions) -> Self:
        changed = copy.copy(self)
        changed.space = self._space_of(self.recorded_job, allow_lossy=options.allowing(plan).allow_lossy)
        return changed

    def terms(self) -> tuple[Term, ...]:
        return (link_term(self.recorded_job.bytes_per_us), *(Term(name=n, value=v, meaning=m) for n, v, m in self._cost_rows()))

    @abstractmethod
    def _cost_rows(self) -> tuple[tuple[str, str, str], ...]:
        """Name, value and meaning of each cost of the job."""

    def tensor_groups(self, step: int | None, best: Plan | None) -> TensorGroups | None:
        """Messages by the server that they go to, as recorded and under the best plan."""
        found: dict[str, tuple[Group, ...]] = {}
        for setting, plan in ({"as recorded": Plan()} | ({} if best is None else {describe(best): best})).items():
            job = self.job(plan)
            of_server: dict[int, list[Group]] = {server: [] for server in range(len(job.server_core))}
            for server, tensor, size_bytes in self._messages(job):
                of_server[server].append(Group(tensors=(self.tensors[tensor].name,), size_bytes=round(size_bytes)))
            found |= {f"{setting}, server {server}": tuple(groups) for server, groups in of_server.items()}
        return TensorGroups(groups=found, noun="message", note="A worker sends them to the server, and gets as much back.")

    @abstractmethod
    def _messages(self, job: _Job) -> Iterable[tuple[int, int, float]]:
        """Server, tensor and bytes of each message that a worker sends."""

    def op_count(self, plan: Plan) -> int:
        return len(self.graph(plan))

    def timeline(self, plan: Plan) -> Timeline:
        return replay(self.graph(plan))

    def replayed(self, plan: Plan) -> Prediction:
        """The prediction over resampled costs, with the breakdown of one replay."""
        one, found = self.prediction(self.timeline(plan), plan), self.reevaluated(plan)
        parts = {part: us * found.iteration_us / one.iteration_us for part, us in one.breakdown_us.items()}
        return msgspec.structs.replace(found, breakdown_us=parts, settled=one.settled)

    def graph(self, plan: Plan) -> ReplayGraph:
        """What is replayed; raises `InputError` for a plan that the job cannot follow."""
        self.space.check(plan)
        return self._asked_graph(self._folded(plan))

    @property
    def folded_ranks(self) -> frozenset[int]:
        """Ranks of the graph that stand for several workers: questions about one of them cannot be answered."""
        classes = self._folded(Plan()).classes
        if classes is None:
            return frozenset()
        return frozenset(rank for rank, members in zip(classes.rank, classes.members, strict=False) if members > 1)

    def _folded(self, plan: Plan) -> _Job:
        """The job under a legal plan, with workers that behave alike folded but those that a question is about."""
        return self.job(plan).folded(_CLASSES, self._apart)

    def prediction(self, timeline: Timeline, plan: Plan) -> Prediction:
        """The prediction from a replay of a plan, with its breakdown."""
        return self._price(timeline.iteration_us, timeline.settled, plan, breakdown_us(timeline))

    def sampled(self, plan: Plan, *, samples: int, seed: int = 0, on_sample: Callable[[], None] = lambda: None) -> Floats:
        """Iteration times over resampled costs, [samples]; the same draws for every plan."""
        self.space.check(plan)
        workers, job = len(self.recorded_job.workers), self._folded(plan)

        def one(factors: CostFactors) -> float:
            if job.classes is not None:
                slowest = job.classes.slowest
                factors = replace(factors, compute=slowest(factors.compute), step=slowest(factors.step))
            graph = self._asked_graph(job.at_costs(factors))
            return varied_us(graph, _longer(graph, job, factors.step))

        draws = self.cost_spread.drawn(workers, _ITERATIONS, samples, seed)
        found = np.empty(samples)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for number, us in enumerate(pool.map(one, draws)):
                found[number] = us
                on_sample()
        return found

    def reevaluated(self, plan: Plan) -> Prediction:
        """The prediction of a plan over resampled costs: their mean, with an interval that includes their spread."""
        found, times_us = self.predict(plan), self.sampled(plan, samples=_SAMPLES)
        centre = float(times_us.mean())
        model_error = self.calibration.model_error[0 if found.source == "recorded" else 1]
        half = float(np.hypot(model_error * centre, _Z_90 * times_us.std()))
        resampled = msgspec.structs.replace(found, iteration_us=centre, interval_us=(centre - half, centre + half))
        return self.with_replay_error(resampled)

    def _asked_graph(self, job: _Job) -> ReplayGraph:
        graph = self._built(job)
        for question in self._questions:
            graph = question.apply(graph)
        return graph

    def _predict(self, plan: Plan) -> Prediction:
        # Without the times of ops and the breakdown, which take longer than the replay.
        return self._price(*settled_us(self.graph(plan)), plan, {})

    def _price(self, centre: float, settled: bool, plan: Plan, breakdown: dict[str, float]) -> Prediction:
        as_recorded = plan == Plan() and not self._changed
        model_error = self.calibration.model_error[0 if as_recorded else 1]
        return Prediction(
            iteration_us=centre,
            interval_us=(centre * (1 - model_error), centre * (1 + model_error)),
            breakdown_us=breakdown,
            peak_memory_bytes=None,
            source="recorded" if as_recorded else "extrapolated",
            settled=settled,
        )

    def _with_job(self, job: _Job) -> Self:
        changed = copy.copy(self)
        changed.recorded_job, changed._changed = job, True
        changed.space = self._space_of(job, allow_lossy="compression" in self.space.fields)  # without limit there is less to choose
        return changed

    def _space_of(self, job: _Job, *, allow_lossy: bool) -> PlanSpace:
        """The plans of another job."""
        return self.of_job(job, self.tensors, allow_lossy=allow_lossy).space


def _longer(graph: ReplayGraph, job: KvstoreJob | BytepsJob, step: Floats) -> Floats:
    """How many times its duration each op takes in each iteration, [iterations, ops], by `CostFactors.step`: workers' operators.

    Cores are the first devices of these graphs, in the order in which workers, then servers name them.
    """
    cores = list(dict.fromkeys((*job.worker_core, *job.server_core)))
    found = np.ones((len(step), len(graph)))
    for worker, core in enumerate(job.worker_core):
        found[:, (graph.device == cores.index(core)) & np.isin(graph.kind, _OPERATORS)] = step[:, worker, None]
    return found


def breakdown_us(timeline: Timeline) -> dict[str, float]:
    """An iteration by what its critical path does: compute of workers, communication that nothing hides, the servers' work."""
    found = {"compute": 0.0, "exposed_communication": 0.0, "server": 0.0}
    for (_, kind), us in path_shares(timeline).by_rank_and_kind.items():
        found[_PART_OF_KIND.get(kind, "server")] += us
    total = sum(found.values()) or 1.0
    return {part: us / total * timeline.iteration_us for part, us in found.items()}


def recorded_servers(trace: Trace) -> Servers:
    """Parameter servers of a recorded job: ranks behind those that train, which enqueue no gradient."""
    workers = len(set(trace.events.rank[trace.events.kind == EventKind.COMM].tolist()))
    return Servers(trace.meta.ranks - workers, on_workers(workers, server_hosts(trace, workers)))
