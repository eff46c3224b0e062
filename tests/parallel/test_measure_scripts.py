"""Scripts that measure an exported plan beside the baseline: their hosts, their order, and what is left to be filled in."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.in_process import dpro

JOB = """\
model = "llama3-8b"
cluster = "2xhgx-h100"
global_batch = 64
sequence = 2048
[runs]
tp = 2
pp = 4
micro_batch = 1
"""
# A stand-in for torchrun: it prints its arguments, a line each, between the variables that a run has.
RUNNER = '#!/bin/sh\nprintf "%s\\n" "$PYTHONPATH" "$@"\n'


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    (folder / "job.toml").write_text(JOB)
    assert dpro("run", folder / "job.toml", "--quiet", "--out", folder / "run").returncode == 0
    return folder / "run"


@pytest.fixture(scope="module")
def megatron(run) -> Path:
    out = run.parent / "megatron"
    assert dpro("export", run, "--plan", "1", "--target", "megatron", "--out", out).returncode == 0
    return out


def started(folder: Path, tmp_path: Path, name: str, **environment: str) -> list[str]:
    """The words that a run of a setting gives to torchrun."""
    (tmp_path / "torchrun").write_text(RUNNER)
    (tmp_path / "torchrun").chmod(0o755)
    variables = os.environ | {"TORCHRUN": str(tmp_path / "torchrun"), "HEAD": "first-host"} | environment
    command = ["bash", str(folder / "measure_torchrun.sh"), "once", name, "1"]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=variables).stdout.splitlines()


def test_hosts_tasks_and_devices_are_those_of_the_cluster(megatron):
    text = (megatron / "measure_slurm.sh").read_text()
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=8\n" in text
    for name in ("partition", "account", "time"):  # unknown here, so that no line of them is in force
        assert re.search(rf"^##SBATCH --{name}=FILL_IN$", text, re.MULTILINE)


def test_the_baseline_starts_with_its_own_arguments(megatron, tmp_path):
    plan, baseline = started(megatron, tmp_path, "plan"), started(megatron, tmp_path, "baseline", STEPS="7")
    for words, folder in ((plan, megatron), (baseline, megatron / "baseline")):
        assert words[0].partition(":")[0] == str(folder)
        assert words[1:7] == ["--nnodes", "2", "--nproc-per-node", "8", "--rdzv-backend", "c10d"]
        assert "first-host:29500" in words
    assert baseline[baseline.index("--pipeline-model-parallel-size") + 1] == "4"
    assert baseline[baseline.index("--train-iters") + 1] == "7"
    assert plan[plan.index("--pipeline-model-parallel-size") + 1] != "4"


def test_hosts_need_the_name_of_the_first(megatron):
    variables = {name: value for name, value in os.environ.items() if name != "HEAD"}
    done = subprocess.run(["bash", megatron / "measure_torchrun.sh"], capture_output=True, text=True, env=variables, check=False)
    assert done.returncode != 0
    assert "HEAD" in done.stderr


def test_slurm_starts_each_run_on_all_hosts(megatron, tmp_path):
    """`srun` and `scontrol` stand for those of Slurm: the first starts its words once, the second lists the hosts."""
    for name, text in (
        ("srun", '#!/bin/sh\necho "srun $*" >> "$CALLS"\nshift\nexec "$@"\n'),
        ("scontrol", "#!/bin/sh\nprintf 'node7\\nnode8\\n'\n"),
        ("torchrun", RUNNER),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    variables = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "LOGS": str(tmp_path / "logs"),
        "SLURM_SUBMIT_DIR": str(megatron),
        "SLURM_JOB_NODELIST": "node[7-8]",
        "ROUNDS": "1",
    }
    done = subprocess.run(["bash", megatron / "measure_slurm.sh"], capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[-2:] for call in calls] == [["baseline", "1"], ["plan", "1"]]
    assert "node7:29500" in (tmp_path / "logs" / "plan-1.log").read_text()
    assert f"--plan 0 --log {tmp_path}/logs/baseline-1.log" in done.stdout
    assert f"--plan 1 --log {tmp_path}/logs/plan-1.log" in done.stdout


def test_a_baseline_that_the_target_cannot_express_is_left_out_with_the_reason(run, tmp_path):
    exports = (dpro("export", run, "--plan", n, "--target", "deepspeed", "--out", tmp_path / "out") for n in range(1, 11))
    assert any(answer.returncode == 0 for answer in exports)
    text = (tmp_path / "out" / "measure_torchrun.sh").read_text()
    assert "# The baseline does not run: sequence_parallel: deepspeed cannot express it" in text
    assert "run_baseline" not in text
    assert not (tmp_path / "out" / "baseline").exists()


def test_scripts_are_correct_bash(run, megatron, tmp_path):
    folders = [megatron]
    for target in ("megatron-bridge", "pytorch", "deepspeed"):
        for number in range(1, 11):
            if dpro("export", run, "--plan", number, "--target", target, "--out", tmp_path / target).returncode == 0:
                folders.append(tmp_path / target)
                break
    assert len(folders) == 4
    for script in [path for folder in folders for path in folder.glob("measure_*.sh")]:
        subprocess.run(["bash", "-n", script], check=True)
        if checker := shutil.which("shellcheck"):
            done = subprocess.run([checker, script], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout
