"""`latency_on`: the predictor on a device, corrected by the ops that its file says were measured on it.

`held_out` says how far it is off there: ops that were measured are predicted from the others.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dpro_search.cluster import Device
from dpro_search.costmodel.devices.choice import stack_of
from dpro_search.costmodel.devices.model import REFUSED, DeviceLatency, LatencyModel
from dpro_search.costmodel.devices.model_file import default_model
from dpro_search.costmodel.devices.ops import Floats, Ops
from dpro_search.costmodel.devices.profile import DeviceProfile, Probes, probe_places, probes_of, profile_of
from dpro_search.costmodel.devices.written import OpSpec, ops_of
from dpro_search.errors import InputError

FOLDS = 5
FEWEST = 10  # ops, to say how far predictions are off


class SampledOps(NamedTuple):
    """Ops of a device's samples, and their times, us, [n] each."""

    ops: Ops
    us: Floats


class HeldOutErrors(NamedTuple):
    """Errors on ops of a device that were predicted from others of it; of `rows` ops."""

    rows: int
    mape_pct: float
    median_ape_pct: float
    coverage: float  # Part of the ops within their 90 % interval.


def measured_on(device: Device) -> SampledOps | None:
    """A device's samples; None: it has none. Raises `InputError` for a text that is no op."""
    if not device.samples:
        return None
    specs = []
    for number, sample in enumerate(device.samples):
        try:
            specs.append(OpSpec.parse(sample.op))
        except InputError as error:
            raise InputError(f"{device.name}: samples, entry {number}: {error}") from error
    return SampledOps(ops_of(specs, stack_of(device)), np.array([sample.us for sample in device.samples]))


@lru_cache(maxsize=64)
def latency_on(device: Device) -> DeviceLatency:
    """The shipped predictor on a device: with the probes and the correction of its samples, else known probes.

    Raises
    ------
    InputError
        Specs are missing, or samples contradict them.
    """
    measured = measured_on(device)
    if measured is None:
        return default_model().on(profile_of(device))
    return _on(default_model(), device, measured.ops, measured.us)


def held_out(device: Device) -> HeldOutErrors | None:
    """Errors of predictions from four fifths of a device's samples on the others; None: too few samples, or none predicted.

    Probes stay in every part, as they are measured on every device.
    """
    measured = measured_on(device)
    if measured is None or len(measured.us) < FEWEST:
        return None
    probes = probe_places(measured.ops, device)
    others = np.setdiff1d(np.arange(len(measured.us)), probes)
    predicted, low, high = (np.full(len(measured.us), np.nan) for _ in range(3))
    for fold in range(FOLDS):
        judged = others[fold::FOLDS]
        if not len(judged):
            continue
        kept = np.setdiff1d(np.arange(len(measured.us)), judged)
        part = _on(default_model(), device, measured.ops[kept], measured.us[kept]).predict(measured.ops[judged])
        predicted[judged], low[judged], high[judged] = part.us, part.low_us, part.high_us
    known = np.flatnonzero(np.isfinite(predicted))
    if not len(known):
        return None
    error_pct = np.abs(predicted[known] / measured.us[known] - 1) * 100
    inside = (low[known] <= measured.us[known]) & (measured.us[known] <= high[known])
    return HeldOutErrors(len(known), float(error_pct.mean()), float(np.median(error_pct)), float(inside.mean()))


def outside_of(device: Device) -> str:
    """A sentence about a device that is unlike those that the predictor was fitted to; empty: it is like them."""
    measured = measured_on(device)
    if measured is None:
        return ""
    beyond = latency_on(device).beyond(measured.ops)
    refused = int((beyond > REFUSED).sum())
    if device.kind == "gpu" and not (beyond > 0).any():
        return ""
    what = "is a CPU core, and the predictor was fitted to GPUs alone: intervals" if device.kind == "cpu" else "has intervals that"
    more = (
        f"; {refused} of {len(beyond)} measured ops are so far outside that nothing is predicted of their like" if refused else ""
    )
    middle = 2 ** float(np.median(beyond))
    return (
        f"{device.name} {what} are wider: its rates and ops lie outside of measured ones, in the median by {middle:.1f} times{more}"
    )


def _on(model: LatencyModel, device: Device, ops: Ops, us: Floats) -> DeviceLatency:
    places = probe_places(ops, device)
    probes = probes_of(ops[places], us[places], device) if len(places) else Probes()
    return model.on(DeviceProfile(device=device, probes=probes), ops, us)
