"""Buckets by PyTorch's rule, and the program that every rank runs."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.collect.trace import TensorInfo
from dpro_search.costmodel.collectives.ddp import fit_ddp_costs
from dpro_search.costmodel.compressed_gradients import half_back_us, half_cast_us, of_halves
from dpro_search.costmodel.powersgd import COMPRESSIONS as POWERSGD
from dpro_search.costmodel.powersgd import low_rank
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.graph.ddp import build_ddp_graph
from dpro_search.replay.ddp.timeline import replay_ddp
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.programs.ddp_job import Action, DdpJob, apply_ddp, bucket_assignment
from tests.recordings import trace_of


def gradients(*sizes: int, dtypes: str = "") -> list[TensorInfo]:
    kinds = {"f": "float32", "h": "float16"}
    letters = dtypes or "f" * len(sizes)
    return [
        TensorInfo(name=f"g{i}", node="", dtype=kinds[letter], shape=(size,), size_bytes=size)
        for i, (size, letter) in enumerate(zip(sizes, letters, strict=True))
    ]


def test_a_bucket_is_closed_by_the_gradient_that_brings_it_to_its_limit():
    assert bucket_assignment(gradients(3, 3, 4, 9, 10, 1), [10]).tolist() == [0, 0, 0, 1, 1, 2]


def test_the_first_bucket_has_a_limit_of_its_own_and_the_last_limit_holds_on():
    assert bucket_assignment(gradients(1, 1, 1, 1, 1, 1, 1), [1, 3]).tolist() == [0, 1, 1, 1, 2, 2, 2]


def test_types_of_elements_do_not_share_buckets():
    # Those that never reach the limit come last.
    assert bucket_assignment(gradients(4, 4, 4, 4, dtypes="fhff"), [8]).tolist() == [0, 1, 0, 2]


def test_a_gradient_above_the_limit_closes_the_bucket_that_it_falls_into():
    assert bucket_assignment(gradients(1, 100, 1), [10]).tolist() == [0, 0, 1]


@pytest.mark.parametrize("limits", [[], [-1]])
def test_limits_that_are_none_are_refused(limits):
    with pytest.raises(InputError, match="sizes >= 0"):
        bucket_assignment(gradients(1), limits)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 60))
def test_every_bucket_but_the_last_has_at_least_its_limit_and_none_could_have_ended_earlier(sizes, limit):
    bucket_of = bucket_assignment(gradients(*sizes), [limit])
    assert (np.diff(bucket_of) >= 0).all()
    for bucket in range(bucket_of.max()):
        members = [size for size, in_bucket in zip(sizes, bucket_of, strict=True) if in_bucket == bucket]
        assert sum(members) >= limit > sum(members[:-1])


@pytest.fixture(scope="module")
def recorded():
    trace = trace_of("ddp_mlp")
    graph = build_ddp_graph(trace)
    return graph, fit_ddp_costs(trace, graph), ClusterSpec.of(trace.meta)


def program(job: DdpJob) -> list[tuple[str, int]]:
    return [(Action(action).name, int(which)) for action, which in zip(job.action, job.collective, strict=True)]


def test_halves_move_half_of_the_gradients_bytes_and_cost_casts(recorded):
    plain, half = (apply_ddp(*recorded, compression=kind) for kind in (None, "fp16"))
    assert half.size_bytes.tolist() == [1536, 24, 36904 / 2, 17152 / 2]  # buffers travel as they are
    more_us = (half.work_us - plain.work_us).mean(axis=(0, 1))
    posts = np.flatnonzero(plain.action == Action.POST)[2:]
    bucket_bytes = np.array([36904.0, 17152.0])
    np.testing.assert_allclose(more_us[posts], half_cast_us(bucket_bytes), rtol=1e-6)
    assert more_us.sum() == pytest.approx(half_cast_us(bucket_bytes).sum())
    assert half.finish_us.tolist() == [0, 0, *half_back_us(bucket_bytes)]
    assert half.comm == of_halves(plain.comm, 2)
    assert not plain.finish_us.any()


@given(st.lists(st.integers(0, 60_000), max_size=3))
def test_halves_are_half_whatever_the_buckets(recorded, limits):
    plain, half = (apply_ddp(*recorded, bucket_limits_bytes=limits, compression=kind) for kind in (None, "fp16"))
    np.testing.assert_allclose(half.size_bytes[2:], plain.size_bytes[2:] / 2)
    assert (half.work_us >= plain.work_us - 1e-6).all()
    assert half.action.tolist() == plain.action.tolist()


def test_gradients_of_other_types_are_not_halved(recorded):
    graph, costs, cluster = recorded
    tensors = tuple(msgspec.structs.replace(tensor, dtype="float16") for tensor in graph.tensors)
    plain = apply_ddp(replace(graph, tensors=tensors), costs, cluster)
    half = apply_ddp(replace(graph, tensors=tensors), costs, cluster, compression="fp16")
    assert half.size_bytes.tolist() == plain.size_bytes.tolist()
    np.testing.assert_array_equal(half.work_us, plain.work_us)
    assert not half.finish_us.any()


@given(st.sampled_from(sorted(POWERSGD)), st.lists(st.integers(0, 60_000), max_size=3))
def test_powersgd_waits_for_each_of_a_buckets_all_reduces_where_the_bucket_is_full(recorded, compression, limits):
    graph, *_ = recorded
    plain, compressed = (apply_ddp(*recorded, bucket_limits_bytes=limits, compression=kind) for kind in (None, compression))
    bucket_of = bucket_assignment(graph.tensors, limits) if limits else graph.bucket_of
    low_rank_parts = low_rank(graph.tensors, bucket_of, POWERSGD[compression])
    forward = len(graph.forward_bytes)
    sent = low_rank_parts.sent_bytes.ravel()
    assert compressed.size_bytes[forward:].tolist() == sent[sent > 0].tolist()
    assert compressed.size_bytes[:forward].tolist() == plain.size_bytes[:forward].tolist()
    later = [
        ("POST", c) if is_post else ("WAIT", c) for c in range(forward, len(compressed.size_bytes)) for is_post in (True, False)
    ]
    assert program(compressed)[2 * forward :] == [*later, ("NONE", -1)]
    more_us = compressed.work_us.sum(axis=2) - plain.work_us.sum(axis=2)
    np.testing.assert_allclose(more_us, low_rank_parts.stages_us.sum(), rtol=1e-6)
    assert (compressed.work_us >= 0).all()
    assert compressed.comm == plain.comm
    assert len(set(compressed.collective_names)) == len(compressed.size_bytes)
    assert replay_ddp(compressed, iterations=4).iteration_us >= compressed.work_us.sum(axis=2).min()


def test_powersgd_computes_in_the_backward_pass(recorded):
    job = apply_ddp(*recorded, compression="powersgd-1")
    assert job.collective_names[2:] == [f"{part} of bucket {bucket}" for bucket in range(2) for part in ("vectors", "P", "Q")]
    stages_us = low_rank(recorded[0].tensors, recorded[0].bucket_of, 1).stages_us
    full = apply_ddp(*recorded).work_us[:, :, 4]
    np.testing.assert_allclose(job.work_us[:, :, 4], full + stages_us[0, 0])
    np.testing.assert_allclose(job.work_us[:, :, 6], stages_us[0, 1])
    np.testing.assert_allclose(job.work_us[:, :, 8], stages_us[0, 2])
    assert job.segment_kinds[-2:] == [OpKind.BACKWARD, OpKind.UPDATE]
    assert job.segment_names[4] == "backward until vectors of bucket 0"


def test_a_rank_syncs_buffers_posts_buckets_waits_for_them_in_turn_and_steps(recorded):
    job = apply_ddp(*recorded)
    assert program(job) == [
        ("POST", 0), ("POST", 1), ("WAIT", 0), ("WAIT", 1),  # running statistics, counters of batches
        ("POST", 2), ("POST", 3), ("WAIT", 2), ("WAIT", 3), ("NONE", -1),
    ]  # fmt: skip
    assert job.is_broadcast.tolist() == [True, True, False, False]
    assert job.size_bytes.tolist() == [1536, 24, 36904, 17152]


def test_other_buckets_move_the_same_bytes_and_take_the_same_core_time(recorded):
    as_recorded = apply_ddp(*recorded)
    for cap in (0, 10_000, 10**9):
        job = apply_ddp(*recorded, bucket_limits_bytes=[cap])
        assert job.size_bytes.sum() == as_recorded.size_bytes.sum()
        np.testing.assert_allclose(job.work_us.sum(axis=2), as_recorded.work_us.sum(axis=2))
        assert (job.work_us >= 0).all()
    assert len(apply_ddp(*recorded, bucket_limits_bytes=[0]).size_bytes) == 2 + 14  # every gradient on its own
    assert len(apply_ddp(*recorded, bucket_limits_bytes=[10**9]).size_bytes) == 2 + 1


def test_the_recorded_size_gives_the_recorded_buckets(recorded):
    graph = recorded[0]
    cap = int(0.03 * 2**20)
    np.testing.assert_array_equal(bucket_assignment(graph.tensors, [cap]), graph.bucket_of)


def test_more_ranks_repeat_the_recorded_ones(recorded):
    graph, costs, cluster = recorded
    job = apply_ddp(graph, costs, cluster, cluster=cluster.with_ranks(4, 2))
    assert job.core.tolist() == [0, 1, 0, 1]
    np.testing.assert_array_equal(job.work_us[:, 2], job.work_us[:, 0])
