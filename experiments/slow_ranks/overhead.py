"""Processor time that stamps add to a DDP job with real compute: ``python -m experiments.slow_ranks.overhead``, runs in turn.

Two ranks on one core each train a model of linear layers over Gloo, with and without stamps in turn. Printed: processor time a step
of both ranks in each run, and the difference of the means.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile

from experiments.slow_ranks.launch import STAMPS_CODE, TORCH_PYTHON

_RANKS, _STEPS, _RUNS = 2, 150, 4


def main() -> None:
    """Run in turn and print."""
    used = {False: [], True: []}
    for run in range(2 * _RUNS):
        stamped = bool(run % 2)
        used[stamped].append(_run(stamped))
        print(f"{'stamped' if stamped else 'plain'}: {used[stamped][-1]:.2f} ms of processor a step", flush=True)
    plain, stamped_ms = (sum(values) / len(values) for values in (used[False], used[True]))
    print(f"stamps add {(stamped_ms / plain - 1) * 100:.2f} % ({plain:.2f} to {stamped_ms:.2f} ms)")


def _run(stamped: bool) -> float:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "STAMPS": folder if stamped else "",
            "STAMPS_CODE": str(STAMPS_CODE),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(_RANKS),
            "OMP_NUM_THREADS": "1",
        }
        ranks = [
            subprocess.Popen(
                ["taskset", "-c", str(rank % 2), str(TORCH_PYTHON), "-c", _JOB, str(_STEPS)],
                env={**environment, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(_RANKS)
        ]
        return sum(float(rank.communicate()[0]) for rank in ranks)


_JOB = """
import contextlib, os, sys, time
sys.path.insert(0, os.environ["STAMPS_CODE"])
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from collective_stamps import CollectiveStamps
torch.set_num_threads(1)
steps, folder = int(sys.argv[1]), os.environ["STAMPS"]
with CollectiveStamps(folder) if folder else contextlib.nullcontext() as stamps:
    dist.init_process_group("gloo")
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(512, 512), torch.nn.ReLU())]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    inputs = torch.randn(256, 512)
    for step in range(steps + 20):
        if step == 20:
            began = time.process_time()
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print((time.process_time() - began) / steps * 1e3)
"""


if __name__ == "__main__":
    sys.exit(main())
