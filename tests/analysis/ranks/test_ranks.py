"""Answers of `ranks` on simulated jobs: who is slow, of what kind, since when, and when nobody is."""

from __future__ import annotations

import numpy as np
import pytest

from dpro_search.analysis.ranks import RanksAnswer, Watch, ranks
from tests.analysis.ranks.simulated import BUCKETS, SimulatedJob

SLOW_FROM = 40


def named(answer: RanksAnswer) -> set[tuple[str, tuple[int, ...]]]:
    return {(finding.kind, finding.ranks) for finding in answer.findings}


def late(rank: int, us: float, first: int = SLOW_FROM):
    return lambda step, which: us if which == rank and step >= first else 0.0


def test_no_rank_is_slow_in_a_healthy_job() -> None:
    watch = Watch()
    watch.feed(SimulatedJob(steps=600).stamps())
    assert watch.changes == []
    assert watch.answer().lines() == ["no rank is slow (steps up to 599, 50.1 ms each)"] or not watch.answer().findings


def test_a_rank_that_computes_longer_is_named_with_begin_size_and_gain() -> None:
    answer = ranks(SimulatedJob(compute_extra=late(5, 6_000)).stamps())
    (finding,) = answer.findings
    assert (finding.kind, finding.ranks, finding.host) == ("compute", (5,), "h2")
    assert abs(finding.since_step - SLOW_FROM) <= 2
    assert finding.by_us == pytest.approx(6_000, rel=0.1)
    assert finding.by_interval_us[0] < 6_000 < finding.by_interval_us[1]
    assert finding.gain_us == pytest.approx(6_000, rel=0.25)
    assert finding.false_alarm < 1e-6


def test_a_rank_that_waits_for_input_is_told_from_one_that_computes() -> None:
    assert named(ranks(SimulatedJob(input_extra=late(2, 5_000)).stamps())) == {("input", (2,))}


def test_ranks_of_a_host_that_are_late_together_are_one_finding() -> None:
    slow = lambda step, rank: 6_000.0 if rank in (4, 5) and step >= SLOW_FROM else 0.0  # noqa: E731
    assert named(ranks(SimulatedJob(compute_extra=slow).stamps())) == {("host", (4, 5))}


def test_lateness_in_some_steps_only_is_jitter() -> None:
    hit = np.random.default_rng(3).random(80) < 0.6
    size_us = np.random.default_rng(4).exponential(30_000, 80)
    slow = lambda step, rank: float(size_us[step]) if rank == 1 and step >= SLOW_FROM and hit[step] else 0.0  # noqa: E731
    assert named(ranks(SimulatedJob(compute_extra=slow).stamps())) == {("jitter", (1,))}


def test_two_causes_at_once_are_both_named() -> None:
    job = SimulatedJob(compute_extra=late(0, 8_000), input_extra=late(6, 5_000))
    assert named(ranks(job.stamps())) == {("compute", (0,)), ("input", (6,))}


def test_a_slow_link_is_named_by_the_two_ranks_that_receive_over_it() -> None:
    slow = lambda step, rank: 4_000.0 if rank in (1, 2) and step >= SLOW_FROM else 0.0  # noqa: E731
    assert named(ranks(SimulatedJob(ranks=4, ranks_of_host=1, link_extra=slow).stamps())) == {("link", (2,))}


def test_the_answer_follows_when_another_rank_becomes_slow() -> None:
    watch = Watch()
    slow = lambda step, rank: 8_000.0 if rank == (1 if step < 70 else 3) and step >= SLOW_FROM else 0.0  # noqa: E731
    watch.feed(SimulatedJob(steps=120, compute_extra=slow).stamps())
    at_65 = [findings for step, findings in watch.changes if step <= 65][-1]
    assert at_65 == (("compute", (1,)),)
    assert named(watch.answer()) == {("compute", (3,))}


def test_records_fed_in_small_parts_give_the_same_changes() -> None:
    stamps = SimulatedJob(compute_extra=late(5, 6_000)).stamps()
    whole, parts = Watch(), Watch()
    whole.feed(stamps)
    for first in range(0, len(stamps[0].records), 11):
        parts.feed([_part(each, first, first + 11) for each in stamps])
    assert parts.changes == whole.changes


def test_clocks_of_machines_that_differ_change_nothing() -> None:
    ahead = lambda step, rank: 7e9 * (rank // 2)  # noqa: E731
    job = SimulatedJob(one_clock=False, clock_ahead_ns=ahead, compute_extra=late(5, 6_000))
    assert named(ranks(job.stamps())) == {("compute", (5,))}


def test_a_clock_that_jumps_is_named_and_no_rank_is_slow() -> None:
    ahead = lambda step, rank: 3e9 if rank >= 6 and step >= SLOW_FROM else 0.0  # noqa: E731
    answer = ranks(SimulatedJob(one_clock=False, clock_ahead_ns=ahead, steps=90).stamps())
    assert answer.findings == ()
    assert answer.notes == tuple(f"the clock of rank {rank} jumped by 3e+03 ms at step {SLOW_FROM}" for rank in (6, 7))


def test_ranks_that_part_are_named_with_their_last_operations() -> None:
    stop = 30 * BUCKETS + 1
    job = SimulatedJob(last_collective=dict.fromkeys(range(8), stop + 1) | {3: stop})
    parting = ranks(job.stamps()).parting
    assert parting is not None
    assert (parting.behind, parting.sequence, parting.last[3]) == ((3,), stop + 1, ("allreduce", stop))
    assert "rank 3 never enqueued it" in parting.sentence()


def _part(stamps, first: int, end: int):
    from dataclasses import replace

    return replace(stamps, records=stamps.records[first:end])
