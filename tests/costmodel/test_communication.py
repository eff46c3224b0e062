"""All-reduces that were not measured: a formula carries, a residual corrects it, intervals say how sure that is."""

import contextlib
import functools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.costmodel.collectives.all_reduce_formula import AllReduceCost
from dpro_search.costmodel.collectives.cost import CollectiveCost, fit_collective_cost, folds
from dpro_search.costmodel.collectives.counts import Algorithm, Points
from dpro_search.costmodel.collectives.model_file import CommunicationModel
from dpro_search.costmodel.collectives.series import Series
from dpro_search.costmodel.intervals import PredictionOrigin
from dpro_search.errors import DproSearchError, InputError, TraceFormatError, TraceVersionError

TRUE = AllReduceCost(
    algorithm=Algorithm.RING,
    overhead_us=150.0,
    message_us=60.0,
    wire_factor=1.05,
    move_us_per_byte=1e-3,
    add_us_per_byte=0.0,
    exposed=0.1,
)


RATES, UNLIMITED = (60.0, 250.0), (np.inf,)  # bytes a microsecond; a fit without limits of links needs half as many attempts


def grid(sizes, ranks=(2, 4), rates=RATES) -> Points:
    axes = (axis.ravel() for axis in np.meshgrid(sizes, ranks, rates))
    return Points(**dict(zip(("size_bytes", "ranks", "link_bytes_per_us"), axes, strict=True)))


def measured(points: Points, seed: int = 0) -> np.ndarray:
    """What a library takes that has a slow protocol for some sizes, with some noise."""
    protocol = np.where((points.size_bytes > 2**16) & (points.size_bytes < 2**20), 1.5, 1.0)
    return TRUE.predict(points) * protocol * np.exp(np.random.default_rng(seed).normal(0, 0.01, len(points)))


SIZES = 2.0 ** np.arange(10, 27)


def usual() -> CollectiveCost:
    """Fitted to the whole grid: the only series of the model."""
    (cost,) = model().costs.values()
    return cost


def fitted(points: Points, **parameters) -> CollectiveCost:
    return fit_collective_cost(points, measured(points), **parameters)


def error(cost: CollectiveCost, points: Points) -> float:
    return float(np.abs(cost.predict(points) / measured(points, seed=1) - 1).mean())


def test_sizes_between_measured_ones_are_met_though_the_formula_alone_misses_them():
    between = grid(SIZES[:-1] * 1.4)
    assert error(usual(), between) < 0.05 < error(fitted(grid(SIZES), correct=False), between)


def test_far_from_what_was_measured_the_formula_alone_counts():
    cost = usual()
    far = Points(size_bytes=np.array([2.0**40]), ranks=np.array([2]), link_bytes_per_us=np.array(60.0))
    np.testing.assert_allclose(cost.predict(far), cost.formula.predict(far), rtol=1e-3)


def test_intervals_widen_away_from_what_was_measured_until_nothing_is_predicted():
    cost = usual()
    points = Points(size_bytes=np.array([1e6, 2.0**28, 2.0**40]), ranks=np.array(2), link_bytes_per_us=np.array(60.0))
    durations = cost.predict_interval(points)
    assert durations.origin.tolist() == [PredictionOrigin.INTERPOLATED, PredictionOrigin.EXTRAPOLATED, PredictionOrigin.REFUSED]
    width = np.log(durations.high_us / durations.low_us)
    assert 0 < width[0] < width[1]
    assert np.isnan(durations.us[2])


def test_more_ranks_are_as_uncertain_as_the_most_were_from_the_others():
    points = grid(SIZES, ranks=(2, 3, 4), rates=UNLIMITED)
    slower = measured(points) * points.ranks**0.7  # what no formula of a ring knows
    cost = fit_collective_cost(points, slower)
    many = grid(SIZES, ranks=(8,), rates=UNLIMITED)
    beyond = cost.predict_interval(many)
    truth = measured(many, seed=1) * many.ranks**0.7
    assert ((beyond.low_us <= truth) & (truth <= beyond.high_us)).mean() > 0.8
    inside = cost.predict_interval(grid(SIZES, ranks=(4,), rates=UNLIMITED))
    assert (beyond.high_us / beyond.low_us > inside.high_us / inside.low_us).all()


def test_where_ranks_never_differed_all_that_the_formula_adds_for_more_of_them_is_uncertain():
    cost = fitted(grid(SIZES, ranks=(2,), rates=UNLIMITED))
    assert "ranks" not in cost.carried
    durations = cost.predict_interval(grid(SIZES, ranks=(8,), rates=UNLIMITED))
    of_eight_us, of_two_us = (cost.formula.predict(grid(SIZES, ranks=(ranks,), rates=UNLIMITED)) for ranks in (8, 2))
    assert (durations.high_us / durations.us >= of_eight_us / of_two_us * (1 - 1e-9)).all()


def test_intervals_hold_about_as_often_as_they_say():
    cost = usual()
    between = grid(np.geomspace(2e3, 5e7, 60))
    durations = cost.predict_interval(between)
    truth = measured(between, seed=2)
    assert 0.8 < ((durations.low_us <= truth) & (truth <= durations.high_us)).mean() <= 1.0


def test_left_out_sizes_are_predicted_by_fits_without_them():
    groups = np.repeat(np.arange(11.0), 3)
    masks = folds(groups, seed=0)
    assert np.sum(masks, axis=0).tolist() == [1] * len(groups)
    for mask in masks:
        assert not set(groups[mask]) & set(groups[~mask])


def test_a_few_points_give_a_formula_and_no_residual():
    points = Points(size_bytes=np.array([1e4, 1e5, 1e6, 1e7, 1e8]), ranks=np.array(2))
    cost = fitted(points)
    assert cost.residual is None
    assert len(cost.scores)


def test_one_size_alone_has_an_interval_from_its_own_repeats():
    points = Points(size_bytes=np.full(12, 1e6), ranks=np.array(2))
    durations = fitted(points).predict_interval(points.select(np.array([0])))
    assert durations.low_us < durations.us < durations.high_us


def series(name="gloo ring", sizes=SIZES, rates=RATES) -> Series:
    points = grid(sizes, rates=rates)
    return Series(
        name=name, algorithms=(Algorithm.RING,), points=points, duration_us=measured(points), spread_pct=np.ones(len(points))
    )


@functools.cache
def model() -> CommunicationModel:
    return CommunicationModel.train([series()], ["made"])


def test_a_model_says_how_good_it_is_on_sizes_that_it_was_not_trained_on():
    (info,) = model().info.series
    assert (info.name, info.rows, info.sizes) == ("gloo ring", len(SIZES) * 4, len(SIZES))
    assert info.mape_pct < info.formula_mape_pct
    assert 0.8 <= info.coverage <= 1


def test_a_saved_model_predicts_the_same(tmp_path):
    model().save(tmp_path / "m")
    points = grid(np.geomspace(1e3, 1e9, 20), ranks=(2, 3, 8))
    before, after = (each.predict("gloo ring", points) for each in (model(), CommunicationModel.load(tmp_path / "m")))
    np.testing.assert_allclose(after.us, before.us, rtol=1e-6)
    np.testing.assert_allclose(after.high_us, before.high_us, rtol=1e-4)
    np.testing.assert_array_equal(after.origin, before.origin)


def test_series_that_the_model_has_not_are_named():
    with pytest.raises(InputError, match=r"has no series 'nccl'.*gloo ring"):
        model().predict("nccl", grid([1e3]))
    with pytest.raises(InputError, match="no series 'nccl'"):
        model().fastest(("gloo ring", "nccl"), grid([1e3]))


def test_the_fastest_of_several_series_is_chosen_point_by_point():
    ring = series(sizes=SIZES[::2], rates=UNLIMITED)
    doubling = msgspec.structs.replace(TRUE, algorithm=Algorithm.RECURSIVE_DOUBLING)
    other = Series(
        name="doubling",
        algorithms=(Algorithm.RECURSIVE_DOUBLING,),
        points=ring.points,
        duration_us=doubling.predict(ring.points),
        spread_pct=ring.spread_pct,
    )
    both = CommunicationModel.train([ring, other], ["made"])
    ends = Points(size_bytes=np.array([1e3, 6e7]), ranks=np.array(4))
    names, times = both.fastest(("gloo ring", "doubling"), ends)
    assert names == ["doubling", "gloo ring"]
    assert (times > 0).all()


def test_files_of_another_version_or_with_other_features_are_refused(tmp_path):
    model().save(tmp_path / "m")
    path = tmp_path / "m" / "communication.json"
    whole = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode(whole | {"version": 99}))
    with pytest.raises(TraceVersionError, match="version 99"):
        CommunicationModel.load(tmp_path / "m")
    path.write_bytes(msgspec.json.encode(whole | {"columns": ["other"]}))
    with pytest.raises(InputError, match="other features"):
        CommunicationModel.load(tmp_path / "m")


@pytest.mark.parametrize("damage", [{"constants": [1.0]}, {"constants": [99.0] * 6}, {"inputs": []}, {"values": [0.0]}])
def test_an_impossible_residual_is_noticed(damage, tmp_path):
    model().save(tmp_path / "m")
    path = tmp_path / "m" / "communication.json"
    whole = msgspec.json.decode(path.read_bytes())
    whole["series"][0]["residual"] |= damage
    path.write_bytes(msgspec.json.encode(whole))
    with pytest.raises(TraceFormatError, match="residual"):
        CommunicationModel.load(tmp_path / "m")


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_damaged_model_is_a_model_or_an_error_of_ours(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("m") / "m"
    model().save(folder)
    path = folder / "communication.json"
    raw = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(raw[: data.draw(st.sampled_from([len(raw), position]))]))
    with contextlib.suppress(DproSearchError):
        CommunicationModel.load(folder)
