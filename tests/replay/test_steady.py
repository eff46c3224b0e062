"""Whether iterations that vary have settled."""

import numpy as np

from dpro_search.replay.steady import halves_agree


def iterations_us(first: float, second: float, noise: float = 0.0) -> np.ndarray:
    """Sixteen iterations around one time, then sixteen around another."""
    return np.repeat([first, second], 16) + noise * np.random.default_rng(0).standard_normal(32)


def test_halves_of_one_median_agree() -> None:
    assert halves_agree(iterations_us(1000.0, 1000.0, noise=20.0))


def test_halves_agree_up_to_one_percent() -> None:
    assert halves_agree(iterations_us(1000.0, 1009.0))
    assert not halves_agree(iterations_us(1000.0, 1011.0))


def test_noise_widens_what_agrees() -> None:
    assert not halves_agree(iterations_us(1000.0, 1050.0))
    assert halves_agree(iterations_us(1000.0, 1050.0, noise=200.0))


def test_of_less_than_four_iterations_nothing_is_told() -> None:
    assert halves_agree(np.array([1.0, 2.0, 3.0]))
