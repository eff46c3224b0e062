"""What other bucket sizes and communication hooks would gain, beside the questions that every job raises."""

from __future__ import annotations

from dpro_search.kinds._predictor import Gains
from dpro_search.kinds.ddp.predictor import DdpPredictor
from dpro_search.space.plan import Plan

_MIB = 2**20
_BUCKETS_MIB = (1, 5, 25, 100)  # largest buckets that `gains` asks for
_HOOKS = {"compression=fp16": Plan(compression="fp16"), "compression=powersgd-1": Plan(compression="powersgd-1")}


def gains(predictor: DdpPredictor) -> Gains:
    """Iteration time and gain of the questions that every job raises and of other bucket sizes, largest gain first."""
    plans = {f"bucket_cap_bytes={mib}MiB": Plan.of(bucket_cap_bytes=mib * _MIB) for mib in _BUCKETS_MIB}
    plans |= {f"first_bucket_bytes={mib}MiB": Plan.of(first_bucket_bytes=mib * _MIB) for mib in _BUCKETS_MIB}
    plans |= {name: plan for name, plan in _HOOKS.items() if predictor.refusal(plan) is None}
    return predictor.gains(plans)
