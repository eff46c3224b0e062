"""Trees as arrays say what XGBoost's own trees say."""

import numpy as np
import pytest
import xgboost

from dpro_search.costmodel.devices.forest import Forest


@pytest.mark.parametrize("depth", [2, 5])
def test_a_forest_predicts_what_its_booster_does(depth):
    random = np.random.default_rng(0)
    rows = random.normal(size=(400, 6)).astype(np.float32)
    target = rows[:, 1] * 2 + np.sin(rows[:, 4]) + 3
    columns = (1, 4, 5)
    data = xgboost.DMatrix(rows[:, list(columns)], label=target, nthread=1)
    booster = xgboost.train({"max_depth": depth, "nthread": 1}, data, num_boost_round=12)
    forest = Forest.of(booster, depth, columns)
    assert forest.predict(rows) == pytest.approx(booster.predict(data), abs=1e-5)
