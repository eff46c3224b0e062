"""The program that every rank of a fully sharded job runs: as recorded, and sharded otherwise."""

from dataclasses import replace

import numpy as np
import pytest
from ddp_jobs import FREE
from fsdp_graphs import two_units
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.programs.ddp_job import Action, LabelledJob
from dpro_search.space.programs.fsdp_job import apply_fsdp

CLUSTER = ClusterSpec(cores=(0, 1), rate_bps=1e9)


def applied(graph=None, **options) -> LabelledJob:
    return apply_fsdp(two_units() if graph is None else graph, FREE, CLUSTER, **options)


def program(job: LabelledJob) -> list[tuple[str, str]]:
    names = [*job.collective_names, ""]
    return [(Action(action).name, names[which]) for action, which in zip(job.action, job.collective, strict=True)]


def test_a_unit_waits_at_once_for_its_parameters_and_for_its_gradients():
    in_turn = (
        "all-gather of 0", "all-gather of 1", "all-gather of 1 for backward", "reduce-scatter of 1", "all-gather of 0 for backward",
        "reduce-scatter of 0",
    )  # fmt: skip
    assert program(applied()) == [(action, name) for name in in_turn for action in ("POST", "WAIT")] + [("NONE", "")]


def test_a_gather_moves_half_of_what_a_scatter_does():
    assert applied().size_bytes.tolist() == [20, 20, 20, 40, 20, 40]


def test_a_prefetched_gather_is_posted_a_unit_earlier_and_awaited_where_it_is_needed():
    job = applied(prefetch=True)
    assert program(job)[:4] == [
        ("POST", "all-gather of 0"), ("WAIT", "all-gather of 0"), ("POST", "all-gather of 1"), ("WAIT", "all-gather of 1"),
    ]  # fmt: skip
    assert job.work_us[0, 0, :4].tolist() == [5, 0, 5 + 5, 100]  # copies; the forward pass of unit 0 beside the gather of unit 1


def test_parameters_that_are_kept_are_not_gathered_again():
    job = applied(reshard=False)
    assert job.collective_names == ["all-gather of 0", "all-gather of 1", "reduce-scatter of 1", "reduce-scatter of 0"]
    assert applied().work_us.sum() - job.work_us.sum() == pytest.approx(2 * 2 * 10)  # on 2 ranks, 2 gathers with both copies each


def test_a_collective_ends_when_the_last_rank_has_its_part():
    """The lag of a recording, last rank over first, stretches what bytes take and what a collective of few bytes takes."""
    costs = replace(FREE, alpha_busy_us=100.0, alpha_more_us=10.0, alpha_tail_us=40.0)
    usual, late = (apply_fsdp(replace(two_units(), lag=lag), costs, CLUSTER) for lag in (1.0, 1.5))
    np.testing.assert_allclose(late.size_bytes, 1.5 * usual.size_bytes)
    assert (late.comm.alpha_busy_us, late.comm.alpha_more_us, late.comm.alpha_tail_us) == (150.0, 15.0, 60.0)


def test_segments_say_in_which_pass_they_are():
    job = applied()
    names = job.segment_names
    assert names[0] == "forward until all-gather of 0"
    assert names[-2:] == ["backward until reduce-scatter of 0 is back", "end of backward, optimizer"]
    assert [kind.name for kind in job.segment_kinds] == ["FORWARD"] * 4 + ["BACKWARD"] * 8 + ["UPDATE"]


@given(st.floats(0, 1e3), st.floats(0, 50), st.floats(1, 1e3), st.booleans(), st.booleans())
def test_any_way_to_shard_computes_the_same_and_posts_in_order(work, copy, size, prefetch, reshard):
    graph = two_units(work, copy, size, samples=2)
    job, recorded = applied(graph, prefetch=prefetch, reshard=reshard), applied(graph)
    copies = 0 if reshard else 2 * 2 * copy
    np.testing.assert_allclose(job.work_us.sum(axis=2), recorded.work_us.sum(axis=2) - copies, atol=1e-6)
    assert (job.work_us >= 0).all()
    posted = job.collective[job.action == Action.POST]
    assert posted.tolist() == sorted(job.collective[job.action == Action.WAIT].tolist()) == list(range(len(job.size_bytes)))
    assert len(job.labels) == len(job.size_bytes)


def test_more_ranks_repeat_the_recorded_ones():
    job = applied(cluster=CLUSTER.with_ranks(4, 2))
    assert job.core.tolist() == [0, 1, 0, 1]
    np.testing.assert_array_equal(job.work_us[:, 2], job.work_us[:, 0])
