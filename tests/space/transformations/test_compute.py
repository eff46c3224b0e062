"""What plans do to a step's compute: posts, work, bytes; and why some plans are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compute_graphs import layered, space_of
from hypothesis import given, settings
from hypothesis import strategies as st
from small_steps import floats, step

from dpro_search.graph.build import validate
from dpro_search.graph.dataflow import DataflowGraph, OpKind
from dpro_search.space.plan import Plan
from dpro_search.space.transformations.compute import ComputeGraph, transformed
from dpro_search.space.transformations.op_fusion import OpFusion


def under(plan: Plan, graph: DataflowGraph, factor: float = 0.5) -> DataflowGraph:
    compute, space = space_of(graph, factor=factor)
    space.check(plan)
    return transformed(compute, plan, space.transformations)[0]


def posts(graph: DataflowGraph) -> list[float]:
    return graph.profiles[0].post_us[0].tolist()


def main_us(graph: DataflowGraph) -> float:
    return float(graph.profiles[0].main_us[0])


GRAPH = layered(3, work_us=[100, 200, 300, 40, 50, 60, 70, 80, 90])  # f0 f1 f2 b2 w2 b1 w1 b0 w0


def test_the_empty_plan_is_the_recorded_step() -> None:
    compute, space = space_of(GRAPH)
    assert transformed(compute, Plan(), space.transformations) == (GRAPH, 0.0)
    rebuilt = compute.rebuilt(compute.unchanged())
    for one, other in zip(rebuilt.profiles, GRAPH.profiles, strict=True):
        np.testing.assert_array_equal(one.post_us, other.post_us)
        np.testing.assert_array_equal(one.main_us, other.main_us)


def test_an_op_is_due_by_the_first_post_that_needs_it() -> None:
    compute = ComputeGraph(GRAPH)
    due = {name: int(compute.due[ops[0]]) for name, ops in compute.ops.items()}
    assert due | {"c0": 0, "c1": 0, "c2": 0} == {
        "f0": 0, "f1": 0, "f2": 0, "b2": 0, "w2": 0, "b1": 1, "w1": 1, "b0": 2, "w0": 2,
        "c0": 0, "c1": 0, "c2": 0, "u0": 3, "u1": 3, "u2": 3,
    }  # fmt: skip


class TestPrecision:
    def test_a_faster_op_moves_its_post_and_all_later_ones(self) -> None:
        changed = under(Plan(bfloat16_ops=("w1",)), GRAPH)
        assert posts(changed) == [690, 820 - 35, 990 - 35]
        assert main_us(changed) == 990 - 35

    def test_casts_take_time_of_their_own_beside_the_ops_that_need_them(self) -> None:
        """f1 reads the 1,000 numbers of f0, and f2 needs the 500 that f1 makes: 15 us at 0.01 us each, and half of 200 us less."""
        types = {"x": floats(2, 10), "f0": floats(2, 500), "f1": floats(2, 250), "f2": floats(2, 10)}
        nodes = [("x", "_Arg", ""), ("f0", "MatMul", "x"), ("f1", "MatMul", "f0"), ("f2", "MatMul", "f1"), ("end", "NoOp", "f2")]
        changed = under(Plan(bfloat16_ops=("f1",)), replace(GRAPH, memory=step(nodes, types)))
        assert main_us(changed) == pytest.approx(990 - 100 + 15)

    @pytest.mark.parametrize(
        ("op", "why"),
        [
            ("u0", "op 'u0' is of kind UPDATE: only forward and backward ops change precision"),
            ("b0", "what ReluGrad takes in bfloat16 was not measured"),
            ("nothing", "the trace has no op 'nothing' on every rank"),
        ],
    )
    def test_what_cannot_be_is_refused_with_the_reason(self, op: str, why: str) -> None:
        assert why in str(space_of(GRAPH)[1].refusal(Plan(bfloat16_ops=(op,))))

    def test_types_that_are_not_safe_stay_in_float32(self) -> None:
        types = tuple("Softmax" if name.startswith("f2") else kind for name, kind in zip(GRAPH.op_name, GRAPH.op_type, strict=True))
        assert "Softmax is not safe" in str(space_of(replace(GRAPH, op_type=types))[1].refusal(Plan(bfloat16_ops=("f2",))))


class TestOpFusion:
    def test_a_cluster_takes_what_the_model_says_on_every_rank(self) -> None:
        changed = under(Plan(op_clusters=(("f0", "f1"),)), GRAPH)
        assert posts(changed) == [690 - 150, 820 - 150, 990 - 150]
        assert [float(profile.main_us[0]) for profile in changed.profiles] == [990 - 150] * 2

    def test_results_come_when_the_whole_cluster_has_ended(self) -> None:
        """w2 and w0 at one time: the first gradient waits for all that the last one needs."""
        changed = under(Plan(op_clusters=(("w2", "w0"),)), GRAPH, factor=1.0)
        assert main_us(changed) == 990
        assert posts(changed) == [990 - 70, 990, 990], "all but w1 is done before the first post"

    @pytest.mark.parametrize(
        ("clusters", "why"),
        [
            ((("b2", "b0"),), "the cluster of 'b2' is not convex"),
            ((("f0", "b1"), ("f1", "b2")), "not convex"),
            ((("f0",),), "there is nothing to fuse"),
            ((("w0", "u0"),), "op 'u0' is of kind UPDATE"),
            ((("f0", "c0"),), "op 'c0' is of kind COMM"),
        ],
    )
    def test_what_cannot_be_is_refused_with_the_reason(self, clusters: tuple[tuple[str, ...], ...], why: str) -> None:
        assert why in str(space_of(GRAPH)[1].refusal(Plan(op_clusters=clusters)))

    def test_an_op_has_one_change_at_a_time(self) -> None:
        space = space_of(GRAPH)[1]
        cluster = (("f0", "f1"),)
        assert "is in a cluster and computes in bfloat16" in str(space.refusal(Plan(op_clusters=cluster, bfloat16_ops=("f1",))))
        assert "is in a cluster and is recomputed" in str(space.refusal(Plan(op_clusters=cluster, recomputed_ops=("f1",))))
        assert "is recomputed" in str(space.refusal(Plan(bfloat16_ops=("f1",), recomputed_ops=("f1",))))

    def test_what_the_model_does_not_know_is_doubt(self) -> None:
        compute, space = space_of(GRAPH)
        plan = Plan(op_clusters=(("f0", "f1"),))
        assert transformed(compute, plan, space.transformations)[1] == pytest.approx(0.1 * 300, rel=0.02)

    def test_ops_are_fused_wherever_the_model_says_that_it_pays(self) -> None:
        space = space_of(GRAPH)[1]
        (fusion,) = (t for t in space.transformations if isinstance(t, OpFusion))
        suggestion = fusion.suggested(Plan(), {})
        assert suggestion is not None
        assert space.refusal(suggestion) is None
        assert main_us(under(suggestion, GRAPH)) < 0.6 * main_us(GRAPH)
        (costly,) = (t for t in space_of(GRAPH, factor=1.2)[1].transformations if isinstance(t, OpFusion))
        assert costly.suggested(Plan(), {}) is None

    def test_unless_an_earlier_gradient_would_wait_for_longer_than_that(self) -> None:
        """b2 is all that the first gradient needs of the backward pass: fused, b1 would come before it as well."""
        graph = layered(3, work_us=[100, 200, 300, 400, 5, 410, 5, 8, 9])
        space = space_of(graph)[1]
        (fusion,) = (t for t in space.transformations if isinstance(t, OpFusion))
        free, dear = (fusion.suggested(Plan(), {"t2": us, "t1": us}) for us in (0.0, 1e9))
        assert free is not None
        assert dear is not None
        together = [{"b2", "b1"} <= set(cluster) for cluster in free.op_clusters or ()]
        assert any(together)
        assert not any({"b2", "b1"} <= set(cluster) for cluster in dear.op_clusters or ())


def test_a_recomputed_op_runs_again_before_the_backward_op_that_needs_it() -> None:
    changed = under(Plan(recomputed_ops=("f0", "f1")), GRAPH)
    # f1 is needed by b1, and so is f0's second result, from which f1 is computed: both before the second post.
    assert posts(changed) == [690, 820 + 300, 990 + 300]


def test_an_op_that_draws_numbers_is_not_recomputed() -> None:
    types = tuple("RandomUniform" if name == "f1" else kind for name, kind in zip(GRAPH.op_name, GRAPH.op_type, strict=True))
    assert "would draw other numbers" in str(space_of(replace(GRAPH, op_type=types))[1].refusal(Plan(recomputed_ops=("f1",))))


def test_an_op_that_no_gradient_needs_is_not_recomputed() -> None:
    """An update is told to be a product of the forward pass, like a step's counter: it follows all gradients."""
    late = [op for op, name in enumerate(GRAPH.op_name) if name == "u2"]
    kinds, types = GRAPH.op_kind.copy(), list(GRAPH.op_type)
    for op in late:
        kinds[op], types[op] = OpKind.FORWARD, "Mul"
    graph = replace(GRAPH, op_kind=kinds, op_type=tuple(types))
    assert "no gradient needs it" in str(space_of(graph)[1].refusal(Plan(recomputed_ops=("u2",))))


@pytest.mark.parametrize("field", ["op_clusters", "bfloat16_ops", "recomputed_ops"])
def test_what_the_optimizer_made_at_run_time_cannot_be_told_to_a_job(field: str) -> None:
    made = "encoder/ArithmeticOptimizer/AddOpsRewrite_add_1"
    names = tuple(made if name == "f1" else name for name in GRAPH.op_name)
    ops = (("f0", made),) if field == "op_clusters" else (made,)
    assert "made by TensorFlow's optimizer" in str(space_of(replace(GRAPH, op_name=names))[1].refusal(Plan.of(**{field: ops})))


class TestAccumulation:
    def test_gradients_are_posted_in_the_last_part(self) -> None:
        changed = under(Plan(micro_batches=2), GRAPH)
        assert main_us(changed) >= main_us(GRAPH), "what does not shrink with the batch is there twice"
        assert posts(changed)[0] > main_us(changed) / 2
        assert posts(changed) == sorted(posts(changed))
        assert posts(changed)[-1] == pytest.approx(main_us(changed))

    def test_smaller_batches_change_what_batch_normalisation_computes(self) -> None:
        types = tuple("FusedBatchNormV3" if name == "f1" else kind for name, kind in zip(GRAPH.op_name, GRAPH.op_type, strict=True))
        graph = replace(GRAPH, op_type=types)
        assert "only with --allow-lossy" in str(space_of(graph, lossy=False)[1].refusal(Plan(micro_batches=2)))
        assert space_of(graph, lossy=True)[1].refusal(Plan(micro_batches=2)) is None


class TestCompression:
    def test_half_the_bytes_for_two_casts(self) -> None:
        changed = under(Plan(compression="fp16"), GRAPH)
        assert [tensor.size_bytes for tensor in changed.tensors] == [tensor.size_bytes // 2 for tensor in GRAPH.tensors]
        assert main_us(changed) == pytest.approx(990 + 0.001 * 24_000)
        assert sum(float(r.work_us[0]) for r in changed.profiles[0].releases) == pytest.approx(60 + 0.001 * 24_000)

    def test_it_is_for_who_allows_it(self) -> None:
        assert "changes the numbers" in str(space_of(GRAPH, lossy=False)[1].refusal(Plan(compression="fp16")))
        assert "has fp16" in str(space_of(GRAPH)[1].refusal(Plan(compression="2bit")))


@given(layers=st.integers(1, 6), seed=st.integers(0, 10_000), moves=st.integers(1, 25), factor=st.sampled_from([0.3, 1.0, 1.7]))
@settings(max_examples=40, deadline=None)
def test_whatever_moves_lead_to_is_legal_and_keeps_the_graph_valid(layers: int, seed: int, moves: int, factor: float) -> None:
    rng = np.random.default_rng(seed)
    graph = layered(layers)
    compute, space = space_of(graph, factor=factor)
    plan = Plan()
    for _ in range(moves):
        plan = space.propose(plan, rng)
    assert space.refusal(plan) is None
    simplest = space.simplest(plan)
    assert space.refusal(simplest) is None
    assert space.simplest(simplest) == simplest
    changed, uncertainty_us = transformed(compute, plan, space.transformations)
    validate(changed)
    assert uncertainty_us >= 0
    for profile in changed.profiles:
        assert (profile.post_us >= 0).all()
        assert (profile.post_us <= profile.main_us[:, None] + 1e-6).all()
    assert (changed.op_work_us >= 0).all()


@given(layers=st.integers(1, 6), seed=st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_clusters_that_save_nothing_only_move_posts(layers: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = layered(layers)
    compute, space = space_of(graph, factor=1.0)
    (fusion,) = (t for t in space.transformations if isinstance(t, OpFusion))
    plan = Plan()
    for _ in range(10):
        plan = fusion.propose(plan, rng, {})
    changed, _ = transformed(compute, plan, space.transformations)
    for one, other in zip(changed.profiles, graph.profiles, strict=True):
        np.testing.assert_allclose(one.main_us, other.main_us)
        assert (one.post_us >= other.post_us - 1e-6).all(), "no gradient is ready earlier"
