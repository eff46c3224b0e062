"""Op fusion: ops that a compiler turns into one, as clusters that are the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import numpy as np

from dpro_search.collect.trace import Ints
from dpro_search.costmodel.learned.op_classes import OTHER, kind_of
from dpro_search.graph.dataflow import OpKind
from dpro_search.space.plan import Plan
from dpro_search.space.transformations._base import JobFacts
from dpro_search.space.transformations.compute import ComputeChange, ComputeGraph, ComputeTransformation

if TYPE_CHECKING:
    from dpro_search.costmodel.learned.clusters import ClusterTimes

Clusters = tuple[tuple[str, ...], ...]

_NOT_FUSED = (OTHER, "variable", "gather")  # what XLA does not compile, or what writes a variable
_ATTEMPTS = 8
_ROUNDS = 6  # of `suggested`: clusters of up to 2^6 ops
_SHRINK_SHARE = 0.3  # of the moves make clusters smaller
_COSTLY_SHARE = 0.1  # of the moves to clusters that take longer than their ops are proposed: a larger one may pay


class ClusterPrices(Protocol):
    """Says what clusters take; `costmodel.learned.clusters.ClusterCosts` does."""

    def times(self, clusters: Sequence[Sequence[str]]) -> ClusterTimes:
        """Predictions of clusters, each the names of its ops."""


class _Price(NamedTuple):
    us: float
    half_width_us: float
    members_us: float


class OpFusion(ComputeTransformation):
    """Convex clusters of forward and backward ops; each takes what the cost model says, and all its results come when it ends."""

    name = "op-fusion"
    fields = ("op_clusters",)
    weight = 4.0

    def __init__(self, job: JobFacts, compute: ComputeGraph, prices: ClusterPrices) -> None:
        super().__init__(job, compute)
        self._prices = prices
        self._known: dict[tuple[str, ...], _Price] = {}
        self._us = np.median(compute.graph.op_work_us, axis=0)
        graph = compute.graph
        self._fusible = tuple(name for name in compute.ops if self._not_fusible(name) is None)
        fusible = set(self._fusible)
        # Of each fusible op, those that use its result on rank 0: the edges that a move may fuse along.
        self._users = {
            name: tuple(dict.fromkeys(user for op in compute.users(compute.ops[name][0]) if (user := graph.op_name[op]) in fusible))
            for name in self._fusible
        }
        self._sources = tuple(name for name in self._fusible if self._users[name])
        names = [tensor.name for tensor in graph.tensors]
        self._tensor_at = [*(names[tensor] for tensor in np.argsort(compute.place[0]).tolist()), ""]  # by place of its post

    def legal(self, plan: Plan) -> str | None:
        clusters = plan.op_clusters or ()
        other = dict.fromkeys(plan.bfloat16_ops or (), "computes in bfloat16")
        other |= dict.fromkeys(plan.recomputed_ops or (), "is recomputed")
        for cluster in clusters:
            reason = self.unknown_op(cluster)
            if reason is None and len(cluster) < 2:
                reason = f"the cluster of '{cluster[0]}' has one op: there is nothing to fuse"
            reason = reason or next((why for name in cluster if (why := self._not_fusible(name)) is not None), None)
            clash = next((name for name in cluster if name in other), None)
            if reason is None and clash is not None:
                reason = f"op '{clash}' is in a cluster and {other[clash]}: what such a cluster takes is not known"
            if reason is not None:
                return reason
        if clusters and not self.compute.is_acyclic_with(self._labels(clusters)):
            twisted = next((c for c in clusters if not self.compute.is_acyclic_with(self._labels((c,)))), None)
            if twisted is None:
                return "clusters need each other's results: no order runs each of them at one time"
            return f"the cluster of '{twisted[0]}' is not convex: an op outside of it needs one of its ops and is needed by another"
        unknown = next((cluster for cluster in clusters if math.isnan(self._price(cluster).us)), None)
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
            candidate = msgspec.structs.replace(plan, op_clusters=moved or None)
            costly = any(price.us > price.members_us for price in map(self._price, set(moved).difference(clusters)))
            if costly and rng.random() >= _COSTLY_SHARE:
                continue
            if moved != clusters and self.legal(candidate) is None:
                return candidate
        return plan

    def suggested(self, plan: Plan, delay_us: Mapping[str, float]) -> Plan | None:
        """Fuse an op with one that uses its result wherever the model says that it pays, and go on with what came of it.

        Theorem 1 of dPRO, corrected: where an earlier gradient waits for the fused op, fusing must save more than that costs: at
        most the gradient's collective, and at most the work that now comes before it.
        """
        taken = {*(plan.bfloat16_ops or ()), *(plan.recomputed_ops or ())}
        clusters = list(plan.op_clusters or ())
        for _ in range(_ROUNDS):
            home = {name: cluster for cluster in clusters for name in cluster}
            pairs = {
                self._ordered({*one, *other}): (one, other)
                for source in self._sources
                for user in self._users[source]
                if not taken & {source, user} and (one := home.get(source, (source,))) != (other := home.get(user, (user,)))
            }
            self._price_all([*pairs, *clusters])
            gains = {
                fused: self._alone_us(one) + self._alone_us(other) - self._price(fused).us - self._delay_us(fused, delay_us)
                for fused, (one, other) in pairs.items()
            }
            best_first = sorted(
                (fused for fused, gain_us in gains.items() if gain_us > 0), key=lambda fused: (-gains[fused], fused)
            )
            fused_ops: set[str] = set()
            for fused in best_first:
                if fused_ops.isdisjoint(fused):
                    tried = [*(cluster for cluster in clusters if cluster not in pairs[fused]), fused]
                    if self.compute.is_acyclic_with(self._labels(tried)):
                        clusters = tried
                        fused_ops |= set(fused)
            if not fused_ops:
                break
        found = msgspec.structs.replace(plan, op_clusters=self._canonical(clusters) or None)
        return found if found != plan and self.legal(found) is None else None

    def simplest(self, plan: Plan) -> Plan:
        if plan.op_clusters is None:
            return plan
        return msgspec.structs.replace(plan, op_clusters=self._canonical(plan.op_clusters) or None)

    def apply(self, change: ComputeChange, plan: Plan) -> None:
        ranks = self.compute.graph.ranks
        for number, cluster in enumerate(plan.op_clusters or ()):
            price = self._price(cluster)
            ratio = price.us / price.members_us
            for rank in range(ranks):
                members = [self.compute.ops[name][rank] for name in cluster]
                work = change.work_us[:, members].sum(axis=1)
                change.work_us[:, members] = 0.0
                change.work_us[:, members[0]] = work * ratio
                change.cluster[members] = number * ranks + rank
            change.doubt_us += price.half_width_us

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
        """Ask for many prices at a time, which takes little longer than for one."""
        new = [cluster for cluster in dict.fromkeys(clusters) if cluster not in self._known]
        if not new:
            return
        found = self._prices.times(new)
        rows = zip(new, found.us.tolist(), found.low_us.tolist(), found.high_us.tolist(), found.members_us.tolist(), strict=True)
        for cluster, us, low_us, high_us, members_us in rows:
            self._known[cluster] = _Price(us if members_us > 0 else math.nan, (high_us - low_us) / 2, members_us)

    def _price(self, cluster: tuple[str, ...]) -> _Price:
        self._price_all([cluster])
        return self._known[cluster]

    def _alone_us(self, cluster: tuple[str, ...]) -> float:
        """What a cluster, or an op that is in none, takes on rank 0."""
        return self._price(cluster).us if len(cluster) > 1 else self._work_us(cluster[0])

    def _delay_us(self, cluster: tuple[str, ...], delay_us: Mapping[str, float]) -> float:
        """What it costs at most that the first gradient that needs an op of a cluster waits for all of it."""
        due = {name: int(self.compute.due[self.compute.ops[name][0]]) for name in cluster}
        first = min(due.values())
        pulled_us = sum(self._work_us(name) for name in cluster if due[name] > first)
        return min(pulled_us, delay_us.get(self._tensor_at[first], 0.0)) if pulled_us else 0.0

    def _work_us(self, name: str) -> float:
        return float(self._us[self.compute.ops[name][0]])

    def _labels(self, clusters: Sequence[tuple[str, ...]]) -> Ints:
        ranks = self.compute.graph.ranks
        labels = np.full(len(self.compute.graph), -1, dtype=np.int64)
        for number, cluster in enumerate(clusters):
            for name in cluster:
                labels[list(self.compute.ops[name])] = number * ranks + np.arange(ranks)
        return labels

    def _canonical(self, clusters: Sequence[Sequence[str]]) -> Clusters:
        """The one spelling of clusters: ops in the order of the graph, clusters by their first."""
        place = {name: self.compute.ops[name][0] for cluster in clusters for name in cluster if name in self.compute.ops}
        if any(name not in place for cluster in clusters for name in cluster):
            return tuple(map(tuple, clusters))  # illegal anyway
        inside = (self._ordered(cluster) for cluster in clusters if cluster)
        return tuple(sorted(inside, key=lambda cluster: place[cluster[0]]))

    def _ordered(self, cluster: Iterable[str]) -> tuple[str, ...]:
        """A cluster's ops in the order of the graph."""
        return tuple(sorted(cluster, key=lambda name: self.compute.ops[name][0]))

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
