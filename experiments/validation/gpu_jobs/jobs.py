"""The jobs: models at the sizes of their publications, random inputs on the device, and one training step of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from experiments.capture import models

VOCABULARY = {"bert": models.VOCAB_BERT, "gpt2": models.VOCAB_GPT2}
CLASSES = 1000


@dataclass(frozen=True, kw_only=True)
class GpuJob:
    """A job; `blocks` of a transformer, 0: as published, `side` of images in pixels."""

    name: str
    model: str
    batch: int
    sequence: int = 0
    bf16: bool = False
    blocks: int = 0
    side: int = 224

    @property
    def has_images(self) -> bool:
        return self.model == "resnet50"


JOBS = (
    GpuJob(name="resnet50-b32-fp32", model="resnet50", batch=32),
    GpuJob(name="resnet50-b128-bf16", model="resnet50", batch=128, bf16=True),
    GpuJob(name="bert-b32-bf16", model="bert", batch=32, sequence=128, bf16=True),
    GpuJob(name="bert-b4-bf16", model="bert", batch=4, sequence=128, bf16=True),
    GpuJob(name="gpt2-b8-bf16", model="gpt2", batch=8, sequence=1024, bf16=True),
)


def smaller(job: GpuJob) -> GpuJob:
    """The same job at a size that a CPU trains in a moment, to try this program without a GPU."""
    return replace(job, batch=2, sequence=min(job.sequence, 8), blocks=1, side=32)


def built(job: GpuJob) -> nn.Module:
    """The model, on the default device."""
    if job.model == "bert":
        return models.Bert(job.blocks or 12)
    if job.model == "gpt2":
        return models.Gpt(job.blocks or 12)
    try:
        from torchvision.models import resnet50
    except ImportError:
        return models.resnet50()
    return resnet50()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a transformer, which FSDP shards one by one."""
    return list(model.h if isinstance(model, models.Gpt) else model.layers)


def recompute(blocks: list[nn.Module]) -> None:
    """Compute the forward pass of each block again in the backward pass, in place of keeping its activations."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


class Training:
    """A job that can be stepped.

    Parameters
    ----------
    wrap
        What makes the model parallel.
    fused, capturable
        Options of the optimizer; without them it is PyTorch's default, one kernel for lists of parameters (foreach).
    updates
        Whether the optimizer steps.
    autocast
        Whether a job in bf16 autocasts; else the wrapped model casts itself.
    autocast_cache
        False within a CUDA graph.
    """

    def __init__(
        self,
        job: GpuJob,
        device: str,
        *,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
        fused: bool = False,
        capturable: bool = False,
        updates: bool = True,
        autocast: bool = True,
        autocast_cache: bool = True,
    ) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.model = built(job).train()
        if wrap is not None:
            self.model = wrap(self.model)
        self.inputs, self.labels = random_batch(job, device)
        self._updates, self._device, self._autocast, self._autocast_cache = updates, device, job.bf16 and autocast, autocast_cache
        options = {"fused": True} if fused else {}
        if job.has_images:
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001, momentum=0.9, **options)
        else:
            options |= {"capturable": True} if capturable else {}
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, **options)
        self.loss = torch.zeros(())

    def step(self) -> None:
        """Of the batch that stays on the device."""
        self.step_on(self.inputs, self.labels)

    def step_on(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self._device, torch.bfloat16, enabled=self._autocast, cache_enabled=self._autocast_cache):
            given = self.model(inputs)
            loss = F.cross_entropy(given.flatten(0, -2), labels)
        loss.backward()
        if self._updates:
            self.optimizer.step()
        self.loss = loss.detach()


def random_batch(job: GpuJob, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of a step."""
    if job.has_images:
        images = torch.randn(job.batch, 3, job.side, job.side, device=device)
        return images, torch.randint(CLASSES, (job.batch,), device=device)
    sizes, vocabulary = (job.batch, job.sequence), VOCABULARY[job.model]
    return torch.randint(vocabulary, sizes, device=device), torch.randint(vocabulary, sizes, device=device).flatten()


class RandomCrops(Dataset):
    """Images in memory, of which each sample is a random crop, at times mirrored, in floats: the work of an input pipeline."""

    def __init__(self, side: int, count: int = 64) -> None:
        self._images = torch.randint(256, (count, 3, side + 32, side + 32), dtype=torch.uint8)
        self._side = side

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        top, left = torch.randint(33, (2,)).tolist()
        crop = self._images[number % len(self._images), :, top : top + self._side, left : left + self._side].float()
        crop = crop.flip(2) if number % 2 else crop
        return crop.sub_(120.0).div_(60.0), number % CLASSES
