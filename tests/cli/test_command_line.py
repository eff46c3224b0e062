"""The frame of the command line: exit codes, one line for each error, nothing but JSON on stdout."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dpro_search import __version__
from dpro_search.space.plan import Plan
from tests.in_process import dpro


def error_line(done: subprocess.CompletedProcess[str]) -> str:
    """The only line on stderr, without its prefix; stdout must be empty."""
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("dpro-search: error: ")
    return line.removeprefix("dpro-search: error: ")


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_bytes(Plan(tensor_groups=(("a#0", "b#1"),)).to_json())
    return path


def test_help_names_the_verbs() -> None:
    done = dpro("--help")
    assert done.returncode == 0
    assert {"doctor", "export"} <= set(done.stdout.split())


def test_no_arguments_show_the_help() -> None:
    assert dpro().stdout == dpro("--help").stdout


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom dpro_search.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "numba", "optuna", "networkx", "msgspec"} & set(done.stderr.split())


@pytest.mark.parametrize("verb", ["export", "doctor"])
def test_every_verb_shows_an_example(verb: str) -> None:
    assert f"Example: dpro-search {verb}" in dpro(verb, "--help").stdout


def test_version() -> None:
    assert dpro("--version").stdout == f"dpro-search {__version__}\n"


def test_an_unknown_verb_is_wrong_usage() -> None:
    done = dpro("exprot")
    assert done.returncode == 2
    assert "exprot" in error_line(done)


def test_an_unknown_option_is_named(plan_file: Path) -> None:
    done = dpro("export", plan_file, "--ouput", "x")
    assert done.returncode == 2
    assert "--ouput" in error_line(done)


def test_a_missing_option_is_named(plan_file: Path) -> None:
    done = dpro("export", plan_file)
    assert done.returncode == 2
    assert "--out" in error_line(done)


def test_a_bad_value_names_its_option(plan_file: Path) -> None:
    done = dpro("export", plan_file, "--out", "x", "--target", "byteps")
    assert done.returncode == 2
    assert "--target" in error_line(done)


def test_a_missing_file_is_bad_input(tmp_path: Path) -> None:
    done = dpro("export", tmp_path / "none.json", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert str(tmp_path / "none.json") in error_line(done)


def test_a_damaged_file_is_bad_input_and_leaves_nothing(tmp_path: Path, plan_file: Path) -> None:
    plan_file.write_bytes(plan_file.read_bytes()[:30])
    done = dpro("export", plan_file, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert str(plan_file) in error_line(done)
    assert list(tmp_path.iterdir()) == [plan_file]


def test_an_error_stays_off_stdout_with_json(tmp_path: Path) -> None:
    done = dpro("export", tmp_path / "none.json", "--out", tmp_path / "out", "--json")
    assert done.returncode == 2
    assert error_line(done)


def test_export_prints_one_json_object(tmp_path: Path, plan_file: Path) -> None:
    done = dpro("export", plan_file, "--out", tmp_path / "out", "--json")
    assert done.returncode == 0
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert set(result) >= {"files", "usage"}
    assert sorted(result["files"]) == sorted(str(path) for path in (tmp_path / "out").iterdir())


def test_export_takes_the_best_plan_of_a_run(tmp_path: Path) -> None:
    plans = [Plan.of(cycle_time_us=float(ms * 1000)) for ms in (3, 7)]
    (tmp_path / "run" / "plans").mkdir(parents=True)
    for number, plan in enumerate(plans, 1):
        (tmp_path / "run" / "plans" / f"plan-{number}.json").write_bytes(plan.to_json())
    assert dpro("export", tmp_path / "run", "--out", tmp_path / "best").returncode == 0
    assert dpro("export", tmp_path / "run", "--plan", 2, "--out", tmp_path / "second").returncode == 0
    assert [Plan.load(tmp_path / out / "plan.json") for out in ("best", "second")] == plans


def test_export_says_how_many_plans_a_run_has(tmp_path: Path) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "plan-1.json").write_bytes(Plan().to_json())
    done = dpro("export", tmp_path, "--plan", 4, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "holds 1 plans" in error_line(done)


def test_a_full_disk_is_one_line(plan_file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dpro_search.cli", "export", str(plan_file), "--out", str(tmp_path / "out"), "--json"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_reader_that_has_gone_is_no_error(plan_file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dpro_search.cli", "export", str(plan_file), "--out", str(tmp_path / "out")]
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert done.stderr == ""


def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    pipe = tmp_path / "plan.json"
    os.mkfifo(pipe)
    code = (
        "import signal, sys, dpro_search.cli.export as verb\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where the tests run in the background
        "def export(): open(sys.argv[1]).read()\n"
        "verb.export = export\n"
        "from dpro_search.cli import main; main(['export'])"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(pipe)], stderr=subprocess.PIPE, text=True)
    with pipe.open("w"):  # opens when the verb is at its read, which then blocks
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate()
    assert process.returncode == 1
    assert stderr == "dpro-search: error: interrupted\n"
