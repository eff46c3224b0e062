"""Measured ops of one device moved to another, whose architecture was left out of the fit: as a what-if moves recorded kernels.

Ways: the ratio of the data sheets' peaks (``costmodel.roofline``); that of probed rates; that of the latencies which trees predict
on both, with probes of both devices or of none; of products that of the tiles and waves by which described jobs are priced; and, as
if sizes were not known, of products that of the square product which takes as long, of attention that of the sequence which does.
Ops that are mostly launch are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search.cluster import Device
from dpro_search.cluster.device import PRECISIONS
from dpro_search.costmodel.devices.features import parts_us
from dpro_search.costmodel.devices.model_file import default_model
from dpro_search.costmodel.devices.ops import ELEMENT_BYTES, KINDS, STACKS, Floats, LibraryOpKind, Ops, Stack, attention, gemm
from dpro_search.costmodel.devices.profile import DeviceProfile, peak_flops_per_s
from dpro_search.costmodel.devices.ratios import HEAD_DIM, HEADS, MUCH, SEQUENCES, SIDES, UNKNOWN_SIZES
from dpro_search.costmodel.roofline import LEAST_US
from dpro_search.errors import InputError
from dpro_search.parallel.gpu_ops import OpCosts
from experiments.devices.data import USUAL, Target
from experiments.devices.fit import Measured
from experiments.devices.models import predicted_us
from experiments.devices.protocol import LeftOut

_ALIKE = "square or sequence that takes as long"
_WIDTHS: Mapping[str, Callable[[], float]] = {
    _ALIKE: lambda: float(np.log(UNKNOWN_SIZES)),
    "predicted ratio, specs only": lambda: default_model().training.widths.specs,
    "predicted ratio, probes": lambda: default_model().training.probed_half_width,
}
"""Half widths of the intervals of what-ifs: those of predictions."""
FEWEST, MOST = 50, 400  # ops that two devices of a source have both


def errors(without: Sequence[LeftOut], targets: Sequence[Target]) -> Iterator[dict[str, Any]]:
    """Of each pair of devices of a source and each kind of op."""
    for to in without:
        for of in targets:
            if of.family == to.target.family or of.name.split()[0] != to.target.name.split()[0]:
                continue
            here, there = _common(of.measured, to.target.measured, to.target.judge & ~_mostly_launch(to.target.measured))
            if len(here) < FEWEST:
                continue
            before, after = of.measured, to.target.measured
            measured_us = after.us[there]
            for way, us in _moved_us(before, after, before.ops[here], before.us[here], to).items():
                error = np.abs(us / measured_us - 1) * 100
                for kind in np.unique(before.ops.kind[here]).tolist():
                    of_kind = before.ops.kind[here] == kind
                    row: dict[str, Any] = {"way": way, "kind": str(KINDS[int(kind)]), "pair": f"{of.name} -> {to.target.name}"}
                    if np.isnan(us[of_kind]).any():
                        continue  # no way for such ops
                    if way in _WIDTHS:
                        logs = np.abs(np.log(us / measured_us))[of_kind]
                        row["covered_pct"] = float((logs <= _WIDTHS[way]()).mean() * 100)
                    yield {**row, "error_pct": error[of_kind]}


def _mostly_launch(part: Measured) -> npt.NDArray[np.bool_]:
    """Ops that hardly take longer than their launch, which kernels in a profile have not, [n]."""
    return np.asarray(part.us < MUCH * part.profile.rates(USUAL).floor_us[part.ops.stack.astype(int)])


def _moved_us(before: Measured, after: Measured, ops: Ops, us: Floats, to: LeftOut) -> Mapping[str, Floats]:
    least = np.minimum(us, LEAST_US)
    bare = [DeviceProfile(device=part.profile.device) for part in (before, after)]
    probed = [_longest(ops, part.profile) for part in (before, after)]
    specs = [predicted_us(to.trees, profile, ops) for profile in bare]
    probes = [predicted_us(to.trees, part.profile, ops) for part in (before, after)]
    return {
        "roofline ratio": least + (us - least) * _peaks(before, after, ops),
        "ratio of probed rates": least + (us - least) * probed[1] / probed[0],
        "predicted ratio, specs only": us * specs[1] / specs[0],
        "predicted ratio, probes": us * probes[1] / probes[0],
        "tiles and waves": us * _tiles_us(after.profile.device, ops) / _tiles_us(before.profile.device, ops),
        _ALIKE: us * _alike(before, after, ops, us, to),
    }


def _tiles_us(device: Device, ops: Ops) -> Floats:
    """Latencies of products as described jobs have them (`parallel.gpu_ops`), us, [n]; NaN of other ops or without a peak."""
    us = np.full(len(ops), np.nan)
    for code in np.unique(ops.precision).tolist():
        precision = PRECISIONS[int(code)]
        with suppress(InputError):  # the device has no such peak
            costs = OpCosts(device, precision, ELEMENT_BYTES[precision])
            for place in np.flatnonzero((ops.precision == code) & (ops.kind == KINDS.index(LibraryOpKind.GEMM))).tolist():
                sizes = (float(size[place]) for size in (ops.m, ops.k, ops.n, ops.batch))
                us[place] = ops.products[place] * costs.matmul_us(*sizes)
    return us


def _alike(before: Measured, after: Measured, ops: Ops, us: Floats, to: LeftOut) -> Floats:
    """Of products and attention the ratio for `_series` of that precision and stack that take as long; NaN of other ops, [n]."""
    found = np.full(len(us), np.nan)
    for kind in (LibraryOpKind.GEMM, LibraryOpKind.ATTENTION):
        of_kind = ops.kind == KINDS.index(kind)
        for precision, stack in np.unique(np.stack((ops.precision, ops.stack))[:, of_kind], axis=1).T.astype(int).tolist():
            mine = of_kind & (ops.precision == precision) & (ops.stack == stack)
            series = _series(kind, PRECISIONS[precision], STACKS[stack])
            before_us, after_us = (predicted_us(to.trees, part.profile, series) for part in (before, after))
            at = np.log(np.maximum.accumulate(before_us))
            found[mine] = np.exp(np.interp(np.log(us[mine]), at, np.log(after_us / before_us)))
    return found


def _series(kind: LibraryOpKind, precision: str, stack: Stack) -> Ops:
    if kind is LibraryOpKind.GEMM:
        return gemm(SIDES, SIDES, SIDES, precision=precision, stack=stack)
    return attention(1, HEADS, HEADS, SEQUENCES, SEQUENCES, HEAD_DIM, causal=True, precision=precision, stack=stack)


def _longest(ops: Ops, profile: DeviceProfile) -> Floats:
    compute, memory, stream = parts_us(ops, profile.rates(USUAL))
    return np.asarray(np.maximum(compute, memory) + stream)


def _peaks(before: Measured, after: Measured, ops: Ops) -> Floats:
    """Products by arithmetic, others by memory."""
    devices = before.profile.device, after.profile.device
    peaks = [np.array([peak_flops_per_s(device, one) or np.nan for one in PRECISIONS]) for device in devices]
    rates = [device.memory_bytes_per_s or np.nan for device in devices]
    return np.asarray(np.where(ops.flops > 0, (peaks[0] / peaks[1])[ops.precision.astype(int)], rates[0] / rates[1]))


def _common(before: Measured, after: Measured, judge: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Places of the ops that both have, and that are judged, in each."""
    places = {row.tobytes(): place for place, row in enumerate(after.ops.matrix) if judge[place]}
    small = _mostly_launch(before)
    rows = enumerate(before.ops.matrix)
    pairs = [(here, places[row.tobytes()]) for here, row in rows if row.tobytes() in places and not small[here]]
    found = np.array(pairs[:: -(-len(pairs) // MOST)] if pairs else [], dtype=np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]
