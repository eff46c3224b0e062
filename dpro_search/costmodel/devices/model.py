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
from typing import NamedTuple

import numpy as np

from dpro_search.costmodel.devices.correction import OpPoints, Similarity
from dpro_search.costmodel.devices.families import FamilyTrees
from dpro_search.costmodel.devices.features import DEVICE_FEATURES, FEATURES, base_us, features
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


def points_of(ops: Ops, seen: Singles, trees: Trees, families: FamilyTrees) -> OpPoints:
    """Points of n ops and their features, with what trees tell of them."""
    base = trees.base
    some = Forest(feature=base.feature[::EVERY], threshold=base.threshold[::EVERY], leaf=base.leaf[::EVERY])
    return OpPoints.of(ops, seen, some.leaves(seen), families.apart(ops, seen, trees.log_ratio(seen)))


@dataclass(frozen=True, kw_only=True)
class OpsFit:
    """Everything that was fitted to one set of measured ops."""

    trees: Trees
    families: FamilyTrees
    similarity: Similarity
    widths: Widths
    domain: OpDomain

    def points(self, ops: Ops, seen: Singles) -> OpPoints:
        """Points of n ops and their features."""
        return points_of(ops, seen, self.trees, self.families)

    @property
    def probed_half_width(self) -> float:
        """Half width of the interval of an op on a device of which rates were probed, and no other op was measured."""
        return self.widths.deviations[0] * float(np.sqrt(self.similarity.variance))

    def residual(self, ops: Ops, seen: Singles, measured_log: Floats) -> Residual[OpPoints] | None:
        """Errors of the trees on measured ops, by log(latency / base), [n]; None: no op was measured."""
        if not len(ops):
            return None
        return self.similarity.residual(self.points(ops, seen), measured_log - self.trees.log_ratio(seen))


@dataclass(frozen=True, kw_only=True)
class LatencyModel:
    """A fitted predictor.

    Ops of 8 and 4 bits, experts and decoding steps were measured in few engines and mostly on new devices. A fit to them, too, is
    worse on the ops of training: 20.6 instead of 18.1 % where architectures are left out. So there are two fits.

    Attributes
    ----------
    training
        The fit to ops that training runs (`Ops.of_training`), which predicts these.
    every
        The fit to all ops, which predicts the others.
    """

    training: OpsFit
    every: OpsFit
    usual: UsualShares

    def on(self, profile: DeviceProfile, ops: Ops | None = None, us: Floats | None = None) -> DeviceLatency:
        """The predictor on a device, of which ops may have been measured.

        Raises
        ------
        InputError
            The measured times contradict the device's specs by orders of magnitude.
        """
        if ops is None or us is None or not len(ops):
            return DeviceLatency(model=self, profile=profile, training=None, every=None)
        if len(ops) != len(us) or not (np.isfinite(us) & (us > 0)).all():
            raise InputError(f"{len(ops)} ops and {len(us)} times: each op needs a time above 0")
        seen = features(ops, profile, self.usual)
        measured_log = np.log(us / base_us(ops, profile, self.usual))
        middle = float(np.exp(np.median(measured_log - self.log_ratio(ops, seen))))
        if not 1 / UNITS < middle < UNITS:
            raise InputError(
                f"{profile.device.name}: the measured times are {middle:.3g} times those expected; are they in microseconds?"
            )
        chosen = ops.of_training
        return DeviceLatency(
            model=self,
            profile=profile,
            training=self.training.residual(ops[chosen], seen[chosen], measured_log[chosen]),
            every=self.every.residual(ops, seen, measured_log),
        )

    def log_ratio(self, ops: Ops, seen: Singles) -> Floats:
        """log(latency / base) of ops and their features, [n]."""
        return np.asarray(np.where(ops.of_training, self.training.trees.log_ratio(seen), self.every.trees.log_ratio(seen)))


class _PredictedLatency(NamedTuple):
    """log(latency / base) of n ops, its half width in the logarithm, and doublings beyond what was measured, [n] each."""

    log: Floats
    half: Floats
    beyond: Floats


@dataclass(frozen=True, kw_only=True)
class DeviceLatency:
    """A predictor for one device, with the errors of each fit on ops that were measured there."""

    model: LatencyModel
    profile: DeviceProfile
    training: Residual[OpPoints] | None
    every: Residual[OpPoints] | None

    def predict(self, ops: Ops) -> Durations:
        """Latencies with 90 % intervals, us, [n]; NaN where nothing like an op, or the device, was measured."""
        seen = features(ops, self.profile, self.model.usual)
        log, half, beyond = (np.empty(len(ops)) for _ in _PredictedLatency._fields)
        of_training = ops.of_training
        for chosen, fit, measured in (
            (of_training, self.model.training, self.training),
            (~of_training, self.model.every, self.every),
        ):
            if chosen.any():
                log[chosen], half[chosen], beyond[chosen] = self._by(fit, measured, ops[chosen], seen[chosen])
        return Durations.of(
            base_us(ops, self.profile, self.model.usual) * np.exp(log),
            half * (1 + np.where(np.isfinite(beyond), beyond, 0.0)),
            outside=beyond > 0,
            refused=beyond > REFUSED,
        )

    def beyond(self, ops: Ops) -> Floats:
        """Doublings by which ops or the device lie outside of what was measured, [n]; infinite where nothing alike was."""
        seen, model = features(ops, self.profile, self.model.usual), self.model
        return np.asarray(np.where(ops.of_training, model.training.domain.beyond(seen), model.every.domain.beyond(seen)))

    def _by(self, fit: OpsFit, measured: Residual[OpPoints] | None, ops: Ops, seen: Singles) -> _PredictedLatency:
        log, beyond = fit.trees.log_ratio(seen), fit.domain.beyond(seen)
        if measured is None:
            return _PredictedLatency(log, np.full(len(ops), self._uncorrected(fit)), beyond)
        shift, deviation = fit.similarity.correction(measured, fit.points(ops, seen))
        return _PredictedLatency(log + shift, deviation * fit.widths.deviations[_regime(len(measured.errors))], beyond)

    def _uncorrected(self, fit: OpsFit) -> float:
        """Half width without measured ops; probes of the device never make it larger than its data sheet alone does."""
        probes = self.profile.probes
        if probes.matrix_flops_per_s or probes.stream_bytes_per_s is not None:
            return min(fit.probed_half_width, fit.widths.specs)
        return fit.widths.specs


def _regime(samples: int) -> int:
    return max(place for place, budget in enumerate(BUDGETS) if budget <= samples)
