"""`replay` and `diagnose` of traces of PyTorch jobs whose model ``fully_shard`` divided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpro_search.cli._jobs import ReplayRequest
    from dpro_search.collect.trace import Trace
    from dpro_search.replay.fsdp.predictor import FsdpPredictor
    from dpro_search.space.plan import Plan


def replay_trace(trace: Trace, request: ReplayRequest) -> dict[str, Any]:
    """The facts that the verb `replay` prints.

    Raises
    ------
    InputError
        A change that a fully sharded job does not have.
    """
    from dpro_search.cli._torch import replayed
    from dpro_search.replay.fsdp.predictor import FsdpPredictor

    return replayed(trace, request, FsdpPredictor, _with_changes)


def diagnose_trace(trace: Trace) -> dict[str, Any]:
    """The facts that the verb `diagnose` prints; `collectives` are in the order of their posts."""
    from dpro_search.cli._torch import diagnosed
    from dpro_search.replay.fsdp.findings import findings
    from dpro_search.replay.fsdp.predictor import FsdpPredictor
    from dpro_search.replay.fsdp.what_if import gains

    predictor = FsdpPredictor.from_trace(trace)
    found = diagnosed(
        trace,
        predictor,
        gains(predictor),
        lambda path, gained, iteration_us: findings(path, gained, iteration_us, predictor.regathered_bytes),
    )
    return found | {"collectives": _collectives(predictor)}


def print_diagnosis(result: dict[str, Any]) -> None:
    """What `diagnose_trace` found, for people."""
    from dpro_search.cli import _torch
    from dpro_search.cli._output import microseconds, size

    rows = [(row["name"], size(row["bytes"]), microseconds(row["transfer_us"])) for row in result["collectives"]]
    _torch.print_diagnosis(result, ("collectives", ("collective", "whole tensor", "transfer"), rows))


def _collectives(predictor: FsdpPredictor) -> list[dict[str, Any]]:
    """Of each collective as recorded: its name, bytes of the whole tensor, and its transfer."""
    from dpro_search.space.plan import Plan

    graph, moves_us = predictor.graph, predictor.timeline(Plan()).collective_us
    return [
        {"name": label, "bytes": int(size_bytes), "transfer_us": float((moves_us[:, place, 1] - moves_us[:, place, 0]).mean())}
        for place, (label, size_bytes) in enumerate(zip(graph.labels, graph.size_bytes.tolist(), strict=True))
    ]


def _with_changes(predictor: FsdpPredictor, plan: Plan, changes: Sequence[str]) -> tuple[FsdpPredictor, Plan]:
    """Predictor and plan after the ``--set`` options, in order."""
    from dpro_search.cli._facts import changed, cluster_knobs

    def prefetch(state: tuple[FsdpPredictor, Plan], value: str) -> tuple[FsdpPredictor, Plan]:
        return state[0].at(prefetch=_switch("prefetch", value, only=True)), state[1]

    def reshard(state: tuple[FsdpPredictor, Plan], value: str) -> tuple[FsdpPredictor, Plan]:
        return state[0].at(reshard=_switch("reshard_after_forward", value, only=False)), state[1]

    knobs = {"prefetch": prefetch, "reshard_after_forward": reshard}
    return changed((predictor, plan), changes, {**knobs, **cluster_knobs(type(predictor))}, "a fully sharded job")


def _switch(name: str, value: str, *, only: bool) -> bool:
    """The value of a switch that a replay can only turn one way: the other is what was recorded, or was not."""
    from dpro_search.errors import InputError

    if int(value) != only:
        raise InputError(f"--set {name}={value}: only {int(only)} can be asked for; leave it out for what was recorded")
    return only
