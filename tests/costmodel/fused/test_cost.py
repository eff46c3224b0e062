"""Durations of fused clusters: better than the baselines on left-out models, physical, and honest about what it does not know."""

import dataclasses

import numpy as np
import pytest
from costmodel.fused.clusters import clusters, model, table

from dpro_search.costmodel.fused.additive import TreeSettings
from dpro_search.costmodel.fused.cost import fit_fused_cost
from dpro_search.costmodel.fused.features import FEATURES, shaped_features
from dpro_search.costmodel.fused.model_file import ALL, FusionModel
from dpro_search.costmodel.fused.op_parts import PART_FEATURES
from dpro_search.costmodel.intervals import PredictionOrigin, conformal_quantile
from dpro_search.errors import InputError


def test_left_out_models_are_predicted_better_than_by_the_sum_of_the_members():
    overall = model().info.overall
    assert overall.rows == len(table().measured)
    assert overall.mape_pct < overall.sum_mape_pct < overall.scaled_sum_mape_pct
    assert overall.pays_right_pct > overall.sum_pays_right_pct > overall.scaled_sum_pays_right_pct


def test_each_left_out_model_has_its_score():
    names = [score.model for score in model().info.scores]
    assert names == [*sorted({row.model for row in table().measured}), ALL]
    assert sum(score.rows for score in model().info.scores[:-1]) == model().info.overall.rows


def test_intervals_hold_the_truth_of_left_out_models_about_as_often_as_they_say():
    assert 0.8 <= model().info.overall.coverage <= 0.97


def test_without_shapes_the_intervals_are_wider_and_hold_the_truth_as_often():
    blind = model().timed
    assert conformal_quantile(blind.scores, 0.9) > conformal_quantile(model().shaped.scores, 0.9)
    assert 0.8 <= model().info.times.overall.coverage <= 0.97
    assert model().info.times.overall.mape_pct > model().info.overall.mape_pct


def test_that_fusing_never_pays_is_a_baseline_too():
    rows = [row for row in table().measured if row.pays is not None]
    assert model().info.overall.pays_rows == len(rows)
    assert model().info.overall.never_pays_right_pct == pytest.approx(np.mean([not row.pays for row in rows]) * 100)


def test_more_work_at_the_same_unfused_time_is_never_predicted_faster():
    features = shaped_features(clusters())
    before = model().shaped.predict(features)
    for name in ("work", "read_bytes", "written_bytes"):
        more = features.parts.copy()
        more[:, PART_FEATURES.index(name)] *= 3
        more[:, PART_FEATURES.index(name)] += 1e4
        prediction = model().shaped.predict(dataclasses.replace(features, parts=more))
        assert (prediction >= before * (1 - 1e-5)).all(), name


def test_an_interval_holds_its_prediction_and_grows_with_the_coverage():
    features = shaped_features(clusters())
    narrow, wide = (model().shaped.predict_interval(features, coverage) for coverage in (0.5, 0.95))
    assert (narrow.low_us < narrow.us).all()
    assert (narrow.us < narrow.high_us).all()
    assert (wide.high_us > narrow.high_us).all()
    np.testing.assert_allclose(narrow.us, model().shaped.predict(features), rtol=1e-6)


def test_what_was_measured_is_interpolated():
    origin = model().shaped.predict_interval(shaped_features(clusters())).origin
    assert (origin == PredictionOrigin.INTERPOLATED).mean() > 0.9


def test_the_interval_widens_outside_of_what_was_measured_until_nothing_is_predicted():
    one = shaped_features(clusters()[:1])
    features = np.median(shaped_features(clusters()).whole, axis=0, keepdims=True)
    heavy = [FEATURES.index(name) for name in FEATURES if name.startswith(("flops", "depthwise", "gather", "pool", "largest"))]
    widths, origins = [], []
    for factor in (*np.geomspace(1, 1e3, 30), 1e14):
        moved = features.copy()
        moved[:, heavy] = (moved[:, heavy] + 1) * factor - 1
        durations = model().shaped.predict_interval(dataclasses.replace(one, whole=moved))
        widths.append(float(durations.high_us[0] / durations.low_us[0]))
        origins.append(PredictionOrigin(int(durations.origin[0])))
    assert origins[-1] == PredictionOrigin.REFUSED
    assert np.isnan(widths[-1])
    assert PredictionOrigin.EXTRAPOLATED in origins
    predicted = [width for width in widths if not np.isnan(width)]
    assert (np.diff(predicted) > -1e-9).all()
    assert predicted[-1] > predicted[0]


def test_equal_seeds_give_equal_models():
    rows = table().measured
    features, fused = shaped_features(clusters()), np.array([row.fused_us for row in rows])
    first, second = (fit_fused_cost(features, fused, settings=TreeSettings(trees=20, seed=3)).predict(features) for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    ("coverage", "expected"), [(0.5, 5.0), (0.9, 9.0), (0.99, 9.0)], ids=["half", "nine of ten", "more than there are"]
)
def test_the_conformal_quantile_counts_the_new_one_in(coverage, expected):
    assert conformal_quantile(np.arange(1.0, 10.0), coverage) == expected


def test_without_a_second_model_there_is_no_interval():
    rows = table().measured
    fused_us = np.array([row.fused_us for row in rows])
    cost = fit_fused_cost(shaped_features(clusters()), fused_us, settings=TreeSettings(trees=5))
    with pytest.raises(InputError, match="at least two models"):
        cost.predict_interval(shaped_features(clusters()))


def test_wrong_features_are_refused():
    one = shaped_features(clusters()[:1])
    with pytest.raises(InputError, match="shaped_features"):
        model().shaped.predict(dataclasses.replace(one, parts=one.parts[:, 1:]))
    with pytest.raises(InputError, match="not finite"):
        model().shaped.predict(dataclasses.replace(one, whole=np.full_like(one.whole, np.nan)))


def test_a_handful_of_clusters_is_too_little():
    few = table().rows[:10]
    with pytest.raises(InputError, match="too few"):
        FusionModel.train([type(table())(header=table().header, rows=few, dropped={})])


def test_tables_of_different_machines_are_not_mixed():
    header = type(table().header)(machine="another processor", versions={}, started_at="")
    other = type(table())(header=header, rows=table().rows, dropped={})
    with pytest.raises(InputError, match="another processor"):
        FusionModel.train([table(), other])
