"""A job's first steps time the chosen all-reduce against the MPI library's default: on simulated ranks, whose clock is a number."""

from collections.abc import Mapping
from threading import Barrier, Thread
from types import SimpleNamespace

import numpy as np
import pytest

from dpro_search.runtime.all_reduce.dpro_search_all_reduce import check
from dpro_search.runtime.all_reduce.dpro_search_all_reduce.check import CheckedAllReduce, SizeTimes

MIB = 1 << 20
RING, DEFAULT, HALVING = ("ring", 0), ("native", 0), ("halving-doubling", 0)
CLOCK = SimpleNamespace(now_s=0.0)


class SimulatedAllReduce:
    """An all-reduce that takes a given time by each algorithm, and writes down which one each call was made by."""

    ranks, rank = 2, 0

    def __init__(self, time_s: Mapping[str, float], candidates: tuple[tuple[str, int], ...] = (RING, DEFAULT)) -> None:
        self.time_s, self._candidates = dict(time_s), list(candidates)
        self.registry = SimpleNamespace(memory=self._memory)
        self.calls: list[tuple[int, str | None]] = []

    def _memory(self, buffer: np.ndarray) -> SimpleNamespace:
        return SimpleNamespace(narrow=buffer.dtype == np.float16, on_device=False, count=buffer.size, itemsize=buffer.itemsize)

    def candidates(self, size_bytes: int) -> list[tuple[str, int]]:
        return self._candidates

    def prepare(self, candidates: list[tuple[str, int]]) -> None:
        pass

    def least(self, values: list[float]) -> list[float]:
        return list(values)

    def sum(
        self, buffer: np.ndarray, average: bool = False, algorithm: str | None = None, segment_bytes: int | None = None
    ) -> None:
        self.calls.append((buffer.nbytes, algorithm))
        CLOCK.now_s += self.time_s[algorithm or "ring"]


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    CLOCK.now_s = 0.0
    monkeypatch.setattr(check, "perf_counter", lambda: CLOCK.now_s)


def train(all_reduce: SimulatedAllReduce, steps: int, sizes: tuple[int, ...] = (MIB,), compute_s: float = 0.9) -> list[str]:
    """Sum buffers of these sizes in each step; returns what was said."""
    lines: list[str] = []
    checked = CheckedAllReduce(all_reduce, say=lines.append)
    for _ in range(steps):
        CLOCK.now_s += compute_s
        for size in sizes:
            checked.sum(np.zeros(size // 4, "float32"))
    return lines


def test_the_default_is_kept_where_it_is_faster_and_one_line_says_so():
    all_reduce = SimulatedAllReduce({"ring": 0.10, "native": 0.08})
    (line,) = train(all_reduce, 40)
    assert line == "all-reduce of 1048576 bytes by native (in this job: ring 100 ms, native 80 ms)"
    assert {algorithm for _, algorithm in all_reduce.calls[-20:]} == {"native"}


def test_the_tables_choice_is_kept_where_it_is_faster():
    all_reduce = SimulatedAllReduce({"ring": 0.10, "native": 0.12})
    train(all_reduce, 40)
    assert {algorithm for _, algorithm in all_reduce.calls[-20:]} == {"ring"}


def test_the_default_wins_a_tie():
    all_reduce = SimulatedAllReduce({"ring": 0.100, "native": 0.101})
    train(all_reduce, 40)
    assert all_reduce.calls[-1] == (MIB, "native")


def test_a_close_alternative_is_kept_where_it_is_the_fastest():
    all_reduce = SimulatedAllReduce({"ring": 0.10, "native": 0.12, "halving-doubling": 0.07}, (RING, DEFAULT, HALVING))
    train(all_reduce, 40)
    assert all_reduce.calls[-1] == (MIB, "halving-doubling")


def test_a_job_of_five_steps_and_a_size_that_occurs_once_are_not_checked():
    all_reduce = SimulatedAllReduce({"ring": 0.10, "native": 0.05})
    checked = CheckedAllReduce(all_reduce, say=lambda line: pytest.fail(line))
    for _ in range(5):
        checked.sum(np.zeros(MIB // 4, "float32"))
    checked.sum(np.zeros(MIB, "float32"))
    assert {algorithm for _, algorithm in all_reduce.calls} == {None}


@pytest.mark.parametrize("default_s", [0.11, 0.2, 1.0])
def test_the_check_costs_less_than_a_two_hundredth_of_two_hundred_steps(default_s):
    sizes = MIB, 2 * MIB, 3 * MIB
    all_reduce = SimulatedAllReduce({"ring": 0.1, "native": default_s})
    train(all_reduce, 200, sizes)
    extra_s = CLOCK.now_s - 200 * (0.9 + 3 * 0.1)
    # One call of a slow default cannot be avoided: nobody knew how slow it is.
    assert extra_s <= max(0.005 * 200 * 1.2, default_s - 0.1) + 1e-9


def test_sums_of_16_bit_floats_are_left_as_they_are():
    all_reduce = SimulatedAllReduce({"ring": 0.1, "native": 0.01})
    checked = CheckedAllReduce(all_reduce, say=lambda line: pytest.fail(line))
    for _ in range(40):
        checked.sum(np.zeros(MIB // 4, "float16"))
    assert {algorithm for _, algorithm in all_reduce.calls} == {None}


def test_a_size_whose_time_changes_is_checked_again():
    all_reduce = SimulatedAllReduce({"ring": 0.10, "native": 0.2})
    checked = CheckedAllReduce(all_reduce, say=lambda line: None)
    buffer = np.zeros(MIB // 4, "float32")
    for _ in range(100):
        checked.sum(buffer)
    assert all_reduce.calls[-1] == (MIB, "ring")
    all_reduce.time_s["ring"] = 0.4
    for _ in range(600):
        checked.sum(buffer)
    assert all_reduce.calls[-1] == (MIB, "native")


def test_after_the_check_ranks_exchange_no_times_until_calls_have_changed(monkeypatch):
    all_reduce = SimulatedAllReduce({"ring": 0.10, "native": 0.2})
    checked = CheckedAllReduce(all_reduce, say=lambda line: None)
    buffer = np.zeros(MIB // 4, "float32")
    for _ in range(40):
        checked.sum(buffer)
    monkeypatch.setattr(all_reduce, "least", lambda values: pytest.fail("times were exchanged"))
    for _ in range(200):
        checked.sum(buffer)


def test_a_size_that_does_not_come_back_holds_up_no_other():
    all_reduce = SimulatedAllReduce({"ring": 0.10, "native": 0.05})
    lines: list[str] = []
    checked = CheckedAllReduce(all_reduce, say=lines.append)
    for _ in range(6):
        checked.sum(np.zeros(MIB // 4, "float32"))
    for _ in range(200):
        checked.sum(np.zeros(MIB // 2, "float32"))
    assert [line.split()[2] for line in lines] == [str(2 * MIB)]


def test_ranks_that_measure_different_times_keep_the_same_algorithm():
    """One rank waits for the other in the ring, the other one in the default: the shorter time of each call is what it takes."""
    barrier, values = Barrier(2), {}

    class Rank(SimulatedAllReduce):
        def least(self, mine: list[float]) -> list[float]:
            values[self.rank] = mine
            barrier.wait()
            agreed = [min(pair) for pair in zip(values[0], values[1], strict=True)]
            barrier.wait()
            return agreed

    def run(all_reduce: Rank) -> None:
        now_s = 0.0
        trial = SizeTimes([RING, DEFAULT], 1)
        while trial.kept is None:
            times_s = trial.add(all_reduce.time_s[trial.candidates[trial.next()][0]])
            if times_s is not None:
                trial.agree(all_reduce.least(times_s), 10.0 - now_s)
        kept[all_reduce.rank] = trial.kept

    ranks = [Rank({"ring": 0.1, "native": 0.5}), Rank({"ring": 0.9, "native": 0.2})]
    ranks[1].rank = 1
    kept: dict[int, int] = {}
    threads = [Thread(target=run, args=(one,)) for one in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert kept == {0: 0, 1: 0}


def test_one_disturbed_call_of_the_tables_choice_decides_nothing():
    trial = SizeTimes([RING, DEFAULT], 1)
    for times_s in ([0.5, 0.2], [0.2, 0.1], [0.1, 0.2], [0.2, 0.1], [0.1, 0.2], [0.2, 0.1]):
        if trial.kept is None:
            trial.agree(times_s, 10.0)
    assert trial.candidates[trial.kept] == RING
