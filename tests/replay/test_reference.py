"""The semantics of a replay, on graphs small enough to know the answer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.graph.dataflow import OpKind
from dpro_search.replay.reference import max_min_rates, replay_reference
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.replay_graph import OrderPolicy, SharedCores


def starts_on_one_device(policy, arrivals):
    """Start of each op of 10 us, (ready time, priority), on one device of a policy."""
    graph = GraphBuilder()
    elsewhere, device = graph.add_device(policy=OrderPolicy.UNBOUNDED), graph.add_device(policy=policy)
    causes = [graph.add_op(elsewhere, ready) for ready, _ in arrivals]
    ops = [graph.add_op(device, 10.0, priority=p, after=[c]) for c, (_, p) in zip(causes, arrivals, strict=True)]
    return replay_reference(graph.build()).start_us[ops].tolist()


def test_a_device_in_program_order_waits_for_its_next_op():
    assert starts_on_one_device(OrderPolicy.PROGRAM, [(5, 9), (0, 0)]) == [5, 15]


def test_first_in_first_out_goes_by_ready_time_then_priority_then_number():
    assert starts_on_one_device(OrderPolicy.FIFO, [(3, 0), (2, 9), (0, 5), (3, 0), (2, 1)]) == [30, 20, 0, 40, 10]


def test_a_device_that_serves_by_priority_takes_the_least_value_that_is_ready_and_interrupts_nothing():
    assert starts_on_one_device(OrderPolicy.PRIORITY, [(0, 9), (1, 5), (2, 1), (15, 0)]) == [0, 30, 10, 20]


def test_an_unbounded_device_serves_all_at_once():
    assert starts_on_one_device(OrderPolicy.UNBOUNDED, [(0, 0), (1, 0), (1, 0)]) == [0, 1, 1]


def test_an_instant_is_settled_on_unbounded_devices_before_a_device_chooses():
    graph = GraphBuilder()
    unbounded, device = graph.add_device(policy=OrderPolicy.UNBOUNDED), graph.add_device(policy=OrderPolicy.FIFO)
    late = graph.add_op(device, 1.0, priority=5)
    barrier = graph.add_op(unbounded, 0.0, after=[graph.add_op(unbounded, 0.0)])
    early = graph.add_op(device, 1.0, priority=1, after=[barrier])
    times = replay_reference(graph.build())
    assert (times.start_us[early], times.start_us[late]) == (0, 1)


def test_a_collective_holds_each_device_from_the_post_and_moves_when_the_last_rank_has_posted():
    graph = GraphBuilder()
    parts = []
    for rank, compute_us in enumerate((5.0, 20.0)):
        compute, network = graph.add_device(rank), graph.add_device(rank)
        parts.append(graph.add_op(network, 7.0, after=[graph.add_op(compute, compute_us)], collective=0))
    times = replay_reference(graph.build())
    assert times.start_us[parts].tolist() == [5, 20]
    assert times.moved_us[parts].tolist() == [20, 20]
    assert times.end_us[parts].tolist() == [27, 27]


def test_a_flow_moves_its_bytes_after_its_latency_and_shares_its_link():
    graph = GraphBuilder()
    link = graph.add_link(2.0)
    first = graph.add_op(graph.add_device(), 1.0, flow_bytes=10.0, links=[link])
    second = graph.add_op(graph.add_device(), 3.0, flow_bytes=10.0, links=[link])
    # 4 bytes go alone in 2 us, then both at 1 byte/us until the first has moved 10, then the second alone.
    assert replay_reference(graph.build()).end_us[[first, second]].tolist() == [9, 11]


def on_cores(graph, core, *, messages=(), rate=1.0, idle_rate=1.0, core_us_per_byte=0.0, factors=(), servers=None):
    """Times of a graph whose devices have cores; messages are (op, latency while no core computes, its core time, finish)."""
    columns = np.zeros((3, len(graph)))
    for op, *values in messages:
        columns[:, op] = values
    links = 1 if rate else 0
    cores = SharedCores(
        core=np.array(core, np.int32),
        idle_us=columns[0],
        core_us=columns[1],
        finish_us=columns[2],
        idle_bytes_per_us=np.full(links, idle_rate),
        core_us_per_byte=np.full(links, core_us_per_byte),
        latency_factors=np.array(factors, dtype=float),
    )
    return replay_reference(graph.build(servers=None if servers is None else np.array(servers, np.int32), cores=cores))


def test_a_device_of_two_servers_runs_two_ops_at_a_time_in_the_order_of_its_policy():
    graph = GraphBuilder()
    device = graph.add_device(policy=OrderPolicy.PROGRAM)
    ops = [graph.add_op(device, duration) for duration in (5.0, 3.0, 4.0)]
    assert replay_reference(graph.build(servers=np.array([2], np.int32))).end_us[ops].tolist() == [5, 3, 7]


def test_ops_on_one_core_share_it_equally():
    graph = GraphBuilder()
    long, short = graph.add_op(graph.add_device(0), 10.0), graph.add_op(graph.add_device(1), 4.0)
    elsewhere = graph.add_op(graph.add_device(2), 10.0)
    times = on_cores(graph, [0, 0, 1], rate=None)
    assert times.end_us[[long, short, elsewhere]].tolist() == [14, 8, 10]


def test_a_message_has_one_latency_while_a_core_computes_and_another_while_none_does():
    graph = GraphBuilder()
    graph.add_op(graph.add_device(0), 10.0)
    message = graph.add_op(graph.add_device(0), 20.0)
    # Half of the latency of 20 us passes beside the compute; the other half passes in half of 4 us.
    assert on_cores(graph, [0, -1], messages=[(message, 4.0, 0.0, 0.0)], rate=None).end_us[message] == 12


def test_a_latency_that_begins_beside_compute_is_drawn_in_the_order_of_priority_and_number():
    graph = GraphBuilder()
    graph.add_op(graph.add_device(0), 100.0)
    messages = [graph.add_op(graph.add_device(0), 10.0, priority=p) for p in (1, 0)]
    times = on_cores(graph, [0, -1, -1], messages=[(op, 4.0, 0.0, 0.0) for op in messages], rate=None, factors=[0.5, 2.0])
    assert times.end_us[messages].tolist() == [20, 5]


def test_latency_and_bytes_take_core_time_of_every_process():
    graph = GraphBuilder()
    link = graph.add_link(1.0)
    first = graph.add_op(graph.add_device(0), 8.0)
    second = graph.add_op(graph.add_device(1), 8.0)
    message = graph.add_op(graph.add_device(0), 4.0, flow_bytes=4.0, links=[link])
    # A quarter of each core for 4 us of latency, half of it for 4 us of bytes.
    times = on_cores(graph, [0, 1, -1], messages=[(message, 4.0, 1.0, 0.0)], core_us_per_byte=0.5)
    assert times.end_us[[first, second, message]].tolist() == [11, 11, 8]


def test_a_link_has_another_rate_while_no_core_computes():
    graph = GraphBuilder()
    link = graph.add_link(1.0)
    graph.add_op(graph.add_device(0), 5.0)
    message = graph.add_op(graph.add_device(0), 1.0, flow_bytes=8.0, links=[link])
    assert on_cores(graph, [0, -1], messages=[(message, 1.0, 0.0, 0.0)], idle_rate=2.0).end_us[message] == 7


def test_after_its_bytes_every_process_works_on_a_message_beside_its_compute():
    graph = GraphBuilder()
    compute = graph.add_op(graph.add_device(0), 10.0)
    graph.add_op(graph.add_device(1), 0.0)
    message = graph.add_op(graph.add_device(0), 2.0)
    # From 2 us on both have half of the core.
    times = on_cores(graph, [0, 1, -1], messages=[(message, 2.0, 0.0, 3.0)], rate=None)
    assert times.end_us[[compute, message]].tolist() == [13, 8]


def test_compute_is_slower_while_it_overlaps_communication_on_its_rank():
    graph = GraphBuilder()
    compute = graph.add_op(graph.add_device(0), 10.0, kind=OpKind.BACKWARD)
    elsewhere = graph.add_op(graph.add_device(1), 10.0, kind=OpKind.BACKWARD)
    graph.add_op(graph.add_device(0), 6.0, kind=OpKind.COMM)
    slowdown = np.ones((len(OpKind), len(OpKind)))
    slowdown[OpKind.BACKWARD, OpKind.COMM] = 1.5
    # In 6 us of overlap 4 us of work are done.
    assert replay_reference(graph.build(slowdown=slowdown)).end_us[[compute, elsewhere]].tolist() == [12, 10]


@given(
    st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=1, max_size=4).flatmap(
        lambda capacity: st.tuples(
            st.just(capacity),
            st.lists(st.lists(st.integers(0, len(capacity) - 1), min_size=1, max_size=3, unique=True), max_size=6),
        )
    )
)
def test_max_min_shares_use_no_link_beyond_its_rate_and_every_flow_has_a_bottleneck(case):
    capacity, flows = case
    rates = max_min_rates(flows, capacity)
    used = [sum(rate for rate, links in zip(rates, flows, strict=True) if link in links) for link in range(len(capacity))]
    assert all(total <= limit * (1 + 1e-9) for total, limit in zip(used, capacity, strict=True))
    for rate, links in zip(rates, flows, strict=True):
        # On one of its links, which is full, no flow has more than this one: nobody can get more but from one that has less.
        assert any(
            used[link] >= capacity[link] * (1 - 1e-9)
            and rate >= max(other for other, flow in zip(rates, flows, strict=True) if link in flow) * (1 - 1e-9)
            for link in links
        )


def test_an_empty_queue_is_no_deadlock():
    graph = GraphBuilder()
    graph.add_op(graph.add_device(), 0.0)
    assert replay_reference(graph.build()).end_us.tolist() == [0]


@pytest.mark.parametrize("durations", [(1.0, 2.0), (0.0, 0.0)])
def test_ops_of_a_chain_follow_each_other(durations):
    graph = GraphBuilder()
    device = graph.add_device()
    first = graph.add_op(device, durations[0])
    graph.add_op(device, durations[1], after=[first])
    times = replay_reference(graph.build())
    assert times.start_us[1] == times.end_us[0] == durations[0]
    assert times.order.tolist() == [0, 1]
