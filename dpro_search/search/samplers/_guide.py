"""Hints that samplers take from a timeline of collectives: tensors on the critical path, and collectives to join or to cut.

The theorems on tensor fusion of dPRO's Algorithm 1 (Hu et al., MLSys 2022), corrected: a fused collective waits not only for its
last tensor but also for the previous collective, and is compared with two separate collectives, the second after the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import linear_regression
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from dpro_search.space.plan import Plan
from dpro_search.space.tensorflow.fusion_moves import Grouping

if TYPE_CHECKING:
    from dpro_search.replay.exchanges import Exchange


_SAME_US = 1e-3  # times closer than this are equal
_DIGITS = 3  # of times in us


class Guide(Protocol):
    """Replays plans and gives their per-collective timelines."""

    def exchanges(self, plan: Plan) -> tuple[Exchange, ...]:
        """The collectives of an iteration under a plan with exact groups, by enqueue time; empty if not known."""


def to_a_nanosecond(exchanges: Sequence[Exchange]) -> tuple[Exchange, ...]:
    """The collectives with rounded times.

    The last digits of a prediction depend on the processor. Without them, ties are decided alike everywhere, and a seed gives the
    same plans.
    """
    return tuple(
        replace(
            exchange,
            ready_us=tuple(round(us, _DIGITS) for us in exchange.ready_us),
            posted_us=round(exchange.posted_us, _DIGITS),
            ended_us=round(exchange.ended_us, _DIGITS),
        )
        for exchange in exchanges
    )


def hot_tensors(exchanges: Sequence[Exchange]) -> dict[str, float]:
    """Time in us for which an iteration waits for each tensor's collective, of those on the critical path."""
    time_us_of: dict[str, float] = {}
    for exchange, us in reversed(_durations(exchanges)):
        time_us_of |= dict.fromkeys(exchange.tensors, us)
        if exchange.ended_us - us <= exchange.posted_us + _SAME_US:
            break  # it waited for compute, not for the previous collective
    return time_us_of


def collective_us(exchanges: Sequence[Exchange]) -> dict[str, float]:
    """Duration of the collective of each tensor, by name, without waiting time."""
    return {name: us for exchange, us in _durations(exchanges) for name in exchange.tensors}


def _durations(exchanges: Sequence[Exchange]) -> list[tuple[Exchange, float]]:
    """Exchanges in the order of their ends, and the duration of each after its tensors are ready and the previous one has ended."""
    in_order = sorted(exchanges, key=lambda exchange: exchange.ended_us)
    before_us = [0.0, *(exchange.ended_us for exchange in in_order)]
    return [(e, e.ended_us - max(before, e.posted_us)) for e, before in zip(in_order, before_us, strict=False)]


@dataclass(frozen=True, kw_only=True)
class SyncTime:
    """Duration of a collective by its size: ``alpha_us + size_bytes * beta_us``, with negotiation and copies."""

    alpha_us: float
    beta_us: float

    def __call__(self, size_bytes: float) -> float:
        return self.alpha_us + size_bytes * self.beta_us


def fitted_sync_time(exchanges: Sequence[Exchange]) -> SyncTime:
    """The line through the sizes and durations of collectives (at least one), without negative terms."""
    durations = _durations(exchanges)
    size = np.array([exchange.size_bytes for exchange, _ in durations])
    duration = np.array([us for _, us in durations])
    if len(set(size.tolist())) == 1:
        mean = float(duration.mean())
        return SyncTime(alpha_us=mean / 2, beta_us=mean / 2 / max(float(size[0]), 1.0))
    slope, offset = linear_regression(size.tolist(), duration.tolist())
    if slope < 0:
        return SyncTime(alpha_us=max(float(duration.mean()), 0.0), beta_us=0.0)
    if offset < 0:
        return SyncTime(alpha_us=0.0, beta_us=float((size * duration).sum() / (size * size).sum()))
    return SyncTime(alpha_us=round(offset, _DIGITS), beta_us=float(f"{slope:.6g}"))


class TensorGroupPart(NamedTuple):
    """Tensors that travel together: their bytes, and when the last of them is ready."""

    tensors: tuple[str, ...]
    size_bytes: float
    ready_us: float


def parts_of(exchanges: Sequence[Exchange]) -> list[TensorGroupPart]:
    """The collectives as parts, in the order in which they become ready."""
    return sorted((TensorGroupPart(e.tensors, e.size_bytes, e.posted_us) for e in exchanges), key=lambda part: part.ready_us)


def single_parts(exchanges: Sequence[Exchange], size_bytes: Mapping[str, int]) -> list[TensorGroupPart]:
    """Every tensor as a part of its own, in the order in which they become ready.

    Parameters
    ----------
    size_bytes
        Of each tensor as recorded; a plan may compress what an exchange sends.
    """
    parts = []
    for exchange in exchanges:
        sent = exchange.size_bytes / max(sum(size_bytes[name] for name in exchange.tensors), 1)
        for name, ready_us in zip(exchange.tensors, exchange.ready_us, strict=True):
            parts.append(TensorGroupPart((name,), size_bytes[name] * sent, ready_us))
    return sorted(parts, key=lambda part: part.ready_us)


def fusing_pays(before_end_us: float, first: TensorGroupPart, second: TensorGroupPart, sync: SyncTime) -> bool:
    """Whether two parts end no later as one collective than as two in sequence (Theorem 2, corrected).

    Parameters
    ----------
    before_end_us
        When the collective before them ends.
    """
    first_end_us = max(first.ready_us, before_end_us) + sync(first.size_bytes)
    apart_us = max(second.ready_us, first_end_us) + sync(second.size_bytes)
    together_us = max(first.ready_us, second.ready_us, before_end_us) + sync(first.size_bytes + second.size_bytes)
    return together_us <= apart_us


def joined(parts: Sequence[TensorGroupPart], sync: SyncTime) -> Grouping:
    """A pass over parts in order: each is fused with the previous one where that makes them end earlier."""
    walked: list[TensorGroupPart] = []
    before_end_us = 0.0  # of the collective before the open one, which is the last walked
    for part in parts:
        if walked and fusing_pays(before_end_us, walked[-1], part, sync):
            walked[-1] = _together(walked[-1], part)
        else:
            if walked:
                before_end_us = max(walked[-1].ready_us, before_end_us) + sync(walked[-1].size_bytes)
            walked.append(part)
    return tuple(part.tensors for part in walked)


def cut(exchanges: Sequence[Exchange], size_bytes: Mapping[str, int], sync: SyncTime) -> Grouping:
    """A pass over collectives in order: each is cut in two, at the best place, where that makes it end earlier."""
    groups: list[tuple[str, ...]] = []
    before_end_us = 0.0
    for exchange in sorted(exchanges, key=lambda exchange: exchange.posted_us):
        members = single_parts([exchange], size_bytes)
        end_us = max(members[-1].ready_us, before_end_us) + sync(exchange.size_bytes)
        best = len(members)
        upto_bytes = 0.0
        for number, member in enumerate(members[:-1], start=1):
            upto_bytes += member.size_bytes
            first_end_us = max(member.ready_us, before_end_us) + sync(upto_bytes)
            apart_us = max(members[-1].ready_us, first_end_us) + sync(exchange.size_bytes - upto_bytes)
            if apart_us < end_us:
                best, end_us = number, apart_us
        names = tuple(member.tensors[0] for member in members)
        groups += [part for part in (names[:best], names[best:]) if part]
        before_end_us = end_us
    return tuple(groups)


def _together(first: TensorGroupPart, second: TensorGroupPart) -> TensorGroupPart:
    return TensorGroupPart(
        first.tensors + second.tensors, first.size_bytes + second.size_bytes, max(first.ready_us, second.ready_us)
    )
