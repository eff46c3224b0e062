"""Recorded ops in another precision on the same GPU: ``precision_change(trace, ops, device, "bf16")``.

The lower types run as PyTorch's autocast runs them (`costmodel.autocast`): products in the lower type; parameters, gradients, their
buckets and the optimizer in single precision. The kernels of products change as `costmodel.devices.ratios.PrecisionRatios` says,
element-wise ones by their bytes. A profile does not show which tensor an op reads, so the types of ops that compute in what they
read are taken from the op before them; the interval holds both types. Casts are part of the op that reads their result, on the
device and, as launches, on the host. "fp8" casts both operands of products with sides that are multiples of 16, after a kernel that
finds their largest element; everything else is as in bf16.

"fp32" and "tf32" are the types of products in a model without autocast; casts of a recorded autocast are gone then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from dpro_search.cluster import Device
from dpro_search.collect.trace import EventKind, Floats, Ints, Trace
from dpro_search.costmodel.autocast import FP8_MULTIPLE, AutocastPolicy, KernelKind, base_name, casts_input, operands
from dpro_search.costmodel.devices.ratios import PrecisionRatios
from dpro_search.costmodel.devices.recorded import RecordedSpecs
from dpro_search.costmodel.roofline import EFFICIENCY, LEAST_US, OTHER, Ratio
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.graph.event_names import kernel_class
from dpro_search.quantities import time_text
from dpro_search.space.recorded.events import LAUNCHES, launched_within
from dpro_search.space.recorded.fused_kernels import OUTSIDE_THE_MODEL
from dpro_search.space.recorded.ops import RecordedOps
from dpro_search.space.replay_graph import OrderPolicy

TARGETS = ("fp32", "tf32", "fp16", "bf16", "fp8")
_LOWER = ("fp16", "bf16", "fp8")
_SAME = Ratio(1.0, 1.0, 1.0)
_BATCH_NORM_NCHW = 1.39
"""Time of batch norms in bf16 over that in fp32 where images are not channels-last, for PyTorch then takes kernels of its own in
place of cuDNN's (measured: ResNet-50 on an H200, 30 against 21.6 ms of 128 images, experiments/validation/gpu_jobs.md)."""
_LEAST_KNOWN = 0.5  # share of the products' time whose recorded precision must be known
_BACKWARD = re.compile(r"autograd::engine::evaluate_function|Backward\d*$")
_CAST = re.compile("float16_copy|LoadWithCast|StoreWithCast")  # kernels of PyTorch that copy to another type
_WORTH_SAYING = 0.005  # share of the products' time


@dataclass(frozen=True, kw_only=True)
class PrecisionChange:
    """Changes of n ops: middle, low and high ends of 90 % intervals, [3, n] each."""

    ratio: Floats  # New over old time, of what an op takes above the least time of a kernel.
    added_us: Floats  # Casts, on the device and on the host.
    least_us: Floats  # The part of each op that no ratio changes, [n].
    assumed: tuple[str, ...]  # Assumptions, a sentence each.

    def applied(self, ends: Sequence[RecordedOps]) -> list[RecordedOps]:
        """Three durations of the ops (middle, low, high) in the other precision."""
        changed = []
        for ops, ratio, added_us in zip(ends, self.ratio, self.added_us, strict=True):
            fixed_us = np.where(ops.kind == OpKind.UNKNOWN, 0.0, np.minimum(ops.unexplained_us, ops.duration_us))
            fixed_us = np.minimum(fixed_us + self.least_us, ops.duration_us)
            changed.append(replace(ops, duration_us=fixed_us + (ops.duration_us - fixed_us) * ratio + added_us))
        return changed


@dataclass
class _Casts:
    """Casts that autocast adds, by kernel (a place among the kernels): device time, and how many."""

    us: dict[int, float] = field(default_factory=dict)
    count: dict[int, float] = field(default_factory=dict)

    def add(self, kernel: int, us: float, count: float = 1.0) -> None:
        self.us[kernel] = self.us.get(kernel, 0.0) + us
        self.count[kernel] = self.count.get(kernel, 0.0) + count


def precision_change(trace: Trace, ops: RecordedOps, device: Device, precision: str) -> PrecisionChange:
    """Changes of recorded ops in another precision.

    Parameters
    ----------
    device
        The GPU that runs the ops.
    precision
        One of `TARGETS`.

    Raises
    ------
    InputError
        There is no such precision, the device has no units for it, the trace has no kernels of PyTorch, or their recorded precision
        is not known.
    """
    if precision not in TARGETS:
        raise InputError(f"precision={precision}: use {', '.join(TARGETS)}")
    if precision != "fp32" and device.peak_flops_per_s(precision) is None:
        raise InputError(f"precision={precision}: {device.name} has no peak in {precision} (no units, or not in its device file)")
    if trace.meta.framework == "xla":
        raise InputError(f"precision={precision}: the trace is of a program that XLA compiled; only PyTorch's autocast is known")
    kernels = _Kernels.of(trace, ops)
    if not kernels.products_us:
        raise InputError(f"precision={precision}: the trace shows no kernels of products (GEMMs, convolutions, attention)")
    if kernels.recorded is None:
        raise InputError(
            f"precision={precision}: neither names nor types of the products' kernels tell the recorded precision; "
            "profile with record_shapes=True"
        )
    return _PrecisionChange(ops, kernels, PrecisionRatios(device), precision).result()


def lower_precision(trace: Trace, ops: RecordedOps, device: Device) -> str | None:
    """The 16-bit type that the GPU has units for, for ops all of whose products are known to be wider; else None."""
    kernels = _Kernels.of(trace, ops)
    if trace.meta.framework == "xla" or not kernels.products_us or not kernels.all_single:
        return None
    return next((one for one in ("bf16", "fp16") if device.peak_flops_per_s(one) is not None), None)


@dataclass(frozen=True, kw_only=True)
class _Kernels:
    """The kernels among ops, in the order in which each stream runs them."""

    rows: Ints  # Place of each among the ops, [k].
    kinds: tuple[KernelKind, ...]
    kind: Ints  # Number of its kind, [k].
    us: Floats  # Recorded durations, [k].
    is_model: np.ndarray[tuple[int], np.dtype[np.bool_]]  # Whether the model's passes launched it: no hook, no optimizer, [k].
    is_backward: np.ndarray[tuple[int], np.dtype[np.bool_]]  # Whether the backward pass launched it, [k].

    @staticmethod
    def of(trace: Trace, ops: RecordedOps) -> _Kernels:
        """The kernels of a recording."""
        events = trace.events
        rows = np.flatnonzero((ops.event >= 0) & (events.kind[ops.event] == EventKind.KERNEL))
        rows = rows[np.lexsort((events.start_us[ops.event[rows]], ops.device[rows], ops.step[rows]))]
        event = ops.event[rows]
        columns = np.stack([column[event].astype(np.int64) for column in (events.name, events.dtype, events.op, events.shapes)])
        described, kind = np.unique(columns, axis=1, return_inverse=True)
        outside = launched_within(trace, lambda name: name.startswith(OUTSIDE_THE_MODEL))
        backward = launched_within(trace, lambda name: bool(_BACKWARD.search(name)))
        return _Kernels(
            rows=rows,
            kinds=tuple(_kinds(trace, described)),
            kind=kind.reshape(-1),
            us=ops.duration_us[rows],
            is_model=np.array([one not in outside for one in event.tolist()], np.bool_),
            is_backward=np.array([one in backward for one in event.tolist()], np.bool_),
        )

    @cached_property
    def products_us(self) -> dict[tuple[str, ...], float]:
        """Time of products by the precisions that they may have been recorded in."""
        total_us = np.bincount(self.kind, weights=self.us, minlength=len(self.kinds))
        by_precision: dict[tuple[str, ...], float] = {}
        for kind, us in zip(self.kinds, total_us.tolist(), strict=True):
            if kind.is_product and not kind.is_fixed:
                by_precision[kind.precisions] = by_precision.get(kind.precisions, 0.0) + us
        return by_precision

    @cached_property
    def recorded(self) -> str | None:
        """The precision of most of the products' time; None: of half of it or more nothing is known."""
        us_of: dict[str, float] = {}
        for precisions, us in self.products_us.items():
            usual = precisions[0] if precisions else ""
            us_of[usual] = us_of.get(usual, 0.0) + us
        if us_of.pop("", 0.0) > (1 - _LEAST_KNOWN) * sum(self.products_us.values()):
            return None
        return max(us_of, key=lambda precision: us_of[precision], default=None)

    @cached_property
    def all_single(self) -> bool:
        """Whether products are known to be in single precision, or TF32, but for a part that is too small to matter."""
        products_us = self.products_us
        single_us = sum(us for one, us in products_us.items() if one and set(one) <= {"fp32", "tf32"})
        return single_us >= (1 - _WORTH_SAYING) * sum(products_us.values())


def _kinds(trace: Trace, described: Ints) -> Iterator[KernelKind]:
    """Kinds of kernels from name, element type, op and shapes, [4, kinds]."""
    specs = RecordedSpecs(trace)
    for name, dtype_number, op_number, shapes in described.T.tolist():
        op, dtype = (names[n] if n >= 0 else "" for names, n in ((trace.names, op_number), (trace.dtypes, dtype_number)))
        kind = KernelKind.of(trace.names[name], dtype, op, trace.shapes[shapes] if shapes >= 0 else None)
        yield replace(kind, spec=specs.of(op, shapes, dtype or "float32")) if kind.is_product and op and shapes >= 0 else kind


class _PrecisionChange:
    """Ratios and casts of one change, kernel by kernel."""

    def __init__(self, ops: RecordedOps, kernels: _Kernels, ratios: PrecisionRatios, precision: str) -> None:
        self._ops, self._kernels, self._ratios, self._precision = ops, kernels, ratios, precision
        self._lower = "bf16" if precision == "fp8" else precision  # of what is no product in fp8
        self._ratio = np.ones((3, len(kernels.rows)))
        self._casts, self._scalings = _Casts(), _Casts()
        # Sums with an input in single precision are in it: that is the residual stream of a model whose norms are.
        single = (kind for kind in kernels.kinds if kind.policy is AutocastPolicy.SINGLE)
        self._sums_are_single = any("norm" in kind.op + kind.name for kind in single)
        self._by_peaks_us = self._inferred_us = self._batch_norm_us = 0.0
        self._of_kind: dict[int, Ratio] = {}
        specs = {kind.spec for kind in kernels.kinds if kind.spec is not None}
        ratios.price(specs, [one for one in TARGETS if one == "fp32" or ratios.device.peak_flops_per_s(one) is not None])

    def result(self) -> PrecisionChange:
        """The change of all ops."""
        lowers = self._precision in _LOWER
        for stream in self._streams():
            lowered = self._lowered(stream) if lowers else [False] * len(stream)
            for kernel, is_low in zip(stream, lowered, strict=True):
                self._ratio[:, kernel] = self._ratio_of(kernel, is_low)
        ratio, added_us, least_us = np.ones((3, len(self._ops))), np.zeros((3, len(self._ops))), np.zeros(len(self._ops))
        rows = self._kernels.rows
        ratio[:, rows], least_us[rows] = self._ratio, np.minimum(LEAST_US, self._kernels.us)
        unknown = self._ops.kind == OpKind.UNKNOWN
        if unknown.any() and len(rows):  # it may stay, or change like any op whose kind is known
            ratio[1, unknown], ratio[2, unknown] = min(1.0, self._ratio[1].min()), max(1.0, self._ratio[2].max())
        self._add_casts(added_us)
        return PrecisionChange(ratio=ratio, added_us=added_us, least_us=least_us, assumed=tuple(self._assumed()))

    def _streams(self) -> Iterator[list[int]]:
        """Kernels of each stream in each step, in order."""
        rows = self._kernels.rows
        place = np.stack((self._ops.step[rows], self._ops.device[rows]))
        begins = np.flatnonzero((np.diff(place, axis=1) != 0).any(axis=0)) + 1
        for part in np.split(np.arange(len(rows)), begins):
            yield part.tolist()

    # Types and casts.

    def _lowered(self, stream: Sequence[int]) -> list[bool]:
        """Whether each kernel of a stream computes in the lower type under autocast; notes casts.

        The backward pass casts the gradient of each cast; these are spread over its products.
        """
        kernels, lowered = self._kernels, []
        casts: list[tuple[int, int | None]] = []  # Kernel, and elements.
        backward_products = []
        is_low = reads_low = False  # The type of what ran last, and of what the current product reads.
        op_before: KernelKind | None = None  # The product that ran last, if nothing else did since, and its own kernel.
        own_before: KernelKind | None = None
        for kernel in stream:
            kind = kernels.kinds[kernels.kind[kernel]]
            if kind.is_fixed or not kernels.is_model[kernel]:
                lowered.append(False)
                continue
            is_backward = bool(kernels.is_backward[kernel])
            if kind.policy is AutocastPolicy.PRODUCT:
                if op_before is None or (op_before.op, op_before.shapes) != (kind.op, kind.shapes):
                    reads_low, own_before = is_low, None
                if kind.is_product and (own_before is None or own_before.name == kind.name):
                    if is_backward:
                        backward_products.append(kernel)
                    else:
                        casts += [(kernel, elements) for elements in self._cast_elements(kind, reads_low=reads_low)]
                is_low, op_before = True, kind
                own_before = own_before or (kind if kind.is_product else None)
            else:
                is_single = kind.policy is AutocastPolicy.SINGLE
                if is_single and is_low and not is_backward and casts_input(kind.op) and kind.element in ("fp32", ""):
                    casts.append((kernel, operands(kind.op, kind.shapes).activations))
                is_sum = self._sums_are_single and base_name(kind.op) == "add" and not is_backward
                is_low, op_before = is_low and not is_single and not is_sum, None
            lowered.append(is_low)
        casts_us = [self._ratios.moved_us((4.0 + 2.0) * (elements or 0)) for _, elements in casts]
        for (kernel, _), us in zip(casts, casts_us, strict=True):
            self._casts.add(kernel, us)
        for kernel in backward_products:
            self._casts.add(kernel, sum(casts_us) / len(backward_products), len(casts) / len(backward_products))
        return lowered

    def _cast_elements(self, kind: KernelKind, *, reads_low: bool) -> Iterator[int | None]:
        """Elements of each cast of a product of the forward pass; None: not known."""
        if not kind.precisions or kind.precisions[0] in _LOWER:
            return
        read = operands(kind.op, kind.shapes)
        if read.weights != 0:
            yield read.weights
        if not reads_low:
            yield read.activations

    # Ratios.

    def _ratio_of(self, kernel: int, is_low: bool) -> Ratio:
        kind = self._kernels.kinds[self._kernels.kind[kernel]]
        if kind.is_fixed or not self._kernels.is_model[kernel]:
            return _SAME
        us = float(self._kernels.us[kernel])
        if kind.is_product:
            number = int(self._kernels.kind[kernel])
            if number not in self._of_kind:
                self._of_kind[number] = self._of_product(kind)
            if kind.spec is None:
                self._by_peaks_us += us
            if self._precision == "fp8" and kind.fits_fp8 and kind.spec is not None:
                sizes = kind.spec.all_sizes
                elements = sizes["m"] * sizes["k"] + sizes["k"] * sizes["n"]
                # Read for the largest element; read again, scaled and written.
                self._scalings.add(kernel, self._ratios.moved_us((2.0 + 2.0 + 1.0) * elements), 4)
            return self._of_kind[number]
        if self._precision not in _LOWER:
            return self._raised(kind)
        if kind.policy is AutocastPolicy.SINGLE or kind.element in (*_LOWER, OTHER) or self._kernels.recorded in _LOWER:
            return _SAME  # stays in fp32, holds no such numbers, or autocast was recorded
        of_bytes, element = PrecisionRatios.of_bytes("fp32", self._lower), kind.element or self._kernels.all_single
        if kind.policy is AutocastPolicy.PRODUCT and element:
            return of_bytes
        self._inferred_us += us
        middle = of_bytes.middle if is_low and element else 1.0
        if is_low and self._lower == "bf16" and kind.is_batch_norm_nchw:
            self._batch_norm_us += us
            return Ratio(_BATCH_NORM_NCHW, of_bytes.low, _BATCH_NORM_NCHW * EFFICIENCY)
        return Ratio(middle, of_bytes.low, 1.0)

    def _of_product(self, kind: KernelKind) -> Ratio:
        """Ratio of a product's kernel; the interval holds all precisions that it may have been recorded in."""
        has = {one: self._ratios.device.peak_flops_per_s(one) is not None for one in TARGETS} | {"fp32": True}
        possible = kind.precisions or tuple(one for one in TARGETS if has[one])
        before = ["fp32" if one == "tf32" and not has["tf32"] else one for one in possible]  # on a GPU without TF32
        after = [self._precision]
        if self._precision == "fp8" and not kind.fits_fp8:
            maybe = kind.spec is None and kernel_class(kind.name) == "gemm"
            after = ["bf16", "fp8"] if maybe else ["bf16"]
        ratios = [self._ratios.of_product(kind.spec, one, target) for one in before for target in after]
        usual = before.index(self._kernels.recorded) if not kind.precisions and self._kernels.recorded in before else 0
        return Ratio(ratios[usual * len(after)].middle, min(one.low for one in ratios), max(one.high for one in ratios))

    def _raised(self, kind: KernelKind) -> Ratio:
        """Ratio of a kernel that is no product, in a model without autocast."""
        if self._kernels.recorded in _LOWER and _CAST.search(kind.name):
            return Ratio(0.0, 0.0, 1.0)
        if kind.element not in ("fp16", "bf16"):
            return _SAME if kind.element or self._kernels.all_single else Ratio(1.0, 1.0, 2.0 * EFFICIENCY)
        return PrecisionRatios.of_bytes(kind.element, "fp32")

    # Places of casts.

    def _add_casts(self, added_us: Floats) -> None:
        """Adds casts to the kernels that read them, and their launches to the host's time before the launch of these."""
        ops, rows = self._ops, self._kernels.rows
        host = np.flatnonzero((ops.role == LAUNCHES) & (ops.policy[ops.device] != OrderPolicy.UNBOUNDED))
        row_of_event = dict(zip(ops.about[host].tolist(), host.tolist(), strict=True))
        launch_us = self._launch_us(row_of_event)
        for casts in (self._casts, self._scalings):
            for kernel, us in casts.us.items():
                added_us[:, rows[kernel]] += us * np.array([1.0, 1 / EFFICIENCY, EFFICIENCY])
                row = row_of_event.get(int(ops.event[rows[kernel]]))
                if row is not None:
                    added_us[:, row] += casts.count[kernel] * launch_us

    def _launch_us(self, row_of_event: dict[int, int]) -> Floats:
        """Host time of an added kernel, [3]: median and quartiles of those before element-wise kernels, or before any kernels."""
        kernels, ops = self._kernels, self._ops
        is_small = np.array([kernel_class(kind.name) == "elementwise" for kind in kernels.kinds], np.bool_)[kernels.kind]
        for chosen in (is_small & kernels.is_model, kernels.is_model):
            events = ops.event[kernels.rows[chosen]].tolist()
            recorded_us = [float(ops.duration_us[row_of_event[event]]) for event in events if event in row_of_event]
            if recorded_us:
                return np.percentile(recorded_us, (50, 25, 75))
        return np.zeros(3)

    # Sentences.

    def _assumed(self) -> Iterator[str]:
        products_us = self._kernels.products_us
        whole_us, precision = sum(products_us.values()), self._precision
        shown = ", ".join(
            f"{' or '.join(precisions) or 'an unknown precision'} ({us / whole_us * 100:.0f} %)"
            for precisions, us in sorted(products_us.items(), key=lambda item: -item[1])
            if us >= _WORTH_SAYING * whole_us
        )
        yield f"products were recorded in {shown} of their time, by the names and types of their kernels"
        steps = len(self._ops.steps) * len(set(self._ops.rank_of_device.tolist()))
        if precision in _LOWER:
            device_us, count = (sum(values.values()) / steps for values in (self._casts.us, self._casts.count))
            yield (
                f"{self._lower} is PyTorch's autocast: products in {self._lower}; layer norms, softmax, losses, parameters, "
                f"gradients, their buckets and the optimizer in fp32; {count:.0f} casts a step and rank, {time_text(device_us)} on "
                f"the device, are part of the ops that read them"
            )
        if precision == "fp16":
            yield "fp16 usually needs a GradScaler: its check of all gradients, and the wait of the host for it, are left out"
        if precision == "fp8":
            device_us, count = (sum(values.values()) / steps for values in (self._scalings.us, self._scalings.count))
            yield (
                f"fp8 is for single products whose sides are multiples of {FP8_MULTIPLE}; the largest elements and casts of their "
                f"operands are {count:.0f} kernels a step and rank, {time_text(device_us)}"
            )
        if self._by_peaks_us > _WORTH_SAYING * whole_us:
            yield (
                f"products without recorded shapes ({self._by_peaks_us / whole_us * 100:.0f} % of the products' time) are scaled "
                "between the ratios of peaks and of bytes; a profile with record_shapes=True narrows the interval"
            )
        if self._inferred_us and precision in _LOWER:
            share = self._inferred_us / max(float(self._kernels.us.sum()), 1e-9)
            yield (
                f"kernels that compute in the type that they read ({share * 100:.0f} % of the kernels' time) have that of the op "
                "before them; the interval holds both types, and layouts of images as recorded"
            )
        if self._batch_norm_us:
            yield f"batch norms of images that are not channels-last take {_BATCH_NORM_NCHW:g} times as long in bf16, as on an H200"
        yield "host threads take as long as recorded, and longer where they launch added kernels"
