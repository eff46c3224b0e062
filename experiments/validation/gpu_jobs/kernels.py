"""How far predicted latencies of library ops are from the kernels of profiles, on a device of which nothing was measured here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dpro_search.cluster import Device, bundled
from dpro_search.collect.trace import EventKind, Trace
from dpro_search.costmodel.devices.ops import Stack
from dpro_search.costmodel.devices.recorded import RecordedSpecs
from dpro_search.costmodel.devices.sampled import latency_on
from dpro_search.costmodel.devices.written import OpSpec, ops_of
from dpro_search.parallel.gpu_ops import OpCosts


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """What the kernels of one op of PyTorch took, mean over its calls, and its calls a step."""

    spec: OpSpec
    us: float
    calls: float


def kernel_times(trace: Trace) -> list[KernelTime]:
    """Of the ops of a profile whose shapes make them library ops."""
    events, recorded = trace.events, RecordedSpecs(trace)
    kernels = np.flatnonzero((events.kind == EventKind.KERNEL) & (events.op >= 0) & (events.shapes >= 0) & (events.step >= 0))
    calls = np.flatnonzero((events.kind == EventKind.OP) & (events.shapes >= 0) & (events.step >= 0))
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for name, shapes in zip(events.name[calls].tolist(), events.shapes[calls].tolist(), strict=True):
        counts[name, shapes] += 1
    took: dict[tuple[int, int, int], float] = defaultdict(float)
    columns = (events.op, events.shapes, events.dtype, events.end_us - events.start_us)
    for op, shapes, dtype, us in zip(*(column[kernels].tolist() for column in columns), strict=True):
        took[op, shapes, dtype] += us
    steps = max(len(np.unique(events.step[kernels])), 1)
    found = []
    for (op, shapes, dtype), us in took.items():
        spec = recorded.of(trace.names[op], shapes, trace.dtypes[dtype] if dtype >= 0 else "")
        count = counts[op, shapes]
        if spec is not None and count:
            found.append(KernelTime(spec=spec, us=us / count, calls=count / steps))
    return found


def kernel_rows(traces: Sequence[Trace], gpu: str) -> Iterator[Sequence[str]]:
    """A row for each class of ops, by both models of latencies: sizes, and errors over distinct shapes."""
    name = bundled.aliases("device").get(bundled.plain(gpu))
    times = {one.spec: one for trace in traces for one in kernel_times(trace)}
    if name is None or not times:
        return
    device = bundled.device(name)
    classes: dict[str, list[KernelTime]] = defaultdict(list)
    for spec, one in times.items():
        classes[f"{spec.name} {spec.precision}{', backward' if spec.backward else ''}"].append(one)
    for title, ones in sorted(classes.items()):
        run = ops_of([_as_run(one.spec, device) for one in ones], Stack.SERVING)  # kernels alone, without their launches
        predicted = latency_on(device).predict(run).us
        yield _row(title, ones, predicted)
        if ones[0].spec.name == "gemm":
            yield _row(f"{title}, by gpu_ops", ones, np.array([_by_formula(one.spec, device) for one in ones]))


def _row(title: str, ones: Sequence[KernelTime], predicted_us: np.ndarray) -> Sequence[str]:
    us, calls = np.array([one.us for one in ones]), np.array([one.calls for one in ones])
    known = np.isfinite(predicted_us)
    if not known.any():
        return title, str(len(ones)), f"{us @ calls / 1e3:.2f}", "refused", "", ""
    errors = np.abs(predicted_us[known] / us[known] - 1) * 100
    together = (predicted_us[known] @ calls[known]) / (us[known] @ calls[known]) - 1
    return (
        title,
        str(len(ones)),
        f"{us @ calls / 1e3:.2f}",
        f"{np.median(errors):.0f}",
        f"{np.quantile(errors, 0.9):.0f}",
        f"{together * 100:+.0f}",
    )


def _as_run(spec: OpSpec, device: Device) -> OpSpec:
    """fp32 convolutions run in TF32 unless the script says otherwise."""
    if spec.name == "convolution" and spec.precision == "fp32" and device.peak.tf32 is not None:
        return OpSpec(name=spec.name, precision="tf32", backward=spec.backward, sizes=spec.sizes)
    return spec


def _by_formula(spec: OpSpec, device: Device) -> float:
    size = spec.all_sizes
    return OpCosts(device, spec.precision, 2.0 if spec.precision in ("bf16", "fp16") else 4.0).matmul_us(
        size["m"], size["k"], size["n"], size["batch"]
    )
