"""Jobs whose tensors are cut each by a size of its own: the question of whether one size for all is enough."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.collect.assemble.kvstore_slices import Slicing
from dpro_search.space.servers.byteps_job import BytepsJob, byteps_graph
from dpro_search.space.servers.kvstore_job import KvstoreJob, kvstore_graph
from experiments.search.parts_by_tensor import BytepsByTensor, Case, KvstoreByTensor, searched, with_sizes
from tests.store_jobs import byteps_job, kvstore_job, layers_of

ELEMENTS = [300_000, 70_000, 1_000]


LAYERS = layers_of([2_000.0] * 3, [2_000.0] * 3)


def kvstore(*, priority: bool, size: int) -> KvstoreJob:
    return kvstore_job(
        4.0 * np.array(ELEMENTS),
        segments=LAYERS,
        server_core=(0, 1),
        slicing=Slicing(servers=2, priority=priority, bound=size, slice_threshold=size),
        bytes_per_us=250.0,
        **dict.fromkeys(("comm_us_per_byte", "copy_us_per_byte", "sum_us_per_byte", "update_us_per_byte"), 1e-3),
        slice_us=200.0,
    )


def byteps(partition_bytes: int) -> BytepsJob:
    order = np.array([2, 1, 0])
    return byteps_job(
        4.0 * np.array(ELEMENTS),
        segments=LAYERS,
        declared_key=1 + np.arange(len(ELEMENTS)),
        group=order,
        order=order,
        server_core=(0, 1),
        partition_bytes=partition_bytes,
        bytes_per_us=250.0,
        cpu_us_per_byte=1e-3,
        message_us=50.0,
        **dict.fromkeys(("reduce_us", "before_push_us", "reply_us", "after_pull_us"), 10.0),
    )


@given(st.integers(500, 400_000), st.booleans())
def test_one_size_for_all_cuts_as_kvstore_does(size: int, priority: bool) -> None:
    job = kvstore(priority=priority, size=size)
    assert with_sizes(KvstoreByTensor, job, (size,) * len(ELEMENTS)).slices == job.slices


@given(st.integers(500, 2_000_000))
def test_one_size_for_all_cuts_as_byteps_does(size: int) -> None:
    job = byteps(size)
    alike = with_sizes(BytepsByTensor, job, (size,) * len(ELEMENTS))
    assert [alike.parts(i) for i in range(len(ELEMENTS))] == [job.parts(i) for i in range(len(ELEMENTS))]


def test_each_tensor_is_cut_by_its_own_size_and_no_byte_is_lost() -> None:
    job = with_sizes(KvstoreByTensor, kvstore(priority=True, size=40_000), (100_000, 70_000, 100))
    assert [len(row) for row in job.slices] == [3, 1, 10]
    assert [sum(count for _, count in row) for row in job.slices] == job.tensor_bytes.tolist()
    assert [server for row in job.slices for server, _ in row] == [i % 2 for i in range(14)], "servers alternate"


def test_a_bound_of_its_own_cuts_a_tensor_over_all_servers_or_not_at_all() -> None:
    job = with_sizes(KvstoreByTensor, kvstore(priority=False, size=40_000), (300_001, 70_000, 1_001))
    assert [len(row) for row in job.slices] == [1, 2, 1]


def test_sizes_of_their_own_are_at_least_as_good_as_the_best_for_all() -> None:
    job, cut = kvstore(priority=True, size=40_000), byteps(4096)
    whole = np.array(ELEMENTS)
    stores = Case("slices", lambda size: kvstore_graph(with_sizes(KvstoreByTensor, job, size)), whole)
    parts = Case("partitions", lambda size: byteps_graph(with_sizes(BytepsByTensor, cut, size)), 4 * whole)
    for case in (stores, parts):
        found = searched(case, seconds=0.3, seed=0)
        assert found.own_us <= found.alike_us
        assert found.tried > 37, "more than the grid"
        again_us = searched(case, seconds=0.0, seed=1).alike_us
        assert again_us == pytest.approx(found.alike_us), "the grid is deterministic"
