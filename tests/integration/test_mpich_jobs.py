"""Jobs under MPICH's Hydra: their ranks find each other, a failed one is named, and nothing is left of a job that hangs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from dpro_search.collect.launch.mpich import MPIEXEC, run_mpich_job
from dpro_search.collect.launch.netns import ShapedHosts
from dpro_search.collect.launch.ranks import JobSpec
from dpro_search.errors import JobError

pytestmark = [
    pytest.mark.integration,
    pytest.mark.one_core,
    pytest.mark.skipif(
        not shutil.which(MPIEXEC) or importlib.util.find_spec("mpi4py") is None, reason="needs MPICH and mpi4py (extra mpi)"
    ),
]
WORLD = "from mpi4py import MPI; w = MPI.COMM_WORLD; print(w.rank, w.size, MPI.Get_library_version().split()[0])"


def job(code: str, timeout_s: float = 60.0) -> JobSpec:
    return JobSpec(command=(sys.executable, "-c", code), ranks=2, timeout_s=timeout_s)


@pytest.mark.parametrize("shaped", [False, pytest.param(True, marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root"))])
def test_ranks_find_each_other_with_mpich_whatever_else_is_installed(shaped: bool, tmp_path: Path) -> None:
    if shaped:
        with ShapedHosts(2, 1e9) as hosts:
            run_mpich_job(job(WORLD), tmp_path, hosts=hosts)
    else:
        run_mpich_job(job(WORLD), tmp_path)
    assert [(tmp_path / f"rank{rank}" / "log").read_text().split() for rank in (0, 1)] == [["0", "2", "MPICH"], ["1", "2", "MPICH"]]


def test_the_rank_that_failed_is_named_with_its_last_words(tmp_path: Path) -> None:
    fails = f"{WORLD}; import os, sys; w.rank == 1 and (print('no such data', flush=True), os._exit(3)); w.Barrier()"
    with pytest.raises(JobError, match=r"rank 1 ended with code 3: .*no such data"):
        run_mpich_job(job(fails), tmp_path)


def test_nothing_is_left_of_a_job_that_took_too_long(tmp_path: Path) -> None:
    mark = f"{tmp_path.name}-{time.monotonic_ns()}"
    with pytest.raises(JobError, match="longer than 3 s"):
        run_mpich_job(job(f"import time; {mark!r}; time.sleep(600)", timeout_s=3.0), tmp_path)
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline and (left := _running(mark)):
        time.sleep(0.1)
    assert not left


def _running(mark: str) -> list[str]:
    collected = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes()
        except OSError:
            continue
        if mark.encode() in text and int(path.parent.name) != os.getpid():
            collected.append(path.parent.name)
    return collected
