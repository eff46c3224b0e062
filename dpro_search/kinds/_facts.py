"""Facts and tables that `diagnose` gives of several kinds of jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from dpro_search._text import shortened
from dpro_search.collect.trace import Trace
from dpro_search.graph.dataflow import OpKind
from dpro_search.graph.event_names import origin_text, short_names
from dpro_search.graph.recorded_collectives import arrivals
from dpro_search.kinds._job import Table
from dpro_search.quantities import percent_text, time_text
from dpro_search.replay.critical_path import REASONS, path_columns, path_shares
from dpro_search.replay.path_segments import path_totals
from dpro_search.replay.sensitivity import BandwidthScaled, Change, CommunicationScaled, ComputeScaled, Gain
from dpro_search.replay.timeline import Timeline
from dpro_search.space.scenario import Scale

_AFTER = {"start": "nothing", "dependency": "what it needs", "device": "its device", "collective": "other ranks"}
_BEFORE = {"host until the launch of ": "host: ", "launch of ": "launch: "}  # in the names of ops (`space.recorded.ops`), and shown
_NAME_LENGTH = 50  # of an op in a table of 80 columns
_COUNTS_LENGTH = 16  # of two more columns
_TOP_GAINS = 12


def rank_facts(trace: Trace, rank_breakdown_us: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """Breakdown of each rank's iteration, how often it comes last to a collective, and how long it waits for others."""
    punctuality = {arrival.rank: arrival for arrival in arrivals(trace)}
    return [
        {
            "rank": rank,
            "host": trace.meta.hosts[rank % len(trace.meta.hosts)],  # other ranks behave like the recorded ones in turn
            "breakdown_us": breakdown,
            "last_pct": punctuality[rank].last_pct if rank in punctuality else None,
            "waited_us": punctuality[rank].waited_us if rank in punctuality else None,
        }
        for rank, breakdown in enumerate(rank_breakdown_us)
    ]


def critical_ops(
    timeline: Timeline,
    most: int = 10,
    *,
    numbers: Sequence[int] = (),
    origins: Sequence[Mapping[str, str]] = (),
    row_name: Callable[[str], str] = str,
) -> list[dict[str, Any]]:
    """The ops with the largest part of the critical path, and the commonest reason why they started no earlier.

    Ops of one name (which has the rank) are one row. A row counts over all replayed iterations; ``count`` (of ops on the path) and
    ``total_us`` are per iteration.

    Parameters
    ----------
    numbers
        Of the graph's ranks in the job; empty: 0, 1, 2...
    origins
        Of the graph's ops (`graph.event_names.origins`): a row has that of the op with the largest part, and ``origins``, how many
        there are.
    row_name
        The name of the row to which an op of some name belongs.
    """
    graph, path = timeline.graph, path_columns(timeline)
    shares = path_shares(timeline).by_op
    of_name: dict[str, list[int]] = {}
    for op in shares:
        of_name.setdefault(row_name(graph.name(op)), []).append(op)
    spent_us = {name: sum(shares[op] for op in ops) for name, ops in of_name.items()}
    total_us = sum(shares.values()) or 1.0
    op_of_step = path.op % len(graph)
    rows = []
    for name in sorted(of_name, key=lambda name: -spent_us[name])[:most]:
        ops = of_name[name]
        on_path = np.isin(op_of_step, ops)
        rank = int(graph.rank_of_op[ops[0]])
        row = {
            "op": name,
            "rank": numbers[rank] if numbers and rank >= 0 else rank,
            "kind": OpKind(graph.op_kind[ops[0]]).name,
            "share_pct": spent_us[name] / total_us * 100,
            "reason": REASONS[Counter(path.reason[on_path].tolist()).most_common(1)[0][0]].value,
            "count": len(ops),
            "total_us": spent_us[name] / timeline.iterations,
        }
        if origins:
            row |= origins[ops[0]]
            row["origins"] = len({tuple(origins[op].items()) for op in ops if origins[op]})
        rows.append(row)
    return rows


def path_facts(timeline: Timeline) -> list[dict[str, Any]]:
    """Shares of the critical path by rank and kind of op."""
    facts: list[dict[str, Any]] = msgspec.to_builtins(path_totals(timeline))
    return facts


def gain_rows(gains: Sequence[Gain]) -> list[dict[str, Any]]:
    """Gains of changes of the graph."""
    return [
        {
            "what_if": gain.change.text,
            "predicted_iteration_us": gain.iteration_us,
            "gain_us": gain.gain_us,
            "gain_pct": gain.gain_pct,
        }
        for gain in gains
    ]


def graph_change(scale: Scale, ranks: int) -> Change:
    """The change of a replay graph that a scale means; raises `InputError` for a rank that is not there."""
    scale.check_rank(ranks)
    if scale.what == "bandwidth":
        return BandwidthScaled(factor=scale.factor)
    if scale.what == "communication":
        return CommunicationScaled(factor=scale.factor, rank=scale.rank)
    return ComputeScaled(factor=scale.factor, rank=scale.rank)


def rank_table(ranks: Sequence[Mapping[str, Any]]) -> Table:
    """The table of `rank_facts`."""
    rows = [
        (
            str(row["rank"]),
            *(time_text(row["breakdown_us"][key]) for key in ("compute", "contention", "exposed_communication")),
            "unknown" if row["last_pct"] is None else percent_text(row["last_pct"]),
            "unknown" if row["waited_us"] is None else time_text(row["waited_us"]),
        )
        for row in ranks
    ]
    columns = ("rank", "compute", "contention", "exposed comm.", "comes last", "waits for others")
    return Table(title="ranks", columns=columns, rows=rows)


def op_texts(names: Sequence[str], most: int) -> list[str]:
    """Names of ops as tables have them: kernels without what tells nothing apart, what hosts do before a launch by its kernel."""
    texts = []
    for name in short_names(names):
        prefix = next((text for text in _BEFORE if name.startswith(text)), "")
        shown = _BEFORE.get(prefix, "")
        texts.append(shown + shortened(name.removeprefix(prefix), most - len(shown)))
    return texts


def critical_table(ops: Sequence[Mapping[str, Any]]) -> Table:
    """The table of `critical_ops`."""
    several = any(row["count"] > 1 for row in ops)
    length = _NAME_LENGTH - (_COUNTS_LENGTH if several else 0)
    rows: list[tuple[str, ...]] = []
    for name, row in zip(op_texts([row["op"] for row in ops], length), ops, strict=True):
        counted = (str(row["count"]), time_text(row["total_us"])) if several else ()
        rows.append((name, *counted, percent_text(row["share_pct"]), _AFTER[row["reason"]]))
        if origin := origin_text(row):
            rows.append((f"  {shortened(origin, length - 2)}", *[""] * (len(rows[-1]) - 1)))
    columns = ("op", *(("ops", "time") if several else ()), "share", "starts after")
    return Table(title="ops on the critical path", columns=columns, rows=rows)


def gain_table(gains: Sequence[Mapping[str, Any]], iteration_us: float) -> Table:
    """The table of what-if gains, the largest first."""
    rows = [
        (
            shortened(name, _NAME_LENGTH),
            time_text(row["predicted_iteration_us"]),
            f"{time_text(row['gain_us'])} ({percent_text(row.get('gain_pct', row['gain_us'] / iteration_us * 100))})",
        )
        for name, row in zip(short_names([row["what_if"] for row in gains[:_TOP_GAINS]]), gains, strict=False)
    ]
    return Table(title="what would it gain", columns=("what if", "iteration", "gain"), rows=rows)
