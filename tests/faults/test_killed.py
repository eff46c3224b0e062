"""Dozens of kills with SIGKILL at random points: nothing half-written, nothing lost, no process left, the next call works.

`python -m tests.faults.hundred` makes a hundred of each kind.
"""

import pytest

from tests.faults.kills import WRITERS, Kills, kill_searches, kill_searches_with_workers, kill_writers

pytestmark = [pytest.mark.integration, pytest.mark.one_core]  # for its minutes; it needs no framework


def test_a_search_that_is_killed_again_and_again_ends_as_if_nothing_had_happened(tmp_path):
    kill_searches(tmp_path, Kills(wanted=25))


def test_workers_end_with_a_search_that_is_killed(tmp_path):
    kill_searches_with_workers(tmp_path, Kills(wanted=10))


@pytest.mark.parametrize("verb", WRITERS)
def test_what_a_killed_command_writes_is_whole_or_not_there(verb, tmp_path):
    kill_writers(tmp_path, Kills(wanted=12, seed=2), writer=WRITERS[verb])
