"""`OpLatency`: durations of recorded kernels on another GPU, by the predictor that is best for the device and the op;
`PrecisionRatios`: by what they change in another precision.

Measured ops that were moved to devices of left-out architectures decided which predictor is taken for which op
(experiments/devices/README.md): for products, convolutions, norms and embeddings the ratio of predicted latencies; for element-wise
ops and softmax the ratio of the memories' rates (`costmodel.roofline`). A product of unknown sizes is taken for the square one that
takes as long on the recorded device, and attention of unknown sizes for that of the sequence that does: the longer it takes, the
nearer both come to their peaks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from functools import cache, cached_property

import numpy as np

from dpro_search.cluster import Device, bundled
from dpro_search.costmodel.devices.choice import stack_of
from dpro_search.costmodel.devices.model import DeviceLatency
from dpro_search.costmodel.devices.ops import ELEMENT_BYTES, Floats, LibraryOpKind, Stack, joined
from dpro_search.costmodel.devices.profile import known_probes, peak_flops_per_s
from dpro_search.costmodel.devices.sampled import latency_on
from dpro_search.costmodel.devices.written import STREAMED, OpSpec
from dpro_search.costmodel.intervals import Durations, PredictionOrigin
from dpro_search.costmodel.roofline import EFFICIENCY, LEAST_US, Ratio, kernel_ratio, product_precision
from dpro_search.errors import InputError
from dpro_search.graph.event_names import kernel_class

_BY_MEMORY = (LibraryOpKind.ELEMENTWISE, LibraryOpKind.SOFTMAX)
SIDES = np.round(2.0 ** np.arange(6, 14.5, 0.5))  # of square products, from 64 to 16,384
SEQUENCES = np.round(2.0 ** np.arange(6, 16.5, 0.5))  # of one sample's causal attention, from 64 to 65,536
HEADS, HEAD_DIM = 32, 128  # of that attention: usual ones
UNKNOWN_SIZES = 2.0
"""Uncertainty factor for ops whose sizes are unknown: it holds 91 % of measured products (experiments/devices/README.md)."""
PAIR_ERROR = 1.5
"""Uncertainty factor of the ratio of a product's times in two precisions. 1.24 holds 90 % of 621 pairs in single (or TF32) and half
precision on five GPUs (Sailor's table, experiments/devices/README.md), but these ops are among those that the predictor was fitted
to; the rest is estimated."""
MUCH = 2.0
"""Times the launch that an op must take, to tell of its kernel: what was measured of fp32 holds the launch."""


class KernelPredictor(StrEnum):
    """How the duration of a kernel on another device was predicted."""

    OP = "op"  # by the latencies of its op, whose sizes are known
    SIMILAR_OP = "similar op"  # by the latencies of an op of usual sizes that takes as long
    PEAKS = "peaks"  # by the rates of the data sheets


class OpLatency:
    """Durations of recorded kernels on another device.

    Parameters
    ----------
    before, after
        The recorded device (None: it is not known), and the other one. Without the specs that predictions of ops need, kernels
        change by the rates of the data sheets.
    """

    def __init__(self, before: Device | None, after: Device) -> None:
        self._before, self._after = before, after
        self._ratios: dict[OpSpec, Ratio | None] = {}
        self._priced: tuple[DeviceLatency, DeviceLatency] | None = None
        if before is not None:
            with suppress(InputError):  # specs that the predictor needs are missing
                self._priced = latency_on(before), latency_on(after)

    def kernel_us(self, name: str, dtype: str, spec: OpSpec | None, recorded_us: Floats) -> tuple[Floats, KernelPredictor]:
        """Durations of n kernels of one name and op on the other device: middle, low and high end of the interval, [3, n].

        Kernels of an unknown device take as long as recorded, in an interval that holds for each of `known_gpus`.

        Parameters
        ----------
        dtype
            Element type of the first tensor; empty: not known.
        spec
            The op that the kernels belong to; None: its sizes were not recorded.
        recorded_us
            Recorded durations, [n].

        Raises
        ------
        InputError
            A device's file lacks the memory's rate or all peaks.
        """
        if self._before is None:
            of_gpus = [kernel_ratio(name, dtype, device, self._after).middle for device in known_gpus()]
            return np.multiply.outer((1.0, min(1.0, *of_gpus), max(1.0, *of_gpus)), recorded_us), KernelPredictor.PEAKS
        peaks = kernel_ratio(name, dtype, self._before, self._after)
        ratios: Sequence[float | Floats] = peaks
        predictor = KernelPredictor.PEAKS
        of_op = None if spec is None else self.ratios([spec])[spec]
        if of_op is not None:
            ratios, predictor = of_op, KernelPredictor.OP
        else:
            similar = self.ratios_of_times(kernel_class(name), product_precision(name, dtype), np.maximum(recorded_us, LEAST_US))
            if similar is not None:
                ratios, predictor = similar, KernelPredictor.SIMILAR_OP
        middle, low, high = ratios
        # The ends lie no further out than both rates that can bound a kernel allow, around the middle.
        low, high = np.maximum(low, np.minimum(peaks.low, middle)), np.minimum(high, np.maximum(peaks.high, middle))
        least_us = np.minimum(recorded_us, LEAST_US)
        return np.stack([least_us + (recorded_us - least_us) * ratio for ratio in (middle, low, high)]), predictor

    def ratios(self, specs: Iterable[OpSpec]) -> Mapping[OpSpec, Ratio | None]:
        """New over old time of each op with a 90 % interval; None: the roofline ratio is nearer, or nothing is known.

        All ops that were not asked for before are priced at once, which is faster than one by one.
        """
        unknown = [spec for spec in dict.fromkeys(specs) if spec not in self._ratios]
        self._ratios |= dict.fromkeys(unknown)
        priced = [spec for spec in unknown if spec.name not in STREAMED or STREAMED[spec.name].kind not in _BY_MEMORY]
        if priced and self._priced is not None:
            before, after = (_durations(latency, priced) for latency in self._priced)
            for place, spec in enumerate(priced):
                self._ratios[spec] = _ratio(before, after, place)
        return self._ratios

    def ratios_of_times(self, name: str, precision: str, us: Floats) -> tuple[Floats, Floats, Floats] | None:
        """New over old time of ops of unknown sizes that took so long, [n], with the ends of 90 % intervals.

        `name`: gemm or attention. None: no such op, or the precision is not predicted on one of the devices.
        """
        if self._priced is None or name not in ("gemm", "attention"):
            return None
        series_us = [_series_us(latency, name, precision) for latency in self._priced]
        known = np.isfinite(series_us[0]) & np.isfinite(series_us[1])
        if known.sum() < 2:
            return None
        before_us, after_us = (one[known] for one in series_us)
        middle = np.exp(np.interp(np.log(us), np.log(np.maximum.accumulate(before_us)), np.log(after_us / before_us)))
        return middle, middle / UNKNOWN_SIZES, middle * UNKNOWN_SIZES


class PrecisionRatios:
    """Ratios of the times of kernels in two precisions on one device.

    A product of known sizes changes as its predicted latencies do, without the launch; any other as the peaks of both precisions
    and the bytes of their elements do.

    Parameters
    ----------
    device
        Without the specs that predictions of ops need, all kernels change by the rates of the data sheet.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._kernel_us: dict[OpSpec, float] = {}

    @cached_property
    def _latency(self) -> DeviceLatency | None:
        """The predictor; None: specs that it needs are missing."""
        with suppress(InputError):
            return latency_on(self.device)
        return None

    def of_product(self, spec: OpSpec | None, before: str, after: str) -> Ratio:
        """Time of a product's kernel in `after` over that in `before`, with a 90 % interval.

        Parameters
        ----------
        spec
            The op, at any precision; None: its sizes were not recorded.

        Raises
        ------
        InputError
            The device's file states no peak for one of the precisions.
        """
        if before == after:
            return Ratio(1.0, 1.0, 1.0)
        ratio = self._of_latencies(spec, before, after)
        is_wider = ELEMENT_BYTES[after] > ELEMENT_BYTES[before] or (before, after) == ("tf32", "fp32")
        # No wider type makes a product faster.
        return Ratio(*(max(end, 1.0) for end in ratio)) if is_wider else ratio

    def _of_latencies(self, spec: OpSpec | None, before: str, after: str) -> Ratio:
        by_peaks = self._of_peaks(before, after)
        if spec is None:
            return by_peaks
        before_us, after_us = (self._without_launch_us(replace(spec, precision=one)) for one in (before, after))
        if not (before_us > 0 and after_us > 0):
            return by_peaks
        middle = after_us / before_us
        if spec.name == "gemm" and "fp8" not in (before, after):
            return Ratio(middle, middle / PAIR_ERROR, middle * PAIR_ERROR)
        return Ratio(middle, min(middle / PAIR_ERROR, by_peaks.low), max(middle * PAIR_ERROR, by_peaks.high))

    @staticmethod
    def of_bytes(before: str, after: str) -> Ratio:
        """Time of a kernel that memory bounds, whose elements change from one precision to another."""
        middle = ELEMENT_BYTES[after] / ELEMENT_BYTES[before]
        return Ratio(1.0, 1.0, 1.0) if middle == 1 else Ratio(middle, middle / EFFICIENCY, middle * EFFICIENCY)

    def moved_us(self, size_bytes: float) -> float:
        """Time of a kernel that reads and writes so many bytes in all; the least time of a kernel where that is longer."""
        rate = known_probes(self.device).stream_bytes_per_s or self.device.memory_bytes_per_s
        if rate is None:
            raise InputError(f"{self.device.name}: the rate of its memory is not known; give memory_rate in a device file")
        return max(size_bytes / rate * 1e6, LEAST_US)

    def _of_peaks(self, before: str, after: str) -> Ratio:
        """Ratio between those of the peaks and of the bytes: how far arithmetic bounds an op of unknown sizes is not known."""
        peaks = [peak_flops_per_s(self.device, precision) for precision in (before, after)]
        if peaks[0] is None or peaks[1] is None:
            missing = before if peaks[0] is None else after
            raise InputError(f"{self.device.name}: its peak in {missing} is not known; give it in [peak] of a device file")
        ends = sorted((peaks[0] / peaks[1], ELEMENT_BYTES[after] / ELEMENT_BYTES[before]))
        return Ratio(float(np.sqrt(ends[0] * ends[1])), ends[0] / EFFICIENCY, ends[1] * EFFICIENCY)

    def price(self, specs: Iterable[OpSpec], precisions: Sequence[str]) -> None:
        """Predict ops in each precision, all at once, which is faster than one by one; `of_product` needs nothing else then."""
        in_each = {replace(spec, precision=precision) for spec in specs for precision in precisions} - self._kernel_us.keys()
        new = sorted(in_each)
        self._kernel_us |= dict.fromkeys(new, math.nan)
        if not new or self._latency is None:
            return
        # Engines' ops have the shortest launch; of convolutions only those that PyTorch calls one by one were measured.
        ops = joined([spec.ops(Stack.PYTORCH if spec.name == "convolution" else Stack.SERVING) for spec in new])
        floor_us = self._latency.profile.rates(self._latency.model.usual).floor_us[ops.stack.astype(int)]
        whole_us = self._latency.predict(ops).us
        kernel_us = np.where(whole_us >= MUCH * floor_us, whole_us - floor_us, np.nan)
        self._kernel_us |= dict(zip(new, kernel_us.tolist(), strict=True))

    def _without_launch_us(self, spec: OpSpec) -> float:
        """Predicted time of an op's kernels; NaN if it is hardly longer than its launch, or not known."""
        if spec not in self._kernel_us:
            self.price([spec], [spec.precision])
        return self._kernel_us[spec]


@cache
def known_gpus() -> tuple[Device, ...]:
    """The bundled GPUs whose peaks and memories are known."""
    devices = (bundled.device(name) for name in bundled.names("device"))
    return tuple(one for one in devices if one.kind == "gpu" and one.memory_bytes_per_s and (one.peak.fp32 or one.peak.fp16))


def _series_us(latency: DeviceLatency, name: str, precision: str) -> Floats:
    """Latencies of ops of growing sizes on a device; NaN for those that are hardly longer than their launch."""
    if precision == "tf32" and latency.profile.device.peak.tf32 is None:
        precision = "fp32"
    if name == "gemm":
        specs = [OpSpec.of(name, precision, m=side, n=side, k=side) for side in SIDES.astype(int).tolist()]
    else:
        specs = [
            OpSpec.of(name, precision, batch=1, heads=HEADS, queries=queries, head_dim=HEAD_DIM)
            for queries in SEQUENCES.astype(int).tolist()
        ]
    return _durations(latency, specs).us


def _durations(latency: DeviceLatency, specs: Sequence[OpSpec]) -> Durations:
    """Latencies on a device; NaN for ops that are hardly longer than their launch."""
    ops = joined([as_run.ops(stack) for as_run, stack in (_as_run(spec, latency.profile.device) for spec in specs)])
    durations = latency.predict(ops)
    floor_us = latency.profile.rates(latency.model.usual).floor_us[ops.stack.astype(int)]
    small = durations.us < MUCH * floor_us
    origin = np.where(small, PredictionOrigin.REFUSED, durations.origin)
    return replace(durations, us=np.where(small, np.nan, durations.us), origin=origin)


def _ratio(before: Durations, after: Durations, place: int) -> Ratio | None:
    if not (np.isfinite(before.us[place]) and np.isfinite(after.us[place])):
        return None
    middle = float(after.us[place] / before.us[place])
    width = max(float(one.high_us[place] / one.us[place]) for one in (before, after))
    return Ratio(middle, middle / width, middle * width)


def _as_run(spec: OpSpec, device: Device) -> tuple[OpSpec, Stack]:
    """The op at the precision that PyTorch computes it at there, and the way in which such ops were measured."""
    if spec.name == "convolution" and spec.precision == "fp32" and device.peak.tf32 is not None:
        spec = replace(spec, precision="tf32")  # torch.backends.cudnn.allow_tf32 is on by default
    if device.samples:
        return spec, stack_of(device)
    return spec, Stack.SERVING if spec.precision in ("bf16", "fp16") else Stack.PYTORCH
