"""All-reduces of training scripts over MPI, in real processes: sums, wrong use, a rank that is gone, and under DDP."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dpro_search.runtime import ALL_REDUCE

pytestmark = [
    pytest.mark.integration,
    pytest.mark.one_core,
    pytest.mark.skipif(
        not shutil.which("mpirun") or importlib.util.find_spec("mpi4py") is None, reason="needs Open MPI and mpi4py (extra mpi)"
    ),
]
JOB = Path(__file__).with_name("all_reduce_job.py")
TORCH = Path(os.environ.get("DPRO_SEARCH_ENVS") or Path.home() / ".cache" / "dpro-search" / "envs") / "torch" / "bin" / "python"


def run(ranks: int, *arguments: str, python: str = sys.executable, packages: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMPI_MCA_mpi_yield_when_idle": "1", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ALL_REDUCE), packages or os.environ.get("PYTHONPATH", "")])
    mpi = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-x", "PYTHONPATH", "-np", str(ranks)]
    return subprocess.run([*mpi, python, str(JOB), *arguments], env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_sums_are_right_whatever_algorithm_type_and_count(ranks):
    done = run(ranks, "sums")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == ranks


def test_the_mpi_librarys_own_algorithms_are_chosen_by_name():
    done = run(5, "library", "native,native ring,native recursive-doubling,native nonoverlapping")
    assert done.returncode == 0, done.stderr
    assert "3 different sums" in done.stdout  # its own choice for so many bytes is one of the others
    assert not done.stderr


def test_an_algorithm_that_the_mpi_library_has_not_is_left_to_its_choice_and_said_once():
    done = run(2, "library", "native,native tree")
    assert done.returncode == 0, done.stderr
    assert "1 different sums" in done.stdout
    assert done.stderr.count("'native tree' are by the library's own choice: Open MPI has no algorithm 'tree'") == 1


def test_a_bad_choice_of_a_table_is_replaced_in_the_first_steps_of_a_job():
    done = run(4, "checked")
    assert done.returncode == 0, done.stderr
    kept = re.findall(r"^all-reduce of (\d+) bytes by (.+) \(in this job: (.+)\)$", done.stdout, re.MULTILINE)
    assert [int(size) for size, _, _ in kept] == [1 << 22, 1 << 23], done.stdout  # rank 0 says it once for each size
    assert kept[0][1] == "native", done.stdout
    assert kept[0][2].startswith("gather ")
    assert kept[1][1] in ("native", "ring")


def test_a_rank_with_another_buffer_is_named_on_all_ranks():
    done = run(3, "differs")
    assert done.stdout.count("said: rank 1 sums 101 elements of the same type, rank 0 sums 100") == 3, done.stdout
    assert done.stdout.count("said: rank 2 sums 100 elements of another type, rank 0 sums 100") == 3


def test_a_rank_that_is_gone_is_named_and_nobody_hangs():
    """The first rank that waited too long says so; MPI then ends the others, perhaps before they have said the same."""
    done = run(3, "gone")
    said = r"said after 3 s: rank [01] waited 3 s for rank 2 in an all-reduce of 65536 elements of float64"
    assert re.search(said, done.stdout), done.stdout


@pytest.mark.skipif(not TORCH.is_file(), reason=f"no environment {TORCH}; build it with scripts/make_env.sh torch")
def test_ddp_trains_as_without_the_hook(tmp_path):
    import mpi4py

    (tmp_path / "mpi4py").symlink_to(Path(mpi4py.__file__).parent)
    done = run(3, "ddp", str(tmp_path / "rendezvous"), python=str(TORCH), packages=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 3
