"""Trees as arrays say what XGBoost's own trees say."""

import numpy as np
import pytest
import xgboost

from dpro_search.costmodel.forest import Forest


@pytest.mark.parametrize("depth", [2, 5])
def test_a_forest_predicts_what_its_booster_does(depth):
    random = np.random.default_rng(0)
    rows = random.normal(size=(400, 6)).astype(np.float32)
    target = rows[:, 1] * 2 + np.sin(rows[:, 4]) + 3
    columns = (1, 4, 5)
    data = xgboost.DMatrix(rows[:, list(columns)], label=target, nthread=1)
    booster = xgboost.train({"max_depth": depth, "nthread": 1}, data, num_boost_round=12)
    forest = Forest.of_booster(booster, depth, columns)
    assert forest.predict(rows) == pytest.approx(booster.predict(data), abs=1e-5)


def forest(**changes: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of a forest of one tree of depth 2 over three features, some of them changed."""
    plain = Forest(
        feature=np.array([[0, 1, 2]], dtype=np.uint8),
        threshold=np.array([[0.5, 1.0, np.inf]], dtype=np.float32),
        leaf=np.array([[1, 2, 3, 4]], dtype=np.float32),
    )
    return plain.arrays("some") | {f"some_{name}": array for name, array in changes.items()}


def test_arrays_give_the_forest_back():
    forest_again = Forest.from_arrays(forest(), "some", columns=3, base=0.5)
    assert forest_again.predict(np.array([[1, 0, 9], [0, 0, 9]], dtype=np.float32)).tolist() == [3.5, 1.5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feature": np.array([[0, 1, 3]], dtype=np.uint8)}, "a feature that does not exist"),
        ({"feature": np.array([[0, 1, 2]])}, "arrays of other types"),
        ({"feature": np.array([[0, 1]], dtype=np.uint8)}, "no complete trees"),
        ({"leaf": np.array([[1, 2, 3]], dtype=np.float32)}, "arrays that do not fit"),
        ({"leaf": np.array([[1, 2, 3, np.nan]], dtype=np.float32)}, "impossible numbers"),
        ({"threshold": np.array([[0, np.nan, 0]], dtype=np.float32)}, "impossible numbers"),
    ],
)
def test_arrays_that_are_no_trees_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"some: {message}"):
        Forest.from_arrays(forest(**changes), "some", columns=3)
