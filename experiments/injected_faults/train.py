"""Trains like ``experiments/parallel/train.py``, with the pauses of a fault: `python train.py CONFIG.json STEPS`.

INJECTED_FAULT, where it is set, is JSON: ``stall_s`` before each step, ``pause_s`` before every fourth, and the file
that rank 0 writes the rate of a matrix product to, in FLOP/s, which all ranks time before the training.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import train as training

_ROWS, _SECONDS = 1024, 2.0


def product_flops_per_s():
    torch.set_num_threads(1)
    matrix = torch.randn(_ROWS, _ROWS)
    products, began = 0, time.monotonic()
    while time.monotonic() - began < _SECONDS:
        matrix @ matrix
        products += 1
    return 2 * _ROWS**3 * products / (time.monotonic() - began)


def main():
    fault = json.loads(os.environ.get("INJECTED_FAULT", "{}"))
    if fault:  # all ranks at a time, as they compute in the job
        rate = product_flops_per_s()
        if os.environ["RANK"] == "0":
            Path(fault["product"]).write_text(str(rate))

    def pause(step):
        time.sleep(fault["stall_s"] + (fault["pause_s"] if step % 4 == 3 else 0.0))

    training.main(*([pause] if fault else []))


if __name__ == "__main__":
    main()
