"""The exported script runs baseline and plan on real ranks in turn, and says how their times come back."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from integration.test_planned_parallel import CONFIG

from dpro_search.search import SearchResult
from tests.in_process import dpro

pytestmark = [pytest.mark.integration, pytest.mark.one_core]

JOB = Path(__file__).with_name("measured_parallel_job.py")


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    text = 'model = "config.json"\ncluster = "2xh100"\nglobal_batch = 8\nsequence = 16\nprecision = "fp32"\nframework = "pytorch"\n'
    (folder / "job.toml").write_text(f"{text}[runs]\nzero_stage = 0\n")
    run = folder / "a run"
    assert dpro("run", folder / "job.toml", "--quiet", "--trials", "6", "--out", run).returncode == 0
    numbers = range(1, len(SearchResult.load(run).plans) + 1)
    answers = (dpro("export", run, "--plan", number, "--target", "pytorch", "--out", folder / "out") for number in numbers)
    assert any(answer.returncode == 0 for answer in answers)
    return folder / "out"


def test_both_settings_run_in_turn_and_their_times_come_back(exported, torch_python, tmp_path):
    environment = os.environ | {
        "SCRIPT": str(JOB),
        "TORCHRUN": str(Path(torch_python).with_name("torchrun")),
        "LOGS": str(tmp_path / "the logs"),
        "STEPS": "3",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", exported / "measure_torchrun.sh"], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    begun = [line.partition(",")[0] for line in done.stdout.splitlines() if ", run " in line]
    assert begun == ["baseline", "plan", "baseline", "plan"]
    logs = {path.name: path.read_text() for path in (tmp_path / "the logs").iterdir()}
    assert logs.keys() == {"baseline-1.log", "baseline-2.log", "plan-1.log", "plan-2.log"}
    assert all(text.count("of the plan with 2 ranks") == 3 for text in logs.values())
    commands = [shlex.split(line, comments=True) for line in done.stdout.splitlines() if line.startswith("dpro-search measured")]
    assert [words[words.index("--plan") + 1] for words in commands].count("0") == 2
    assert all(Path(words[2]) == exported.parent / "a run" for words in commands)


def test_a_run_that_fails_shows_the_end_of_its_log(exported, torch_python, tmp_path):
    (tmp_path / "broken.py").write_text("raise SystemExit('no data')\n")
    environment = os.environ | {
        "SCRIPT": str(tmp_path / "broken.py"),
        "TORCHRUN": str(Path(torch_python).with_name("torchrun")),
        "LOGS": str(tmp_path / "logs"),
    }
    done = subprocess.run(
        ["bash", exported / "measure_torchrun.sh"], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == 1
    assert "baseline failed" in done.stderr
    assert "no data" in done.stderr
    assert "dpro-search measured" not in done.stdout
