"""The bundled recording as a graph of single ops."""

import functools
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from sample import measured, sample

from dpro_search.collect.trace import EventKind
from dpro_search.errors import GraphError
from dpro_search.graph.dataflow import OpKind
from dpro_search.graph.measured import measured_iteration_us
from dpro_search.replay import replay
from dpro_search.space.replay_graph import OrderPolicy
from dpro_search.space.tensorflow.op_level import op_level, typical_step


@functools.cache
def graph():
    ops_graph = op_level(sample(), measured().graph, measured().costs)
    ops_graph.validate()
    return ops_graph


@functools.cache
def timeline():
    return replay(graph())


def preds(op):
    return graph().pred_idx[graph().pred_ptr[op] : graph().pred_ptr[op + 1]]


def named(name):
    return [op for op, op_name in enumerate(graph().names) if op_name == name]


def parts():
    """Ops that are parts of all-reduces."""
    return np.flatnonzero(graph().op_kind == OpKind.COMM)


def test_the_iteration_is_predicted_within_3_percent_of_the_untraced_steps():
    assert timeline().settled
    assert timeline().iteration_us == pytest.approx(measured_iteration_us(sample()), rel=0.03)


def test_the_ops_of_the_dataflow_graph_keep_their_numbers_and_names():
    source = measured().graph
    assert list(graph().names[: len(source)]) == [f"{n}@{r}" for n, r in zip(source.op_name, source.op_rank, strict=True)]
    np.testing.assert_array_equal(graph().rank_of_op[: len(source)], source.op_rank)
    assert len(set(graph().names)) == len(graph())


def test_every_op_with_core_time_is_on_its_ranks_core_and_no_other():
    source = measured().graph
    on_core = graph().policy[graph().device[: len(source)]] == OrderPolicy.PRIORITY
    np.testing.assert_array_equal(on_core, source.op_work_us.any(axis=0))
    assert np.isin(graph().policy[graph().device[: len(source)]][~on_core], OrderPolicy.UNBOUNDED).all()


def test_the_core_serves_in_recorded_order_where_dependencies_allow():
    of_core = np.flatnonzero(graph().device == 0)
    first = timeline().times.start_us[of_core]
    ready = timeline().times.ready_us[of_core]
    for op, start in zip(of_core, first, strict=True):
        waiting = of_core[(ready <= start) & (first > start)]
        assert (graph().priority[waiting] > graph().priority[op]).all()


def test_durations_are_the_means_of_the_samples_one_a_traced_step():
    assert graph().samples_us.shape == (len(measured().graph.steps), len(graph()))
    np.testing.assert_allclose(graph().samples_us.mean(axis=0), graph().duration_us, rtol=1e-4, atol=1e-3)
    ratio = graph().duration_us[: len(measured().graph)].sum() / measured().graph.op_work_us.mean(axis=0).sum()
    assert 1 < ratio < 1.1  # what Horovod's cycles take of the core


def test_the_collectives_are_those_of_the_typical_step():
    step = typical_step(sample(), measured().graph)
    events = sample().events
    transfers = events.select((events.kind == EventKind.ALLREDUCE) & (events.step == step))
    assert len(parts()) == len(np.unique(transfers.collective)) * sample().meta.ranks
    members, ranks = np.unique(graph().collective[parts()], return_counts=True)
    assert (ranks == sample().meta.ranks).all()
    assert len(members) == len(np.unique(transfers.collective))


def test_a_gradient_goes_from_its_post_through_one_collective_to_its_consumers():
    source = measured().graph
    for tensor in (0, len(source.tensors) // 2, len(source.tensors) - 1):
        placement = source.placements[tensor]
        for rank in range(source.ranks):
            given = {op for consumer in placement.consumers[rank] for op in preds(consumer) if op in parts()}
            times = timeline().times
            enqueued = times.end_us[placement.comm[rank]]
            returned = [op for op in given if times.start_us[op] >= enqueued]
            assert returned
            for consumer in placement.consumers[rank]:
                assert times.start_us[consumer] >= times.end_us[returned].min()
            assert placement.comm[rank] not in {op for consumer in placement.consumers[rank] for op in preds(consumer)}


def test_all_ranks_wait_for_the_last_post():
    end_of_part = timeline().times.moved_us[parts()]
    for number in np.unique(graph().collective[parts()]):
        assert len(set(end_of_part[graph().collective[parts()] == number].tolist())) == 1


def test_an_iteration_follows_the_one_before_on_its_rank():
    for rank in range(sample().meta.ranks):
        (begin,), (end,), (script,) = named(f"step begins@{rank}"), named(f"step ends@{rank}"), named(f"script@{rank}")
        assert (end, begin) in zip(graph().carry_src, graph().carry_dst, strict=True)
        assert preds(script).tolist() == [begin]
        assert graph().duration_us[begin] == graph().duration_us[end] == 0
        host_us = measured().graph.profiles[rank].host_us.mean()
        assert host_us < graph().duration_us[script] < host_us * 1.1


def test_compute_beside_communication_is_slowed_by_what_that_takes_of_the_core():
    factors = graph().slowdown
    assert (factors[: OpKind.COMM, OpKind.COMM] > 1).all()
    others = np.delete(factors, OpKind.COMM, axis=1)
    assert (others == 1).all()


def test_memory_is_variables_gradients_returned_gradients_and_the_fusion_buffer():
    total = sum(tensor.size_bytes for tensor in sample().tensors)
    kinds = {name.split()[0]: 0.0 for name in graph().buffer_names}
    for name, size in zip(graph().buffer_names, graph().buffer_bytes, strict=True):
        kinds[name.split()[0]] += size
    ranks = sample().meta.ranks
    assert kinds.pop("fusion") <= ranks * total
    assert kinds == {"variable": ranks * total, "gradient": ranks * total, "reduced": ranks * total}


def test_fusions_can_be_those_of_another_step():
    step = int(measured().graph.steps[0])
    other = op_level(sample(), measured().graph, measured().costs, step=step)
    other.validate()
    assert replay(other).iteration_us == pytest.approx(timeline().iteration_us, rel=0.05)


def test_a_gradient_that_no_collective_carried_is_named():
    trace = sample()
    lost = measured().graph.tensors[7]
    number = [tensor.name for tensor in trace.tensors].index(lost.name)
    rest = (trace.events.kind != EventKind.ALLREDUCE) | (trace.events.tensor != number)
    without = replace(trace, events=trace.events.select(rest))
    with pytest.raises(GraphError, match="in no profiled step"):
        op_level(without, measured().graph, measured().costs)
    step = int(measured().graph.steps[1])
    with pytest.raises(GraphError, match=f"gradient '{lost.name}' was in no collective of step {step}"):
        op_level(without, measured().graph, measured().costs, step=step)


def test_ranks_that_share_a_core_get_half_of_it():
    shared = replace(sample(), meta=msgspec.structs.replace(sample().meta, cores=(0, 0), hosts=("a", "a")))
    halved = op_level(shared, measured().graph, measured().costs)
    count = len(measured().graph)
    np.testing.assert_allclose(halved.duration_us[:count], 2 * graph().duration_us[:count])
