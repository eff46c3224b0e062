"""A recorded step's compute, op by op, as plans change it: `ComputeGraph`, and ``transformed(...) -> DataflowGraph``.

A rank's profile is a length of core time with marks at which gradients are posted. What an op's change does to the marks follows
from the graph: an op is *due* by the first post that needs it, directly or not, so that time which it saves or costs moves that
post and all later ones. The ops of a cluster run at one time, so that all of it, and all that it needs, is due by the first post
that needs any of it: fusing ops that lead to early and to late gradients delays the early ones.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dpro_search._compiled import njit
from dpro_search.collect.trace import Floats, Ints
from dpro_search.graph.dataflow import DataflowGraph, OpKind, topological_order
from dpro_search.space.plan import Plan
from dpro_search.space.transformations._base import PlanningFacts, Transformation
from dpro_search.space.transformations.contraction import Contraction

_LAUNCH_QUANTILE = 0.1  # of the ops' times: about what an op takes that has next to nothing to do
_NAMES_SHOWN = 40
_MADE_AT_RUN_TIME = re.compile(r"(^|/)(\w+Optimizer|ConstantFolding)/")  # by TensorFlow, of ops of the step


class ComputeGraph:
    """A recorded graph with what changes of compute need to know; made once for many plans.

    Attributes
    ----------
    graph
        What was recorded.
    ops
        Numbers of the ops of a name, one on each rank; names that a rank lacks are left out.
    main
        Ops that wait for no communication, [ops].
    place
        Place of each tensor in the order of posts, [ranks, tensors].
    position
        Place of each op in an order that follows the dependencies, [ops].
    due
        Place of the first post that needs an op; the number of tensors where none does, [ops].
    launch_us
        What an op takes that has next to nothing to do.
    """

    def __init__(self, graph: DataflowGraph) -> None:
        self.graph = graph
        by_name: dict[str, list[int]] = {}
        for op, name in enumerate(graph.op_name):
            by_name.setdefault(name, []).append(op)
        self.ops = {name: tuple(ops) for name, ops in by_name.items() if len(ops) == graph.ranks}
        self.main: npt.NDArray[np.bool_] = ~np.isin(graph.op_kind, (OpKind.UPDATE, OpKind.COMM))
        order = [np.argsort(profile.post_us.mean(axis=0), kind="stable") for profile in graph.profiles]
        self.place = np.stack([np.argsort(row, kind="stable") for row in order])
        forward = topological_order(graph.pred_ptr, graph.pred_idx)
        self.position = np.argsort(forward)
        self._reversed = forward[::-1].copy()
        self._posted = np.full(len(graph), len(graph.tensors), dtype=np.int64)
        for tensor, placement in enumerate(graph.placements):
            for rank, op in enumerate(placement.comm):
                self._posted[op] = min(self._posted[op], self.place[rank, tensor])
        self.due = self.due_with(np.full(len(graph), -1))
        self._recorded_us = self.by_due(graph.op_work_us, self.due)
        source, target = graph.edges()
        within_rank = graph.op_rank[source] == graph.op_rank[target]
        by_source = np.argsort(source[within_rank], kind="stable")
        self._user_idx = target[within_rank][by_source]
        self._user_ptr = np.searchsorted(source[within_rank][by_source], np.arange(len(graph) + 1))
        work = np.median(graph.op_work_us, axis=0)[self.main]
        self.launch_us = float(np.quantile(work[work > 0], _LAUNCH_QUANTILE)) if (work > 0).any() else 0.0

    def users(self, op: int) -> Ints:
        """Ops of the same rank that need an op."""
        users: Ints = self._user_idx[self._user_ptr[op] : self._user_ptr[op + 1]]
        return users

    def needs(self, op: int) -> Ints:
        """Ops that an op needs."""
        return self.graph.pred_idx[self.graph.pred_ptr[op] : self.graph.pred_ptr[op + 1]]

    def due_with(self, cluster: Ints) -> Ints:
        """Place of the first post that needs an op, or an op of the same cluster, [ops]; `cluster` has a number or -1 for each."""
        graph, due = self.graph, self._posted.copy()
        is_comm = graph.op_kind == OpKind.COMM
        first = np.zeros(int(cluster.max(initial=-1)) + 1, dtype=np.int64)
        _settle(due, self._reversed, graph.pred_ptr, graph.pred_idx, graph.op_rank, self.main, self.main | is_comm, cluster, first)
        return due

    def is_acyclic_with(self, cluster: Ints) -> bool:
        """Whether there is an order of the ops in which those of each cluster run at one time."""
        graph = self.graph
        node = np.where(cluster >= 0, len(graph) + cluster, np.arange(len(graph)))
        count = len(graph) + int(cluster.max(initial=-1)) + 1  # an op of a cluster leaves a node behind that needs nothing
        return bool(_ordered_nodes(graph.pred_ptr, graph.pred_idx, node, count) == count)

    def contraction(self) -> Contraction:
        """The graph's ops, to be fused step by step."""
        return Contraction(self.graph, self._reversed[::-1])

    def by_due(self, work_us: Floats, due: Ints) -> Floats:
        """Core time of the main ops of each rank by the place of the post that needs them, [samples, ranks, tensors + 1]."""
        places = len(self.graph.tensors) + 1
        key = (self.graph.op_rank * places + due)[self.main]
        rows = [np.bincount(key, weights=row[self.main], minlength=self.graph.ranks * places) for row in work_us]
        return np.stack(rows).astype(np.float64).reshape(len(work_us), self.graph.ranks, places)

    def unchanged(self) -> ComputeChange:
        """The recorded compute."""
        nothing = np.zeros_like(self.graph.op_work_us)
        late = np.full(len(self.graph), len(self.graph.tensors), dtype=np.int64)
        return ComputeChange(
            work_us=self.graph.op_work_us.copy(),
            again_us=nothing,
            again_due=late,
            cluster=np.full(len(self.graph), -1),
            uncertainty_us=0.0,
        )

    def rebuilt(self, change: ComputeChange) -> DataflowGraph:
        """The graph with changed costs; ops and dependencies are those of the recording."""
        due = self.due_with(change.cluster) if (change.cluster >= 0).any() else self.due
        added = self.by_due(change.work_us, due) - self._recorded_us + self.by_due(change.again_us, change.again_due)
        return with_added_work(replace(self.graph, op_work_us=change.work_us + change.again_us), self.place, added)


@dataclass(kw_only=True)
class ComputeChange:
    """The change that plans make to the compute of a step. Its arrays are not shared."""

    work_us: Floats  # Core time of each op, [samples, ops].
    # again_us, again_due: Core time of an op that runs a second time, [samples, ops], and the place of the post that needs that,
    # [ops].
    again_us: Floats
    again_due: Ints
    cluster: Ints  # Number of the cluster that an op is in on its rank, -1: none, [ops].
    uncertainty_us: float  # How much longer or shorter a step's compute may be than the costs say.


class _StepTransformation(Transformation):
    """A transformation of the recorded step's ops."""

    def __init__(self, job: PlanningFacts, compute: ComputeGraph) -> None:
        self.compute = compute
        super().__init__(job)


class ComputeTransformation(_StepTransformation):
    """A transformation that changes what ops cost."""

    @abc.abstractmethod
    def apply(self, change: ComputeChange, plan: Plan) -> None:
        """Make a legal plan's changes; nothing where its fields are not set."""

    def unknown_op(self, names: Sequence[str]) -> str | None:
        """A reason if an op is not on every rank."""
        name = next((name for name in names if name not in self.compute.ops), None)
        return None if name is None else f"the trace has no op '{name[:_NAMES_SHOWN]}' on every rank"

    def first_refusal(self, names: Sequence[str], able: frozenset[str], refusal: Callable[[str], str | None]) -> str | None:
        """Why the first of the ops that are not among those able to change is refused; None: all are able."""
        if able.issuperset(names):
            return None
        return self.unknown_op(names) or next((why for name in names if (why := refusal(name)) is not None), None)

    def taken(self, plan: Plan) -> set[str]:
        """The ops that other fields of a plan change."""
        of_field = {
            "op_clusters": [name for cluster in plan.op_clusters or () for name in cluster],
            "recomputed_ops": plan.recomputed_ops or (),
            "bfloat16_ops": plan.bfloat16_ops or (),
        }
        return {name for field, names in of_field.items() if field not in self.fields for name in names}

    def kind(self, name: str) -> OpKind:
        """Kind of the op of a name, which is on every rank."""
        return OpKind(self.compute.graph.op_kind[self.compute.ops[name][0]])

    def type(self, name: str) -> str:
        """Type of the op of a name, which is on every rank."""
        return self.compute.graph.op_type[self.compute.ops[name][0]]

    def not_in_the_step(self, name: str) -> str | None:
        """A reason if a framework's optimizer made an op as the step was run, so that no job can change it."""
        if _MADE_AT_RUN_TIME.search(name):
            return f"op '{name}' was made by TensorFlow's optimizer: the training step has none"
        return None


class GraphTransformation(_StepTransformation):
    """A transformation of a whole step, once its ops have their costs."""

    @abc.abstractmethod
    def apply(self, graph: DataflowGraph, plan: Plan) -> DataflowGraph:
        """The graph under a legal plan; the same where its fields are not set."""


def transformed(compute: ComputeGraph, plan: Plan, transformations: Sequence[Transformation]) -> tuple[DataflowGraph, float]:
    """The job's step under the compute part of a legal plan, and how uncertain its length is in us.

    Parameters
    ----------
    transformations
        Those of the job's space; others than `ComputeTransformation` and `GraphTransformation` have no say.
    """
    active = [t for t in transformations if isinstance(t, ComputeTransformation) and _sets(plan, t)]
    graph, uncertainty_us = compute.graph, 0.0
    if active:
        change = compute.unchanged()
        for transformation in active:
            transformation.apply(change, plan)
        graph, uncertainty_us = compute.rebuilt(change), change.uncertainty_us
    for whole in transformations:
        if isinstance(whole, GraphTransformation) and _sets(plan, whole):
            graph = whole.apply(graph, plan)
    return graph, uncertainty_us


def with_added_work(graph: DataflowGraph, place: Ints, added_us: Floats) -> DataflowGraph:
    """A graph whose main streams have more work (or less) before posts.

    Parameters
    ----------
    place
        Place of each tensor in the order of posts, [ranks, tensors].
    added_us
        Core time added before the post at each place and after the one before it; last, after all posts,
        [samples, ranks, tensors + 1].
    """
    upto = np.cumsum(added_us, axis=2)
    profiles = []
    for rank, profile in enumerate(graph.profiles):
        post = np.maximum(profile.post_us + upto[:, rank, place[rank]], 0.0)
        main = np.maximum(profile.main_us + upto[:, rank, -1], post.max(axis=1))
        profiles.append(replace(profile, post_us=post, main_us=main))
    return replace(graph, profiles=tuple(profiles))


def _sets(plan: Plan, transformation: Transformation) -> bool:
    return any(plan.get(name) is not None for name in transformation.fields)


@njit()
def _settle(due, order, pred_ptr, pred_idx, rank, main, hands_on, cluster, first):  # type: ignore[no-untyped-def]
    """Hand the first post on from ops to what they need, until the ops of each cluster agree; `order` is against dependencies."""
    agreed = False
    while not agreed:
        for op in order:
            if hands_on[op]:
                for k in range(pred_ptr[op], pred_ptr[op + 1]):
                    source = pred_idx[k]
                    if main[source] and rank[source] == rank[op] and due[op] < due[source]:
                        due[source] = due[op]
        agreed = True
        first[:] = 2**62
        for op in range(len(due)):
            if cluster[op] >= 0:
                first[cluster[op]] = min(first[cluster[op]], due[op])
        for op in range(len(due)):
            if cluster[op] >= 0 and due[op] > first[cluster[op]]:
                due[op] = first[cluster[op]]
                agreed = False


@njit()
def _ordered_nodes(pred_ptr, pred_idx, node, count):  # type: ignore[no-untyped-def]
    """How many nodes, each some ops, can follow what they need; all of them without a cycle."""
    waiting, ptr = np.zeros(count, np.int64), np.zeros(count + 1, np.int64)
    for op in range(len(node)):
        for k in range(pred_ptr[op], pred_ptr[op + 1]):
            if node[pred_idx[k]] != node[op]:
                waiting[node[op]] += 1
                ptr[node[pred_idx[k]] + 1] += 1
    for i in range(count):
        ptr[i + 1] += ptr[i]
    users, filled = np.empty(ptr[count], np.int64), ptr[:-1].copy()
    for op in range(len(node)):
        for k in range(pred_ptr[op], pred_ptr[op + 1]):
            source = node[pred_idx[k]]
            if source != node[op]:
                users[filled[source]] = node[op]
                filled[source] += 1
    ready, ordered, seen = np.empty(count, np.int64), 0, 0
    for i in range(count):
        if waiting[i] == 0:
            ready[ordered] = i
            ordered += 1
    while seen < ordered:
        for k in range(ptr[ready[seen]], ptr[ready[seen] + 1]):
            waiting[users[k]] -= 1
            if waiting[users[k]] == 0:
                ready[ordered] = users[k]
                ordered += 1
        seen += 1
    return ordered
