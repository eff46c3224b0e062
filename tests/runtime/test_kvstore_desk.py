"""The desk of a job in a KVStore: workers push numbers and pull rows."""

import pickle

import pytest

from dpro_search.runtime.schemes import Adsp, Asp, Bsp, Goal, Scheme
from dpro_search.runtime.synchronisation.kvstore.desk import (
    BEAT,
    COMMIT,
    JOIN,
    LARGEST,
    LEAVE,
    Desk,
    DeskMessage,
    Row,
    desk_size,
    job_number,
    pushed_value,
    row_of,
)

SILENT_S = 10.0


class Job:
    """Two workers whose messages arrive at a desk at given seconds."""

    def __init__(self, scheme: Scheme, goal: Goal | None = None) -> None:
        made = Desk(scheme, 2, goal or Goal(), SILENT_S)
        self.desk: Desk = pickle.loads(pickle.dumps(made, 0))  # as MXNet sends it
        self.scheme = scheme

    def tell(self, kind: int, worker: int, at_s: float, *, scheme: Scheme | None = None, **more: float) -> list[Row]:
        """The rows of both after a message."""
        job = job_number(scheme or self.scheme, 2)
        message = DeskMessage(kind=kind, worker=worker, job=job, **more)
        table = self.desk.answered(pushed_value(message, 2), 1000.0 + at_s)
        assert table.shape == (desk_size(2),)
        return [row_of(table, each) for each in range(2)]

    def joined(self) -> "Job":
        for worker in range(2):
            self.tell(JOIN, worker, 0.0)
        return self


def test_nobody_begins_before_all_have_joined() -> None:
    job = Job(Asp())
    (first, _) = job.tell(JOIN, 0, 0.0)
    assert first.sequence == -1
    rows = job.tell(JOIN, 1, 3.0)
    assert [row.sequence for row in rows] == [0, 0]
    assert [row.reply(None, 0.0).order.steps for row in rows] == [1, 1]
    assert rows[0].job_s == 0.0  # the job begins now
    assert rows[0].reply(None, 0.0).run == rows[1].reply(None, 0.0).run != "0" * 12


def test_a_commit_is_answered_when_the_scheme_lets_the_worker_go_on() -> None:
    job = Job(Bsp()).joined()
    (first, _) = job.tell(COMMIT, 0, 1.0, sequence=1, steps=1, loss=2.0, weight=0.5)
    assert first.sequence == 0
    first, second = job.tell(COMMIT, 1, 2.0, sequence=1, steps=1, loss=2.0, weight=0.5)
    assert first.sequence == 1
    assert second.sequence == 1
    assert (first.time_s, second.time_s) == (1.0, 2.0)
    assert (first.behind_steps, second.behind_steps) == (0.0, 0.5)  # of the other's step, at its weight
    assert (first.commits, second.commits) == (1, 1)


def test_under_adsp_who_lacks_more_commits_gets_less_time() -> None:
    job = Job(Adsp(commits=4, period_s=8.0)).joined()
    for worker in range(2):
        job.tell(COMMIT, worker, 0.0, sequence=1, steps=1, loss=2.0, step_s=0.1, weight=0.5)
    for sequence in (2, 3):
        first, _ = job.tell(COMMIT, 0, 2.0, sequence=sequence, steps=1, loss=2.0, step_s=0.1, weight=0.5)
    _, second = job.tell(COMMIT, 1, 2.0, sequence=2, steps=1, loss=2.0, step_s=0.1, weight=0.5)
    assert first.order_seconds == pytest.approx(6.0 / 2)  # until second 8, both are to have 5
    assert second.order_seconds == pytest.approx(6.0 / 3)


def test_a_silent_worker_is_not_waited_for_and_one_that_left_is_not_lost() -> None:
    job = Job(Bsp()).joined()
    job.tell(COMMIT, 0, 1.0, sequence=1, steps=1, loss=2.0, weight=0.5)
    (first, _) = job.tell(BEAT, 0, SILENT_S + 1.0)
    assert first.sequence == 1
    assert (first.active, first.lost) == (1, 1)
    (first, _) = job.tell(LEAVE, 0, SILENT_S + 2.0)
    assert (first.active, first.lost) == (0, 1)


def test_two_processes_that_are_the_same_worker_are_told() -> None:
    job = Job(Asp())
    job.tell(JOIN, 0, 0.0)
    first, second = job.tell(JOIN, 0, 1.0)
    assert first.doubled
    assert not second.doubled


def test_all_are_told_to_stop_at_the_target_loss() -> None:
    job = Job(Asp(), Goal(target_loss=0.5)).joined()
    (first, _) = job.tell(COMMIT, 0, 1.0, sequence=1, steps=100, loss=0.6, weight=0.5)
    assert not first.stop
    _, second = job.tell(COMMIT, 1, 2.0, sequence=1, steps=100, loss=0.4, weight=0.5)
    assert second.stop


def test_a_worker_that_gives_another_scheme_finds_that_of_the_job() -> None:
    job = Job(Asp())
    (first, _) = job.tell(JOIN, 0, 0.0, scheme=Bsp())
    assert first.job == job_number(Asp(), 2) != job_number(Bsp(), 2) < LARGEST
    assert first.active == 0
    assert first.is_of_a_desk
    assert not row_of(pushed_value(DeskMessage(kind=JOIN, worker=0, job=2), 2), 0).is_of_a_desk  # servers that only store
