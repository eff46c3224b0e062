"""Profiles of jobs whose collectives Gloo's threads carry out: replayed with its own durations, a step takes what it took."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.collect.readers.kineto.importer import read
from dpro_search.collect.trace import DependencyKind, Trace
from dpro_search.replay import replay
from dpro_search.space.recorded.ops import recorded_ops
from dpro_search.space.recorded.step_graph import graph_of_step
from tests.collect.kineto_files import MAIN, START, Profile, distributed, needs
from tests.profiles import profiled

GLOO = 300
Ranks = tuple[float, float]


def trace_of(steps: list[tuple[Ranks, Ranks, Ranks]], transfer_us: float = 400.0) -> Trace:
    """Two ranks that compute, all-reduce, wait, and update.

    `steps` has, by rank, what a step computes before it enqueues, how long after the rank went on Gloo's thread notes the end, and
    how long the update takes.
    """
    now = [float(START), float(START) + 37]
    free = [0.0, 0.0]
    profiles = [Profile(pid=100 + rank, device=rank) for rank in range(2)]
    for number, (before_us, noted_us, update_us) in enumerate(steps):
        posts = [now[rank] + before_us[rank] for rank in range(2)]
        starts = [max(posts[rank] + 60, free[rank]) for rank in range(2)]
        done = max(starts) + transfer_us
        for rank, profile in enumerate(profiles):
            end = done + 30 + 20 * rank + update_us[rank]
            profile.step(number, now[rank], end - now[rank])
            profile.op("aten::mm", now[rank] + 5, before_us[rank] - 10)
            profile.op("c10d::allreduce_", posts[rank], 50, **{"Input Dims": [[[4096]]], "Input type": ["TensorList"]})
            span = starts[rank], done + noted_us[rank] - starts[rank]
            profile.add("user_annotation", "gloo:all_reduce", *span, GLOO, {"Input Dims": [[4096]], "Input type": ["float"]})
            profile.op("aten::add_", done + 30 + 20 * rank, update_us[rank] - 5)
            now[rank], free[rank] = end, done + noted_us[rank]
    with tempfile.TemporaryDirectory() as folder:
        headers = [distributed(rank, 2) | {"host_name": "one"} for rank in range(2)]
        return read([p.write(Path(folder, f"rank{r}.json"), header=headers[r]) for r, p in enumerate(profiles)])


def test_the_thread_waits_for_the_collective_whose_end_is_noted_later() -> None:
    """Gloo's thread wakes the thread that waits, and gets the core back 300 us later on rank 0."""
    trace = trace_of([((1000, 1000), (300, 3), (700, 700))] * 4)
    assert needs(trace, DependencyKind.SYNC) == {("gloo:all_reduce", "wait for a collective")}
    assert (trace.dependencies.kind == DependencyKind.SYNC).sum() == 2 * 4


def test_a_pause_that_ended_before_the_last_rank_enqueued_is_no_wait(tmp_path: Path) -> None:
    """Rank 1 enqueues early, loses its core for 1.7 ms, computes on, and only then waits for what rank 0 enqueues late."""
    files = []
    for rank, posted_us in enumerate((3000, 1000)):
        profile = Profile(pid=100 + rank, device=rank)
        for number in range(2):
            begin_us = START + 5000.0 * number
            profile.step(number, begin_us, 4900)
            profile.op("aten::mm", begin_us + 5, posted_us - 10)
            profile.op("c10d::allreduce_", begin_us + posted_us, 30, **{"Input Dims": [[[4096]]], "Input type": ["TensorList"]})
            span = begin_us + posted_us + 60, 3500.0 - posted_us - 60
            profile.add("user_annotation", "gloo:all_reduce", *span, GLOO, {"Input Dims": [[4096]], "Input type": ["float"]})
            if rank == 1:
                profile.op("aten::relu", begin_us + 2750, 200)
            profile.op("aten::add_", begin_us + 3520, 300)
        files.append(profile.write(tmp_path / f"rank{rank}.json", header=distributed(rank, 2) | {"host_name": "one"}))
    trace = read(files)
    waits = trace.dependencies.target[trace.dependencies.kind == DependencyKind.SYNC]
    assert len(waits) == 2 * 2
    assert (trace.events.end_us[waits] >= trace.events.start_us.min() + 3000).all()


def test_a_collective_is_complete_at_the_first_end_that_a_rank_notes() -> None:
    trace = trace_of([((1000, 1000), (2500, 3), (3000, 700))] * 4)
    graph = graph_of_step(recorded_ops(trace), 1, samples=False)
    parts = graph.collective >= 0
    assert graph.duration_us[parts].tolist() == pytest.approx([403, 403], abs=25)


def test_what_a_step_does_after_its_last_collective_belongs_to_it() -> None:
    """Rank 0 and 1 take turns in a long update: a step lasts as long as its own, not as that of the step before."""
    trace = trace_of([((1000, 1000), (3, 3), (700 + 2000 * (number % 2), 700)) for number in range(6)])
    ops = recorded_ops(trace)
    replayed = [replay(graph_of_step(ops, step, samples=False)).iteration_us for step in (2, 3)]
    assert replayed[1] - replayed[0] == pytest.approx(2000, rel=0.05)


_us = st.floats(20, 3000)
_ranks = st.tuples(_us, _us)


@settings(max_examples=20, deadline=None)
@given(steps=st.lists(st.tuples(_ranks, _ranks, _ranks), min_size=2, max_size=5))
def test_every_step_with_its_own_durations_takes_what_it_took(steps: list[tuple[Ranks, Ranks, Ranks]]) -> None:
    for step in profiled(trace_of(steps)).compared(None).steps:
        assert step.replayed_us == pytest.approx(step.measured_us, rel=1e-6, abs=1.0)


def test_no_end_of_a_step_is_cut_on_a_thread_that_does_nothing_else() -> None:
    """A rank with a device ends where the device does."""
    profile = Profile()
    for number in range(3):
        profile.step(number, START + 1000 * number, 990)
        profile.kernel("gemm", START + 1000 * number + 30, 40, launched=START + 1000 * number + 20, tid=MAIN)
    with tempfile.TemporaryDirectory() as folder:
        names = recorded_ops(read([profile.write(Path(folder, "rank0.json"))])).name
    assert not any("end of the step" in name for name in names)
