"""Whether a PyTorch job computes the same with and without the recorder."""

import os
import subprocess
from pathlib import Path


def assert_same_losses_unrecorded(python: str, raw: Path, job: tuple[object, ...], port: int, work: Path) -> None:
    """Run a job of two ranks, which print their losses in hexadecimal, without the recorder; `raw` is of the recorded run."""
    plain = subprocess.run(
        [
            python, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}",
            "--log-dir", work / "logs", "--redirects=3", *job,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert plain.returncode == 0, plain.stderr
    losses = [
        {line for path in folder.rglob(name) for line in path.read_text().splitlines() if "0x" in line}
        for folder, name in ((raw, "log"), (work / "logs", "stdout.log"))
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2  # each rank has its own batch
