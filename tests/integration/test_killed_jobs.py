"""`collect` and `validate`, ended with SIGKILL at random points: no process is left, nothing half-written, the next call works."""

import os

import pytest

from tests.faults.hundred import COLLECT
from tests.faults.kills import Kills, kill_recordings, kill_validations
from tests.faults.processes import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.one_core]

HOROVOD = ROOT / "tests" / "integration" / "planned_horovod_job.py"
DDP = ROOT / "tests" / "integration" / "planned_ddp_job.py"


def test_recordings_that_are_killed(tensorflow_python, tmp_path):
    rate = ("--rate", "1gbit") if os.geteuid() == 0 else ()
    collect = (*rate, "--warmup", 3, "--untraced", 5, "--traced", 6)
    kill_recordings(tmp_path, Kills(wanted=2, seed=3), collect=collect, job=(tensorflow_python, HOROVOD))


@pytest.mark.skipif(os.geteuid() != 0, reason="shaped hosts need root")
def test_recordings_and_validations_of_a_small_job_that_are_killed(torch_python, tmp_path):
    job = (torch_python, DDP)
    kill_recordings(tmp_path, Kills(wanted=4, seed=5), collect=COLLECT, job=job)
    kill_validations(tmp_path, Kills(wanted=6, seed=4), job=job, options=("--warmup", 2))
