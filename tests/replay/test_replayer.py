"""Settled iterations, re-timing and Monte-Carlo replays."""

from dataclasses import replace

import numpy as np
import pytest
from graphs import replay_graphs
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dpro_search.errors import GraphError, InputError
from dpro_search.replay import replay
from dpro_search.replay.engine import Engine
from dpro_search.replay.monte_carlo import sampled_iterations
from dpro_search.replay.reference import replay_reference
from dpro_search.replay.replayer import settled_us
from dpro_search.replay.steady import settled_distance, unrolled
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.replay_graph import OrderPolicy, csr
from tests.every_case import every_case


def training_loop(forward_us=10.0, backward_us=20.0, reduce_us=15.0, update_us=5.0):
    """Two tensors: the second is all-reduced while the first one's gradient is computed."""
    graph = GraphBuilder()
    compute, network = graph.add_device(name="compute"), graph.add_device(name="network")
    forward = graph.add_op(compute, forward_us, name="forward")
    late = graph.add_op(compute, backward_us, name="backward2", after=[forward])
    early = graph.add_op(compute, backward_us, name="backward1", after=[late])
    for gradient in (late, early):
        reduced = graph.add_op(network, reduce_us, after=[gradient])
        graph.carry(graph.add_op(compute, update_us, after=[reduced]), forward)
    return graph


def test_the_iteration_time_is_the_settled_distance_not_the_makespan_of_one():
    timeline = replay(training_loop().build())
    assert timeline.settled
    assert timeline.iterations >= 3
    # Forward, two backward ops, the second all-reduce, its update; the first all-reduce and update hide behind.
    assert timeline.iteration_us == 10 + 20 + 20 + 15 + 5
    assert timeline.makespan_us > timeline.iteration_us * (timeline.iterations - 1)


def test_iterations_that_overlap_are_closer_than_one_is_long():
    graph = GraphBuilder()
    stage = [graph.add_device() for _ in range(3)]
    last = []
    for device in stage:
        op = graph.add_op(device, 10.0, after=last)
        graph.carry(op, op)
        last = [op]
    timeline = replay(graph.build())
    assert timeline.iteration_us == 10
    assert replay(graph.build(), iterations=1).makespan_us == 30


def test_without_carried_dependencies_one_iteration_is_replayed():
    graph = GraphBuilder()
    graph.add_op(graph.add_device(), 3.0)
    timeline = replay(graph.build())
    assert (timeline.iterations, timeline.iteration_us, timeline.settled) == (1, 3.0, True)


@every_case(
    ("ends", "expected"),
    [
        ([10, 20, 30, 40], (10.0, True)),
        ([50, 90, 100, 110, 120, 130], (10.0, True)),  # a start-up that passes
        ([0, 10, 30, 40, 60, 70, 90], (15.0, True)),  # in turns of 10 and 20
        ([0, 1, 3, 6, 10, 15, 21, 28], (5.0, False)),  # each takes longer than the one before
        ([0, 10, 20, 30, 40, 47], (10.0, True)),  # the last one has no next one beside it
        ([0, 10], (10.0, False)),
        (np.cumsum([0, 9, 11, 9.5, 10.5, 8, 12, 8.5, 11.5, 9, 11, 9, 11, 7]), (10.0, True)),  # in turns that are never the same
    ],
)
def test_a_distance_has_settled_when_it_repeats(ends, expected):
    assert settled_distance(np.array(ends, float)) == expected


def as_fixed_order(graph, order):
    """The graph with every device's order as dependencies, and devices that serve all at once."""
    source, destination = graph.edges()
    served = order[np.argsort(graph.device[order], kind="stable")]
    follows = (graph.device[served][1:] == graph.device[served][:-1]) & (
        graph.policy[graph.device[served][1:]] != OrderPolicy.UNBOUNDED
    )
    source = np.concatenate((source, served[:-1][follows]))
    destination = np.concatenate((destination, served[1:][follows]))
    ptr, idx = csr(destination, source, len(graph))
    return replace(graph, pred_ptr=ptr, pred_idx=idx, policy=np.full(graph.devices, OrderPolicy.UNBOUNDED, np.int8))


@settings(max_examples=150, deadline=None)
@given(replay_graphs(fluid=False), st.data())
def test_a_known_order_is_retimed_as_if_it_were_dependencies(graph, data):
    try:
        engine = Engine(graph)
    except GraphError:
        assume(False)
    duration = np.array(data.draw(st.lists(st.sampled_from([0.0, 0.5, 2.0, 9.0]), min_size=len(graph), max_size=len(graph))))
    fixed = as_fixed_order(replace(graph, duration_us=duration), engine.first.times().order)
    expected = replay_reference(fixed)
    times = engine.retime(engine.in_layout(duration)).times()
    np.testing.assert_array_equal(times.start_us, expected.start_us)
    np.testing.assert_array_equal(times.end_us, expected.end_us)
    np.testing.assert_array_equal(times.moved_us, expected.moved_us)


def test_speeds_that_change_cannot_be_retimed():
    graph = GraphBuilder()
    graph.add_op(graph.add_device(), 1.0, flow_bytes=5.0, links=[graph.add_link(1.0)])
    engine = Engine(graph.build())
    with pytest.raises(InputError, match="replay it"):
        engine.retime(engine.layout.duration_us)


def sampled_loop():
    graph = training_loop().build()
    rng = np.random.default_rng(1)
    return replace(graph, samples_us=(graph.duration_us * rng.uniform(0.9, 1.2, (7, len(graph)))).astype(np.float32))


def test_samples_give_quantiles_of_the_iteration_time():
    timeline = replay(sampled_loop(), samples=200)
    assert len(timeline.sampled_us) == 200
    assert timeline.quantile_us(0.05) < timeline.quantile_us(0.5) < timeline.quantile_us(0.95)
    steps = [replay(replace(sampled_loop(), duration_us=row.astype(float))).iteration_us for row in sampled_loop().samples_us]
    assert min(steps) <= timeline.quantile_us(0.5) <= max(steps)


def test_the_same_seed_gives_the_same_samples_whatever_the_threads():
    graph = sampled_loop()
    engine = Engine(graph, 8)
    alone = sampled_iterations(engine, graph, 50, seed=3, threads=1)
    np.testing.assert_array_equal(alone, sampled_iterations(engine, graph, 50, seed=3, threads=4))
    assert (alone != sampled_iterations(engine, graph, 50, seed=4)).any()


def test_equal_samples_give_the_replay_itself():
    graph = training_loop().build()
    constant = replace(graph, samples_us=np.tile(graph.duration_us, (3, 1)).astype(np.float32))
    timeline = replay(constant, samples=5)
    np.testing.assert_array_equal(timeline.sampled_us, np.full(5, timeline.iteration_us))


def test_the_last_iteration_which_no_next_one_delays_is_in_no_sample():
    graph = GraphBuilder()
    core, link = graph.add_device(), graph.add_device()
    forward = graph.add_op(core, 5.0)
    graph.add_op(core, 5.0, after=[graph.add_op(link, 1.0, after=[forward])])  # queues behind the next iteration's forward
    graph.carry(forward, forward)
    graph = graph.build()
    constant = replace(graph, samples_us=np.tile(graph.duration_us, (3, 1)).astype(np.float32))
    timeline = replay(constant, samples=5)
    assert timeline.iteration_us == 10
    np.testing.assert_array_equal(timeline.sampled_us, np.full(5, 10.0))


@settings(max_examples=100, deadline=None)
@given(replay_graphs(carry=True, max_ops=8))
def test_the_iteration_time_alone_is_that_of_the_replay(graph):
    def answer_of(asked):
        try:
            return asked(graph)
        except GraphError as error:
            return str(error)

    timeline = answer_of(replay)
    expected = timeline if isinstance(timeline, str) else (timeline.iteration_us, timeline.settled)
    assert answer_of(settled_us) == expected


def test_ops_of_several_iterations_are_named_after_theirs():
    graph = GraphBuilder()
    device = graph.add_device()
    for name in ("forward", "backward"):
        graph.carry(*[graph.add_op(device, 1.0, name=name)] * 2)
    names = unrolled(graph.build(), 2).names
    assert list(names) == ["forward#0", "backward#0", "forward#1", "backward#1"]
    assert (names[-1], names[1:3]) == ("backward#1", ["backward#0", "forward#1"])
    with pytest.raises(IndexError):
        names[4]


def test_samples_need_recorded_durations():
    with pytest.raises(InputError, match="no recorded durations"):
        replay(training_loop().build(), samples=3)


@pytest.mark.parametrize("iterations", [0, -1])
def test_at_least_one_iteration_is_replayed(iterations):
    with pytest.raises(InputError, match="iterations must be >= 1"):
        replay(training_loop().build(), iterations=iterations)
