"""What the schemes decide, and that every update is applied exactly once."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.errors import InputError
from dpro_search.runtime.schemes import Commit, Coordinator, Order, parse_scheme
from dpro_search.runtime.schemes.commit_rate import CommitRateSearch, speed_of_decrease
from dpro_search.runtime.schemes.rules import shares


def started(scheme: str, workers: int) -> Coordinator:
    coordinator = Coordinator(parse_scheme(scheme), workers)
    for worker in range(workers):
        coordinator.join(worker, 0.0)
    return coordinator


def commit(coordinator: Coordinator, worker: int, sequence: int, now: float = 0.0, **facts: float) -> bool:
    incarnation = coordinator.members[worker].incarnation
    return coordinator.commit(Commit(worker, incarnation, sequence, steps=1, **facts), now)


def test_nobody_begins_before_all_workers_have_joined():
    coordinator = Coordinator(parse_scheme("asp"), 2)
    coordinator.join(0, 0.0)
    assert not coordinator.ready(0)
    coordinator.join(1, 0.0)
    assert coordinator.ready(0)


def test_bsp_waits_for_the_last_worker():
    coordinator = started("bsp", 2)
    commit(coordinator, 0, 1)
    assert not coordinator.ready(0)
    commit(coordinator, 1, 1)
    assert coordinator.ready(0)
    assert coordinator.ready(1)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_ssp_lets_a_worker_lead_by_its_staleness(staleness):
    coordinator = started(f"ssp(staleness={staleness})", 2)
    for sequence in range(1, staleness + 1):
        commit(coordinator, 0, sequence)
        assert coordinator.ready(0)
    commit(coordinator, 0, staleness + 1)
    assert not coordinator.ready(0)


def test_nobody_waits_for_a_worker_that_left():
    coordinator = started("bsp", 3)
    commit(coordinator, 0, 1)
    commit(coordinator, 1, 1)
    coordinator.leave(2, 0.0)
    assert coordinator.ready(0)
    assert coordinator.weight == 1 / 2


def test_a_worker_that_comes_back_starts_at_the_slowest_clock():
    coordinator = started("bsp", 2)
    coordinator.leave(1, 0.0)
    for sequence in range(1, 6):
        commit(coordinator, 0, sequence)
    coordinator.join(1, 0.0)
    assert coordinator.members[1].clock == 5
    assert coordinator.ready(0)


def test_a_commit_that_is_sent_again_or_by_a_replaced_process_is_not_applied():
    coordinator = started("asp", 2)
    assert commit(coordinator, 0, 1)
    assert not commit(coordinator, 0, 1)
    coordinator.join(0, 0.0)
    assert not coordinator.commit(Commit(0, 1, 2, steps=1), 0.0)
    assert coordinator.commit(Commit(0, 2, 1, steps=1), 0.0)
    assert coordinator.members[0].commits == 2


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["new", "again", "restart", "silent"])), max_size=60))
def test_whatever_happens_each_new_commit_counts_once(events):
    coordinator = started("ssp(staleness=2)", 3)
    sequence, applied = dict.fromkeys(range(3), 0), 0
    for worker, event in events:
        if event == "restart":
            coordinator.join(worker, 0.0)
            sequence[worker] = 0
        elif event == "silent":
            coordinator.leave(worker, 0.0)
        elif event == "new":
            sequence[worker] += 1
            assert commit(coordinator, worker, sequence[worker])
            applied += 1
        elif sequence[worker]:
            assert not commit(coordinator, worker, sequence[worker])
    assert sum(member.commits for member in coordinator.members.all.values()) == applied
    active = coordinator.members.active
    assert not active or any(coordinator.ready(worker) for worker in active)  # never do all wait


def test_adsp_gives_each_worker_the_commits_that_it_lacks():
    coordinator = started("adsp(commits=4, period_s=8)", 2)
    assert coordinator.order(0, 0.0) == Order(steps=1)  # how long steps take is not known yet
    commit(coordinator, 0, 1, step_s=0.1)
    commit(coordinator, 1, 1, step_s=1.0)
    assert coordinator.order(0, 0.0) == Order(seconds=2.0)
    commit(coordinator, 0, 2, now=2.0)
    assert coordinator.order(0, 2.0) == Order(seconds=2.0)
    assert coordinator.order(1, 4.0) == Order(seconds=1.0)  # half the period is over, and it made no commit
    assert coordinator.ready(0)


def test_adsp_goes_on_while_a_worker_that_came_late_has_not_made_a_step():
    coordinator = started("adsp(commits=2, period_s=8)", 2)
    coordinator.leave(1, 0.0)
    commit(coordinator, 0, 1, step_s=0.1)
    coordinator.order(0, 0.0)
    coordinator.join(1, 1.0)
    assert coordinator.order(0, 8.0) == Order(seconds=4.0)


def test_the_search_raises_the_rate_while_the_loss_falls_faster_and_keeps_the_best():
    search, losses, tried = CommitRateSearch(epoch_periods=8), [], []
    commits, time = 1, 0.0
    for _ in range(12):
        tried.append(commits)
        speed = {1: 1.0, 2: 2.0, 3: 3.0, 4: 2.5}[commits]
        begin = 1.0 / losses[-1][1] if losses else 0.5
        losses += [(time + 0.1 * i, 1.0 / (begin + speed * 0.1 * (i + 1))) for i in range(10)]
        time += 1.0
        commits = search.next_commits(losses, time - 1.0, most=9)
    assert tried == [1, 2, 3, 4, 3, 3, 3, 3, 1, 2, 3, 4]


def test_the_fitted_speed_is_that_of_the_curve():
    losses = [(0.1 * i, 1.0 / (2.0 * 0.1 * i + 1.0)) for i in range(40)]
    assert speed_of_decrease(losses, 2.0) == pytest.approx(2.0, rel=0.05)


def test_adacomm_takes_fewer_steps_as_the_loss_falls():
    coordinator = started("adacomm(steps=8, adapt_s=1)", 1)
    collected = []
    for second in range(4):
        commit(coordinator, 0, second + 1, now=float(second), loss=1.0 / (1 + second) ** 2)
        collected.append(coordinator.order(0, float(second)).steps)
    assert collected[0] == 8
    assert collected == sorted(collected, reverse=True)
    assert collected[-1] < 8


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=8), st.integers(0, 40))
def test_shares_add_up_and_no_single_move_ends_the_round_earlier(step_s, more):
    batches = len(step_s) + more
    parts = shares(dict(enumerate(step_s)), batches)
    assert sum(parts.values()) == batches
    assert min(parts.values()) >= 1
    end = max(parts[i] * step_s[i] for i in parts)
    last = [i for i in parts if math.isclose(parts[i] * step_s[i], end) and parts[i] > 1]
    assert all((parts[j] + 1) * step_s[j] >= end * (1 - 1e-9) for i in last for j in parts if j != i)


def test_a_job_without_workers_or_a_worker_outside_it_is_refused():
    with pytest.raises(InputError, match="at least one worker"):
        Coordinator(parse_scheme("bsp"), 0)
    with pytest.raises(InputError, match="no worker 2"):
        Coordinator(parse_scheme("bsp"), 2).join(2, 0.0)


def test_a_job_of_one_worker_never_waits():
    for scheme in ("bsp", "ssp", "asp", "adsp", "adacomm", "fixed-adacomm"):
        coordinator = started(scheme, 1)
        commit(coordinator, 0, 1, step_s=0.1)
        assert coordinator.ready(0)
