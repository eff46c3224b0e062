"""`LatencyModel`: latencies of ops on a device, from its specs and, better, a few measurements of it.

    model = default_model()
    profile = DeviceProfile(device=bundled.device("l40s"), probes=Probes(stream_bytes_per_s=6.8e11, floor_us=9.0))
    durations = model.on(profile).predict(gemm(4096, 4096, 4096, precision="bf16"))
    durations.us, durations.low_us, durations.high_us       # [1] each; the interval is one of 90 %

A prediction is the roofline at the rates that the probes show, times what trees learned of ops on other devices, times what
measured ops of this device say about their error (`correction`). Intervals are conformal: their width is that which held 90 % of
the ops of devices whose whole architecture had been left out (Vovk et al. 2005), and grows outside of what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpro_search.costmodel.devices.correction import OpPoints, Similarity
from dpro_search.costmodel.devices.families import FamilyTrees
from dpro_search.costmodel.devices.features import DEVICE_FEATURES, FEATURES, base_us, features, of_training
from dpro_search.costmodel.devices.ops import Floats, Ops, Singles
from dpro_search.costmodel.devices.profile import DeviceProfile, UsualShares
from dpro_search.costmodel.forest import Forest
from dpro_search.costmodel.intervals import Durations
from dpro_search.costmodel.residual import Residual
from dpro_search.errors import InputError

COVERAGE = 0.9
BUDGETS = (0, 5, 20, 100)
"""Numbers of measured ops of a device for which widths are known; a device has that of the largest that it reaches."""
UNITS = 300.0
"""Median error of samples, as a factor, that no device explains: times in other units are wrong by 1,000."""
_SIZES = ("log_batch", "log_m", "log_n", "log_k", "log_flops", "log_matrix_bytes", "log_stream_bytes")
KIND_PLACES = [place for place, name in enumerate(FEATURES) if name.startswith("is_")]
CHECKED_PLACES = [
    place for place, name in enumerate(FEATURES) if name in _SIZES or (name in DEVICE_FEATURES and name.startswith("log_"))
]
ELEMENT_PLACE = FEATURES.index("element_bytes")
MARGIN = 1.0
"""Doublings beyond the measured sizes that count as inside: trees go on as at their edge, and the base grows with the op."""
REFUSED = 6.0
"""Doublings beyond which nothing is predicted: 64 times what was measured."""


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Half widths of 90 % intervals."""

    specs: float  # Half width of the logarithm where a device was not probed.
    deviations: tuple[float, ...]  # In expected deviations, by `BUDGETS`.


@dataclass(frozen=True, kw_only=True)
class OpDomain:
    """Least and largest value of each checked feature by kind, [kinds, checked]; infinite where a kind was not measured."""

    low: Floats
    high: Floats
    element_bytes: Floats  # Sizes of elements that were measured.

    @staticmethod
    def shape() -> tuple[int, int]:
        """Shape of `low` and `high`."""
        return len(KIND_PLACES), len(CHECKED_PLACES)

    def beyond(self, features: Singles) -> Floats:
        """Doublings by which an op or its device lies beyond the margin, [n]; infinite where nothing alike was measured."""
        kind = np.argmax(features[:, KIND_PLACES], axis=1)
        values = features[:, CHECKED_PLACES].astype(np.float64)
        with np.errstate(invalid="ignore"):
            outside = np.maximum(self.low[kind] - values, values - self.high[kind]).max(axis=1) - MARGIN
        # A precision for which a device states no peak makes no number.
        known = np.isin(features[:, ELEMENT_PLACE], self.element_bytes) & np.isfinite(values).all(axis=1)
        outside = np.where(known, outside, np.inf)
        return np.asarray(np.maximum(outside, 0.0))


EVERY = 4  # One tree of so many tells which ops end in the same leaves.


@dataclass(frozen=True, kw_only=True)
class Trees:
    """Trees that see all features, and trees that see ops only, which were fitted to the errors of the first."""

    base: Forest
    shapes: Forest

    def log_ratio(self, features: Singles) -> Floats:
        """log(latency / base) by the sum of the trees, [n]."""
        return self.base.predict(features) + self.shapes.predict(features)


@dataclass(frozen=True, kw_only=True)
class Forests:
    """Trees fitted to the ops that training runs (`features.of_training`), and trees fitted to all ops, for the others.

    Ops of 8 and 4 bits, experts and decoding steps were measured in few engines and mostly on new devices: trees that were fitted
    to them, too, were off by 20.6 instead of 18.1 % on the ops of training (architectures left out).
    """

    training: Trees
    every: Trees

    def log_ratio(self, features: Singles) -> Floats:
        """log(latency / base), [n]."""
        return np.asarray(np.where(of_training(features), self.training.log_ratio(features), self.every.log_ratio(features)))


def points_of(ops: Ops, seen: Singles, forests: Forests, families: FamilyTrees) -> OpPoints:
    """Points of n ops and their features, with what trees tell of them."""
    base = forests.every.base
    some = Forest(feature=base.feature[::EVERY], threshold=base.threshold[::EVERY], leaf=base.leaf[::EVERY])
    return OpPoints.of(ops, seen, some.leaves(seen), families.apart(ops, seen, forests.log_ratio(seen)))


@dataclass(frozen=True, kw_only=True)
class LatencyModel:
    """A fitted predictor."""

    forests: Forests
    families: FamilyTrees
    similarity: Similarity
    widths: Widths
    domain: OpDomain
    usual: UsualShares

    def on(self, profile: DeviceProfile, ops: Ops | None = None, us: Floats | None = None) -> DeviceLatency:
        """The predictor on a device, of which ops may have been measured.

        Raises
        ------
        InputError
            The measured times contradict the device's specs by orders of magnitude.
        """
        if ops is None or us is None or not len(ops):
            return DeviceLatency(model=self, profile=profile, measured=None)
        if len(ops) != len(us) or not (np.isfinite(us) & (us > 0)).all():
            raise InputError(f"{len(ops)} ops and {len(us)} times: each op needs a time above 0")
        seen = features(ops, profile, self.usual)
        errors = np.log(us / base_us(ops, profile, self.usual)) - self.forests.log_ratio(seen)
        middle = float(np.exp(np.median(errors)))
        if not 1 / UNITS < middle < UNITS:
            raise InputError(
                f"{profile.device.name}: the measured times are {middle:.3g} times those expected; are they in microseconds?"
            )
        return DeviceLatency(model=self, profile=profile, measured=self.similarity.residual(self.points(ops, seen), errors))

    def points(self, ops: Ops, seen: Singles) -> OpPoints:
        """Points of n ops and their features."""
        return points_of(ops, seen, self.forests, self.families)


@dataclass(frozen=True, kw_only=True)
class DeviceLatency:
    """A predictor for one device."""

    model: LatencyModel
    profile: DeviceProfile
    measured: Residual[OpPoints] | None  # Errors of the trees on ops that were measured there.

    def predict(self, ops: Ops) -> Durations:
        """Latencies with 90 % intervals, us, [n]; NaN where nothing like an op, or the device, was measured."""
        model = self.model
        seen = features(ops, self.profile, model.usual)
        log = model.forests.log_ratio(seen)
        if self.measured is None:
            half = np.full(len(ops), self._uncorrected())
        else:
            shift, deviation = model.similarity.correction(self.measured, model.points(ops, seen))
            log = log + shift
            half = deviation * model.widths.deviations[_regime(len(self.measured.errors))]
        beyond = model.domain.beyond(seen)
        return Durations.of(
            base_us(ops, self.profile, model.usual) * np.exp(log),
            half * (1 + np.where(np.isfinite(beyond), beyond, 0.0)),
            outside=beyond > 0,
            refused=beyond > REFUSED,
        )

    def beyond(self, ops: Ops) -> Floats:
        """Doublings by which ops or the device lie outside of what was measured, [n]; infinite where nothing alike was."""
        return self.model.domain.beyond(features(ops, self.profile, self.model.usual))

    def _uncorrected(self) -> float:
        probes = self.profile.probes
        if probes.matrix_flops_per_s or probes.stream_bytes_per_s is not None:
            return self.model.widths.deviations[0] * float(np.sqrt(self.model.similarity.variance))
        return self.model.widths.specs


def _regime(samples: int) -> int:
    return max(place for place, budget in enumerate(BUDGETS) if budget <= samples)
