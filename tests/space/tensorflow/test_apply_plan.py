"""A plan on the sample's graph."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_apply import plain_apply
from sample import measured, sample

from dpro_search.errors import InputError
from dpro_search.replay.horovod.timeline import replay_horovod
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.plan import Plan
from dpro_search.space.tensorflow.apply_plan import apply
from dpro_search.space.tensorflow.fusion_moves import contiguous_groups, propose


def applied(plan: Plan, cluster: ClusterSpec | None = None):
    step = measured()
    return apply(plan, step.graph, step.costs, (sample().horovod_settings, step.cluster), cluster)


def test_the_empty_plan_is_the_recorded_setting():
    graph = applied(Plan())
    assert graph.units == len(sample().tensors)
    assert graph.fusion_threshold_bytes == sample().horovod_settings.fusion_threshold_bytes
    assert graph.cycle_us == sample().horovod_settings.cycle_time_us
    assert not graph.exact_groups


def test_knobs_are_taken_from_the_plan():
    graph = applied(Plan.of(fusion_threshold_bytes=0, cycle_time_us=5000.0))
    assert (graph.fusion_threshold_bytes, graph.cycle_us) == (0, 5000)


def test_a_group_is_posted_with_its_last_tensor():
    tensors = measured().graph.tensors
    single, grouped = applied(Plan()), applied(Plan(tensor_groups=(tuple(t.name for t in tensors),)))
    assert grouped.units == 1
    np.testing.assert_allclose(grouped.post_us[:, :, 0], single.post_us.max(axis=2))


def test_a_tensor_in_no_group_goes_alone():
    names = [tensor.name for tensor in measured().graph.tensors]
    graph = applied(Plan(tensor_groups=((names[0], names[1]),)))
    assert graph.units == len(names) - 1
    assert sorted(graph.unit_tensors.tolist()) == [1] * (len(names) - 2) + [2]


def test_an_unknown_tensor_is_named():
    with pytest.raises(InputError, match="no tensor 'nobody'"):
        applied(Plan(tensor_groups=(("nobody",),)))


def test_more_ranks_behave_like_the_recorded_ones_and_are_followed_once():
    many, recorded = applied(Plan(), measured().cluster.with_ranks(5)), applied(Plan())
    assert many.class_of_rank.tolist() == [0, 1, 0, 1, 0]
    np.testing.assert_array_equal(many.main_us, recorded.main_us)
    assert many.on_core.tolist() == [1, 1]


def test_ranks_on_fuller_cores_are_followed_apart():
    graph = applied(Plan(), measured().cluster.with_ranks(5, 2))  # cores of ranks 0, 2, 4 and of 1, 3
    assert graph.class_of_rank.tolist() == [0, 1, 0, 1, 0]
    assert graph.on_core.tolist() == [3, 2]
    assert len(set(graph.core.tolist())) == 2


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 20), st.integers(0, 2**31), st.integers(0, 30))
def test_no_grouping_loses_bytes_tensors_or_updates(count, seed, moves):
    tensors = measured().graph.tensors
    position = {tensor.name: i for i, tensor in enumerate(tensors)}
    groups = contiguous_groups(tensors, count)
    rng = np.random.default_rng(seed)
    for _ in range(moves):
        groups = propose(groups, position, rng)
    graph, single = applied(Plan(tensor_groups=groups)), applied(Plan())
    assert graph.unit_bytes.sum() == single.unit_bytes.sum()
    assert graph.unit_tensors.sum() == len(tensors)
    assert graph.release_work_us.sum() == pytest.approx(single.release_work_us.sum())
    assert (np.sort(graph.post_order, axis=2) == np.arange(graph.units)).all()
    assert (graph.post_us <= (graph.main_us)[:, :, None] + 1e-6).all()


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 40), st.integers(0, 2**31), st.booleans())
def test_a_job_is_what_the_plain_way_makes_of_it(count, seed, shared):
    """The same enqueues, sizes and updates, and so the same iterations; with neighbours together and with any tensors together."""
    tensors = measured().graph.tensors
    rng = np.random.default_rng(seed)
    unit_of = rng.integers(0, count, len(tensors)) if shared else np.arange(len(tensors)) * count // len(tensors)
    unit_of = np.unique(unit_of, return_inverse=True)[1]
    groups = tuple(tuple(t.name for t, unit in zip(tensors, unit_of, strict=True) if unit == k) for k in range(unit_of.max() + 1))
    job = applied(Plan(tensor_groups=groups))
    plain = plain_apply(job, measured().graph.profiles, unit_of, np.array([tensor.size_bytes for tensor in tensors], float))
    np.testing.assert_array_equal(job.post_us, plain.post_us)
    np.testing.assert_array_equal(job.unit_bytes, plain.unit_bytes)
    np.testing.assert_array_equal(job.unit_tensors, plain.unit_tensors)
    assert job.release_work_us.sum() == pytest.approx(plain.release_work_us.sum())
    iterations_us, expected = (replay_horovod(one, iterations=4).iterations_us for one in (job, plain))
    np.testing.assert_allclose(iterations_us, expected, rtol=1e-9)
