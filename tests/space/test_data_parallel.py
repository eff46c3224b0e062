"""Jobs of many ranks: who waits for whom, and steps of real recordings."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample import sample

from dpro_search.errors import GraphError, InputError
from dpro_search.graph.build import build_graph
from dpro_search.graph.dataflow import OpKind
from dpro_search.replay.reference import replay_reference
from dpro_search.space.data_parallel import DataParallelJob, RankStep, buckets, layered_step, rank_step_of, replicated
from dpro_search.space.job_graph import build
from dpro_search.space.network import HalvingDoubling, Network, ParameterServer, Rendezvous, Ring
from dpro_search.space.replay_graph import OrderPolicy

_FREE = Rendezvous(us_per_byte=0.0)


def _step(**changes):
    given = {"tensor_bytes": [100.0, 200.0], "forward_us": 10.0, "backward_us": [4.0, 6.0], "update_us": 1.0}
    return layered_step(**(given | changes))


def _times(graph):
    """Start and end of every op by its name."""
    times = replay_reference(graph)
    return {graph.name(op): (float(times.start_us[op]), float(times.end_us[op])) for op in range(len(graph))}


def test_one_rank_with_free_communication_takes_its_compute_time():
    assert replay_reference(build(replicated(_step(), 1, _FREE))).end_us.max() == 10.0 + 4.0 + 6.0 + 2 * 1.0


def test_communication_overlaps_what_is_left_of_backward():
    times = _times(build(replicated(_step(), 2, Rendezvous(latency_us=1.0, us_per_byte=0.03))))
    assert times["tensor0.allreduce@1"] == (14.0, 18.0)
    assert times["tensor1.backward@1"] == (14.0, 20.0)
    assert times["tensor1.allreduce@1"] == (20.0, 27.0)
    assert times["tensor0.update@1"] == (20.0, 21.0)
    assert times["tensor1.update@1"] == (27.0, 28.0)


def test_the_slowest_rank_holds_up_all_and_others_know_that_they_waited():
    graph = build(replicated(_step(), 3, Rendezvous(us_per_byte=0.01), compute_factor=np.array([1.0, 2.0, 1.0])))
    times = replay_reference(graph)
    first = {graph.rank_of_op[op]: op for op in range(len(graph)) if graph.name(op).startswith("tensor0.allreduce")}
    assert [float(times.start_us[first[rank]]) for rank in range(3)] == [14.0, 28.0, 14.0]
    assert [float(times.moved_us[first[rank]]) for rank in range(3)] == [28.0] * 3
    assert [float(times.end_us[first[rank]]) for rank in range(3)] == [29.0] * 3


@pytest.mark.parametrize("scheme", [_FREE, Ring(), HalvingDoubling()])
def test_nobody_communicates_before_all_have_agreed(scheme):
    network = Network.uniform(3, 100.0)
    job = replicated(_step(), 3, scheme, network=network, negotiate_us=5.0, compute_factor=np.array([1.0, 2.0, 1.0]))
    graph = build(job)
    times = replay_reference(graph)
    of_first = [op for op in range(len(graph)) if graph.name(op).startswith("tensor0.") and graph.kind[op] == OpKind.COMM]
    assert min(times.start_us[op] for op in of_first) == 2 * 14.0 + 5.0


def test_a_ring_without_agreement_starts_where_gradients_are():
    job = replicated(_step(), 3, Ring(), network=Network.uniform(3, 100.0), compute_factor=np.array([1.0, 2.0, 1.0]))
    times = _times(build(job))
    assert times["tensor0.send.0@0"][0] == 14.0
    assert times["tensor0.send.0@1"][0] == 28.0
    assert times["tensor0.receive.0@1"][0] == 28.0  # it has nothing yet to add to


@pytest.mark.parametrize("negotiate_us", [None, 1.0])
def test_ranks_that_make_gradients_in_different_orders_do_not_deadlock(negotiate_us):
    other = _step()
    other = RankStep(**{**other.__dict__, "maker_tensor": np.array([1, 0])})
    job = DataParallelJob(
        steps=(_step(), other), step_of_rank=np.array([0, 1]), scheme=Rendezvous(us_per_byte=0.01), negotiate_us=negotiate_us
    )
    assert np.isfinite(replay_reference(build(job)).end_us).all()


def test_a_fused_group_waits_for_all_its_tensors_and_frees_all_their_users():
    times = _times(build(replicated(_step(), 2, Rendezvous(us_per_byte=0.01), groups=((0, 1),))))
    assert times["tensor0+1.allreduce@0"] == (20.0, 23.0)
    assert times["tensor0.update@0"][0] == 23.0


def test_urgent_groups_go_first_when_the_sender_is_free():
    step = layered_step([100.0] * 3, forward_us=0.0, backward_us=1.0, update_us=0.0)
    network = Network.uniform(1, 1.0, other_hosts=1)
    scheme = ParameterServer(server_host=(1,), policy=OrderPolicy.PRIORITY)
    times = _times(build(replicated(step, 1, scheme, network=network, group_priority=np.array([2, 1, 0]))))
    assert [times[f"tensor{tensor}.push.0@0"][0] for tensor in range(3)] == [1.0, 201.0, 101.0]


def test_the_next_forward_waits_for_all_updates():
    graph = build(replicated(_step(), 2, _FREE))
    carried = {(graph.name(s), graph.name(d)) for s, d in zip(graph.carry_src, graph.carry_dst, strict=True)}
    assert carried == {(f"tensor{t}.update@{r}", f"forward@{r}") for t in range(2) for r in range(2)}


def test_devices_belong_to_their_ranks_and_servers_come_after():
    network = Network.uniform(3, 100.0, other_hosts=1)
    graph = build(replicated(_step(), 3, ParameterServer(server_host=(3,), threads=2), network=network))
    for op in range(len(graph)):
        name = graph.name(op)
        if graph.kind[op] == OpKind.SERVER or ".pull" in name:
            assert graph.rank_of_op[op] == 3
        else:
            assert graph.rank_of_op[op] == int(name.split("@")[1])


def test_the_slowdown_of_the_job_is_the_graphs():
    slowdown = np.ones((len(OpKind), len(OpKind)))
    slowdown[OpKind.BACKWARD, OpKind.COMM] = 1.5
    np.testing.assert_array_equal(build(replicated(_step(), 1, _FREE, slowdown=slowdown)).slowdown, slowdown)


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 150))
def test_buckets_hold_consecutive_tensors_and_no_bucket_could_take_the_next(sizes, bucket_bytes):
    sizes = np.array(sizes, np.float64)
    found = buckets(sizes, bucket_bytes)
    assert [tensor for bucket in found for tensor in bucket] == list(range(len(sizes)))
    for bucket, following in zip(found, (*found[1:], ()), strict=False):
        total = sizes[list(bucket)].sum()
        assert total <= bucket_bytes or len(bucket) == 1
        assert not following or total + sizes[following[0]] > bucket_bytes


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
    job = replicated(step, 1, Rendezvous(us_per_byte=1.0))  # so slow that no update delays backward
    built = build(job)
    times = replay_reference(built)
    enqueued = [op for op in range(len(built)) if built.name(op).endswith(".post@0")]
    np.testing.assert_allclose(times.end_us[enqueued], graph.profiles[0].post_us.mean(axis=0), rtol=1e-9)


def test_recorded_ranks_make_a_job_of_any_size():
    graph = _recorded()
    steps = tuple(rank_step_of(graph, rank) for rank in range(graph.ranks))
    job = DataParallelJob(steps=steps, step_of_rank=np.arange(6) % len(steps), scheme=Rendezvous(us_per_byte=0.01))
    built = build(job)
    built.validate()
    assert built.ranks == 6
    assert np.isfinite(replay_reference(built).end_us).all()


def test_a_rank_that_was_not_recorded_is_refused():
    with pytest.raises(GraphError, match="rank 99 is not in the graph"):
        rank_step_of(_recorded(), 99)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": ()}, "at least one gradient"),
        ({"step_of_rank": np.array([0, 1])}, "one of the 1 steps"),
        ({"step_of_rank": np.zeros(0, np.int64)}, "at least one rank"),
        ({"compute_factor": np.array([1.0, 0.0])}, "compute_factor"),
        ({"groups": ((0,),)}, "each of the 2 tensors once"),
        ({"groups": ((0, 1), (1,))}, "each of the 2 tensors once"),
        ({"group_priority": np.array([1])}, "1 entries for 2 groups"),
        ({"scheme": Ring()}, "needs a network"),
        ({"scheme": Ring(), "network": Network.uniform(3, 1.0)}, "hosts for 3 of 2 ranks"),
        ({"scheme": Ring(), "network": Network.uniform(2, 0.0)}, "above 0"),
        ({"scheme": ParameterServer(server_host=(2,)), "network": Network.uniform(2, 1.0)}, "among the 2"),
        ({"scheme": ParameterServer(server_host=()), "network": Network.uniform(2, 1.0)}, "needs a host"),
        ({"scheme": ParameterServer(server_host=(0,), balance="random"), "network": Network.uniform(2, 1.0)}, "least-load"),
        ({"steps": (_step(), _step(tensor_bytes=[1.0, 2.0]))}, "other tensors"),
        ({"steps": (RankStep(**{**_step().__dict__, "maker_tensor": np.array([0, 0])}),)}, "no op makes tensor 1"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    fields = {"steps": (_step(),), "step_of_rank": np.zeros(2, np.int64), "scheme": _FREE}
    with pytest.raises(InputError, match=message):
        DataParallelJob(**(fields | changes))


@pytest.mark.parametrize(
    ("column", "message"), [("maker_op", "maker_op names op 9 of 5"), ("device", "device 9 of 1"), ("user_tensor", "tensor 9 of 2")]
)
def test_a_step_names_what_it_has(column, message):
    with pytest.raises(InputError, match=message):
        RankStep(**{**_step().__dict__, column: np.array([0, 9])})
