"""`OpLatency`: durations of recorded kernels on another GPU, by the nearest of three predictors.

Measured ops that were moved to devices of left-out architectures decided which predictor is taken for which op
(experiments/devices/README.md): for products, convolutions, norms and embeddings the ratio of predicted latencies; for element-wise
ops and softmax the ratio of the memories' rates (`costmodel.roofline`). A product of unknown sizes is taken for the square one that
takes as long on the recorded device, and attention of unknown sizes for that of the sequence that does: the longer it takes, the
nearer both come to their peaks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum

import numpy as np

from dpro_search.cluster import Device
from dpro_search.costmodel.devices.choice import stack_of
from dpro_search.costmodel.devices.model import DeviceLatency
from dpro_search.costmodel.devices.ops import Floats, LibraryOpKind, Ops, Stack
from dpro_search.costmodel.devices.sampled import latency_on
from dpro_search.costmodel.devices.written import STREAMED, OpSpec, ops_of
from dpro_search.costmodel.intervals import Durations, PredictionOrigin
from dpro_search.costmodel.roofline import LEAST_US, Ratio, kernel_ratio, product_precision
from dpro_search.errors import InputError
from dpro_search.graph.event_names import kernel_class

_BY_MEMORY = (LibraryOpKind.ELEMENTWISE, LibraryOpKind.SOFTMAX)
SIDES = np.round(2.0 ** np.arange(6, 14.5, 0.5))  # of square products, from 64 to 16,384
SEQUENCES = np.round(2.0 ** np.arange(6, 16.5, 0.5))  # of one sample's causal attention, from 64 to 65,536
HEADS, HEAD_DIM = 32, 128  # of that attention: usual ones
UNKNOWN_SIZES = 2.0
"""Uncertainty factor for ops whose sizes are unknown: it holds 91 % of measured products (experiments/devices/README.md)."""
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
        The recorded device, and the other one.
    specs
        Ops behind the kernels, where their sizes were recorded; all are priced at once.

    Raises
    ------
    InputError
        A device's file lacks the memory's rate or all peaks (from `kernel_us`).
    """

    def __init__(self, before: Device, after: Device, specs: Iterable[OpSpec] = ()) -> None:
        self._devices = before, after
        self._ratios = OpRatios(before, after)
        self._of_op = self._ratios.of(specs)

    def kernel_us(self, name: str, dtype: str, spec: OpSpec | None, recorded_us: Floats) -> tuple[Floats, KernelPredictor]:
        """Durations of n kernels of one name and op on the other device: middle, low and high end of the interval, [3, n].

        Parameters
        ----------
        dtype
            Element type of the first tensor; empty: not known.
        spec
            The op that the kernels belong to; None: its sizes were not recorded.
        recorded_us
            Recorded durations, [n].
        """
        peaks = kernel_ratio(name, dtype, *self._devices)
        ratios: Sequence[float | Floats] = peaks
        predictor = KernelPredictor.PEAKS
        of_op = None if spec is None else self._of_op.get(spec)
        if of_op is not None:
            ratios, predictor = of_op, KernelPredictor.OP
        else:
            similar = self._ratios.of_times(kernel_class(name), product_precision(name, dtype), np.maximum(recorded_us, LEAST_US))
            if similar is not None:
                ratios, predictor = similar, KernelPredictor.SIMILAR_OP
        middle, low, high = ratios
        # The ends lie no further out than both rates that can bound a kernel allow, around the middle.
        low, high = np.maximum(low, np.minimum(peaks.low, middle)), np.minimum(high, np.maximum(peaks.high, middle))
        least_us = np.minimum(recorded_us, LEAST_US)
        return np.stack([least_us + (recorded_us - least_us) * ratio for ratio in (middle, low, high)]), predictor


class OpRatios:
    """Ratios of predicted latencies between two devices; ops are priced once.

    Parameters
    ----------
    before, after
        Devices; those of which a spec is missing know no ratio.
    """

    def __init__(self, before: Device, after: Device) -> None:
        self._devices = before, after
        self._known: dict[OpSpec, Ratio | None] = {}
        self._priced: tuple[DeviceLatency, DeviceLatency] | None = None
        with suppress(InputError):  # specs that the predictor needs are missing
            self._priced = latency_on(before), latency_on(after)

    def of(self, specs: Iterable[OpSpec]) -> dict[OpSpec, Ratio | None]:
        """New over old time of each op with a 90 % interval; None: the roofline ratio is nearer, or nothing is known."""
        unknown = [spec for spec in dict.fromkeys(specs) if spec not in self._known]
        self._known |= dict.fromkeys(unknown)
        priced = [spec for spec in unknown if spec.name not in STREAMED or STREAMED[spec.name].kind not in _BY_MEMORY]
        if priced and self._priced is not None:
            before, after = (self._durations(priced, number) for number in (0, 1))
            for place, spec in enumerate(priced):
                self._known[spec] = _ratio(before, after, place)
        return self._known

    def of_times(self, name: str, precision: str, us: Floats) -> tuple[Floats, Floats, Floats] | None:
        """New over old time of ops of unknown sizes that took so long, [n], with the ends of 90 % intervals.

        `name`: gemm or attention. None: no such op, or the precision is not predicted on one of the devices.
        """
        if self._priced is None or name not in ("gemm", "attention"):
            return None
        series_us = [self._series(name, precision, number) for number in (0, 1)]
        known = np.isfinite(series_us[0]) & np.isfinite(series_us[1])
        if known.sum() < 2:
            return None
        before_us, after_us = (one[known] for one in series_us)
        middle = np.exp(np.interp(np.log(us), np.log(np.maximum.accumulate(before_us)), np.log(after_us / before_us)))
        return middle, middle / UNKNOWN_SIZES, middle * UNKNOWN_SIZES

    def _series(self, name: str, precision: str, number: int) -> Floats:
        """Latencies of ops of growing sizes on a device; NaN for those that are hardly longer than their launch."""
        if precision == "tf32" and self._devices[number].peak.tf32 is None:
            precision = "fp32"
        if name == "gemm":
            specs = [OpSpec.of(name, precision, m=side, n=side, k=side) for side in SIDES.astype(int).tolist()]
        else:
            specs = [
                OpSpec.of(name, precision, batch=1, heads=HEADS, queries=queries, head_dim=HEAD_DIM)
                for queries in SEQUENCES.astype(int).tolist()
            ]
        return self._durations(specs, number).us

    def _durations(self, specs: list[OpSpec], number: int) -> Durations:
        """Latencies on a device; NaN for ops that are hardly longer than their launch."""
        assert self._priced is not None
        device, latency = self._devices[number], self._priced[number]
        ops = _joined([_as_run(spec, device) for spec in specs])
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


def _joined(specs: list[tuple[OpSpec, Stack]]) -> Ops:
    return Ops.of_matrix(np.concatenate([ops_of([spec], stack).matrix for spec, stack in specs]))
