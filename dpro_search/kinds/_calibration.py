"""``device_of(trace)``: what the ranks of a recording compute on, which decides whether error bars hold for it."""

from __future__ import annotations

from dpro_search.collect.trace import EventKind, Trace
from dpro_search.machine import Device


def device_of(trace: Trace) -> Device:
    """The devices on which the trace's computation ran. MXNet's profiler notes operators of a CPU as kernels of threads."""
    kernels = bool((trace.events.kind == EventKind.KERNEL).any())
    return "gpu" if kernels and trace.meta.framework != "mxnet" else "cpu"
