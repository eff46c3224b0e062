"""`dpro-search ranks` on folders of stamps: its sentences, exit codes and errors."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from tests.analysis.ranks.simulated import SimulatedJob, write
from tests.in_process import dpro


def slow(step: int, rank: int) -> float:
    return 6_000.0 if rank == 5 and step >= 40 else 0.0


def test_a_slow_rank_is_printed_and_the_exit_code_is_3(tmp_path: Path) -> None:
    write(SimulatedJob(compute_extra=slow).stamps(), tmp_path)
    done = dpro("ranks", tmp_path)
    assert (done.returncode, "rank 5 (h2) computes longer than its peers since step" in done.stdout) == (3, True)


def test_a_healthy_job_exits_with_0(tmp_path: Path) -> None:
    write(SimulatedJob().stamps(), tmp_path)
    done = dpro("ranks", tmp_path)
    assert (done.returncode, "no rank is slow" in done.stdout) == (0, True)


def test_json_is_the_answer(tmp_path: Path) -> None:
    write(SimulatedJob(compute_extra=slow).stamps(), tmp_path)
    answer = json.loads(dpro("ranks", tmp_path, "--json").stdout)
    assert [(finding["kind"], finding["ranks"]) for finding in answer["findings"]] == [("compute", [5])]


def test_steps_before_since_are_left_out(tmp_path: Path) -> None:
    write(SimulatedJob(steps=90, compute_extra=lambda step, rank: 6_000.0 if rank == 5 and step < 40 else 0.0).stamps(), tmp_path)
    assert json.loads(dpro("ranks", tmp_path, "--since", 50, "--json").stdout)["steps"] == 39


def test_following_prints_each_change_until_the_job_is_silent(tmp_path: Path) -> None:
    write(SimulatedJob(compute_extra=slow).stamps(), tmp_path)
    for path in tmp_path.glob("*.stamps"):
        os.utime(path, (time.time() - 60, time.time() - 60))
    done = dpro("ranks", tmp_path, "--follow")
    assert (done.returncode, done.stdout.count("rank 5")) == (3, 1)


def test_a_torn_record_of_a_killed_rank_costs_nothing_else(tmp_path: Path) -> None:
    write(SimulatedJob(compute_extra=slow).stamps(), tmp_path)
    path = tmp_path / "rank-00003.stamps"
    path.write_bytes(path.read_bytes()[:-20])
    answer = json.loads(dpro("ranks", tmp_path, "--json").stdout)
    assert (answer["steps"], answer["findings"][0]["ranks"]) == (58, [5])


def test_a_missing_rank_is_said(tmp_path: Path) -> None:
    write(SimulatedJob().stamps()[:-1], tmp_path)
    assert "no stamps of rank 7" in dpro("ranks", tmp_path).stdout


def test_a_folder_without_stamps_and_a_file_that_is_none_are_errors(tmp_path: Path) -> None:
    done = dpro("ranks", tmp_path)
    assert (done.returncode, "no rank-*.stamps" in done.stderr) == (2, True)
    (tmp_path / "rank-00000.stamps").write_bytes(b"not stamps")
    done = dpro("ranks", tmp_path)
    assert (done.returncode, "no file of stamps" in done.stderr) == (2, True)
