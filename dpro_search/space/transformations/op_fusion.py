"""Op fusion: ops that a compiler turns into one, as clusters that are the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from dpro_search.collect.trace import Floats, Ints
from dpro_search.costmodel.fused.op_classes import OTHER, kind_of
from dpro_search.graph.dataflow import OpKind
from dpro_search.space.plan import Plan
from dpro_search.space.transformations._base import PlanningFacts
from dpro_search.space.transformations.compute import ComputeChange, ComputeGraph, ComputeTransformation
from dpro_search.space.transformations.fusing import Step, fused

if TYPE_CHECKING:
    from dpro_search.costmodel.fused.clusters import ClusterTimes
    from dpro_search.space.transformations.precision import Precision

Clusters = tuple[tuple[str, ...], ...]

_NOT_FUSED = (OTHER, "variable", "gather")  # what XLA does not compile, or what writes a variable
_ATTEMPTS = 8
_SLACK_LAUNCHES = (0, 0.25, 1)  # what a step of `suggested` may cost at first, in what a launch takes
_SHRINK_SHARE = 0.3  # of the moves make clusters smaller
_REMEMBERED = 256  # plans' clusters that were looked at for cycles, and suggestions
_COSTLY_SHARE = 0.1  # of the moves to clusters that take longer than their ops are proposed: a larger one may pay


class ClusterPrices(Protocol):
    """Predicts the duration of fused clusters, as `costmodel.fused.clusters.ClusterCosts` does."""

    def times(self, clusters: Sequence[Sequence[str]]) -> ClusterTimes:
        """Predictions of clusters, each the names of its ops."""


class _Price(NamedTuple):
    us: float
    half_width_us: float
    members_us: float


class _Fused(NamedTuple):
    """A cluster's ops on all ranks, [ranks, ops], and what it takes there, [samples, ranks]."""

    ops: Ints
    us: Floats


class OpFusion(ComputeTransformation):
    """Convex clusters of forward and backward ops; each takes what the cost model says, and all its results come when it ends."""

    name = "op-fusion"
    fields = ("op_clusters",)
    weight = 4.0

    def __init__(
        self, job: PlanningFacts, compute: ComputeGraph, prices: ClusterPrices, precision: Precision | None = None
    ) -> None:
        """`precision`: the other thing that may be done to an op, where plans may do it."""
        super().__init__(job, compute)
        self._prices = prices
        self._precision = precision
        self._known: dict[tuple[str, ...], _Price] = {}
        self._fused: dict[tuple[str, ...], _Fused] = {}
        self._refusals: dict[tuple[str, ...], str | None] = {}
        self._ordered_before: dict[Clusters, bool] = {}
        self._suggestions: dict[tuple[frozenset[str], frozenset[tuple[str, float]]], tuple[Clusters, tuple[str, ...]]] = {}
        graph = compute.graph
        first = {name: ops[0] for name, ops in compute.ops.items()}
        self._place = first
        self._work_us = dict(zip(first, np.median(graph.op_work_us, axis=0)[list(first.values())].tolist(), strict=True))
        self._due = dict(zip(first, compute.due[list(first.values())].tolist(), strict=True))
        self._fusible = tuple(name for name in compute.ops if self._not_fusible(name) is None)
        fusible = set(self._fusible)
        # Of each fusible op, those that use its result on rank 0: the edges that a move may fuse along.
        self._users = {
            name: tuple(dict.fromkeys(user for op in compute.users(compute.ops[name][0]) if (user := graph.op_name[op]) in fusible))
            for name in self._fusible
        }
        self._sources = tuple(name for name in self._fusible if self._users[name])
        self._beside = {name: list(users) for name, users in self._users.items()}
        for name, users in self._users.items():
            for user in users:
                self._beside[user].append(name)
        names = [tensor.name for tensor in graph.tensors]
        self._tensor_at = [*(names[tensor] for tensor in np.argsort(compute.place[0]).tolist()), ""]  # by place of its post

    def legal(self, plan: Plan) -> str | None:
        clusters = plan.op_clusters or ()
        if not clusters:
            return None
        other = dict.fromkeys(plan.bfloat16_ops or (), "computes in bfloat16")
        other |= dict.fromkeys(plan.recomputed_ops or (), "is recomputed")
        for cluster in clusters:
            reason = self._refusal(cluster)
            if reason is None and not other.keys().isdisjoint(cluster):
                clash = next(name for name in cluster if name in other)
                reason = f"op '{clash}' is in a cluster and {other[clash]}: what such a cluster takes is not known"
            if reason is not None:
                return reason
        if not self._has_order(clusters):
            twisted = next((c for c in clusters if not self.compute.is_acyclic_with(self._labels((c,)))), None)
            if twisted is None:
                return "clusters need each other's results: no order runs each of them at one time"
            return f"the cluster of '{twisted[0]}' is not convex: an op outside of it needs one of its ops and is needed by another"
        self._price_all(clusters)
        unknown = next((cluster for cluster in clusters if math.isnan(self._known[cluster].us)), None)
        return None if unknown is None else f"no cost model can say what the cluster of '{unknown[0]}' takes"

    def propose(self, plan: Plan, rng: np.random.Generator, hot: Mapping[str, float]) -> Plan:
        clusters = plan.op_clusters or ()
        for _ in range(_ATTEMPTS):
            if clusters and rng.random() < _SHRINK_SHARE:
                moved = self._smaller(clusters, rng)
            elif self._sources:
                moved = self._larger(clusters, rng)
            else:
                break
            candidate = plan.changed(op_clusters=moved or None)
            costly = any(price.us > price.members_us for price in map(self._price, set(moved).difference(clusters)))
            if costly and rng.random() >= _COSTLY_SHARE:
                continue
            if moved != clusters and self.legal(candidate) is None:
                return candidate
        return plan

    def suggested(self, plan: Plan, delay_us: Mapping[str, float]) -> Plan | None:
        """The clusters that the cost model says are best, and bfloat16 where an op is faster with that by itself.

        Theorem 1 of dPRO, corrected: where an earlier gradient waits for the fused op, fusing must save more than that costs: at
        most the gradient's collective, and at most the work that now comes before it.
        """
        kept = frozenset(plan.recomputed_ops or ())
        key = kept, frozenset(delay_us.items())
        if key not in self._suggestions:
            if len(self._suggestions) > _REMEMBERED:
                self._suggestions.clear()
            self._suggestions[key] = self._best(kept, delay_us)
        clusters, alone = self._suggestions[key]
        suggestion = plan.changed(op_clusters=clusters or None)
        if self._precision is not None:
            suggestion = suggestion.changed(bfloat16_ops=alone or None)
        return suggestion if suggestion != plan and self.legal(suggestion) is None else None

    def _best(self, kept: frozenset[str], delay_us: Mapping[str, float]) -> tuple[Clusters, tuple[str, ...]]:
        """Clusters without some ops, and the ops outside of them that are faster in bfloat16."""
        bfloat16_us = {} if self._precision is None else self._precision.gaining_us(self._work_us, kept)
        alone_us = self._work_us | bfloat16_us

        def costs_us(parts: Sequence[tuple[str, ...]]) -> list[float]:
            self._price_all([part for part in parts if len(part) > 1])
            return [self._known[part].us + self._delay_us(part, delay_us) if len(part) > 1 else alone_us[part[0]] for part in parts]

        free = self._beside.keys() - kept
        beside = {name: [other for other in others if other in free] for name, others in self._beside.items() if name in free}
        clusters = fused(Step(self.compute, beside, costs_us, self._place), [n * self.compute.launch_us for n in _SLACK_LAUNCHES])
        inside = {name for cluster in clusters for name in cluster}
        return self._canonical(clusters), self._ordered(bfloat16_us.keys() - inside)

    def simplest(self, plan: Plan) -> Plan:
        if plan.op_clusters is None:
            return plan
        return plan.changed(op_clusters=self._canonical(plan.op_clusters) or None)

    def apply(self, change: ComputeChange, plan: Plan) -> None:
        clusters = plan.op_clusters or ()
        if not clusters:
            return
        self._price_all(clusters)
        fused = [self._taken(cluster) for cluster in clusters]
        change.work_us[:, np.concatenate([one.ops.ravel() for one in fused])] = 0.0
        change.work_us[:, np.concatenate([one.ops[:, 0] for one in fused])] = np.concatenate([one.us for one in fused], axis=1)
        change.cluster[:] = self._labels(clusters)
        for cluster in clusters:
            change.uncertainty_us += self._known[cluster].half_width_us

    def _taken(self, cluster: tuple[str, ...]) -> _Fused:
        """No other change of a legal plan touches the ops of a cluster, so that its work is the recorded one's share."""
        if cluster not in self._fused:
            ops, price = self._ops(cluster), self._known[cluster]
            work_us = [self.compute.graph.op_work_us[:, ops_of_rank].sum(axis=1) for ops_of_rank in ops.tolist()]
            self._fused[cluster] = _Fused(ops, np.stack(work_us, axis=1) * (price.us / price.members_us))
        return self._fused[cluster]

    def _ops(self, cluster: Sequence[str]) -> Ints:
        """A cluster's ops, [ranks, ops]."""
        return np.array([self.compute.ops[name] for name in cluster], dtype=np.int64).T

    def _has_order(self, clusters: Clusters) -> bool:
        """Whether there is an order that runs each cluster at one time; plans are asked about as they are proposed and priced."""
        if clusters not in self._ordered_before:
            if len(self._ordered_before) > _REMEMBERED:
                self._ordered_before.clear()
            self._ordered_before[clusters] = self.compute.is_acyclic_with(self._labels(clusters))
        return self._ordered_before[clusters]

    def _refusal(self, cluster: tuple[str, ...]) -> str | None:
        """Why a cluster cannot be, whatever else a plan says."""
        if cluster not in self._refusals:
            reason = self.unknown_op(cluster)
            if reason is None and len(cluster) < 2:
                reason = f"the cluster of '{cluster[0]}' has one op: there is nothing to fuse"
            reasons = (self._not_fusible(name) for name in cluster)
            self._refusals[cluster] = reason or next((why for why in reasons if why is not None), None)
        return self._refusals[cluster]

    def _not_fusible(self, name: str) -> str | None:
        kind = self.kind(name)
        if why := self.not_in_the_step(name):
            return why
        if kind not in (OpKind.FORWARD, OpKind.BACKWARD):
            return f"op '{name}' is of kind {kind.name}: only forward and backward ops are fused"
        if kind_of(self.type(name)) in _NOT_FUSED:
            return f"op '{name}' of type {self.type(name)} cannot be fused"
        return None

    def _price_all(self, clusters: Sequence[tuple[str, ...]]) -> None:
        """Predict many clusters at a time, which takes little longer than one."""
        new = [cluster for cluster in dict.fromkeys(clusters) if cluster not in self._known]
        if not new:
            return
        times = self._prices.times(new)
        rows = zip(new, times.us.tolist(), times.low_us.tolist(), times.high_us.tolist(), times.members_us.tolist(), strict=True)
        for cluster, us, low_us, high_us, members_us in rows:
            self._known[cluster] = _Price(us if members_us > 0 else math.nan, (high_us - low_us) / 2, members_us)

    def _price(self, cluster: tuple[str, ...]) -> _Price:
        self._price_all([cluster])
        return self._known[cluster]

    def _delay_us(self, cluster: tuple[str, ...], delay_us: Mapping[str, float]) -> float:
        """Upper bound of the cost when the first gradient that needs an op of a cluster waits for the whole cluster."""
        first = min(self._due[name] for name in cluster)
        pulled_us = sum(self._work_us[name] for name in cluster if self._due[name] > first)
        return min(pulled_us, delay_us.get(self._tensor_at[first], 0.0)) if pulled_us else 0.0

    def _labels(self, clusters: Sequence[tuple[str, ...]]) -> Ints:
        """Number of the cluster of each op on its rank, -1: none, [ops]."""
        ranks = self.compute.graph.ranks
        labels = np.full(len(self.compute.graph), -1, dtype=np.int64)
        if clusters:
            ops = np.array([self.compute.ops[name] for cluster in clusters for name in cluster])
            number = np.repeat(np.arange(len(clusters)), [len(cluster) for cluster in clusters])
            labels[ops] = number[:, None] * ranks + np.arange(ranks)
        return labels

    def _canonical(self, clusters: Sequence[Sequence[str]]) -> Clusters:
        """The one spelling of clusters: ops in the order of the graph, clusters by their first."""
        place = self._place
        if any(name not in place for cluster in clusters for name in cluster):
            return tuple(map(tuple, clusters))  # illegal anyway
        inside = (self._ordered(cluster) for cluster in clusters if cluster)
        return tuple(sorted(inside, key=lambda cluster: place[cluster[0]]))

    def _ordered(self, cluster: Iterable[str]) -> tuple[str, ...]:
        """A cluster's ops in the order of the graph."""
        return tuple(sorted(cluster, key=self._place.__getitem__))

    def _larger(self, clusters: Clusters, rng: np.random.Generator) -> Clusters:
        """Fuse an op with one that uses its result, and the clusters that they are in."""
        source = self._sources[rng.integers(len(self._sources))]
        user = self._users[source][rng.integers(len(self._users[source]))]
        touched = [cluster for cluster in clusters if source in cluster or user in cluster]
        fused = {source, user}.union(*touched)
        return self._canonical([*(cluster for cluster in clusters if cluster not in touched), tuple(fused)])

    def _smaller(self, clusters: Clusters, rng: np.random.Generator) -> Clusters:
        """Take an op out of a cluster, or dissolve the cluster."""
        number = int(rng.integers(len(clusters)))
        chosen = clusters[number]
        rest = (*clusters[:number], *clusters[number + 1 :])
        if len(chosen) == 2 or rng.random() < 0.5:
            return rest
        out = int(rng.integers(len(chosen)))
        return self._canonical([*rest, (*chosen[:out], *chosen[out + 1 :])])
