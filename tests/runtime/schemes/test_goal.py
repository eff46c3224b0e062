"""When a training ends: the mean loss of a window of local steps, or a time."""

from __future__ import annotations

import pytest

from dpro_search.errors import InputError
from dpro_search.runtime.schemes import Goal, LossWindow


def test_a_window_is_the_mean_of_the_newest_steps_once_it_is_full():
    window = LossWindow(4)
    window.add(9.0, 3)
    assert window.mean is None
    window.add(1.0, 1)
    assert window.mean == pytest.approx(7.0)
    window.add(3.0, 2)
    window.add(1.0, 1)
    assert window.mean == pytest.approx((1.0 + 3.0 + 3.0 + 1.0) / 4)


def test_a_commit_longer_than_the_window_counts_whole():
    window = LossWindow(4)
    window.add(5.0, 2)
    window.add(2.0, 10)
    assert window.mean == 2.0


def test_a_goal_is_a_loss_or_a_time():
    goal = Goal(target_loss=0.5, limit_s=10.0)
    assert goal.ends(1.0, 0.5)
    assert goal.ends(10.0, None)
    assert not goal.ends(9.9, 0.51)
    assert not Goal().ends(1e9, 0.0)


@pytest.mark.parametrize("goal", [{"target_loss": float("nan")}, {"limit_s": 0.0}])
def test_impossible_goals_are_refused(goal):
    with pytest.raises(InputError, match="synchronise"):
        Goal(**goal)
