"""The all-reduces that training scripts can use: what ranks send each other, and how they add, without MPI."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.costmodel.collectives.counts import Algorithm, counts
from dpro_search.runtime.all_reduce.dpro_search_all_reduce import ALGORITHMS, Choice
from dpro_search.runtime.all_reduce.dpro_search_all_reduce.choice import of_size
from dpro_search.runtime.all_reduce.dpro_search_all_reduce.memory import HostMemory, Registry
from dpro_search.runtime.all_reduce.dpro_search_all_reduce.rounds import ADD, COPY, IN_RANK_ORDER, stages
from tests.every_case import every_case

layouts = st.tuples(st.integers(1, 5), st.integers(1, 4)).map(
    lambda shape: [[host * shape[1] + i for i in range(shape[1])] for host in range(shape[0])]
)


def summed(algorithm: str, hosts: list[list[int]], rows: np.ndarray) -> np.ndarray:
    """All ranks' buffers after an all-reduce, [ranks, count]: messages between two ranks arrive in order."""
    ranks, count = rows.shape
    memories = [HostMemory(row.copy()) for row in rows]
    todo = [stages(algorithm, rank, hosts, count) for rank in range(ranks)]
    wires: dict[tuple[int, int], list[np.ndarray]] = {}
    at, sent = [0] * ranks, [False] * ranks
    for _ in range(ranks * sum(map(len, todo)) + 1):
        for rank in range(ranks):
            if at[rank] == len(todo[rank]):
                continue
            stage = todo[rank][at[rank]]
            if not sent[rank]:
                for message in stage.sends:
                    part = memories[rank].buffer(message.start, message.stop).copy()
                    wires.setdefault((rank, message.peer), []).append(part)
                sent[rank] = True
            if not all(wires.get((message.peer, rank)) for message in stage.receives):
                continue
            got = [wires[message.peer, rank].pop(0).view(rows.dtype) for message in stage.receives]
            assert [len(part) for part in got] == [message.stop - message.start for message in stage.receives]
            combine(memories[rank], rank, stage, got)
            at[rank], sent[rank] = at[rank] + 1, False
    assert at == [len(one) for one in todo], "a rank waits for ever"
    assert not any(wires.values()), "a message was sent that nobody waits for"
    return np.stack([memory._row for memory in memories])


def combine(memory: HostMemory, rank: int, stage, got) -> None:
    messages = list(zip(stage.receives, got, strict=True))
    if stage.combine == ADD:
        for message, part in messages:
            memory.add(message.start, message.stop, HostMemory(part), 0)
    elif stage.combine == COPY:
        for message, part in messages:
            memory._row[message.start : message.stop] = part
    elif messages:
        start, stop = stage.receives[0][1:]
        places = {message.peer: (HostMemory(part), 0) for message, part in messages} | {rank: (memory, start)}
        memory.put_sum(start, stop, [places[one] for one in sorted(places)])


@settings(max_examples=60, deadline=None)
@given(algorithm=st.sampled_from(ALGORITHMS), hosts=layouts, count=st.integers(0, 40), seed=st.integers(0, 99))
def test_every_rank_gets_the_sum_and_the_same_bits(algorithm, hosts, count, seed):
    rows = np.random.default_rng(seed).normal(size=(sum(map(len, hosts)), count)).astype(np.float32)
    total = summed(algorithm, hosts, rows)
    np.testing.assert_allclose(total[0], rows.astype(np.float64).sum(axis=0), rtol=1e-5, atol=1e-5)
    assert (total == total[0]).all()


@settings(max_examples=30, deadline=None)
@given(hosts=layouts, count=st.integers(1, 40), seed=st.integers(0, 99))
def test_sums_by_rank_have_the_bits_of_adding_rank_after_rank(hosts, count, seed):
    rows = (10.0 ** np.random.default_rng(seed).uniform(-4, 4, (sum(map(len, hosts)), count))).astype(np.float32)
    expected = rows[0]
    for row in rows[1:]:
        expected = expected + row
    for algorithm in IN_RANK_ORDER:
        assert (summed(algorithm, hosts, rows) == expected).all(), algorithm


def test_half_precision_is_rounded_once():
    rows = np.array([[2048.0], [1.0], [1.0], [1.0], [1.0]], np.float16)  # 2048 + 1 is 2048 in 16 bits
    assert summed("direct", [list(range(5))], rows)[0, 0] == 2052


@every_case("ranks", [2, 3, 8, 12])
@every_case(
    ("name", "algorithm"),
    [
        ("ring", Algorithm.RING),
        ("recursive-doubling", Algorithm.RECURSIVE_DOUBLING),
        ("halving-doubling", Algorithm.HALVING_DOUBLING),
        ("gather", Algorithm.GATHER),
        ("direct", Algorithm.DIRECT),
    ],
)
def test_the_busiest_rank_sends_what_the_cost_model_counts(name, algorithm, ranks):
    count = 1200
    sent = [
        sum(message.stop - message.start for stage in stages(name, rank, [list(range(ranks))], count) for message in stage.sends)
        for rank in range(ranks)
    ]
    received = [
        sum(message.stop - message.start for stage in stages(name, rank, [list(range(ranks))], count) for message in stage.receives)
        for rank in range(ranks)
    ]
    within = ranks & (ranks - 1) == 0 or algorithm not in (Algorithm.RECURSIVE_DOUBLING, Algorithm.HALVING_DOUBLING)
    expected = counts(algorithm, float(ranks)).wire * count
    assert max(sent) == pytest.approx(expected, rel=0.01) if within else max(*sent, *received) <= expected


def test_a_hierarchy_sends_between_hosts_only_what_hosts_must():
    hosts, count = [[0, 1, 2, 3], [4, 5, 6, 7]], 1200
    crossing = sum(
        message.stop - message.start
        for rank in hosts[0]
        for stage in stages("hierarchy", rank, hosts, count)
        for message in stage.sends
        if message.peer in hosts[1]
    )
    assert crossing == count


def test_hosts_of_different_sizes_have_no_hierarchy():
    with pytest.raises(ValueError, match=r"same number of ranks on every host, not \[1, 2\]"):
        stages("hierarchy", 0, [[0, 1], [2]], 8)


def table(*ranges, ranks=4, ranks_per_host=1):
    named = [{"from_bytes": start, "algorithm": name} for start, name in ranges]
    return {"ranks": ranks, "ranks_per_host": ranks_per_host, "ranges": named}


def test_a_size_uses_the_algorithm_of_its_range_in_the_nearest_table():
    tables = [table((0, "gather"), (1000, "ring")), table((0, "direct"), ranks=16), table((0, "hierarchy"), ranks_per_host=2)]
    choice = Choice({"version": 1, "tables": tables})
    assert [of_size(choice.ranges(6, 1), size)[0] for size in (0, 999, 1000, 10**9)] == ["gather", "gather", "ring", "ring"]
    assert of_size(choice.ranges(12, 1), 8)[0] == "direct"
    assert of_size(choice.ranges(12, 2), 8)[0] == "hierarchy"


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"version": 2, "tables": []}, "it has version 2, and this reads version 1"),
        ({"version": 1}, "'tables' is missing"),
        ({"version": 1, "tables": [table((8, "ring"))]}, "must begin at 0 bytes and ascend"),
        ({"version": 1, "tables": [table((0, "star"))]}, "algorithm 'star' is unknown"),
    ],
)
def test_a_broken_table_says_what_is_wrong(broken, said):
    with pytest.raises(ValueError, match=said):
        Choice(broken)


def test_a_buffer_is_asked_once_what_it_is():
    registry, buffer = Registry(), np.zeros(8, np.float32)
    assert registry.memory(buffer) is registry.memory(buffer)
    assert registry.asked == 1
    registry.memory(buffer[:4])
    assert registry.asked == 2


@pytest.mark.parametrize(
    ("buffer", "said"),
    [
        (np.zeros((4, 4))[:, 1], "has strides"),
        (np.zeros(4, bool), "takes numbers, not bool"),
        ([1.0], "a NumPy array or a torch tensor, not list"),
        (np.broadcast_to(np.zeros(1), 4), "has strides"),
    ],
)
def test_a_buffer_that_cannot_be_summed_in_place_is_refused(buffer, said):
    with pytest.raises((ValueError, TypeError), match=said):
        Registry().memory(buffer)
