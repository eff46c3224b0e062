"""The coarsened view of a step has fewer ops, and the times of the whole one."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.graph.dataflow import OpKind
from dpro_search.replay.replayer import replay
from dpro_search.space.coarse import coarsened
from dpro_search.space.data_parallel import RankStep, replicated
from dpro_search.space.job_graph import build
from dpro_search.space.network import Rendezvous
from dpro_search.space.replay_graph import OrderPolicy

PROGRAM, FIFO = int(OrderPolicy.PROGRAM), int(OrderPolicy.FIFO)


def step(count, *, device=None, policy=(PROGRAM,), maker=(), user=(), edges=(), carry=(), durations=None):
    """Ops of one kind on given devices; pairs of (maker, tensor), (tensor, user), and of ops."""
    pairs = [np.array(given, np.int64).reshape(-1, 2).T for given in (maker, user, edges, carry)]
    return RankStep(
        duration_us=np.arange(1.0, count + 1) if durations is None else np.array(durations, float),
        kind=np.full(count, int(OpKind.BACKWARD)),
        device=np.zeros(count, np.int64) if device is None else np.array(device),
        policy=np.array(policy),
        tensor_bytes=np.full(max([tensor for _, tensor in maker], default=0) + 1, 100.0),
        maker_op=pairs[0][0], maker_tensor=pairs[0][1], user_tensor=pairs[1][0], user_op=pairs[1][1],
        edge_src=pairs[2][0], edge_dst=pairs[2][1], carry_src=pairs[3][0], carry_dst=pairs[3][1],
        op_names=tuple(f"op{op}" for op in range(count)),
    )  # fmt: skip


def test_ops_between_two_gradients_are_one():
    coarse = coarsened(step(7, maker=[(2, 0), (4, 1)], user=[(0, 5)]))
    assert coarse.duration_us.tolist() == [1 + 2 + 3, 4 + 5, 6 + 7]
    assert coarse.op_names == ("op0+2", "op3+1", "op5+1")
    assert coarse.maker_op.tolist() == [0, 1]
    assert coarse.user_op.tolist() == [2]


def test_what_another_stream_waits_for_ends_a_run():
    coarse = coarsened(step(4, device=[0, 0, 0, 1], policy=(PROGRAM, PROGRAM), maker=[(2, 0)], edges=[(0, 3)]))
    assert coarse.duration_us.tolist() == [1, 2 + 3, 4]
    assert (coarse.edge_src.tolist(), coarse.edge_dst.tolist()) == ([0], [2])


def test_a_stream_that_chooses_is_left_alone():
    fine = step(4, policy=(FIFO,), maker=[(1, 0)], user=[(0, 3)])
    assert len(coarsened(fine)) == len(fine)


def test_kinds_stay_apart():
    fine = step(2, maker=[(1, 0)])
    assert len(coarsened(replace(fine, kind=np.array([int(OpKind.FORWARD), int(OpKind.BACKWARD)])))) == 2


@st.composite
def steps(draw):
    count, devices = draw(st.integers(1, 12)), draw(st.integers(1, 2))
    op = st.integers(0, count - 1)
    pairs = draw(st.lists(st.tuples(op, op), max_size=6))
    makers = [(draw(op), tensor) for tensor in range(3)]
    users = [(tensor, draw(st.integers(maker, count - 1))) for maker, tensor in makers]
    return step(
        count,
        device=draw(st.lists(st.integers(0, devices - 1), min_size=count, max_size=count)),
        policy=draw(st.lists(st.sampled_from([PROGRAM, PROGRAM, FIFO]), min_size=devices, max_size=devices)),
        maker=makers,
        user=[(tensor, user) for (maker, _), (tensor, user) in zip(makers, users, strict=True) if user > maker],
        edges=[(a, b) for a, b in pairs if a < b],
        carry=draw(st.lists(st.tuples(op, op), max_size=3)),
        durations=draw(st.lists(st.sampled_from([0.0, 1.0, 2.0, 5.0]), min_size=count, max_size=count)),
    )


@settings(max_examples=150, deadline=None)
@given(steps(), st.sampled_from([1.0, 1.5]))
def test_the_times_are_those_of_the_whole_step(fine, factor):
    coarse = coarsened(fine)
    scheme = Rendezvous(latency_us=1.0, us_per_byte=0.01)
    jobs = [replicated(one, 2, scheme, negotiate_us=1.0, compute_factor=np.array([1.0, factor])) for one in (fine, coarse)]
    whole, few = (replay(build(job), iterations=3) for job in jobs)
    np.testing.assert_array_equal(few.iteration_end_us(), whole.iteration_end_us())
    assert coarse.duration_us.sum() == pytest.approx(fine.duration_us.sum())
