"""Clocks of simulated jobs with known skews are recovered within what is reported."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.collect.clock import CommSpans, align_clocks
from dpro_search.errors import InputError
from tests.every_case import every_case

EPOCH_US = 1.79e15


def simulated(seed, hosts, skew_us, jitter_us, collectives=100, slow_host=1.0, straggler=False):
    """Collectives of a job on the given hosts, and the true offset of each rank's clock from rank 0's.

    A rank sees the completion late by a random delay of mean `jitter_us`, on all hosts but the first `slow_host` times as much.
    """
    rng = np.random.default_rng(seed)
    names = sorted(set(hosts))
    theta = np.concatenate([[0.0], rng.uniform(-skew_us, skew_us, len(names) - 1)])
    offset = theta[[names.index(host) for host in hosts]]
    start = EPOCH_US + np.cumsum(rng.exponential(5_000, collectives) + 15_000)
    enqueue = start[:, None] + rng.exponential(2_000, (collectives, len(hosts)))
    enqueue[:, -1] += 5_000 * straggler
    family = rng.integers(0, 4, collectives)
    done = enqueue.max(axis=1) + np.array([400.0, 1_000, 3_000, 10_000])[family] * rng.lognormal(0, 0.1, collectives)
    delay = rng.exponential(jitter_us, (collectives, len(hosts))) * np.where(np.array(hosts) == hosts[0], 1.0, slow_host)
    spans = CommSpans(enqueue_us=np.round(enqueue + offset), end_us=np.round(done[:, None] + delay + offset), family=family)
    return spans, offset


def hosts(count):
    return tuple(f"host{i}" for i in range(count))


@every_case("ranks", [2, 4, 8])
@every_case("slow_host", [1.0, 5.0])
@every_case("straggler", [False, True])
def test_known_skews_lie_within_the_residual_in_nine_of_ten_cases(ranks, slow_host, straggler):
    inside = []
    for seed in range(20):
        jitter_us, skew_us = 10.0 ** np.random.default_rng(seed).uniform((0.3, 0.5), (2.3, 6.5))
        spans, offset = simulated(seed, hosts(ranks), skew_us, jitter_us, slow_host=slow_host, straggler=straggler)
        report = align_clocks(spans, hosts(ranks))
        inside += list(np.abs(np.array(report.offset_us) - offset)[1:] <= np.array(report.residual_us)[1:])
    assert np.mean(inside) >= 0.9


@given(
    seed=st.integers(0, 2**32 - 1),
    ranks=st.integers(2, 8),
    skew_us=st.floats(1, 5e6),
    jitter_us=st.floats(1, 300),
    collectives=st.integers(1, 60),
)
@settings(max_examples=60, deadline=None)
def test_aligned_spans_are_causal(seed, ranks, skew_us, jitter_us, collectives):
    spans, _ = simulated(seed, hosts(ranks), skew_us, jitter_us, collectives)
    offset = np.array(align_clocks(spans, hosts(ranks)).offset_us)
    first_end, last_enqueue = (spans.end_us - offset).min(axis=1), (spans.enqueue_us - offset).max(axis=1)
    assert (first_end >= last_enqueue - 1).all()  # 1 us: the digits of an epoch time


def test_raw_spans_of_skewed_clocks_are_not_causal():
    spans, _ = simulated(1, hosts(4), skew_us=1e6, jitter_us=10)
    assert (spans.end_us.min(axis=1) < spans.enqueue_us.max(axis=1)).any()


@pytest.mark.parametrize("ranks", [2, 8])
def test_identical_clocks_have_an_offset_within_the_residual_of_zero(ranks):
    inside = []
    for seed in range(20):
        spans, _ = simulated(seed, hosts(ranks), skew_us=0, jitter_us=50)
        report = align_clocks(spans, hosts(ranks))
        inside += list(np.abs(report.offset_us)[1:] <= np.array(report.residual_us)[1:])
    assert np.mean(inside) >= 0.9


def test_short_collectives_decide_where_long_ones_scatter():
    spans, offset = simulated(13, hosts(2), skew_us=1e5, jitter_us=5)
    rng = np.random.default_rng(13)
    spans.end_us[:, 1] += rng.exponential(1.0, 100) * np.where(spans.family == 3, 5_000, 0)
    report = align_clocks(spans, hosts(2))
    assert report.offset_us[1] == pytest.approx(offset[1], abs=20)


def test_ranks_of_one_host_share_their_clock():
    names = ("a", "a", "b", "b")
    spans, offset = simulated(3, names, skew_us=1e5, jitter_us=20)
    report = align_clocks(spans, names)
    assert report.offset_us[0] == report.offset_us[1] == 0
    assert report.offset_us[2] == report.offset_us[3] == pytest.approx(offset[2], abs=report.residual_us[2])
    assert report.residual_us[:2] == (0, 0)


def test_one_host_needs_no_collective():
    nothing = CommSpans(enqueue_us=np.empty((0, 2)), end_us=np.empty((0, 2)), family=np.empty(0, dtype=np.int64))
    report = align_clocks(nothing, ("a", "a"))
    assert (report.offset_us, report.residual_us) == ((0, 0), (0, 0))


def test_several_hosts_without_a_collective_are_an_error():
    nothing = CommSpans(enqueue_us=np.empty((0, 2)), end_us=np.empty((0, 2)), family=np.empty(0, dtype=np.int64))
    with pytest.raises(InputError, match="record more steps"):
        align_clocks(nothing, ("a", "b"))


def test_one_collective_aligns_its_completions_within_what_causality_leaves():
    spans = CommSpans(enqueue_us=np.array([[0.0, 1000.0]]), end_us=np.array([[300.0, 1320.0]]), family=np.array([0]))
    report = align_clocks(spans, ("a", "b"))
    # The second clock is ahead by at least 1000 - 300 and at most 1320 - 0.
    assert report.offset_us[1] == pytest.approx(1020)
    assert report.residual_us[1] == pytest.approx(1020 - 700)


def few(differences_us):
    """All-reduces of 100 us that rank 1 enqueues 600 us after rank 0; completions on rank 1 are noted so much later."""
    begin = EPOCH_US + 1500.0 * np.arange(len(differences_us))[:, None]
    end = begin + 1000 + np.array([[0.0, late] for late in differences_us])
    return CommSpans(enqueue_us=begin + np.array([300.0, 900.0]), end_us=end, family=np.zeros(len(differences_us), np.int64))


@every_case("count", [2, 3, 5, 7])
@every_case("late_us", [0.0, 250.0, -80.0])
def test_a_few_collectives_that_complete_together_fix_the_clocks(count, late_us):
    report = align_clocks(few([late_us] * count), ("a", "b"))
    assert report.offset_us[1] == pytest.approx(late_us, abs=1)
    assert report.residual_us[1] <= 1


def test_a_few_collectives_that_do_not_complete_together_leave_the_clocks_open():
    report = align_clocks(few([0.0, 40.0, -30.0]), ("a", "b"))
    assert report.residual_us[1] >= 70


def test_known_skews_of_a_few_collectives_lie_within_the_residual_in_nine_of_ten_cases():
    inside = []
    for seed in range(40):
        spans, offset = simulated(seed, hosts(2), 1e4, 30, collectives=2 + seed % 6)
        report = align_clocks(spans, hosts(2))
        inside.append(abs(report.offset_us[1] - offset[1]) <= report.residual_us[1])
    assert np.mean(inside) >= 0.9


def test_a_few_torn_records_do_not_move_the_clocks():
    spans, offset = simulated(5, hosts(2), skew_us=1e4, jitter_us=20, collectives=400)
    spans.end_us[[17, 203], 1] -= 1e6
    report = align_clocks(spans, hosts(2))
    assert report.offset_us[1] == pytest.approx(offset[1], abs=report.residual_us[1])


def test_collectives_of_two_runs_are_an_error_that_names_the_hosts():
    spans, _ = simulated(7, hosts(3), skew_us=10, jitter_us=5)
    spans.end_us[::2, 1] -= 1e6
    with pytest.raises(InputError, match=r"host1.*of the same run"):
        align_clocks(spans, hosts(3))


def test_the_same_spans_give_the_same_report():
    spans, _ = simulated(11, hosts(4), skew_us=1e3, jitter_us=50)
    assert align_clocks(spans, hosts(4)) == align_clocks(spans, hosts(4))


class TestManyHosts:
    """More hosts than are fitted together are fitted one by one."""

    @pytest.mark.parametrize(("ranks", "per_host"), [(100, 1), (560, 8)])
    def test_known_skews_lie_within_the_residual_in_nine_of_ten_cases(self, ranks, per_host):
        names = tuple(f"host{rank // per_host:03}" for rank in range(ranks))
        inside = []
        for seed in range(5):
            jitter_us, skew_us = 10.0 ** np.random.default_rng(seed).uniform((0.3, 0.5), (2.3, 6.5))
            spans, offset = simulated(seed, names, skew_us, jitter_us)
            report = align_clocks(spans, names)
            inside += list((np.abs(np.array(report.offset_us) - offset) <= np.array(report.residual_us))[per_host:])
            aligned = np.array(report.offset_us)
            first_end, last_enqueue = (spans.end_us - aligned).min(axis=1), (spans.enqueue_us - aligned).max(axis=1)
            assert (first_end >= last_enqueue - 1).all()
        assert np.mean(inside) >= 0.9

    def test_few_collectives_leave_what_causality_leaves(self):
        spans, offset = simulated(3, hosts(100), 1e5, 30, collectives=3)
        report = align_clocks(spans, hosts(100))
        assert (np.abs(np.array(report.offset_us) - offset) <= np.array(report.residual_us)).all()

    def test_collectives_of_two_runs_are_an_error_that_names_the_hosts(self):
        spans, _ = simulated(0, hosts(100), 1e3, 30)
        other, _ = simulated(1, hosts(100), 1e3, 30)
        mixed = CommSpans(
            enqueue_us=np.hstack([spans.enqueue_us[:, :60], other.enqueue_us[:, 60:]]),
            end_us=np.hstack([spans.end_us[:, :60], other.end_us[:, 60:]]),
            family=spans.family,
        )
        with pytest.raises(InputError, match=r"clocks of hosts host60, host61, .*, ...: collectives complete before"):
            align_clocks(mixed, hosts(100))

    def test_memory_grows_as_the_ranks(self):
        def peak_bytes(ranks):
            spans, _ = simulated(0, hosts(ranks), 1e3, 30, collectives=20)
            tracemalloc.start()
            align_clocks(spans, hosts(ranks))
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return peak

        assert peak_bytes(2000) < 5 * peak_bytes(500)
