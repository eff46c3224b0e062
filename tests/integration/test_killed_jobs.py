"""`collect` and `validate`, ended with SIGKILL at random points: no process is left, nothing half-written, the next call works."""

import os
from pathlib import Path

import pytest

from tests.faults.kills import Kills, kill_recordings, kill_validations

pytestmark = pytest.mark.integration

TRAIN = Path(__file__).parents[2] / "experiments" / "workloads" / "train.py"


def test_recordings_and_validations_that_are_killed(tensorflow_python, tmp_path):
    job = (tensorflow_python, TRAIN, "--model", "vgg16", "--batch", 2, "--steps", 30)
    rate = ("--rate", "1gbit") if os.geteuid() == 0 else ()
    kill_recordings(tmp_path, Kills(wanted=3, seed=3), collect=rate, job=job)
    kill_validations(tmp_path, Kills(wanted=3, seed=4), job=job)
