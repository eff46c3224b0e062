"""Findings on a job's critical path: sentences with numbers and the setting to change, the costliest first.

They hold for any kind of job whose iteration is a `Timeline`; the kind adds sentences about its own knobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from dpro_search.quantities import time_text
from dpro_search.replay.path.segments import COMMUNICATION, LATE_RANK, NEGOTIATION, PathSegment
from dpro_search.replay.sentences import WORTH_PCT, share


class Gained(Protocol):
    """A change, as ``--what-if`` or ``--set`` takes it, and how much shorter an iteration gets by it."""

    @property
    def what_if(self) -> str:
        """The change."""

    @property
    def gain_us(self) -> float:
        """The time that it saves."""


COMMON = {
    "bandwidth=2": "A link twice as fast would gain {}.",
    "compute=0.9": "Compute that takes a tenth less on all ranks would gain {}.",
}  # sentences on gains of any job


def path_findings(
    path: Sequence[PathSegment],
    gains: Sequence[Gained],
    iteration_us: float,
    *,
    sentences: Mapping[str, str] | None = None,
    parts_us: Mapping[str, float] | None = None,
    advice: str = "",
    more: Iterable[tuple[float, str]] = (),
) -> tuple[str, ...]:
    """Sentences on what costs, or would gain, at least 3 % of an iteration.

    Parameters
    ----------
    path
        The critical path of an iteration.
    gains
        Changes, and what they would gain.
    iteration_us
        Replayed.
    sentences
        On gains of the kind's own questions, by `what_if`, with {} for the gain.
    parts_us
        What the communication on the path consists of, by name, where the kind can tell.
    advice
        What to do about communication that nothing hides.
    more
        (cost in us, sentence) of the kind's own findings.
    """
    findings = [
        *_communication(path, iteration_us, parts_us or {}, advice),
        *_late_ranks(path, iteration_us),
        *_gained(gains, COMMON | dict(sentences or {}), iteration_us),
        *more,
    ]
    return costliest(findings, iteration_us)


def costliest(findings: Iterable[tuple[float, str]], iteration_us: float) -> tuple[str, ...]:
    """Sentences of the pairs (cost in us, sentence) whose cost is large enough, the costliest first."""
    ordered = sorted(findings, key=lambda finding: -finding[0])
    return tuple(sentence for cost_us, sentence in ordered if cost_us >= WORTH_PCT / 100 * iteration_us)


def best_gain(gains: Sequence[Gained], prefixes: tuple[str, ...], iteration_us: float, otherwise: str) -> str:
    """Advice: the best of the questions that begin with one of some prefixes; where none would gain anything, something else."""
    candidates = [gain for gain in gains if gain.what_if.startswith(prefixes)]
    best = max(candidates, key=lambda gain: gain.gain_us, default=None)
    if best is None or best.gain_us <= 0:
        return otherwise
    return f"'{best.what_if}' would gain {share(best.gain_us, iteration_us)}"


def exposed_us(path: Sequence[PathSegment]) -> dict[str, float]:
    """Time on the critical path of each collective or message, by its name."""
    exposed: dict[str, float] = {}
    for segment in path:
        if segment.kind == COMMUNICATION:
            exposed[segment.name] = exposed.get(segment.name, 0.0) + segment.duration_us
    return exposed


def _communication(
    path: Sequence[PathSegment], iteration_us: float, parts_us: Mapping[str, float], advice: str
) -> list[tuple[float, str]]:
    exposed = exposed_us(path)
    negotiated_us = sum(segment.duration_us for segment in path if segment.kind == NEGOTIATION)
    total_us = sum(exposed.values()) + negotiated_us
    if not total_us:
        return []
    parts = {name: value_us for name, value_us in (*parts_us.items(), ("negotiation", negotiated_us)) if value_us > 0}
    clauses = [f"Communication that nothing hides takes {share(total_us, iteration_us)}"]
    clauses += [", ".join(f"{name} {time_text(value_us)}" for name, value_us in parts.items()) + " of it"] if parts else []
    if exposed:
        largest = max(exposed, key=lambda name: exposed[name])
        clauses.append(f"{largest} most ({time_text(exposed[largest])})")
    return [(total_us, ", ".join(clauses) + (f": {advice}." if advice else "."))]


def _late_ranks(path: Sequence[PathSegment], iteration_us: float) -> list[tuple[float, str]]:
    """Time that other ranks wait for each rank."""
    late: dict[int, float] = {}
    for segment in path:
        if segment.kind == LATE_RANK:
            late[segment.rank] = late.get(segment.rank, 0.0) + segment.duration_us
    return [
        (
            cost_us,
            f"All ranks wait {share(cost_us, iteration_us)} for rank {rank}: "
            "give it less work, or look at its host and at what else runs on its cores.",
        )
        for rank, cost_us in late.items()
    ]


def _gained(gains: Sequence[Gained], sentences: Mapping[str, str], iteration_us: float) -> list[tuple[float, str]]:
    return [
        (gain.gain_us, sentences[gain.what_if].format(share(gain.gain_us, iteration_us)))
        for gain in gains
        if gain.what_if in sentences
    ]
