"""Algorithms of all-reduces beside the library's own choice."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.costmodel.collectives.all_reduce_choice import AllReduceChoice
from dpro_search.costmodel.collectives.counts import Points
from dpro_search.errors import InputError

# By size in bytes, us. By itself the library takes what doubling takes up to 1 MiB, and what the ring takes beyond.
TIMES = {
    "mpi recursive-doubling": lambda size: 100 + size / 50,
    "mpi ring": lambda size: 10_000 + size / 100,
    "mpi default": lambda size: np.where(size < 2**20, 100 + size / 50, 10_000 + size / 100),
}


class Model:
    """A model of communication whose predictions are `times` of a size."""

    def __init__(self, times=TIMES) -> None:
        self.costs = times
        self.asked: list[Points] = []

    def predict(self, name: str, points: Points) -> SimpleNamespace:
        self.asked.append(points)
        return SimpleNamespace(us=np.asarray(self.costs[name](points.size_bytes)))


def choice() -> AllReduceChoice:
    return AllReduceChoice.of(Model(), ranks=4, rate_bps=1e9, cores=2)


def ratio_at(size_bytes: float, ranges) -> float:
    edges, ratio = choice().ratios(ranges)
    return float(ratio[np.searchsorted(edges, size_bytes, side="right") - 1])


def test_the_model_is_asked_for_the_cluster():
    model = Model()
    AllReduceChoice.of(model, ranks=4, rate_bps=1e9, cores=2)
    assert {(float(p.ranks[0]), float(p.link_bytes_per_us[0]), float(p.cores[0])) for p in model.asked} == {(4, 125.0, 2)}


@pytest.mark.parametrize("size_bytes", [2**12, 2**18, 2**24])
def test_an_algorithm_takes_its_time_over_that_of_the_librarys_choice(size_bytes):
    expected = TIMES["mpi recursive-doubling"](size_bytes) / TIMES["mpi default"](size_bytes)
    assert ratio_at(size_bytes, ((0, "recursive-doubling"),)) == pytest.approx(float(expected))


def test_sizes_from_a_boundary_on_are_the_next_algorithms():
    ranges = ((0, "recursive-doubling"), (5_000_000, "ring"))
    assert ratio_at(4_999_999, ranges) == pytest.approx(ratio_at(4_999_999, ((0, "recursive-doubling"),)))
    assert ratio_at(5_000_000, ranges) == ratio_at(5_000_000, ((0, "ring"),)) == pytest.approx(1.0)


@given(st.lists(st.sampled_from(["ring", "recursive-doubling"]), min_size=1, max_size=4), st.data())
def test_every_size_has_one_ratio_above_0(algorithms, data):
    starts = sorted(data.draw(st.sets(st.integers(1, 2**30), min_size=len(algorithms) - 1, max_size=len(algorithms) - 1)))
    edges, ratio = choice().ratios(tuple(zip((0, *starts), algorithms, strict=True)))
    assert edges[0] == 0
    assert (np.diff(edges) > 0).all()
    assert len(edges) == len(ratio)
    assert (ratio > 0).all()


def test_the_fastest_changes_where_the_times_cross():
    (zero, small), (boundary, large) = choice().fastest()
    assert (zero, small, large) == (0, "recursive-doubling", "ring")
    assert boundary == pytest.approx(990_000, rel=0.1)  # 100 + n / 50 = 10,000 + n / 100
    assert ratio_at(2 * boundary, choice().fastest()) == 1.0 < ratio_at(2 * boundary, ((0, "recursive-doubling"),))


@pytest.mark.parametrize("names", [("mpi ring",), ("mpi default",), ("gloo ring",)])
def test_a_model_that_cannot_compare_is_refused(names):
    with pytest.raises(InputError, match="measure both with 'dpro-search fit --collect comm --backends mpi'"):
        AllReduceChoice.of(Model({name: lambda size: size for name in names}), 2, None, 2)


def test_an_unknown_algorithm_is_refused():
    with pytest.raises(InputError, match="nothing is known of rabenseifner, only of recursive-doubling, ring"):
        choice().ratios(((0, "rabenseifner"),))


TWO_A_HOST = {f"{name}, 2 ranks a host": times for name, times in TIMES.items()}
HIERARCHY = {"mpi hierarchy, 2 ranks a host": lambda size: 5_000 + size / 150}


def test_what_was_measured_with_other_ranks_per_host_says_nothing():
    with pytest.raises(InputError, match="--backends mpi --ranks-per-host 2'"):
        AllReduceChoice.of(Model(), 4, 1e9, 2, ranks_per_host=2)
    with pytest.raises(InputError, match="--backends mpi'"):
        AllReduceChoice.of(Model(TWO_A_HOST), 4, 1e9, 2)
    with pytest.raises(InputError, match="hosts must have one number of ranks"):
        AllReduceChoice.of(Model(TIMES | TWO_A_HOST), 4, 1e9, 2, ranks_per_host=None)


def test_a_hierarchy_is_one_more_algorithm_of_hosts_with_several_ranks():
    known = AllReduceChoice.of(Model(TIMES | TWO_A_HOST | HIERARCHY), 4, 1e9, 2, ranks_per_host=2)
    assert known.algorithms == ("recursive-doubling", "ring", "hierarchy")
    assert known.refusal(["hierarchy", "ring"]) is None
    assert [algorithm for _, algorithm in known.fastest()] == ["recursive-doubling", "hierarchy"]


def test_a_hierarchy_of_hosts_with_one_rank_is_refused_with_the_reason():
    with pytest.raises(InputError, match="plan: allreduce_algorithms: every host has one rank"):
        choice().ratios(((0, "hierarchy"),))
    flat = AllReduceChoice.of(Model(TWO_A_HOST), 4, 1e9, 2, ranks_per_host=2)
    assert flat.refusal(["hierarchy"]) == "allreduce_algorithms: nothing is known of hierarchy, only of recursive-doubling, ring"
