"""Jobs of many ranks: who waits for whom, and steps of real recordings."""

import functools

import numpy as np
import pytest
from sample import sample

from dpro_search.collect.trace import CollectiveKind
from dpro_search.errors import GraphError, InputError
from dpro_search.graph.build import build_graph
from dpro_search.replay.reference import replay_reference
from dpro_search.space.data_parallel import DataParallelJob, LinearCost, RankStep, layered_step, rank_step_of
from dpro_search.space.data_parallel_graph import whole_graph
from tests.data_parallel_jobs import all_reduces, replicated
from tests.every_case import every_case

_FREE = all_reduces()


def _step(**changes):
    given = {"tensor_bytes": [100.0, 200.0], "forward_us": 10.0, "backward_us": [4.0, 6.0], "update_us": 1.0}
    return layered_step(**(given | changes))


def _times(graph):
    """Start and end of every op by its name."""
    times = replay_reference(graph)
    return {graph.name(op): (float(times.start_us[op]), float(times.end_us[op])) for op in range(len(graph))}


def test_one_rank_with_free_communication_takes_its_compute_time():
    assert replay_reference(whole_graph(replicated(_step(), 1, _FREE))).end_us.max() == 10.0 + 4.0 + 6.0 + 2 * 1.0


def test_communication_overlaps_what_is_left_of_backward():
    times = _times(whole_graph(replicated(_step(), 2, all_reduces(latency_us=1.0, us_per_byte=0.03))))
    assert times["tensor0.allreduce@1"] == (14.0, 18.0)
    assert times["tensor1.backward@1"] == (14.0, 20.0)
    assert times["tensor1.allreduce@1"] == (20.0, 27.0)
    assert times["tensor0.update@1"] == (20.0, 21.0)
    assert times["tensor1.update@1"] == (27.0, 28.0)


def test_the_slowest_rank_holds_up_all_and_others_know_that_they_waited():
    graph = whole_graph(replicated(_step(), 3, all_reduces(us_per_byte=0.01), compute_factor=np.array([1.0, 2.0, 1.0])))
    times = replay_reference(graph)
    posts = {graph.rank_of_op[op]: op for op in range(len(graph)) if graph.name(op).startswith("tensor0.post")}
    assert [float(times.start_us[posts[rank]]) for rank in range(3)] == [14.0, 28.0, 14.0]
    first = {graph.rank_of_op[op]: op for op in range(len(graph)) if graph.name(op).startswith("tensor0.allreduce")}
    assert [float(times.moved_us[first[rank]]) for rank in range(3)] == [28.0] * 3
    assert [float(times.end_us[first[rank]]) for rank in range(3)] == [29.0] * 3


def test_a_collective_takes_the_cheapest_of_its_costs():
    kind = CollectiveKind.ALL_GATHER
    costs = tuple(
        LinearCost(kind=kind, latency_us=latency_us, us_per_byte=us_per_byte)
        for latency_us, us_per_byte in ((1.0, 0.1), (10.0, 0.02))
    )
    job = replicated(_step(), 2, (*costs, *all_reduces(latency_us=500.0)), collectives=np.array([int(kind)] * 2))
    assert [job.collective_us(group) for group in range(2)] == [pytest.approx(11.0), pytest.approx(14.0)]


def test_ranks_that_make_gradients_in_different_orders_do_not_deadlock():
    other = _step()
    other = RankStep(**{**other.__dict__, "maker_tensor": np.array([1, 0])})
    job = DataParallelJob(steps=(_step(), other), step_of_rank=np.array([0, 1]), costs=all_reduces(us_per_byte=0.01))
    assert np.isfinite(replay_reference(whole_graph(job)).end_us).all()


def test_a_fused_group_waits_for_all_its_tensors_and_frees_all_their_users():
    times = _times(whole_graph(replicated(_step(), 2, all_reduces(us_per_byte=0.01), groups=((0, 1),))))
    assert times["tensor0+1.allreduce@0"] == (20.0, 23.0)
    assert times["tensor0.update@0"][0] == 23.0


def test_the_next_forward_waits_for_all_updates():
    graph = whole_graph(replicated(_step(), 2, _FREE))
    carried = {(graph.name(s), graph.name(d)) for s, d in zip(graph.carry_src, graph.carry_dst, strict=True)}
    assert carried == {(f"tensor{t}.update@{r}", f"forward@{r}") for t in range(2) for r in range(2)}


@functools.cache
def _recorded():
    return build_graph(sample())


def test_a_recorded_rank_becomes_a_step_with_all_its_work():
    graph = _recorded()
    for rank, profile in enumerate(graph.profiles):
        step = rank_step_of(graph, rank)
        recorded = profile.main_us.mean() + sum(release.work_us.mean() for release in profile.releases) + profile.host_us.mean()
        assert step.duration_us.sum() == pytest.approx(recorded)
        assert (step.duration_us >= 0).all()
        assert step.tensor_bytes.tolist() == [tensor.size_bytes for tensor in graph.tensors]


def test_a_recorded_rank_posts_its_tensors_when_it_did():
    graph = _recorded()
    step = rank_step_of(graph, 0)
    job = replicated(step, 1, all_reduces(us_per_byte=1.0))  # so slow that no update delays backward
    built = whole_graph(job)
    times = replay_reference(built)
    enqueued = [op for op in range(len(built)) if built.name(op).endswith(".post@0")]
    np.testing.assert_allclose(times.end_us[enqueued], graph.profiles[0].post_us.mean(axis=0), rtol=1e-9)


def test_recorded_ranks_make_a_job_of_any_size():
    graph = _recorded()
    steps = tuple(rank_step_of(graph, rank) for rank in range(graph.ranks))
    job = DataParallelJob(steps=steps, step_of_rank=np.arange(6) % len(steps), costs=all_reduces(us_per_byte=0.01))
    built = whole_graph(job)
    built.validate()
    assert built.ranks == 6
    assert np.isfinite(replay_reference(built).end_us).all()


def test_a_rank_that_was_not_recorded_is_refused():
    with pytest.raises(GraphError, match="rank 99 is not in the graph"):
        rank_step_of(_recorded(), 99)


@every_case(
    ("changes", "message"),
    [
        ({"steps": ()}, "at least one gradient"),
        ({"step_of_rank": np.array([0, 1])}, "one of the 1 steps"),
        ({"step_of_rank": np.zeros(0, np.int64)}, "at least one rank"),
        ({"compute_factor": np.array([1.0, 0.0])}, "compute_factor"),
        ({"groups": ((0,),)}, "each of the 2 tensors once"),
        ({"groups": ((0, 1), (1,))}, "each of the 2 tensors once"),
        ({"collectives": np.array([0])}, "1 entries for 2 tensors"),
        ({"collectives": np.array([int(CollectiveKind.ALL_GATHER)] * 2)}, "costs of allgather collectives are missing"),
        ({"steps": (_step(), _step(tensor_bytes=[1.0, 2.0]))}, "other tensors"),
        ({"steps": (RankStep(**{**_step().__dict__, "maker_tensor": np.array([0, 0])}),)}, "no op makes tensor 1"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    fields = {"steps": (_step(),), "step_of_rank": np.zeros(2, np.int64), "costs": _FREE}
    with pytest.raises(InputError, match=message):
        DataParallelJob(**(fields | changes))


@pytest.mark.parametrize(
    ("column", "message"), [("maker_op", "maker_op names op 9 of 5"), ("device", "device 9 of 1"), ("user_tensor", "tensor 9 of 2")]
)
def test_a_step_names_what_it_has(column, message):
    with pytest.raises(InputError, match=message):
        RankStep(**{**_step().__dict__, column: np.array([0, 9])})
