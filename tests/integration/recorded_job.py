"""A rank of a small job with the recorder: ``recorded_job.py HOW FOLDER STEPS``; HOW is ddp, fsdp, bare, lightning...

"bare" is plain DDP without a line about recording.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

HOW, FOLDER, STEPS = sys.argv[1], sys.argv[2], int(sys.argv[3])
SIDE, BATCH = 256, 64
SCHEDULE = {"wait": 8, "warmup": 2, "steps": 4, "every": 10, "windows": int(os.environ.get("WINDOWS", "1"))}
torch.set_num_threads(1)
torch.manual_seed(1)
inputs, labels = torch.randn(BATCH, SIDE), torch.randint(10, (BATCH,))


def layers():
    return [nn.Sequential(nn.Linear(SIDE, SIDE), nn.ReLU()) for _ in range(4)]


def plain():
    """DDP or FSDP in a loop of its own."""
    dist.init_process_group("gloo")
    blocks = layers()
    model = nn.Sequential(*blocks, nn.Linear(SIDE, 10))
    if HOW == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.25)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of = nn.CrossEntropyLoss()

    def train_step():
        optimizer.zero_grad()
        loss_of(model(inputs), labels).backward()
        optimizer.step()

    if HOW == "bare":
        for _ in range(STEPS):
            train_step()
    else:
        from dpro_search.record import Recorder

        with Recorder(FOLDER, batch_size=BATCH, **SCHEDULE) as recorder:
            for step in range(STEPS):
                if os.environ.get("KILLED_AT") == str(step) and dist.get_rank() == 1:
                    os.kill(os.getpid(), 9)
                train_step()
                recorder.step()
    dist.barrier()
    dist.destroy_process_group()


def transformers():
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from dpro_search.record import TransformersCallback

    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=64, n_positions=32, vocab_size=128, use_cache=False))
    tokens = torch.randint(128, (STEPS * 8, 32))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(
        FOLDER + ".out", max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, ddp_backend="gloo", dataloader_pin_memory=False,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=rows, callbacks=[TransformersCallback(FOLDER, **SCHEDULE)]).train()


def lightning():
    import lightning
    from torch.utils.data import DataLoader, TensorDataset

    from dpro_search.record import LightningCallback

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(*layers(), nn.Linear(SIDE, 10))

        def training_step(self, batch, index):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = TensorDataset(inputs.repeat(STEPS, 1), labels.repeat(STEPS))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=STEPS, accumulate_grad_batches=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[LightningCallback(FOLDER, **SCHEDULE)],
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(data, batch_size=16))


def accelerate():
    from accelerate import Accelerator

    from dpro_search.record import AccelerateTracker

    accelerator = Accelerator(cpu=True, log_with=[AccelerateTracker(FOLDER, batch_size=BATCH, **SCHEDULE)])
    accelerator.init_trackers("job", config={"api_key": "hidden"})
    model = nn.Sequential(*layers(), nn.Linear(SIDE, 10))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(STEPS):
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
        optimizer.step()
    accelerator.end_training()


{"transformers": transformers, "lightning": lightning, "accelerate": accelerate}.get(HOW, plain)()
