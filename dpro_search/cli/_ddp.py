"""`replay` and `diagnose` of traces of PyTorch DistributedDataParallel jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpro_search.cli._jobs import ReplayRequest
    from dpro_search.collect.trace import Trace
    from dpro_search.replay.ddp.predictor import DdpPredictor
    from dpro_search.space.plan import Plan


def replay_trace(trace: Trace, request: ReplayRequest) -> dict[str, Any]:
    """The facts that the verb `replay` prints.

    Raises
    ------
    InputError
        A change that DDP does not have.
    """
    from dpro_search.cli._torch import replayed
    from dpro_search.costmodel.precision import named_model
    from dpro_search.replay.ddp.predictor import DdpPredictor

    def with_changes(predictor: DdpPredictor, plan: Plan, changes: Sequence[str]) -> tuple[DdpPredictor, Plan]:
        if plan.bfloat16_modules is not None:
            predictor = predictor.at(ratios=named_model(request.precision_table, "torch"))
        return _with_changes(predictor, plan, changes)

    return replayed(trace, request, DdpPredictor, with_changes)


def diagnose_trace(trace: Trace) -> dict[str, Any]:
    """The facts that the verb `diagnose` prints; `buckets` are in the order of their all-reduces."""
    from dpro_search.cli._torch import diagnosed
    from dpro_search.replay.ddp.findings import findings
    from dpro_search.replay.ddp.predictor import DdpPredictor
    from dpro_search.replay.ddp.what_if import gains

    predictor = DdpPredictor.from_trace(trace)
    return diagnosed(trace, predictor, gains(predictor), findings) | {"buckets": _buckets(predictor)}


def print_diagnosis(result: dict[str, Any]) -> None:
    """What `diagnose_trace` found, for people."""
    from dpro_search.cli import _torch
    from dpro_search.cli._output import microseconds, percent, size

    buckets = [
        (
            str(row["bucket"]),
            str(row["gradients"]),
            size(row["bytes"]),
            percent(row["posted_after_pct"]),
            microseconds(row["transfer_us"]),
        )
        for row in result["buckets"]
    ]
    _torch.print_diagnosis(result, ("buckets", ("bucket", "gradients", "moved", "posted after", "transfer"), buckets))


def _buckets(predictor: DdpPredictor) -> list[dict[str, Any]]:
    """Of each recorded bucket: gradients, bytes moved, after which share of the backward pass it is posted, and its transfer."""
    from dpro_search.space.plan import Plan

    graph = predictor.graph
    moves_us = predictor.timeline(Plan()).collective_us[:, len(graph.forward_bytes) :]
    shares = graph.ready_us / graph.backward_us[..., None]
    found = []
    for bucket in range(int(graph.bucket_of.max()) + 1):
        own = graph.bucket_of == bucket
        found.append(
            {
                "bucket": bucket,
                "gradients": int(own.sum()),
                "bytes": int(graph.gradient_bytes[own].sum()),
                "posted_after_pct": float(shares[..., own].max(axis=-1).mean()) * 100,
                "transfer_us": float((moves_us[:, bucket, 1] - moves_us[:, bucket, 0]).mean()),
            }
        )
    return found


def _with_changes(predictor: DdpPredictor, plan: Plan, changes: Sequence[str]) -> tuple[DdpPredictor, Plan]:
    """Predictor and plan after the ``--set`` options, in order."""
    from dpro_search.cli._facts import changed, cluster_knobs, plan_knobs

    def first(state: tuple[DdpPredictor, Plan], value: str) -> tuple[DdpPredictor, Plan]:
        return state[0].at(first_bucket_bytes=int(value)), state[1]

    knobs: dict[str, Callable[[tuple[DdpPredictor, Plan], str], tuple[DdpPredictor, Plan]]]
    knobs = {**plan_knobs(("bucket_cap_bytes", "compression")), "first_bucket_bytes": first, **cluster_knobs(type(predictor))}
    return changed((predictor, plan), changes, knobs, "a DistributedDataParallel job")
