"""`replay` and `run` state what an interval was calibrated on, and warn where it was not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from dpro_search.machine import BUNDLED, VARIABLE
from tests.in_process import dpro
from tests.sample import HOROVOD_SAMPLE

HOROVOD = ("--sample", HOROVOD_SAMPLE)

FSDP = Path(__file__).parents[1] / "data" / "traces_v1" / "fsdp_mlp"


def verb(*args: object, machine: Path | None = None) -> subprocess.CompletedProcess[str]:
    return dpro(*args, COLUMNS="400", **({} if machine is None else {VARIABLE: str(machine)}))


def test_the_json_of_a_calibrated_replay_names_jobs_and_processors() -> None:
    calibration = json.loads(verb("replay", *HOROVOD, "--json").stdout)["calibration"]
    assert calibration["calibrated"] is True
    assert calibration["widening"] == 1
    assert "Horovod jobs on Gloo on CPU hosts (AMD EPYC)" in calibration["text"]


def test_a_calibrated_replay_prints_no_line_about_it() -> None:
    assert "calibrated" not in verb("replay", *HOROVOD).stdout


@pytest.mark.parametrize("arguments", [("replay", FSDP), ("run", FSDP, "--trials", "2", "--out", "RUN")])
def test_people_read_one_line_where_it_was_not(arguments: tuple[object, ...], tmp_path: Path) -> None:
    done = verb(*(tmp_path / "run" if part == "RUN" else part for part in arguments))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "not calibrated on this kind of job" in line]
    assert len(lines) == 1
    assert "widened 2 times" in lines[0]


def test_the_json_of_a_search_has_it(tmp_path: Path) -> None:
    done = verb("run", FSDP, "--trials", "2", "--out", tmp_path / "run", "--json")
    assert json.loads(done.stdout)["calibration"]["calibrated"] is False


def test_another_machine_file_changes_the_interval(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(BUNDLED.read_text().replace("horovod = { value = [0.05", "horovod = { value = [0.5"))
    narrow, wide = (
        json.loads(verb("replay", *HOROVOD, "--json", machine=machine).stdout)["interval_us"] for machine in (None, path)
    )
    assert wide[1] - wide[0] > 5 * (narrow[1] - narrow[0])


def test_a_later_machine_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text("version = 2\n")
    done = verb("replay", machine=path)
    assert done.returncode == 2
    assert done.stderr == f"dpro-search: error: {VARIABLE}: {path}: machine file of version 2, this program reads 1\n"


def test_a_search_is_not_continued_with_another_machine_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(BUNDLED.read_text())
    arguments = ("run", FSDP, "--trials", "2", "--out", tmp_path / "run")
    assert verb(*arguments).returncode == 0
    done = verb(*arguments, machine=path)
    assert done.returncode == 2
    assert "machine" in done.stderr
