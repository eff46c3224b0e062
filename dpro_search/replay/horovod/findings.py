"""What stands out in a Horovod job, as sentences with numbers and the knob to turn, the costliest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpro_search.graph.arrivals import Arrival
from dpro_search.replay.horovod.critical_path import Segment
from dpro_search.replay.sentences import WORTH_PCT, share

_OFTEN_PCT = 75.0  # a rank that comes last to so many collectives is a straggler


def findings(
    path: Sequence[Segment], late: Sequence[Arrival], gains: Sequence[Mapping[str, Any]], iteration_us: float
) -> tuple[str, ...]:
    """Sentences on what costs, or would gain, at least 3 % of an iteration.

    Parameters
    ----------
    path
        The critical path of an iteration.
    late
        Of every rank, how often it comes last.
    gains
        Rows of `what_if.gains`, knobs among them.
    iteration_us
        Replayed.
    """
    found = [*_communication(path, gains, iteration_us), *_late_ranks(late, iteration_us), *_gains(gains, iteration_us)]
    found.sort(key=lambda finding: -finding[0])
    return tuple(sentence for cost_us, sentence in found if cost_us >= WORTH_PCT / 100 * iteration_us)


def _communication(path: Sequence[Segment], gains: Sequence[Mapping[str, Any]], iteration_us: float) -> list[tuple[float, str]]:
    collectives = [segment.duration_us for segment in path if segment.kind == "collective"]
    agreed_us = sum(segment.duration_us for segment in path if segment.kind == "agreement")
    total_us = sum(collectives) + agreed_us
    if not total_us:
        return []
    best = max((row for row in gains if row.get("knob")), key=lambda row: row["gain_us"], default=None)
    advice = "no other fusion threshold or cycle time that was tried would gain anything; a faster link or compression would"
    if best is not None and best["gain_us"] >= WORTH_PCT / 100 * iteration_us:
        advice = f"'{best['knob']}' would gain {share(best['gain_us'], iteration_us)}"
    return [
        (
            total_us,
            f"An iteration waits {share(total_us, iteration_us)} for {len(collectives)} all-reduces, "
            f"{agreed_us / 1e3:.1f} ms of it for Horovod's cycles and agreements: {advice}.",
        )
    ]


def _late_ranks(late: Sequence[Arrival], iteration_us: float) -> list[tuple[float, str]]:
    return [
        (
            waited_us,
            f"Rank {row.rank} comes last to {row.last_pct:.0f} % of the all-reduces, and the others wait "
            f"{share(waited_us, iteration_us)} for it: give it less work, or look at its host and at what else runs on its cores.",
        )
        for row in late
        if row.last_pct >= _OFTEN_PCT and (waited_us := max(other.waited_us for other in late if other.rank != row.rank)) > 0
    ]


def _gains(gains: Sequence[Mapping[str, Any]], iteration_us: float) -> list[tuple[float, str]]:
    sentences = {
        "bandwidth=2": "A link twice as fast would gain {}.",
        "compute=0.9": "Compute that takes a tenth less on all ranks would gain {}.",
    }
    return [
        (float(row["gain_us"]), sentences[row["what_if"]].format(share(row["gain_us"], iteration_us)))
        for row in gains
        if row["what_if"] in sentences
    ]
