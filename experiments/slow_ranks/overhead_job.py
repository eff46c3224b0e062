"""A rank of `overhead`: trains a model over Gloo and prints its processor time a step: `python overhead_job.py MODEL STEPS`.

STAMPS is the folder of the stamps (empty: none), STAMPS_CODE that of `collective_stamps`.
"""

import contextlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, os.environ["STAMPS_CODE"])
sys.path.append(str(Path(__file__).parents[1] / "parallel"))
from collective_stamps import CollectiveStamps
from models import build

_GPT = {"model_type": "gpt2", "n_embd": 256, "n_layer": 8, "n_head": 8, "n_positions": 128, "vocab_size": 2048}
_BATCH, _WARMUP = 4, 5


def linear():
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=2)
    inputs = torch.randn(256, 512)
    return model, lambda: model(inputs).sum()


def gpt(wrap):
    model = wrap(build(_GPT))
    tokens = torch.randint(_GPT["vocab_size"], (_BATCH, _GPT["n_positions"] + 1))
    return model, lambda: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def sharded(model):
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


MODELS = {"linear": linear, "gpt-ddp": lambda: gpt(DistributedDataParallel), "gpt-fsdp2": lambda: gpt(sharded)}


def main():
    torch.set_num_threads(1)
    name, steps, folder = sys.argv[1], int(sys.argv[2]), os.environ["STAMPS"]
    with CollectiveStamps(folder) if folder else contextlib.nullcontext():
        dist.init_process_group("gloo")
        model, loss = MODELS[name]()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        for step in range(steps + _WARMUP):
            if step == _WARMUP:
                began = time.process_time()
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()
        print((time.process_time() - began) / steps * 1e3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
