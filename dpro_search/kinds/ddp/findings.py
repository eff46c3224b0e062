"""Findings about a DistributedDataParallel job: sentences with numbers and the setting to change, the costliest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpro_search.replay.path_findings import best_gain, path_findings
from dpro_search.replay.path_segments import PathSegment

_HOOKS = {
    "compression=fp16": "Compressing the buckets to half of their bytes (fp16_compress_hook) would gain {}, with what its casts "
    "cost; it changes the numbers.",
    "compression=powersgd-1": "Sending factors of rank 1 in place of gradients (PowerSGD) would gain {}, with what computing them "
    "costs; it changes the numbers more than halves do.",
}


def findings(path: Sequence[PathSegment], gains: Sequence[Mapping[str, Any]], iteration_us: float) -> tuple[str, ...]:
    """Those of `path_findings` with DDP's knobs."""
    otherwise = "no other size of buckets would gain anything; a faster link or a compressing hook would"
    advice = best_gain(gains, ("bucket_cap_bytes", "first_bucket_bytes"), iteration_us, otherwise)
    return path_findings(path, gains, iteration_us, sentences=_HOOKS, advice=advice)
