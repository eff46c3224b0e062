"""The recorder's parts that need no PyTorch: its schedule, its files, what it may write down of the environment."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpro_search.runtime.record.files import job_path, profile_path, write_json, write_profile
from dpro_search.runtime.record.job_facts import place_in_job, public_environment
from dpro_search.runtime.record.schedule import RecordSchedule

ROOT = Path(__file__).parents[2]
SCHEDULE = RecordSchedule.checked(wait=5, warmup=2, steps=3, every=10, windows=2)


def test_windows_begin_as_often_as_the_schedule_says():
    begins = {step: SCHEDULE.window_that_starts_at(step) for step in range(60)}
    assert {step: window for step, window in begins.items() if window is not None} == {3: 0, 13: 1}
    assert [SCHEDULE.profiled(window) for window in (0, 1)] == [(5, 8), (15, 18)]


def test_a_schedule_survives_its_text():
    assert RecordSchedule.from_text(SCHEDULE.to_text()) == SCHEDULE


@pytest.mark.parametrize(
    ("wrong", "name"), [({"wait": 1}, "wait"), ({"steps": 0}, "steps"), ({"every": 7}, "every"), ({"windows": -1}, "windows")]
)
def test_windows_that_overlap_or_do_not_fit_are_refused(wrong, name):
    with pytest.raises(ValueError, match=f"^Recorder: {name}="):
        RecordSchedule.checked(**wrong, **({} if name == "every" else {"every": 1000}))


def test_only_public_variables_are_written_down():
    environment = {
        "NCCL_IB_HCA": "mlx5", "OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "0", "GLOO_SOCKET_IFNAME": "lo", "TORCH_LOGS": "",
        "HOME": "/root", "WANDB_API_KEY": "k", "HF_TOKEN": "t", "NCCL_SECRET": "s", "TORCH_PASSWORD": "p", "GLOO_KEY_FILE": "f",
    }  # fmt: skip
    assert list(public_environment(environment)) == [
        *("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "OMP_NUM_THREADS", "TORCH_LOGS")
    ]


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, (0, 1, 0)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (3, 8, 1)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_LOCALID": "2"}, (5, 6, 2)),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, (2, 4, 0)),
    ],
)
def test_a_rank_knows_its_place_from_its_launcher(variables, place, monkeypatch):
    for name in (*os.environ, "RANK"):
        if "RANK" in name or name.startswith(("SLURM_", "OMPI_", "WORLD_SIZE")):
            monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert tuple(place_in_job().values()) == place


def test_files_of_a_rank_and_a_window_have_names_of_their_own(tmp_path):
    names = {make(str(tmp_path), window, rank) for make in (profile_path, job_path) for window in (0, 1) for rank in (0, 99_999)}
    assert len(names) == 8
    assert profile_path("f", 1, 3) == "f/window1/rank00003.json.gz"


def test_a_profile_is_compressed_and_its_size_is_known(tmp_path):
    path = profile_path(str(tmp_path), 0, 0)
    size = write_profile(path, lambda plain: Path(plain).write_text('{"traceEvents": []}\n') and None)
    assert size == Path(path).stat().st_size
    assert json.loads(gzip.decompress(Path(path).read_bytes())) == {"traceEvents": []}


@pytest.mark.parametrize("content", ["", '{"traceEvents": [{"ph": "X"'])
def test_a_profile_that_was_not_written_whole_is_not_kept(content, tmp_path):
    with pytest.raises(OSError, match="only part of its profile"):
        write_profile(profile_path(str(tmp_path), 0, 0), lambda plain: Path(plain).write_text(content) and None)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path):
    path = job_path(str(tmp_path), 0, 0)
    write_json(path, {"rank": 0})
    circle: list[object] = []
    circle.append(circle)
    with pytest.raises(ValueError, match="Circular"):
        write_json(path, circle)
    assert json.loads(Path(path).read_text()) == {"rank": 0}
    assert len(list(Path(path).parent.iterdir())) == 1


ALLOWED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top not in sys.stdlib_module_names and top not in ("dpro_search", "torch"):
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocker())
from dpro_search.record import Recorder
Recorder("x")
print(sorted(name for name in sys.modules if name.startswith("dpro_search.") and "record" not in name))
"""


def test_the_public_name_needs_nothing_but_the_standard_library_until_it_records():
    done = subprocess.run([sys.executable, "-c", ALLOWED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['dpro_search._version', 'dpro_search.runtime']"


@pytest.mark.parametrize("version", ["3.8", "3.9"])
def test_older_pythons_import_the_public_name(version):
    interpreters = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    if not interpreters:
        pytest.skip(f"there is no Python {version}")
    code = "from dpro_search.record import Recorder; print(Recorder('x').schedule.steps)"
    done = subprocess.run([interpreters[0], "-B", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "5\n"


ATTACHED = """
import sys
sys.path.insert(0, sys.argv[1])
import torch.optim.optimizer
print(sorted(torch.optim.optimizer.hooks))
"""
FAKE_OPTIMIZERS = """
hooks = []
def register_optimizer_step_post_hook(hook):
    hooks.append(type(hook).__name__)
"""


@pytest.mark.parametrize(
    ("schedule", "hooks", "warning"),
    [
        ("12,2,5,1000,3", ["method"], ""),
        ("", ["method"], ""),
        ("12,2", ["method"], ""),
        ("1,2,5,1000,3", [], "wait=1"),
        ("soon", [], "soon"),
    ],
)
def test_variables_of_the_environment_bring_the_recorder_into_a_job_and_cannot_stop_it(schedule, hooks, warning, tmp_path):
    package = tmp_path / "torch" / "optim"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "optimizer.py").write_text(FAKE_OPTIMIZERS)
    env = {
        "PYTHONPATH": str(ROOT / "dpro_search" / "runtime" / "hooks"),
        "DPRO_SEARCH_RECORD_TO": str(tmp_path),
        "DPRO_SEARCH_RECORD_SCHEDULE": schedule,
    }
    done = subprocess.run([sys.executable, "-c", ATTACHED, tmp_path], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(hooks)
    assert warning in done.stderr
    assert len(done.stderr.splitlines()) == (1 if warning else 0)
