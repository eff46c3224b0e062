"""Prices of plans of recorded jobs with parameter servers: `KvstorePlans`, `BytepsPlans`.

A plan's price is what one replay tells, of the costs as recorded. Where servers share the workers' hosts, who waits for whom may
change with a few per cent of a cost, and a search finds those plans for which it happens to turn out well (the winner's curse). A
plan that is to be followed is therefore `judged`: replayed at costs that other recordings of the job might have told, and that vary
from iteration to iteration as recorded ones do.
"""

from __future__ import annotations

import copy
import os
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Generic, Self, TypeVar

import msgspec
import numpy as np

from dpro_search.collect.trace import Floats, TensorInfo, Trace
from dpro_search.graph.dataflow import OpKind
from dpro_search.replay.critical_path import critical_path, path_shares
from dpro_search.replay.plan_predictor import PlanPredictor
from dpro_search.replay.replayer import settled_us, varied_us
from dpro_search.replay.sensitivity import Change
from dpro_search.replay.timeline import Timeline
from dpro_search.space.byteps_job import BytepsJob, byteps_graph
from dpro_search.space.byteps_recorded import recorded_byteps_job
from dpro_search.space.cost_spread import CostFactors, CostSpread
from dpro_search.space.kvstore_job import KvstoreJob, goodput_bytes_per_us, kvstore_graph, store_bytes_per_us
from dpro_search.space.kvstore_recorded import recorded_kvstore_job
from dpro_search.space.placement import on_workers
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.replay_graph import ReplayGraph
from dpro_search.space.transformations import (
    BytepsCompression,
    Credit,
    JobFacts,
    KeySlicing,
    KvstoreCompression,
    PlanSpace,
    ServerCount,
    ServerPlacement,
    TensorPartition,
    Transformation,
    byteps_under,
    kvstore_under,
)

_Job = TypeVar("_Job", KvstoreJob, BytepsJob)
_JUDGED, _ITERATIONS = 16, 10  # replays of a plan that is judged, and iterations of each
_OPERATORS = (OpKind.FORWARD, OpKind.BACKWARD, OpKind.UPDATE)
_Z_90 = 1.64  # standard deviations within which nine in ten values of a normal distribution lie
_PART_OF_KIND = {"FORWARD": "compute", "BACKWARD": "compute", "UPDATE": "compute", "COMM": "exposed_communication"}


class StorePlans(PlanPredictor, Generic[_Job]):
    """Prices by the op-level replay of the job's graph.

    Attributes
    ----------
    recorded_job
        The job as it was recorded, or on another link.
    """

    model_error: float  # half the width of the interval, relative to the prediction
    cost_spread: CostSpread  # between recordings of one job, docs/search_figures.md

    def __init__(self, job: _Job, tensors: Sequence[TensorInfo], space: PlanSpace) -> None:
        self.recorded_job: _Job = job
        self.tensors = tuple(tensors)
        self.space = space
        self._questions: tuple[Change, ...] = ()
        self._changed = False

    @classmethod
    @abstractmethod
    def from_trace(cls, trace: Trace, *, allow_lossy: bool = False) -> Self:
        """Prices of the plans of a recorded job, with `allow_lossy` also of compressed gradients.

        Raises
        ------
        GraphError
            The job cannot be rebuilt.
        """

    @classmethod
    @abstractmethod
    def of_job(cls, job: _Job, tensors: Sequence[TensorInfo], *, allow_lossy: bool = False) -> Self:
        """Prices of the plans of a job, with `allow_lossy` also of compressed gradients."""

    @abstractmethod
    def job(self, plan: Plan) -> _Job:
        """The job under a legal plan."""

    @abstractmethod
    def at_rate(self, rate_bps: float | None) -> Self:
        """Prices on links of another rate; None: without limit."""

    def asked(self, question: Change) -> Self:
        """Prices of the job as a what-if question would have it."""
        changed = copy.copy(self)
        changed._questions, changed._changed = (*self._questions, question), True
        return changed

    def graph(self, plan: Plan) -> ReplayGraph:
        """What is replayed; raises `InputError` for a plan that the job cannot follow."""
        self.space.check(plan)
        return self._asked_graph(self.job(plan))

    def priced(self, timeline: Timeline, plan: Plan) -> Prediction:
        """The price that a replay of a plan tells, with its breakdown."""
        return self._price(timeline.iteration_us, timeline.settled, plan, breakdown_us(timeline))

    def sampled(self, plan: Plan, *, samples: int, seed: int = 0) -> Floats:
        """Iteration times at costs that other recordings of the job might have told, [samples]; the same costs for every plan."""
        self.space.check(plan)
        job = self.job(plan)

        def one(factors: CostFactors) -> float:
            graph = self._asked_graph(job.at_costs(factors))
            return varied_us(graph, _longer(graph, job, factors.step))

        draws = self.cost_spread.drawn(len(job.workers), _ITERATIONS, samples, seed)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            return np.fromiter(pool.map(one, draws), np.float64, samples)

    def judged(self, plan: Plan) -> Prediction:
        """The price of a plan at costs that other recordings might have told: the mean, in an interval that knows the spread."""
        found, times_us = self.predict(plan), self.sampled(plan, samples=_JUDGED)
        centre = float(times_us.mean())
        half = float(np.hypot(self.model_error * centre, _Z_90 * times_us.std()))
        return msgspec.structs.replace(found, iteration_us=centre, interval_us=(centre - half, centre + half))

    def _asked_graph(self, job: _Job) -> ReplayGraph:
        graph = self._built(job)
        for question in self._questions:
            graph = question.apply(graph)
        return graph

    @abstractmethod
    def _built(self, job: _Job) -> ReplayGraph:
        """The graph of a job."""

    def _predict(self, plan: Plan) -> Prediction:
        # Without the times of ops and the breakdown, which take longer than the replay.
        return self._price(*settled_us(self.graph(plan)), plan, {})

    def _price(self, centre: float, settled: bool, plan: Plan, breakdown: dict[str, float]) -> Prediction:
        return Prediction(
            iteration_us=centre,
            interval_us=(centre * (1 - self.model_error), centre * (1 + self.model_error)),
            breakdown_us=breakdown,
            peak_memory_bytes=None,
            source="recorded" if plan == Plan() and not self._changed else "extrapolated",
            settled=settled,
        )

    def _with_job(self, job: _Job) -> Self:
        changed = copy.copy(self)
        changed.recorded_job, changed._changed = job, True
        changed.space = self._space_of(job)  # a link without limit leaves less to choose
        return changed

    def _space_of(self, job: _Job) -> PlanSpace:
        """The plans of another job, of the kinds that there are now."""
        return self.of_job(job, self.tensors, allow_lossy="compression" in self.space.fields).space


class KvstorePlans(StorePlans[KvstoreJob]):
    """Servers, their hosts and slicing of MXNet's KVStore."""

    model_error = 0.12  # of docs/validation.md: nine in ten errors were smaller
    # Core time is already of a step's slowest worker (`KvstoreJob.slowest`), so that none varies from step to step.
    cost_spread = CostSpread(common=0.08, worker=0.04, message=0.08, server=0.45, step=0.0)

    @classmethod
    def from_trace(cls, trace: Trace, *, allow_lossy: bool = False) -> Self:
        return cls.of_job(recorded_kvstore_job(trace), trace.tensors, allow_lossy=allow_lossy)

    @classmethod
    def of_job(cls, job: KvstoreJob, tensors: Sequence[TensorInfo], *, allow_lossy: bool = False) -> Self:
        slicing = job.slicing
        values = {
            "servers": slicing.servers,
            "servers_on_workers": on_workers(len(job.workers), job.server_host),
            "bigarray_bound": slicing.bound,
            "p3": slicing.priority,
            "slice_threshold": slicing.slice_threshold,
        }
        facts = JobFacts(name="a job with parameter servers", tensors=tuple(tensors), values=values)
        elements = np.round(job.tensor_bytes / job.element_bytes).astype(np.int64)
        placement = ServerPlacement(facts, limited=job.bytes_per_us is not None)
        found: list[Transformation] = [ServerCount(facts), KeySlicing(facts, tuple(elements.tolist())), placement]
        if allow_lossy:
            found.append(KvstoreCompression(facts, [tensor.dtype for tensor in tensors]))
        return cls(job, tensors, PlanSpace(facts, found))

    def job(self, plan: Plan) -> KvstoreJob:
        return kvstore_under(plan, self.recorded_job)

    def at_rate(self, rate_bps: float | None) -> Self:
        return self._with_job(replace(self.recorded_job, bytes_per_us=store_bytes_per_us(rate_bps)))

    def _built(self, job: KvstoreJob) -> ReplayGraph:
        return kvstore_graph(job)


class BytepsPlans(StorePlans[BytepsJob]):
    """Servers, their hosts, partition size, credit and compression of BytePS."""

    model_error = 0.16  # of docs/validation.md: nine in ten errors were smaller
    cost_spread = CostSpread(common=0.08, worker=0.07, message=0.30, server=0.0, step=0.16)

    @classmethod
    def from_trace(cls, trace: Trace, *, allow_lossy: bool = False) -> Self:
        return cls.of_job(recorded_byteps_job(trace), trace.tensors, allow_lossy=allow_lossy)

    @classmethod
    def of_job(cls, job: BytepsJob, tensors: Sequence[TensorInfo], *, allow_lossy: bool = False) -> Self:
        values = {
            "servers": len(job.server_core),
            "servers_on_workers": on_workers(len(job.workers), job.server_host),
            "partition_bytes": job.partition_bytes,
            "credit": job.credit,
        }
        facts = JobFacts(name="a job with BytePS", tensors=tuple(tensors), values=values)
        placement = ServerPlacement(facts, limited=job.bytes_per_us is not None)
        found: list[Transformation] = [TensorPartition(facts), Credit(facts), ServerCount(facts), placement]
        if allow_lossy:
            found.append(BytepsCompression(facts, [tensor.dtype for tensor in tensors], job.recorded_compression))
        return cls(job, tensors, PlanSpace(facts, found))

    def job(self, plan: Plan) -> BytepsJob:
        return byteps_under(plan, self.recorded_job)

    def at_rate(self, rate_bps: float | None) -> Self:
        return self._with_job(replace(self.recorded_job, bytes_per_us=goodput_bytes_per_us(rate_bps)))

    def _built(self, job: BytepsJob) -> ReplayGraph:
        return byteps_graph(job)


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
    for (_, kind), us in path_shares(timeline, critical_path(timeline)).by_rank_and_kind.items():
        found[_PART_OF_KIND.get(kind, "server")] += us
    total = sum(found.values()) or 1.0
    return {part: us / total * timeline.iteration_us for part, us in found.items()}
