"""Cost of the recorder in training scripts: steps without it, between its windows, and within one, in turn.

    python -m benchmarks.recorder_overhead --python ENVIRONMENT/bin/python --rounds 6

Each round runs a job of two ranks (DDP over Gloo, one thread each) twice, in an order that alternates. In one the recorder has
ended its window, and every second step calls it: the others are those without it. In the other all measured steps are in a window.
The table has the median over the rounds of what a step takes of wall and processor time beyond one without the recorder, and the
quartiles; an idle machine is needed, for the ranks wait for each other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODES = ("idle", "recording")
SETTLED, STEPS = 40, 120  # steps that are not measured, and those that are
CALLS = 100_000


def main() -> None:
    """Run the jobs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter with PyTorch")
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    beyond: dict[str, dict[str, list[float]]] = {mode: {"wall": [], "processor": []} for mode in MODES}
    for number in range(options.rounds):
        results = {mode: run(options.python, mode) for mode in (MODES if number % 2 == 0 else MODES[::-1])}
        for mode, times in beyond.items():
            for clock, percents in times.items():
                percents.append((results[mode][clock] / results["idle"][f"{clock} without"] - 1) * 100)
        print(json.dumps(results), file=sys.stderr, flush=True)
    for mode, times in beyond.items():
        for clock, percents in times.items():
            low, middle, high = statistics.quantiles(percents, n=4)
            print(f"{mode:10} {clock:10} {middle:+7.2f} %   ({low:+.2f} to {high:+.2f})")
    print(f"processor time of a call of step() between windows: {results['idle']['call_us']:.2f} us")


def run(python: str, mode: str) -> dict[str, float]:
    """Times of a step of rank 0, in seconds."""
    root = str(Path(__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "times.json")
        command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, mode, str(out)]
        subprocess.run(command, env=env, check=True, capture_output=True)
        return dict(json.loads(out.read_text()))


def rank(mode: str, out: Path) -> None:
    """One rank of the job."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from dpro_search.record import Recorder

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers, nn.Linear(512, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, labels = torch.randn(128, 512), torch.randint(10, (128,))
    window = {"wait": 10, "steps": 5} if mode == "idle" else {"wait": SETTLED, "steps": STEPS + 1}
    recorder = Recorder(out.parent / "recording", windows=1, **window)
    recorder.start()
    times: dict[str, list[float]] = {"wall": [], "processor": [], "wall without": [], "processor without": []}
    for step in range(SETTLED + STEPS):
        calls = mode == "recording" or step < SETTLED or step % 2 == 0
        wall, processor = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        if calls:
            recorder.step()
        if step >= SETTLED:
            which = "" if calls else " without"
            times[f"wall{which}"].append(time.perf_counter() - wall)
            times[f"processor{which}"].append(time.process_time() - processor)
    medians = {name: statistics.median(values) for name, values in times.items() if values}
    call_us = calls_us(recorder) if mode == "idle" else 0.0
    if dist.get_rank() == 0:
        out.write_text(json.dumps(medians | {"call_us": call_us}))
    recorder.close()
    dist.barrier()
    dist.destroy_process_group()


def calls_us(recorder: object) -> float:
    """Processor time of a call of `step` in microseconds."""
    began = time.process_time()
    for _ in range(CALLS):
        recorder.step()  # type: ignore[attr-defined]
    return (time.process_time() - began) / CALLS * 1e6


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in MODES:
        rank(sys.argv[1], Path(sys.argv[2]))
    else:
        main()
