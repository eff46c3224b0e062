"""Losses of a small GPT: `python planned_parallel_job.py CASES.json OUT RANK RANKS`, once for each rank.

Each case is a folder with ``parallel_plan.py``, which is followed, or null: the whole model on every rank, on the whole batch.
Rank 0 writes OUT: of each case its losses, norms of gradients, the collectives of its last step, and the whole matrices that are
still in memory when they have been split.
"""

import gc
import importlib.util
import json
import os
import sys
import weakref
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

HIDDEN, HEADS, VOCAB, SEQUENCE, LAYERS, BATCH, STEPS = 32, 4, 64, 16, 4, 8, 3


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first_norm, self.attention = nn.LayerNorm(HIDDEN), Attention()
        self.second_norm, self.feed_forward = nn.LayerNorm(HIDDEN), FeedForward()

    def forward(self, x):
        x = x + self.attention(self.first_norm(x))
        return x + self.feed_forward(self.second_norm(x))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, x):
        if self.tokens is not None:
            x = self.tokens(x) + self.positions(torch.arange(SEQUENCE))
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


class Recorder(TorchDispatchMode):
    """Counts collectives over more than one rank, by type and ranks."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional"):
            ranks = [len(group) for group in map(ranks_of, args) if group]
            if ranks and ranks[0] > 1:
                self.found[f"{name.strip('_')} {ranks[0]}"] += 1
        return func(*args, **(kwargs or {}))


def ranks_of(value):
    if isinstance(value, torch.ScriptObject):
        try:
            return dist.get_process_group_ranks(dist.ProcessGroup.unbox(value))
        except RuntimeError:  # the way of a reduction
            return []
    if isinstance(value, str):
        try:
            return dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(value))
        except (RuntimeError, ValueError):
            return []
    return []


def loss_function(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def trained(folder, number):
    torch.manual_seed(0)
    model = Gpt()
    whole = {name: weakref.ref(each) for name, each in model.named_parameters() if each.ndim == 2}
    if folder is None:
        parameters, part_of_batch = list(model.parameters()), slice(None)
    else:
        spec = importlib.util.spec_from_file_location(f"plan_{number}", Path(folder) / "parallel_plan.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        gc.disable()  # else it depends on luck what cycles hold
        planned = module.apply(model, loss_function)
        gc.enable()
        parameters = list(planned.parameters())
        size = BATCH // planned.data_ranks
        part_of_batch = slice(planned.data_rank * size, (planned.data_rank + 1) * size)
    held = [name for name, each in whole.items() if each() is not None]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    losses, norms = [], []
    for inputs, targets in batches():
        with Recorder() as recorder:
            if folder is None:
                loss = loss_function(model(inputs), targets)
                loss.backward()
            else:
                loss = planned.step(inputs[part_of_batch], targets[part_of_batch])
        losses.append(float(loss) if folder is None else planned.mean(loss))
        norm = nn.utils.clip_grad_norm_(parameters, 1.0) if folder is None else planned.clip_gradients(1.0)
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "collectives": dict(recorder.found), "whole": held}


def main():
    cases, out, rank, ranks = sys.argv[1:]
    torch.set_num_threads(1)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = rank, ranks
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=int(rank), world_size=int(ranks))
    results = [trained(case, number) for number, case in enumerate(json.loads(Path(cases).read_text()))]
    if rank == "0":
        Path(out).write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
