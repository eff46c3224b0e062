"""Start a paced job on shaped hosts, and change the links of hosts when the schedule says so."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from dpro_search.collect.launch.netns import ShapedHosts

CODE = Path(__file__).parent
STAMPS_CODE = CODE.parents[1] / "dpro_search" / "runtime" / "record"
TORCH_PYTHON = Path.home() / ".cache/dpro-search/envs/torch/bin/python"
RATE_BPS = 1e9
_PORT = 29_511
_PRIORITY = ("nice", "-n", "-10")  # other processes of the machine would be true reasons to be slow


def run_job(job: dict[str, Any], folder: Path, timeout_s: float) -> None:
    """Run one job; its stamps and the schedule lie in `folder` afterwards.

    Parameters
    ----------
    job
        ``kind``, ``ranks``, ``hosts``, ``steps``, ``blocks``, ``block_us``, ``input_us``, ``step_us``, ``width``, ``seed`` and
        ``schedule``: a list of disturbances with ``kind``, ``ranks`` (for a link: those of the host), ``first``, ``end``, ``size``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    per_host = job["ranks"] // job["hosts"]
    job = {**job, "stamps": str(folder / "stamps")}
    (folder / "job.json").write_text(json.dumps(job))
    with ShapedHosts(job["hosts"], RATE_BPS) as hosts, contextlib.ExitStack() as processes:
        ranks = []
        for rank in range(job["ranks"]):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "MEET": f"tcp://{hosts.address(0)}:{_PORT}",
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
                "STAMPS_CODE": str(STAMPS_CODE),
            }
            command = hosts.command(
                rank // per_host, [*_PRIORITY, str(TORCH_PYTHON), str(CODE / "worker.py"), str(folder / "job.json")]
            )
            output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            errors = (folder / f"rank{rank}.err").open("w")
            ranks.append(
                subprocess.Popen(command, env=environment, stdout=output, stderr=errors, text=True, start_new_session=True)
            )
            processes.callback(_end, ranks[-1])
        links = [each for each in job["schedule"] if each["kind"] == "link"]
        watching = threading.Thread(target=_change_links, args=(ranks[0].stdout, links, hosts, per_host), daemon=True)
        watching.start()
        deadline = time.monotonic() + timeout_s
        for process in ranks:
            if process.wait(max(deadline - time.monotonic(), 1)):
                raise RuntimeError(f"a rank of {folder} failed: {(folder / f'rank{ranks.index(process)}.err').read_text()[-800:]}")


def _change_links(steps: Any, links: list[dict[str, Any]], hosts: ShapedHosts, per_host: int) -> None:
    for line in steps:
        for each in links:
            if int(line) in (each["first"], each["end"]):
                rate_bps = RATE_BPS / each["size"] if int(line) == each["first"] else RATE_BPS
                hosts.set_rate(rate_bps, each["ranks"][0] // per_host)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
