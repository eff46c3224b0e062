"""A small GPT that follows `parallel_plan.py`, for `STEPS` steps: `torchrun measured_parallel_job.py`."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from parallel_plan import apply
from planned_parallel_job import Gpt, batches, loss_function

dist.init_process_group("gloo")
torch.manual_seed(0)
planned = apply(Gpt(), loss_function)
optimizer = torch.optim.SGD(planned.parameters(), lr=0.1)
inputs, targets = next(batches())
share = len(inputs) // planned.data_ranks
part = slice(planned.data_rank * share, (planned.data_rank + 1) * share)
for step in range(int(os.environ["STEPS"])):
    start = time.perf_counter()
    planned.step(inputs[part], targets[part])
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step} of the plan with {dist.get_world_size()} ranks: {time.perf_counter() - start:.4f} s", flush=True)
dist.destroy_process_group()
