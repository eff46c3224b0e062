"""Six models that train in seconds on data that packages ship.

    workload = WORKLOADS["digits-mlp"]
    task = workload.task(seed=0)                  # model, batches and evaluation; equal seeds, equal models

Data: scikit-learn's handwritten digits (UCI, Alpaydin and Kaynak) and breast cancer (UCI, Wolberg) tables, and the licence text
that every Python installation holds in `site`.
"""

from __future__ import annotations

import site
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn

_CONTEXT = 16  # characters that the language model sees


@dataclass
class Task:
    """A model with its data.

    Attributes
    ----------
    model
        Initialised by the seed.
    loss
        Training loss of outputs and labels.
    inputs, labels
        All training examples.
    """

    model: nn.Module
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    inputs: torch.Tensor
    labels: torch.Tensor
    batch: int

    def batch_loss(self, generator: np.random.Generator) -> torch.Tensor:
        """The loss of a batch that the generator draws."""
        rows = torch.from_numpy(generator.integers(len(self.inputs), size=self.batch))
        return self.loss(self.model(self.inputs[rows]), self.labels[rows])

    def full_loss(self) -> float:
        """The loss over all training examples: what a target is about."""
        with torch.no_grad():
            return float(self.loss(self.model(self.inputs), self.labels))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its data, and how it is trained.

    Attributes
    ----------
    make
        Model, loss, inputs and labels.
    target
        The loss over all training examples at which training ends.
    """

    name: str
    make: Callable[[], tuple[nn.Module, Callable[[torch.Tensor, torch.Tensor], torch.Tensor], torch.Tensor, torch.Tensor]]
    lr: float
    batch: int
    target: float

    def task(self, seed: int, batch: int | None = None) -> Task:
        """The model initialised by a seed, with its data."""
        torch.manual_seed(seed)
        model, loss, inputs, labels = self.make()
        return Task(model, loss, inputs, labels, batch or self.batch)

    def optimizer(self, task: Task) -> torch.optim.Optimizer:
        """Plain SGD, as in the paper."""
        return torch.optim.SGD(task.model.parameters(), lr=self.lr)


@cache
def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.data / 16.0, dtype=torch.float32), torch.tensor(found.target)


@cache
def _cancer() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_breast_cancer

    found = load_breast_cancer()
    scaled = (found.data - found.data.mean(axis=0)) / found.data.std(axis=0)
    return torch.tensor(scaled, dtype=torch.float32), torch.tensor(found.target)


@cache
def _licence() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Contexts and the characters behind them, [n, 16] and [n], of Python's licence; and how many characters there are."""
    text = _licence_text()
    letters = sorted(set(text))
    codes = torch.tensor([letters.index(each) for each in text])
    return codes.unfold(0, _CONTEXT, 1)[:-1], codes[_CONTEXT:], len(letters)


def _licence_text() -> str:
    for folder in (Path(site.__file__).parent, Path(site.__file__).parent.parent):
        if (folder / "LICENSE.txt").is_file():
            return (folder / "LICENSE.txt").read_text(errors="replace")
    return Path(site.__file__).with_name("pydoc_data").joinpath("topics.py").read_text()[:20_000]  # builds without the file


def _digits_mlp() -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]:
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)), nn.CrossEntropyLoss(), *_digits()


def _digits_cnn() -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]:
    layers = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*layers), nn.CrossEntropyLoss(), *_digits()


class _Block(nn.Module):
    """Two convolutions beside a shortcut. Groups are normalised, not batches, whose means would be each worker's own."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        first, second = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.long = nn.Sequential(first, nn.GroupNorm(4, outputs), nn.ReLU(), second, nn.GroupNorm(4, outputs))
        alike = inputs == outputs and stride == 1
        self.short = nn.Identity() if alike else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.long(values) + self.short(values))


def _digits_resnet() -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]:
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.GroupNorm(4, 8), nn.ReLU()]
    layers += [_Block(8, 8), _Block(8, 16, stride=2), _Block(16, 32, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(32, 10)), nn.CrossEntropyLoss(), *_digits()


def _licence_lm() -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]:
    inputs, labels, letters = _licence()
    layers = [nn.Embedding(letters, 8), nn.Flatten(), nn.Linear(8 * _CONTEXT, 64), nn.Tanh(), nn.Linear(64, letters)]
    return nn.Sequential(*layers), nn.CrossEntropyLoss(), inputs, labels


def _cancer_logistic() -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]:
    return nn.Linear(30, 2), nn.CrossEntropyLoss(), *_cancer()


def _hinge(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.clamp(1.0 - scores.squeeze(1) * (2.0 * labels - 1.0), min=0.0).mean()


def _digits_svm() -> tuple[nn.Module, Callable[[torch.Tensor, torch.Tensor], torch.Tensor], torch.Tensor, torch.Tensor]:
    """Even against odd digits by a linear support vector machine."""
    inputs, labels = _digits()
    return nn.Linear(64, 1), _hinge, inputs, labels % 2


WORKLOADS: dict[str, Workload] = {
    each.name: each
    for each in (
        Workload(name="digits-mlp", make=_digits_mlp, lr=0.1, batch=16, target=0.3),
        Workload(name="digits-cnn", make=_digits_cnn, lr=0.1, batch=16, target=0.3),
        Workload(name="digits-resnet", make=_digits_resnet, lr=0.02, batch=16, target=0.3),
        Workload(name="licence-lm", make=_licence_lm, lr=0.5, batch=16, target=2.4),
        Workload(name="cancer-logistic", make=_cancer_logistic, lr=0.02, batch=8, target=0.1),
        Workload(name="digits-svm", make=_digits_svm, lr=0.02, batch=8, target=0.36),
    )
}
