"""`OpDomain`: the sizes of ops by kind, and the rates of devices, near which the predictor was fitted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpro_search.costmodel.devices.features import DEVICE_FEATURES, FEATURES
from dpro_search.costmodel.devices.ops import Floats, Singles

_SIZES = ("log_batch", "log_m", "log_n", "log_k", "log_flops", "log_matrix_bytes", "log_stream_bytes")
KINDS = [place for place, name in enumerate(FEATURES) if name.startswith("is_")]
CHECKED = [place for place, name in enumerate(FEATURES) if name in _SIZES or (name in DEVICE_FEATURES and name.startswith("log_"))]
ELEMENT = FEATURES.index("element_bytes")
MARGIN = 1.0
"""Doublings beyond the measured sizes that count as inside: trees go on as at their edge, and the base grows with the op."""
REFUSED = 6.0
"""Doublings beyond which nothing is predicted: 64 times what was measured."""


@dataclass(frozen=True, kw_only=True)
class OpDomain:
    """Least and largest value of each checked feature by kind, [kinds, checked]; infinite where a kind was not measured."""

    low: Floats
    high: Floats
    element_bytes: Floats  # Sizes of elements that were measured.

    @staticmethod
    def shape() -> tuple[int, int]:
        """Shape of `low` and `high`."""
        return len(KINDS), len(CHECKED)

    def beyond(self, features: Singles) -> Floats:
        """Doublings by which an op or its device lies beyond the margin, [n]; infinite where nothing alike was measured."""
        kind = np.argmax(features[:, KINDS], axis=1)
        values = features[:, CHECKED].astype(np.float64)
        with np.errstate(invalid="ignore"):
            outside = np.maximum(self.low[kind] - values, values - self.high[kind]).max(axis=1) - MARGIN
        outside = np.where(np.isin(features[:, ELEMENT], self.element_bytes), outside, np.inf)
        return np.asarray(np.maximum(outside, 0.0))
