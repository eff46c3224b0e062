"""Real ranks of PyTorch DDP, stamped without a line added to their script: the slow one is named, and none where none is."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from dpro_search.analysis.ranks import ranks
from tests.in_process import dpro

TORCH = Path(os.environ.get("DPRO_SEARCH_ENVS") or Path.home() / ".cache" / "dpro-search" / "envs") / "torch" / "bin" / "python"
HOOKS = Path(__file__).parents[2] / "dpro_search" / "runtime" / "hooks"
RANKS = 4

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not TORCH.exists(), reason="scripts/make_env.sh torch makes the environment"),
]


def run_job(stamps: Path, slow_rank: str, parallel: str = "ddp") -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": str(HOOKS),
        "DPRO_SEARCH_STAMPS": str(stamps),
        "SLOW_RANK": slow_rank,
        "PARALLEL": parallel,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
        "OMP_NUM_THREADS": "1",
    }
    script = str(Path(__file__).with_name("slow_rank_job.py"))
    processes = [subprocess.Popen([TORCH, script], env={**environment, "RANK": str(rank)}) for rank in range(RANKS)]
    try:
        assert [process.wait(240) for process in processes] == [0] * RANKS
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("parallel", ["ddp", "tensor"])
def test_the_rank_that_is_slow_in_its_backward_pass_is_named(tmp_path: Path, parallel: str) -> None:
    run_job(tmp_path / "stamps", "2", parallel)
    answer = ranks(tmp_path / "stamps")
    assert [(finding.kind, finding.ranks) for finding in answer.findings] == [("compute", (2,))]
    assert abs(answer.findings[0].since_step - 20) <= 3
    printed = dpro("ranks", tmp_path / "stamps")
    assert (printed.returncode, "rank 2" in printed.stdout) == (3, True)


def test_no_rank_of_a_healthy_job_is_named(tmp_path: Path) -> None:
    run_job(tmp_path / "stamps", slow_rank="none")
    assert ranks(tmp_path / "stamps").findings == ()
    assert dpro("ranks", tmp_path / "stamps").returncode == 0
