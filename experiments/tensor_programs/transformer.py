"""The predictor of CDMPP (EuroSys 2024, arXiv 2311.09690) in PyTorch, written from the paper.

A transformer encoder reads the leaves of a compact AST, to whose normalized features a sinusoid of the pre-order position was
added; a layer of its own for each number of leaves embeds them; an embedding of the device is added; an MLP gives the Box-Cox
transformed latency. The loss is scaled MSE + MAPE on that, and a distance between embeddings of source and target programs: central
moments up to the fifth (CMD), the maximum mean discrepancy (MMD), or none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import inv_boxcox
from scipy.stats import boxcox
from torch import nn

from dpro_search.errors import DproSearchError
from experiments.tensor_programs.table import FEATURES

Floats = npt.NDArray[np.float64]
MOMENTS = 5
Sample = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], Floats]  # Leaves, positions, device features.


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How it is trained; the defaults are the paper's parts, at a size for a CPU."""

    epochs: int = 60
    batch: int = 128
    width: int = 128
    layers: int = 2
    rate: float = 1e-3
    distance: str = "cmd"  # cmd, mmd or none.
    distance_weight: float = 0.1
    positions: bool = True
    target: str = "box-cox"  # box-cox or log.


def sinusoid(positions: torch.Tensor) -> torch.Tensor:
    """[leaves] to [leaves, 164]."""
    rates = torch.exp(-np.log(10000.0) * torch.arange(0, FEATURES, 2) / FEATURES)
    angle = positions[..., None].float() * rates
    return torch.stack([torch.sin(angle), torch.cos(angle)], dim=-1).flatten(-2)


class Network(nn.Module):
    """[batch, leaves, 164] and [batch, device features] to embeddings [batch, width] and transformed latencies [batch]."""

    def __init__(self, leaf_counts: Sequence[int], devices: int, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.into = nn.Linear(FEATURES, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, settings.layers)
        self.by_count = nn.ModuleDict({str(count): nn.Linear(count * width, width) for count in sorted(set(leaf_counts))})
        self.device = nn.Sequential(nn.Linear(devices, width), nn.ReLU(), nn.Linear(width, width))
        self.out = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, leaves: torch.Tensor, devices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self.by_count[str(leaves.shape[1])](self.encoder(self.into(leaves)).flatten(1)) + self.device(devices)
        return embedded, self.out(embedded)[:, 0]


def central_moment_discrepancy(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Of embeddings [batch, width]: the distances of means and of central moments up to the fifth, after a squash to (0, 1)."""
    one, other = torch.sigmoid(one), torch.sigmoid(other)
    mean, other_mean = one.mean(0), other.mean(0)
    found = torch.linalg.vector_norm(mean - other_mean)
    for order in range(2, MOMENTS + 1):
        found = found + torch.linalg.vector_norm(((one - mean) ** order).mean(0) - ((other - other_mean) ** order).mean(0))
    return found


def maximum_mean_discrepancy(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Of embeddings [batch, width], with a Gaussian kernel as wide as they are apart."""
    joined = torch.cat([one, other])
    distance = torch.cdist(joined, joined) ** 2
    kernel = torch.exp(-distance / distance.detach().mean().clamp(min=1e-6))
    size = len(one)
    return kernel[:size, :size].mean() + kernel[size:, size:].mean() - 2 * kernel[:size, size:].mean()


DISTANCES = {"cmd": central_moment_discrepancy, "mmd": maximum_mean_discrepancy}


class Predictor:
    """`fit`, `fine_tune` and `predict` of the paper's network."""

    def __init__(self, settings: Settings, seed: int) -> None:
        self.settings = settings
        self._seed = seed

    def fit(self, samples: Sequence[Sample], us: Floats) -> Predictor:
        """samples_per_s_: samples that training took in a second of processor time (of one thread)."""
        torch.manual_seed(self._seed)
        joined = np.concatenate([leaves for leaves, _, _ in samples])
        self._mean, self._deviation = joined.mean(0), joined.std(0) + 1e-3
        devices = np.array([device for _, _, device in samples])
        self._device_scale = np.abs(devices).max(0) + 1e-9
        self.leaf_counts_ = sorted({len(leaves) for leaves, _, _ in samples})
        transformed, self._power = boxcox(us) if self.settings.target == "box-cox" else (np.log(us), 0.0)
        # MAPE on the transformed value needs it away from zero: it is moved to [1, ...].
        self._low, self._spread = float(transformed.min()), float(transformed.std()) + 1e-9
        self.network = Network(self.leaf_counts_, devices.shape[1], self.settings)
        self._train(samples, us, None, self.settings.epochs, self.settings.rate)
        return self

    def fine_tune(self, samples: Sequence[Sample], us: Floats, of_target: Sequence[Sample], epochs: int) -> Predictor:
        """Goes on with samples (those of the target among them), drawing embeddings of unlabelled target programs to theirs."""
        self._train(samples, us, of_target, epochs, self.settings.rate / 3)
        return self

    def predict(self, samples: Sequence[Sample]) -> Floats:
        """us; raises `DproSearchError` for a number of leaves that no fitted program had."""
        found = np.zeros(len(samples))
        self.network.eval()
        with torch.no_grad():
            for places, leaves, devices in self._batches(samples, None):
                found[places] = self.network(leaves, devices)[1].numpy()
        shifted = np.maximum((found - 1.0) * self._spread + self._low, -1 / self._power + 1e-6 if self._power > 0 else -np.inf)
        return np.asarray(inv_boxcox(shifted, self._power))

    def _labels(self, us: Floats) -> torch.Tensor:
        transformed = boxcox(us, self._power) if self._power else np.log(us)
        return torch.tensor((transformed - self._low) / self._spread + 1.0, dtype=torch.float32)

    def _train(self, samples: Sequence[Sample], us: Floats, of_target: Sequence[Sample] | None, epochs: int, rate: float) -> None:
        labels = self._labels(us)
        random = np.random.default_rng(self._seed)
        optimizer = torch.optim.Adam(self.network.parameters(), lr=rate)
        self.network.train()
        start = time.process_time()
        for _ in range(epochs):
            others: dict[int, list[Any]] = {}
            for _, leaves, devices in self._batches(of_target or [], random):
                others.setdefault(leaves.shape[1], []).append((leaves, devices))
            for places, leaves, devices in self._batches(samples, random):
                embedded, found = self.network(leaves, devices)
                error = found - labels[places]
                loss = (error**2).mean() + (error.abs() / labels[places]).mean()
                count = leaves.shape[1]
                if self.settings.distance != "none" and others.get(count) and len(places) > 1:
                    other, _ = self.network(*others[count][random.integers(len(others[count]))])
                    loss = loss + self.settings.distance_weight * DISTANCES[self.settings.distance](embedded, other)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        self.samples_per_s_ = len(samples) * epochs / (time.process_time() - start)

    def _batches(self, samples: Sequence[Sample], random: np.random.Generator | None) -> Iterator[Any]:
        """Places, leaves and devices; a batch holds programs of one number of leaves."""
        counts = np.array([len(leaves) for leaves, _, _ in samples], dtype=int)
        found = []
        for count in np.unique(counts):
            if int(count) not in self.leaf_counts_:
                raise DproSearchError(
                    f"no fitted program has {count} leaves (known: {', '.join(map(str, self.leaf_counts_))}); "
                    "the paper's predictor has a layer for each number: fit it with such programs, or use the trees"
                )
            places = np.flatnonzero(counts == count)
            places = places if random is None else random.permutation(places)
            found += [places[start : start + self.settings.batch] for start in range(0, len(places), self.settings.batch)]
        for one in found if random is None else [found[i] for i in random.permutation(len(found))]:
            leaves = torch.tensor(np.stack([(samples[i][0] - self._mean) / self._deviation for i in one]), dtype=torch.float32)
            if self.settings.positions:
                leaves = leaves + sinusoid(torch.tensor(np.stack([samples[i][1] for i in one])))
            devices = torch.tensor(np.stack([samples[i][2] / self._device_scale for i in one]), dtype=torch.float32)
            yield one, leaves, devices
