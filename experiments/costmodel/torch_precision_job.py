"""Trains a model with PyTorch's DistributedDataParallel: a job of `experiments.costmodel.torch_precision`.

    python torch_precision_job.py MODEL

With DPRO_SEARCH_PLAN set to a folder that `dpro-search export` wrote, it follows that plan's modules. PyTorch only.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workloads"))

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_models import CLASSES, bert, inception_v3, resnet50, vgg16

STEPS = 12


class _Residual(nn.Module):
    """What is computed is added to what goes in."""

    def __init__(self, *layers):
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, hidden):
        return hidden + self.body(hidden)


class _Swapped(nn.Module):
    """Layers that see the last two axes in each other's place."""

    def __init__(self, *layers):
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, hidden):
        return self.body(hidden.transpose(1, 2)).transpose(1, 2)


class _Tokens(nn.Module):
    """A transformer with the normalisation first: GPT-2's blocks (Radford et al. 2019), no mask."""

    def __init__(self, width, blocks, heads, vocabulary):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, ids):
        return self.head(self.blocks(self.embedding(ids))[:, 0])


def gpt():
    """Two blocks of width 768, 128 tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4000, (4, 128), generator=generator)
    return _Tokens(768, 2, 12, 4000), ids, torch.randint(CLASSES, (4,), generator=generator)


def mlp_mixer():
    """MLP-Mixer (Tolstikhin et al. 2021), four blocks of 256 channels on 64 patches."""
    layers = [nn.Conv2d(3, 256, 8, stride=8), nn.Flatten(2), _Transposed()]
    for _ in range(4):
        tokens = _Swapped(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        layers += [
            _Residual(nn.LayerNorm(256), tokens),
            _Residual(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)),
        ]
    return nn.Sequential(*layers, _Mean(), nn.Linear(256, CLASSES)), *_images(8)


def convnext():
    """ConvNeXt (Liu et al. 2022) blocks: three at 16 x 16 with 96 channels, three at 8 x 8 with 192."""
    layers = [nn.Conv2d(3, 96, 4, stride=4)]
    for width in (96, 192):
        layers += [
            _Residual(
                nn.Conv2d(width, width, 7, padding=3, groups=width),
                nn.GroupNorm(1, width),
                nn.Conv2d(width, 4 * width, 1),
                nn.GELU(),
                nn.Conv2d(4 * width, width, 1),
            )
            for _ in range(3)
        ]
        layers += [nn.Conv2d(96, 192, 2, stride=2)] if width == 96 else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(192, CLASSES)), *_images(8)


def mobilenet():
    """MobileNet-v2 (Sandler et al. 2018), its inverted residuals at 32 x 32 and below."""
    layers, inputs = [_convolution(3, 32, 3, stride=2)], 32
    for expansion, outputs, count, stride in ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 3, 2), (6, 96, 2, 1)):
        for number in range(count):
            step, wide = (stride if number == 0 else 1), expansion * inputs
            body = [
                _convolution(inputs, wide, 1),
                _convolution(wide, wide, 3, stride=step, groups=wide),
                nn.Conv2d(wide, outputs, 1, bias=False),
                nn.BatchNorm2d(outputs),
            ]
            layers.append(_Residual(*body) if step == 1 and inputs == outputs else nn.Sequential(*body))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES)), *_images(16)


class _Transposed(nn.Module):
    def forward(self, hidden):
        return hidden.transpose(1, 2)


class _Mean(nn.Module):
    def forward(self, hidden):
        return hidden.mean(1)


def _convolution(inputs, outputs, side, stride=1, groups=1):
    layer = nn.Conv2d(inputs, outputs, side, stride=stride, padding=side // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU6())


def _images(batch, pixels=64):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn((batch, 3, pixels, pixels), generator=generator)
    return images, torch.randint(CLASSES, (batch,), generator=generator)


BUILDERS = {
    "bert": bert,
    "convnext": convnext,
    "gpt": gpt,
    "inception_v3": lambda: inception_v3(batch=4),
    "mlp_mixer": mlp_mixer,
    "mobilenet": mobilenet,
    "resnet50": lambda: resnet50(batch=4),
    "vgg16": vgg16,
}


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, inputs, labels = BUILDERS[sys.argv[1]]()
    if "DPRO_SEARCH_PLAN" in os.environ:
        sys.path.insert(0, os.environ["DPRO_SEARCH_PLAN"])
        from modules import planned_modules

        model = planned_modules(model)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(parallel(inputs), labels)
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
