"""The workloads in plain PyTorch: the architectures of `models.py`, at the same sizes.

Each builder returns (model, inputs, labels) with a synthetic batch from a fixed seed; nothing is downloaded.
"""

import torch
from torch import nn

CLASSES = 100


def resnet50(batch=8, pixels=64):
    """ResNet-50 (He et al. 2015), 23.7 M parameters in 161 tensors."""
    layers = [_conv(3, 64, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1)]
    channels = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(_Bottleneck(channels, width, stride if block == 0 else 1))
            channels = 4 * width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))
    return model, *_images(batch, pixels)


class _Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        self.body = nn.Sequential(
            _conv(inputs, width, 1), _conv(width, width, 3, stride=stride), _conv(width, 4 * width, 1, activation=False)
        )
        same = inputs == 4 * width and stride == 1
        self.shortcut = nn.Identity() if same else _conv(inputs, 4 * width, 1, stride=stride, activation=False)

    def forward(self, hidden):
        return torch.relu(self.body(hidden) + self.shortcut(hidden))


class _Branches(nn.Module):
    """Branches side by side, joined along the channels."""

    def __init__(self, *branches):
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, hidden):
        return torch.cat([branch(hidden) for branch in self.branches], dim=1)


def _pooled(inputs, outputs):
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), _conv(inputs, outputs, 1))


def _inception_a(inputs, pooled):
    five = nn.Sequential(_conv(inputs, 48, 1), _conv(48, 64, 5))
    three = nn.Sequential(_conv(inputs, 64, 1), _conv(64, 96, 3), _conv(96, 96, 3))
    return _Branches(_conv(inputs, 64, 1), five, three, _pooled(inputs, pooled))


def _reduction_a(inputs):
    three = nn.Sequential(_conv(inputs, 64, 1), _conv(64, 96, 3), _conv(96, 96, 3, stride=2))
    return _Branches(_conv(inputs, 384, 3, stride=2), three, nn.MaxPool2d(3, stride=2, padding=1))


def _inception_b(width):
    once = nn.Sequential(_conv(768, width, 1), _conv(width, width, (1, 7)), _conv(width, 192, (7, 1)))
    pairs = [_conv(width, width, (7, 1)), _conv(width, width, (1, 7)), _conv(width, width, (7, 1)), _conv(width, 192, (1, 7))]
    return _Branches(_conv(768, 192, 1), once, nn.Sequential(_conv(768, width, 1), *pairs), _pooled(768, 192))


def _reduction_b():
    three = nn.Sequential(_conv(768, 192, 1), _conv(192, 320, 3, stride=2))
    seven = nn.Sequential(_conv(768, 192, 1), _conv(192, 192, (1, 7)), _conv(192, 192, (7, 1)), _conv(192, 192, 3, stride=2))
    return _Branches(three, seven, nn.MaxPool2d(3, stride=2, padding=1))


def _inception_c(inputs):
    def split():
        return _Branches(_conv(384, 384, (1, 3)), _conv(384, 384, (3, 1)))

    three = nn.Sequential(_conv(inputs, 384, 1), split())
    deep = nn.Sequential(_conv(inputs, 448, 1), _conv(448, 384, 3), split())
    return _Branches(_conv(inputs, 320, 1), three, deep, _pooled(inputs, 192))


def inception_v3(batch=8, pixels=96):
    """Inception-v3 (Szegedy et al. 2015) without its auxiliary classifier, 22.0 M parameters in 284 tensors."""
    layers = [_conv(3, 32, 3, stride=2), _conv(32, 32, 3), _conv(32, 64, 3), nn.MaxPool2d(3, stride=2)]
    layers += [_conv(64, 80, 1), _conv(80, 192, 3), nn.MaxPool2d(3, stride=2)]
    layers += [_inception_a(192, 32), _inception_a(256, 64), _inception_a(288, 64), _reduction_a(288)]
    layers += [_inception_b(width) for width in (128, 160, 160, 192)]
    layers += [_reduction_b(), _inception_c(1280), _inception_c(2048)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, CLASSES)), *_images(batch, pixels)


def vgg16(batch=8, pixels=64):
    """VGG-16 (Simonyan & Zisserman 2014), half the channels, 2,048 hidden units: 10.2 M parameters, most of them in two tensors."""
    stages, channels = [], 3
    for width, count in ((32, 2), (64, 2), (128, 3), (256, 3), (256, 3)):
        layers = []
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        stages.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
    features = channels * (pixels // 32) ** 2
    dense = [nn.Linear(features, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, CLASSES)]
    return nn.Sequential(*stages, nn.Flatten(), *dense), *_images(batch, pixels)


class _Bert(nn.Module):
    def __init__(self, length, blocks, width, heads, vocabulary):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(block, blocks, enable_nested_tensor=False)
        self.classifier = nn.Linear(width, CLASSES)

    def forward(self, ids):
        hidden = self.norm(self.tokens(ids) + self.positions(torch.arange(ids.shape[1])))
        return self.classifier(self.encoder(hidden)[:, 0])


def bert(batch=8, length=64, blocks=4, width=384, heads=6, vocabulary=4000):
    """A BERT encoder (Devlin et al. 2018), 4 blocks of width 384, with a token classifier: 8.7 M parameters."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (batch, length), generator=generator)
    return _Bert(length, blocks, width, heads, vocabulary), ids, torch.randint(CLASSES, (batch,), generator=generator)


class _GptBlock(nn.Module):
    """Causal attention and a perceptron, each behind a normalisation and beside a residual connection."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.result = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, hidden):
        parts = self.projections(self.norm_attention(hidden)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + self.result(attended.transpose(1, 2).flatten(2))
        return hidden + self.perceptron(self.norm_perceptron(hidden))


class _Gpt(nn.Module):
    def __init__(self, length, blocks, width, heads, vocabulary):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_GptBlock(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        hidden = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden)).flatten(0, 1)


def gpt(batch=4, length=128, blocks=6, width=256, heads=4, vocabulary=4000):
    """A GPT-2 (Radford et al. 2019) of 6 blocks of width 256 that predicts each next token: 6.8 M parameters."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (batch, length + 1), generator=generator)
    return _Gpt(length, blocks, width, heads, vocabulary), ids[:, :-1], ids[:, 1:].flatten()


def _conv(inputs, outputs, size, stride=1, activation=True):
    """Convolution and batch normalisation, with or without ReLU; `size` is a side or (height, width)."""
    padding = tuple(side // 2 for side in size) if isinstance(size, tuple) else size // 2
    layers = [nn.Conv2d(inputs, outputs, size, stride=stride, padding=padding, bias=False), nn.BatchNorm2d(outputs)]
    return nn.Sequential(*layers, nn.ReLU()) if activation else nn.Sequential(*layers)


def _images(batch, pixels):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn((batch, 3, pixels, pixels), generator=generator)
    return images, torch.randint(CLASSES, (batch,), generator=generator)


BUILDERS = {"resnet50": resnet50, "inception_v3": inception_v3, "vgg16": vgg16, "bert": bert, "gpt": gpt}


def blocks(model):
    """The parts of a workload, in the order in which they run, that its parameters are divided into for sharding."""
    parts = model.encoder.layers if isinstance(model, _Bert) else model.blocks if isinstance(model, _Gpt) else model
    return [part for part in parts if any(True for _ in part.parameters())]
