"""A folded job has exactly the times of the whole one."""

import numpy as np
import pytest
from graphs import TIMES
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.errors import GraphError
from dpro_search.graph.dataflow import OpKind
from dpro_search.replay import replay
from dpro_search.replay.reference import replay_reference
from dpro_search.space.data_parallel import DataParallelJob, RankStep, layered_step
from dpro_search.space.data_parallel_graph import fold, rank_classes, whole_graph
from dpro_search.space.replay_graph import OrderPolicy
from tests.data_parallel_jobs import all_reduces, replicated

_TENSOR_BYTES = np.array([700.0, 1100.0, 300.0])
_POLICIES = (OrderPolicy.FIFO, OrderPolicy.PRIORITY, OrderPolicy.UNBOUNDED)
_DURATIONS_US = (0.0, 1.0, 2.5, 7.0 / 3.0)


def _random_step(seed):
    """A step on two devices whose first ops make gradients and whose last ops use them, with random dependencies."""
    rng = np.random.default_rng(seed)
    tensors = len(_TENSOR_BYTES)
    count = 2 * tensors
    edges = [(a, b) for a in range(count) for b in range(a + 1, count) if rng.random() < 0.25]
    return RankStep(
        duration_us=rng.choice(_DURATIONS_US, count),
        kind=np.repeat([int(OpKind.BACKWARD), int(OpKind.UPDATE)], tensors),
        device=rng.integers(0, 2, count),
        policy=rng.choice(_POLICIES, 2),
        tensor_bytes=_TENSOR_BYTES,
        edge_src=np.array([a for a, _ in edges], np.int64),
        edge_dst=np.array([b for _, b in edges], np.int64),
        maker_op=rng.integers(0, tensors, tensors),
        maker_tensor=np.arange(tensors),
        user_tensor=np.arange(tensors),
        user_op=np.append(rng.integers(tensors, count - 1, tensors - 1), count - 1),
        carry_src=np.array([count - 1]),
        carry_dst=np.array([0]),
    )


@st.composite
def _jobs(draw):
    """Small jobs whose ranks repeat a pattern of steps and speeds, so that some of them are alike."""
    ranks = draw(st.integers(1, 9))
    period = draw(st.sampled_from([p for p in range(1, 5) if ranks % p == 0]))

    def pattern(values):
        return np.resize(draw(st.lists(st.sampled_from(values), min_size=period, max_size=period)), ranks)

    steps = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=2))
    factor = pattern([1.0, 1.3])
    if draw(st.integers(0, 4)) == 4:  # a straggler
        factor = factor.copy()
        factor[draw(st.integers(0, ranks - 1))] = 2.0
    return DataParallelJob(
        steps=tuple(_random_step(seed) for seed in steps),
        step_of_rank=pattern(range(len(steps))).astype(np.int64),
        costs=all_reduces(latency_us=1.0, us_per_byte=0.01),
        groups=draw(st.sampled_from([((0,), (1,), (2,)), ((0, 1), (2,)), ((2, 0, 1),)])),
        compute_factor=factor,
    )


def _assert_equal(job, whole, whole_times, folded, folded_times, iterations=1):
    for rank in range(job.ranks):
        ops = np.flatnonzero(whole.rank_of_op == rank)
        class_ops = np.flatnonzero(folded.graph.rank_of_op == folded.rank_class[rank])
        assert [folded.graph.name(op).split("@")[0] for op in class_ops] == [whole.name(op).split("@")[0] for op in ops]
        for name in TIMES:
            expected, times = (getattr(each, name).reshape(iterations, -1) for each in (whole_times, folded_times))
            np.testing.assert_array_equal(times[:, class_ops], expected[:, ops])


@settings(max_examples=50, deadline=None)
@given(_jobs())
def test_folded_times_are_the_whole_jobs_in_one_iteration_and_in_several(job):
    whole, folded = whole_graph(job), fold(job)
    assert len(folded.graph) <= len(whole)
    assert folded.multiplicity.sum() == job.ranks
    _assert_equal(job, whole, replay_reference(whole), folded, replay_reference(folded.graph))
    times = [replay(graph, iterations=3).times for graph in (whole, folded.graph)]
    _assert_equal(job, whole, times[0], folded, times[1], iterations=3)


@settings(max_examples=25, deadline=None)
@given(_jobs())
def test_ranks_are_of_one_class_exactly_if_they_compute_alike(job):
    behaviour = list(zip(job.step_of_rank.tolist(), job.compute_factor.tolist(), strict=True))
    classes = rank_classes(job).tolist()
    assert len(set(zip(classes, behaviour, strict=True))) == len(set(classes)) == len(set(behaviour))


def _step(tensors=2):
    return layered_step(np.full(tensors, 1000.0), forward_us=5.0, backward_us=2.0, update_us=1.0)


def _factor(ranks, **slow):
    factor = np.ones(ranks)
    for rank, value in slow.items():
        factor[int(rank[1:])] = value
    return factor


def test_ranks_that_are_all_alike_fold_into_one():
    folded = fold(replicated(_step(), 8, all_reduces(us_per_byte=0.01)))
    assert folded.multiplicity.tolist() == [8]
    assert folded.graph.ranks == 1


def test_a_straggler_is_a_class_of_its_own():
    folded = fold(replicated(_step(), 8, all_reduces(us_per_byte=0.01), compute_factor=_factor(8, r3=2.0)))
    assert folded.rank_class.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    assert folded.representative.tolist() == [0, 3]


def test_a_job_that_does_not_fold_and_is_too_large_is_refused_with_advice():
    job = replicated(_step(161), 100_000, all_reduces(), compute_factor=np.linspace(1.0, 2.0, 100_000))
    with pytest.raises(GraphError, match=r"100000 ranks fold into 100000 classes.*fuse tensors"):
        fold(job)


def _large_step():
    """161 gradients of an uneven model."""
    rng = np.random.default_rng(161)
    return layered_step(
        rng.integers(1_000, 9_000_000, 161).astype(np.float64),
        forward_us=90_000.0,
        backward_us=rng.uniform(100.0, 3_000.0, 161),
        update_us=rng.uniform(5.0, 60.0, 161),
    )


def _handful(ranks):
    return np.random.default_rng(7).choice([0.9, 0.95, 1.0, 1.1], ranks)


@pytest.mark.parametrize(
    ("factor", "expected"),
    [(np.ones(10_240), 1), (_handful(10_240), 4), (_factor(10_240, r77=1.5), 2)],
    ids=["alike", "handful", "straggler"],
)
def test_10240_ranks_are_a_few_classes(factor, expected):
    job = replicated(_large_step(), 10_240, all_reduces(latency_us=60.0, us_per_byte=0.0017), compute_factor=factor)
    folded = fold(job)
    assert len(folded.multiplicity) == expected
    assert len(folded.graph) == expected * (1 + 4 * 161)
    timeline = replay(folded.graph)
    assert timeline.settled
    slowest = folded.rank_class[int(np.argmax(factor))]
    compute_us = _large_step().duration_us.sum() * factor.max()
    assert timeline.iteration_us >= compute_us * (1 - 1e-9)
    ends_us = timeline.times.end_us.reshape(timeline.iterations, -1)
    assert ends_us[:, folded.graph.rank_of_op == slowest].max() == ends_us.max()
