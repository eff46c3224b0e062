"""Findings about a Horovod job: sentences with numbers and the setting to change, the costliest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpro_search.graph.recorded_collectives import Arrival
from dpro_search.replay.path_findings import path_findings
from dpro_search.replay.path_segments import LATE_RANK, PathSegment
from dpro_search.replay.sentences import WORTH_PCT, share

_OFTEN_PCT = 75.0  # a rank that comes last to so many collectives is a straggler


def findings(
    path: Sequence[PathSegment], late: Sequence[Arrival], gains: Sequence[Mapping[str, Any]], iteration_us: float
) -> tuple[str, ...]:
    """Those of `path_findings` with Horovod's knobs; who comes late is taken from the recording.

    Parameters
    ----------
    late
        Of every rank, how often it comes last.
    gains
        Rows of `what_if.gains`, knobs among them.
    """
    best = max((row for row in gains if row.get("knob")), key=lambda row: row["gain_us"], default=None)
    advice = "no other fusion threshold or cycle time that was tried would gain anything; a faster link or compression would"
    if best is not None and best["gain_us"] >= WORTH_PCT / 100 * iteration_us:
        advice = f"'{best['knob']}' would gain {share(best['gain_us'], iteration_us)}"
    on_path = [segment for segment in path if segment.kind != LATE_RANK]
    return path_findings(on_path, gains, iteration_us, advice=advice, more=_late_ranks(late, iteration_us))


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
