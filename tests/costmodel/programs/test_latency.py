"""Times of programs on a device of which few were measured."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from dpro_search.costmodel.programs.choice import CHOICES, Choice, chosen
from dpro_search.costmodel.programs.latency import ProgramLatency, order_of, to_try
from dpro_search.errors import InputError

Floats = npt.NDArray[np.float64]


def programs_on(factor: float) -> tuple[Floats, Floats, Floats]:
    """Columns of 400 programs, their times on another device, and on this one, where a condition costs `factor` more."""
    random = np.random.default_rng(0)
    columns = np.column_stack([random.uniform(0, 5, 400), random.uniform(0, 5, 400), random.integers(0, 2, 400)])
    other = np.exp(0.5 * columns[:, 0] + 0.1 * (columns[:, 1] - 2) ** 2)
    return columns, other[:, None], 3 * other * factor ** columns[:, 2] * np.exp(0.2 * columns[:, 1])


def test_a_condition_and_a_slope_are_learned_from_fifty_programs() -> None:
    columns, others_us, us = programs_on(factor=10.0)
    places = chosen(columns, others_us, 50)
    durations = ProgramLatency.fit(columns, others_us, places, us[places]).predict()
    rest = np.setdiff1d(np.arange(400), places)
    assert np.median(np.abs(durations.us / us - 1)[rest]) < 0.1
    assert ((durations.low_us <= us) & (us <= durations.high_us))[rest].mean() > 0.8


def test_a_measured_program_is_as_it_was_measured() -> None:
    columns, others_us, us = programs_on(factor=2.0)
    places = chosen(columns, others_us, 20)
    durations = ProgramLatency.fit(columns, others_us, places, us[places]).predict()
    assert durations.us[places] == pytest.approx(us[places])
    assert durations.low_us[places] == pytest.approx(durations.high_us[places])


def test_times_in_other_units_on_another_device_change_nothing() -> None:
    columns, others_us, us = programs_on(factor=2.0)
    places = chosen(columns, others_us, 20)
    one, same = (ProgramLatency.fit(columns, scale * others_us, places, us[places]).predict().us for scale in (1.0, 1000.0))
    assert one == pytest.approx(same, rel=1e-3)


def test_a_program_that_fails_on_another_device_is_predicted_all_the_same() -> None:
    columns, others_us, us = programs_on(factor=2.0)
    others_us[::7] = np.nan
    places = chosen(columns, others_us, 50)
    assert np.isfinite(ProgramLatency.fit(columns, others_us, places, us[places]).predict().us).all()


def test_no_other_device_is_needed() -> None:
    columns, _, us = programs_on(factor=2.0)
    nothing = np.empty((400, 0))
    places = chosen(columns, nothing, 50)
    assert np.median(np.abs(ProgramLatency.fit(columns, nothing, places, us[places]).predict().us / us - 1)) < 0.2


@pytest.mark.parametrize(
    ("count", "time", "says"), [(5, 1.0, "at least 10"), (20, np.nan, "failed to compile"), (20, 0.0, "above 0")]
)
def test_too_few_programs_and_times_that_are_none_are_refused(count: int, time: float, says: str) -> None:
    columns, others_us, us = programs_on(factor=2.0)
    measured = us[:count].copy()
    measured[0] = time
    with pytest.raises(InputError, match=says):
        ProgramLatency.fit(columns, others_us, np.arange(count), measured)


@pytest.mark.parametrize("way", CHOICES)
def test_programs_to_measure_are_different_ones_and_the_same_each_time(way: Choice) -> None:
    columns, others_us, _ = programs_on(factor=2.0)
    places = chosen(columns, others_us, 40, seed=3, way=way)
    assert len(np.unique(places)) == 40
    assert (places == chosen(columns, others_us, 40, seed=3, way=way)).all()


def test_more_programs_than_there_are_cannot_be_chosen() -> None:
    columns, others_us, _ = programs_on(factor=2.0)
    with pytest.raises(InputError, match="of 400 that there are"):
        chosen(columns, others_us, 401)


def test_without_measurements_programs_are_in_the_order_of_the_device_that_is_most_alike() -> None:
    times = np.array([[1.0, 4.0], [2.0, 3.0], [np.nan, np.nan], [4.0, 1.0]])
    assert np.argsort(order_of(times, np.array([1.0, 0.01]))).tolist() == [0, 1, 3, 2]


def test_programs_to_try_come_from_both_orders_in_turn() -> None:
    assert to_try([np.array([1.0, 2.0, 3.0, 4.0]), np.array([9.0, 7.0, 8.0, 6.0])], 3).tolist() == [0, 3, 1]
