"""Replays with seeds that follow from one."""

import numpy as np
import pytest

from dpro_search.errors import InputError
from dpro_search.replay.monte_carlo import iterations_of_draws_us


def first_draw(seed: np.random.SeedSequence) -> float:
    return float(np.random.default_rng(seed).random())


def test_the_result_does_not_depend_on_the_number_of_threads() -> None:
    seeds = np.random.SeedSequence(5).spawn(8)
    one, two = (iterations_of_draws_us(first_draw, seeds, threads=threads) for threads in (1, 2))
    np.testing.assert_array_equal(one, two)
    assert len(set(one.tolist())) == 8


@pytest.mark.parametrize(("samples", "threads"), [(0, 1), (1, 0)])
def test_no_replays_and_no_threads_are_refused(samples: int, threads: int) -> None:
    with pytest.raises(InputError, match=f"not {samples} and {threads}"):
        iterations_of_draws_us(first_draw, np.random.SeedSequence(0).spawn(samples), threads=threads)
