"""What a search begins with is not looked at by the garbage collector while it searches; what it makes itself is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from bus_objective import BusObjective, tensors_of

from dpro_search.search import run_search
from dpro_search.search.study import frozen_heap

JOB = BusObjective(tensors_of([4_000_000, 8_000_000, 400]))


class Knot:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("thawed")
def test_full_collections_pass_over_what_was_there_and_find_what_came_later() -> None:
    before = weakref.ref(Knot())
    with frozen_heap():
        within = weakref.ref(Knot())
        gc.collect()
        assert before() is not None
        assert within() is None
    gc.collect()
    assert before() is None


@pytest.mark.usefixtures("thawed")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_search_gives_everything_back(workers: int, tmp_path: Path) -> None:
    frozen: list[int] = []
    run_search(
        JOB,
        trials=40,
        sampler="mcmc",
        out=tmp_path / "run",
        trace_digest="-",
        workers=workers,
        on_trial=lambda _: frozen.append(gc.get_freeze_count()),
    )
    assert min(frozen) > 1000
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("thawed")
def test_so_does_one_that_is_broken_off(tmp_path: Path) -> None:
    def broken_off(_: object) -> None:
        assert gc.get_freeze_count() > 1000
        raise RuntimeError

    with pytest.raises(RuntimeError):
        run_search(JOB, trials=40, out=tmp_path / "run", trace_digest="-", on_trial=broken_off)
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("thawed")
def test_what_the_caller_has_frozen_stays_frozen() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with frozen_heap():
        pass
    assert gc.get_freeze_count() == count
