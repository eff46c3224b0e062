"""The GitHub Actions example gates pull requests by step time: its commands run here as they stand, by a shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / "examples" / "step_time_gate.yml"
TRAIN = """\
import sys
sys.path.insert(0, {tests!r})
sys.argv = ["train.py", "plain", "40"]
import torch
{slower}
exec(compile(open({job!r}).read(), {job!r}, "exec"))
"""
SLOWER = """\
import time
forward = torch.nn.Sequential.forward
torch.nn.Sequential.forward = lambda self, inputs: (time.sleep(0.2), forward(self, inputs))[1]
"""


def commands() -> list[str]:
    """The commands of the example, but for the installation of this package."""
    return [line for line in re.findall(r"- run: (.*)", WORKFLOW.read_text()) if not line.startswith("pip install")]


@pytest.fixture
def checkouts(torch_python: str, tmp_path: Path) -> Path:
    """A folder with two versions of a training script, and a PATH with its Python and `dpro-search`."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "python").symlink_to(Path(torch_python).parent)
    (programs / "dpro-search").write_text(f'#!/bin/sh\nexec {sys.executable} -m dpro_search.cli "$@"\n')
    (programs / "dpro-search").chmod(0o755)
    for version in ("base", "head"):
        (tmp_path / version).mkdir()
        write(tmp_path / version, "")
    return tmp_path


def write(folder: Path, slower: str) -> None:
    here = Path(__file__).parent
    (folder / "train.py").write_text(TRAIN.format(tests=str(here), job=str(here / "ddp_job.py"), slower=slower))


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{folder / 'bin'}:{(folder / 'python').readlink()}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    return subprocess.run(["bash", "-ec", command], cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_slower_version_fails_the_gate_and_an_equal_one_passes_it(checkouts):
    *collect, gate = commands()
    assert len(collect) == 2
    write(checkouts / "head", SLOWER)
    for command in collect:
        done = shell(command, checkouts)
        assert done.returncode == 0, done.stderr
    failed = shell(gate, checkouts)
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "more than the allowed regression of 3 %" in failed.stdout
    (checkouts / "after").rename(checkouts / "slower")
    (checkouts / "after").symlink_to(checkouts / "before")
    passed = shell(gate, checkouts)
    assert passed.returncode == 0, passed.stdout + passed.stderr


def test_the_example_is_short_and_gates_with_the_noise():
    assert len(WORKFLOW.read_bytes()) <= 900
    assert commands()[-1] == "dpro-search diff before after --max-regression 3%"
