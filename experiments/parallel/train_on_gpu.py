"""Trains one of the models on a GPU in bf16 under whatever plan it is given: `python train_on_gpu.py CONFIG.json STEPS`.

It follows ``parallel_plan.py`` of the folder on its path, as `dpro-search fit --collect parallel` has it. The loss is in fp32, as
torchtitan's and Hugging Face's are. What fails is also written to the file that TRACEBACK names.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

sys.path.append(str(Path(__file__).parent))
from models import build
from parallel_plan import apply


def loss_function(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def main():
    config, steps = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    vocabulary = config["vocab_size"]
    length = config.get("n_positions") or config["max_position_embeddings"]
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    with device:
        model = build(config)
    planned = apply(model, loss_function)
    alike = {}  # one call updates parameters that are split over the same mesh
    for parameter in planned.parameters():
        alike.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": each} for each in alike.values()], lr=1e-5, fused=True)
    for _ in range(steps):
        tokens = torch.randint(vocabulary, (planned.sequences, length + 1), device=device)
        planned.step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    try:
        main()
    except Exception:
        if "TRACEBACK" in os.environ:
            Path(os.environ["TRACEBACK"]).write_text(traceback.format_exc())
        raise
