"""Which ops to fuse, and that prices do not depend on what was asked before."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from compute_graphs import RECORDED, Factor, layered, space_of
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.collect.trace import Floats
from dpro_search.graph.dataflow import DataflowGraph
from dpro_search.space.plan import Plan
from dpro_search.space.transformations import horovod_facts
from dpro_search.space.transformations.compute import ComputeGraph, transformed
from dpro_search.space.transformations.fusing import Step, fused
from dpro_search.space.transformations.op_fusion import OpFusion
from dpro_search.space.transformations.precision import Precision

GRAPH = layered(3, work_us=[100, 200, 300, 40, 50, 60, 70, 80, 90])  # f0 f1 f2 b2 w2 b1 w1 b0 w0


def labels_of(compute: ComputeGraph, clusters: list[set[str]]) -> np.ndarray:
    labels, ranks = np.full(len(compute.graph), -1), compute.graph.ranks
    for number, cluster in enumerate(clusters):
        for name in cluster:
            labels[list(compute.ops[name])] = number * ranks + np.arange(ranks)
    return labels


@given(layers=st.integers(1, 5), ranks=st.integers(1, 3), data=st.data())
@settings(max_examples=60, deadline=None)
def test_fusing_step_by_step_keeps_an_order_wherever_there_is_one(layers: int, ranks: int, data: st.DataObject) -> None:
    """Any ops, communication included: a step is refused exactly if no order runs each cluster at one time."""
    compute = ComputeGraph(layered(layers, ranks=ranks))
    contraction, clusters = compute.contraction(), [{name} for name in compute.ops]
    for _ in range(12):
        chosen = data.draw(st.sets(st.sampled_from(sorted(compute.ops)), min_size=2, max_size=4))
        touched = [cluster for cluster in clusters if cluster & chosen]
        tried = [*(cluster for cluster in clusters if not cluster & chosen), set().union(*touched)]
        members = np.array([compute.ops[name] for name in sorted(chosen)]).T
        possible = contraction.fuse(members)
        assert possible == compute.is_acyclic_with(labels_of(compute, tried))
        if possible:
            clusters = tried


class Steps:
    """What parts cost: by how many ops they have."""

    def __init__(self, graph: DataflowGraph, us: dict[int, float]) -> None:
        self.compute = ComputeGraph(graph)
        self.us = us

    def fused(self, slacks_us: list[float]) -> list[tuple[str, ...]]:
        users = {name: [] for name in self.compute.ops if name[0] in "fbw"}
        for name, ops in self.compute.ops.items():
            for user in self.compute.users(ops[0]).tolist():
                other = self.compute.graph.op_name[user]
                if name in users and other in users:
                    users[name].append(other)
                    users[other].append(name)
        place = {name: ops[0] for name, ops in self.compute.ops.items()}
        step = Step(self.compute, users, lambda parts: [self.us.get(len(part), float("nan")) for part in parts], place)
        return fused(step, slacks_us)


def test_a_step_that_does_not_pay_may_lead_to_one_that_does() -> None:
    steps = Steps(GRAPH, {1: 10.0, 2: 21.0, 3: 12.0})
    assert steps.fused([0.0]) == []
    assert sorted(map(len, steps.fused([0.0, 2.0])))[-1] == 3


def test_what_did_not_pay_in_the_end_is_taken_back() -> None:
    assert Steps(GRAPH, {1: 10.0, 2: 21.0, 3: 31.0}).fused([5.0]) == []


@given(layers=st.integers(1, 6), seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_clusters_can_all_run_at_one_time_and_are_no_worse_than_ops_by_themselves(layers: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    us = {size: float(rng.uniform(5, 15) * (1 if size == 1 else size**0.7)) for size in range(1, 7)}
    steps = Steps(layered(layers), us)
    fused_ops = steps.fused([0.0, 3.0])
    assert steps.compute.is_acyclic_with(labels_of(steps.compute, [set(cluster) for cluster in fused_ops]))
    assert sum(us[len(cluster)] for cluster in fused_ops) <= us[1] * sum(map(len, fused_ops)) + 1e-6


def test_an_op_is_fused_or_computes_in_bfloat16_whichever_saves_more() -> None:
    class Dear(Factor):
        """Clusters with w2, whose bfloat16 is worth more, save next to nothing."""

        def times(self, clusters: list[tuple[str, ...]]) -> SimpleNamespace:
            times = super().times(clusters)
            times.us = np.where(["w2" in cluster for cluster in clusters], times.members_us * 0.95, times.us)
            return times

    facts, compute = horovod_facts(GRAPH.tensors, RECORDED), ComputeGraph(GRAPH)
    precision = Precision(facts, compute, Factor(GRAPH, 0.6))
    both = OpFusion(facts, compute, Dear(GRAPH, 0.5), precision).suggested(Plan(bfloat16_ops=("f1",)), {})
    assert both is not None
    inside = {name for cluster in both.op_clusters or () for name in cluster}
    assert {"f1", "f2"} <= inside
    assert both.bfloat16_ops is not None
    assert "w2" in both.bfloat16_ops
    assert not inside.intersection(both.bfloat16_ops)
    kept = OpFusion(facts, compute, Dear(GRAPH, 0.5), precision).suggested(Plan(recomputed_ops=("f1",)), {})
    assert kept is not None
    assert not any("f1" in cluster for cluster in kept.op_clusters or ())
    assert "f1" not in (kept.bfloat16_ops or ())


def plainly(graph: DataflowGraph, plan: Plan, factor: float) -> tuple[Floats, float]:
    """Work of all ops under clusters and bfloat16 op by op, and the doubt."""
    work_us, uncertainty_us = graph.op_work_us.copy(), 0.0
    model = Factor(graph, factor)
    numbers = {(name, int(rank)): op for op, (name, rank) in enumerate(zip(graph.op_name, graph.op_rank, strict=True))}
    for cluster in plan.op_clusters or ():
        price = model.times([cluster])
        for rank in range(graph.ranks):
            ops = [numbers[name, rank] for name in cluster]
            total_us = work_us[:, ops].sum(axis=1)
            work_us[:, ops] = 0.0
            work_us[:, ops[0]] = total_us * (price.us[0] / price.members_us[0])
        uncertainty_us += float(price.high_us[0] - price.low_us[0]) / 2
    for name in plan.bfloat16_ops or ():
        ops = [numbers[name, rank] for rank in range(graph.ranks)]
        mean_us = float(work_us[:, ops].mean())
        low, high = factor - 0.1, factor + 0.1
        work_us[:, ops] *= factor
        uncertainty_us += mean_us * (high - low) / 2
    return work_us, uncertainty_us


@given(layers=st.integers(1, 6), seed=st.integers(0, 1000), moves=st.integers(1, 15))
@settings(max_examples=30, deadline=None)
def test_prices_are_those_of_one_op_after_the_other_to_the_last_bit(layers: int, seed: int, moves: int) -> None:
    rng = np.random.default_rng(seed)
    graph = layered(layers)
    graph = replace(graph, op_work_us=graph.op_work_us * rng.uniform(0.5, 1.5, graph.op_work_us.shape))
    compute, space = space_of(graph, factor=0.7)
    plan = Plan()
    for _ in range(moves):
        moved = space.propose(plan, rng)
        plan = Plan(op_clusters=moved.op_clusters, bfloat16_ops=moved.bfloat16_ops)
        changed_job, uncertainty_us = transformed(compute, plan, space.transformations)
        work_us, plain_uncertainty_us = plainly(graph, plan, 0.7)
        np.testing.assert_array_equal(changed_job.op_work_us, work_us)
        assert uncertainty_us == pytest.approx(plain_uncertainty_us, rel=1e-12)
        compute_afresh, space_afresh = space_of(graph, factor=0.7)
        afresh, _ = transformed(compute_afresh, plan, space_afresh.transformations)
        for one, other in zip(changed_job.profiles, afresh.profiles, strict=True):
            np.testing.assert_array_equal(one.post_us, other.post_us)
            np.testing.assert_array_equal(one.main_us, other.main_us)
