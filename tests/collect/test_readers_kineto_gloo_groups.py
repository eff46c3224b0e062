"""Profiles of jobs on Gloo do not name process groups: which ranks a collective is among follows from lists and shapes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from dpro_search.collect.readers.kineto.importer import read
from dpro_search.collect.trace import CollectiveKind, EventKind, Trace
from tests.collect.kineto_files import START, Profile, distributed

GLOO = 300
SHARDS, COPIES = ((0, 1), (2, 3)), ((0, 2), (1, 3))


def listed(*groups: tuple[str, tuple[int, ...]]) -> list[dict[str, object]]:
    everyone = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 4, "ranks": [0, 1, 2, 3]}
    named = [
        {"pg_name": str(number), "pg_desc": description, "pg_size": len(ranks), "ranks": list(ranks)}
        for number, (description, ranks) in enumerate(groups, 1)
    ]
    return [everyone, *named]


def hsdp(folder: Path, *, shards=SHARDS, copies=COPIES, described=False, skew_us=500.0) -> Trace:
    """Four ranks that gather a unit, reduce-scatter and average its gradients, and average the loss; pairs are `skew_us` apart."""
    paths = []
    for rank in range(4):
        profile = Profile(pid=100 + rank, device=rank)
        shard = next(group for group in shards if rank in group)
        copy = next(group for group in copies if rank in group)
        own_us = skew_us * shards.index(shard)
        for number in range(3):
            now = START + 10_000 * number + own_us
            profile.step(number, now, 9000)
            calls = (
                ("c10d::_allgather_base_", "gloo:all_gather", [[4096], [2048]], 100, 0),
                ("c10d::_reduce_scatter_base_", "gloo:reduce_scatter", [[2048], [4096]], 2000, 1000),
                ("c10d::allreduce_", "gloo:all_reduce", [[[2048]]], 3000 + (skew_us - own_us), 1000),
                ("c10d::allreduce_", "gloo:all_reduce", [[[1]]], 6000, 0),
            )
            for op, span, dims, at, within in calls:
                if within:
                    profile.add("user_annotation", "FSDP::post_backward_reduce (0)", now + at - 10, 80, 100)
                profile.op(op, now + at, 50, **{"Input Dims": dims, "Input type": ["float"] * len(dims)})
                last = max(skew_us - own_us, 0) if at >= 6000 else 0
                profile.add("user_annotation", span, now + at + 60, 400 + last, GLOO, {"Input Dims": dims, "Input type": ["float"]})
            profile.op("aten::add_", now + 8000, 500)
        names = ("mesh_shard", "mesh_replicate") if described else ("", "")
        groups = listed((names[1], copy), (names[0], shard))
        header = distributed(rank, 4) | {"host_name": "one"}
        header["distributedInfo"] |= {"pg_config": groups, "pg_count": 3}
        paths.append(profile.write(folder / f"rank{rank}.json", header=header))
    return read(paths)


def groups_of(trace: Trace, kind: CollectiveKind) -> Counter[tuple[int, ...]]:
    """How many parts of collectives of a type are of each group."""
    events = trace.events
    parts = (events.kind == EventKind.COLLECTIVE) & (events.collective_kind == kind)
    return Counter(trace.groups[group].ranks for group in events.group[parts].tolist())


def matched(trace: Trace, kind: CollectiveKind) -> set[tuple[int, ...]]:
    """The sets of ranks whose parts are one collective."""
    events = trace.events
    parts = (events.kind == EventKind.COLLECTIVE) & (events.collective_kind == kind) & (events.collective >= 0)
    numbers = events.collective[parts]
    return {tuple(sorted(events.rank[parts][numbers == number].tolist())) for number in set(numbers.tolist())}


@pytest.mark.parametrize("described", [False, True])
def test_pairs_that_share_parameters_gather_among_themselves_and_average_with_the_other_pair(tmp_path, described):
    trace = hsdp(tmp_path, described=described)
    assert matched(trace, CollectiveKind.ALL_GATHER) == set(SHARDS)
    assert matched(trace, CollectiveKind.REDUCE_SCATTER) == set(SHARDS)
    assert groups_of(trace, CollectiveKind.ALL_REDUCE) == {(0, 2): 6, (1, 3): 6, (0, 1, 2, 3): 12}
    assert matched(trace, CollectiveKind.ALL_REDUCE) == {(0, 2), (1, 3), (0, 1, 2, 3)}


def test_the_description_of_a_group_counts_before_its_ranks(tmp_path):
    """A mesh whose outer dimension shares the parameters."""
    trace = hsdp(tmp_path, shards=COPIES, copies=SHARDS, described=True)
    assert matched(trace, CollectiveKind.ALL_GATHER) == set(COPIES)
    assert matched(trace, CollectiveKind.ALL_REDUCE) == {*SHARDS, (0, 1, 2, 3)}


def test_what_was_assumed_is_said_once_for_all_ranks(tmp_path):
    (warning,) = (text for text in hsdp(tmp_path).meta.warnings if "process groups" in text)
    assert "the innermost shares FSDP's parameters" in warning


def test_without_a_list_of_groups_collectives_of_a_type_are_of_all_ranks(tmp_path):
    paths = []
    for rank in range(2):
        profile = Profile(pid=100 + rank, device=rank)
        for number in range(3):
            now = START + 10_000 * number
            profile.step(number, now, 9000)
            dims = {"Input Dims": [[[4096]]], "Input type": ["TensorList"]}
            profile.op("c10d::allreduce_", now + 100, 50, **dims)
            profile.add("user_annotation", "gloo:all_reduce", now + 160, 400, GLOO, dims)
            profile.op("aten::add_", now + 600, 100)
        paths.append(profile.write(tmp_path / f"rank{rank}.json", header=distributed(rank, 2) | {"host_name": "one"}))
    trace = read(paths)
    assert matched(trace, CollectiveKind.ALL_REDUCE) == {(0, 1)}
    assert not any("process groups" in text for text in trace.meta.warnings)


def pipelined(folder: Path, *, noted: bool, ranks: int = 3) -> Trace:
    """Ranks that pass a micro-batch on, and a gradient back, in each of three steps."""
    paths = []
    for rank in range(ranks):
        profile = Profile(pid=100 + rank, device=rank)
        for number in range(3):
            now = START + 10_000 * number
            profile.step(number, now, 9000)
            messages = [("c10d::send", "gloo:send", (rank, rank + 1), 500 + 1000 * rank)] if rank < ranks - 1 else []
            messages += [("c10d::recv_", "gloo:recv", (rank - 1, rank), 100)] if rank else []
            messages += [("c10d::recv_", "gloo:recv", (rank + 1, rank), 600 + 1000 * rank)] if rank < ranks - 1 else []
            messages += [("c10d::send", "gloo:send", (rank, rank - 1), 8000 - 1000 * rank)] if rank else []
            for op, span, ends, at in messages:
                if noted:
                    profile.add("user_annotation", f"dpro_search.group {ends[0]},{ends[1]}", now + at - 5, 60, 100)
                profile.op(op, now + at, 50, **{"Input Dims": [[[512]]], "Input type": ["TensorList"]})
                profile.add("user_annotation", span, now + at + 50, 300, 100, {"Input Dims": [[512]], "Input type": ["float"]})
            profile.op("aten::add_", now + 8500, 300)
        header = distributed(rank, ranks) | {"host_name": "one"}
        paths.append(profile.write(folder / f"rank{rank}.json", header=header))
    return read(paths)


def messages_of(trace: Trace) -> dict[int, list[tuple[str, int]]]:
    """Ends of each message in the second step, as (name, rank)."""
    events, messages = trace.events, {}
    for row in (events.kind == EventKind.COLLECTIVE).nonzero()[0]:
        if events.step[row] == 1 and events.collective[row] >= 0:
            ends = messages.setdefault(int(events.collective[row]), [])
            ends.append((trace.names[events.name[row]], int(events.rank[row])))
    return messages


def test_messages_have_both_of_their_ends_where_peers_are_noted(tmp_path):
    messages = sorted(sorted(ends) for ends in messages_of(pipelined(tmp_path, noted=True)).values())
    expected = [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert messages == sorted([(f"gloo:recv from rank {a}", b), (f"gloo:send to rank {b}", a)] for a, b in expected)


def test_messages_to_different_peers_are_on_streams_of_their_own(tmp_path):
    events = (trace := pipelined(tmp_path, noted=True)).events
    rows = [row for row in (events.kind == EventKind.COLLECTIVE).nonzero()[0] if events.rank[row] == 1]
    assert len({(trace.names[events.name[row]], int(events.stream[row])) for row in rows}) == 4
    assert len({int(events.stream[row]) for row in rows}) == 4


def test_peers_of_two_ranks_need_no_note_and_those_of_three_do(tmp_path):
    (tmp_path / "two").mkdir()
    (tmp_path / "three").mkdir()
    assert len(messages_of(pipelined(tmp_path / "two", noted=False, ranks=2))) == 2
    assert messages_of(pipelined(tmp_path / "three", noted=False)) == {}
