"""Gains of other bucket sizes and communication hooks, in addition to the questions of every job."""

from __future__ import annotations

from dpro_search.kinds._predictor import Gains
from dpro_search.kinds.ddp.predictor import DdpPredictor
from dpro_search.space.plan import Plan

_MIB = 2**20
_BUCKETS_MIB = (1, 5, 25, 100)
BUCKETS = {f"bucket_cap_bytes={mib}MiB": Plan.of(bucket_cap_bytes=mib * _MIB) for mib in _BUCKETS_MIB}
_FIRST_BUCKETS = {f"first_bucket_bytes={mib}MiB": Plan.of(first_bucket_bytes=mib * _MIB) for mib in _BUCKETS_MIB}
_VIEWS = {"gradient_as_bucket_view=1": Plan.of(gradient_as_bucket_view=True)}
_HOOKS = {"compression=fp16": Plan(compression="fp16"), "compression=powersgd-1": Plan(compression="powersgd-1")}


def questions(predictor: DdpPredictor) -> dict[str, Plan]:
    """Other bucket sizes, gradients that are views of the buckets, and communication hooks, where the job can have them."""
    hooks = {name: plan for name, plan in _HOOKS.items() if predictor.refusal(plan) is None}
    views = _VIEWS if predictor.graph.copy_us.any() else {}
    return BUCKETS | _FIRST_BUCKETS | views | hooks


def gains(predictor: DdpPredictor) -> Gains:
    """Iteration time and gain of the questions that every job raises and of `questions`, largest gain first."""
    return predictor.gains(questions(predictor))
