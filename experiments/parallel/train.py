"""Trains one of the models under whatever plan it is given: `python train.py CONFIG.json STEPS`, once for each rank.

It follows ``parallel_plan.py`` of the folder on its path (`dpro-search export --target pytorch`), as `dpro-search validate` has it.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

sys.path.append(str(Path(__file__).parent))
from models import build
from parallel_plan import apply


def loss_function(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(before_step=lambda step: None):
    config, steps = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    vocabulary = config["vocab_size"]
    length = config.get("n_positions") or config["max_position_embeddings"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    planned = apply(build(config), loss_function)
    optimizer = torch.optim.AdamW(planned.parameters(), lr=1e-3, foreach=False)
    generator = torch.Generator().manual_seed(1)
    size, batch = planned.sequences, planned.sequences * planned.data_ranks
    own = slice(planned.data_rank * size, (planned.data_rank + 1) * size)
    for step in range(steps):
        before_step(step)
        tokens = torch.randint(vocabulary, (batch, length + 1), generator=generator)[own]
        loss = planned.step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        mean = planned.mean(loss)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {mean:.6f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
