"""`Diagnosis`: the answer of `diagnose`, and what kinds of jobs make its parts of. A kind adds fields and tables in a subclass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from dpro_search._text import shortened
from dpro_search.collect.trace import Trace
from dpro_search.graph.dataflow import OpKind
from dpro_search.graph.event_names import origin_text, short_names
from dpro_search.graph.recorded_collectives import arrivals
from dpro_search.quantities import percent_text, time_text
from dpro_search.replay.path.critical_path import REASONS, path_columns, path_shares
from dpro_search.replay.path.segments import PathSegment
from dpro_search.replay.timeline import Timeline
from dpro_search.search.run_folder import ClusterFacts

_AFTER = {"start": "nothing", "dependency": "what it needs", "device": "its device", "collective": "other ranks"}
_BEFORE = {"host until the launch of ": "host: ", "launch of ": "launch: "}  # in the names of ops (`space.recorded.ops`), and shown
_NAME_LENGTH = 50  # of an op in a table of 80 columns
_COUNTS_LENGTH = 16  # of two more columns
_TOP_GAINS = 12


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table for people: a title, names of columns, rows of cells; only the first column may be long."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class PredictedGain(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A change, and what it would gain.

    Attributes
    ----------
    what_if
        The change as ``--what-if`` or ``--set`` takes it, or words about the graph.
    topic, ranks
        What it is about: "launch", "loading", "communication", "rank" (one is slow), "kernels", "module", "link", "plan"; and which
        ranks.
    meaning
        The change in words.
    predicted_iteration_us, predicted_mean_us
        Median and mean of the steps with the change.
    gain_us, gain_pct
        How much shorter an iteration gets; below 0, longer. Where steps stall, so that the mean of the steps is noticeably longer
        than their median, the mean of the iterations.
    certain
        Whether the gain is larger than the error of the replay of the recorded setting.
    knob
        The variable of the environment that makes the change.
    """

    what_if: str
    topic: str | UnsetType = UNSET
    ranks: tuple[int, ...] | UnsetType = UNSET
    meaning: str | UnsetType = UNSET
    predicted_iteration_us: float
    predicted_mean_us: float | UnsetType = UNSET
    gain_us: float
    gain_pct: float | UnsetType = UNSET
    certain: bool | UnsetType = UNSET
    knob: str | UnsetType = UNSET


def sorted_gains(base_us: float, iteration_us: Mapping[str, float]) -> tuple[PredictedGain, ...]:
    """The gain of each change over an iteration without it, the largest first.

    Parameters
    ----------
    iteration_us
        The iteration with each change, by how the change is written.
    """
    gains = [PredictedGain(what_if=text, predicted_iteration_us=us, gain_us=base_us - us) for text, us in iteration_us.items()]
    return tuple(sorted(gains, key=lambda gain: -gain.gain_us))


class CriticalOp(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Ops of one name on the critical path.

    Attributes
    ----------
    share_pct
        Their part of the path.
    reason
        The commonest reason why they started no earlier.
    count, total_us
        How many of them are on the path, and their time on it, per iteration.
    framework_op, module, source
        Where the framework launched the op with the largest part.
    origins
        The number of different places that launch them.
    """

    op: str
    rank: int
    kind: str
    share_pct: float
    reason: str
    count: int
    total_us: float
    framework_op: str | UnsetType = UNSET
    module: str | UnsetType = UNSET
    source: str | UnsetType = UNSET
    origins: int | UnsetType = UNSET

    @property
    def origin(self) -> str:
        """The places in one line; empty where they are not known."""
        return origin_text({name: value for name, value in msgspec.structs.asdict(self).items() if value is not UNSET})


class RankFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Times of a rank in an iteration.

    Attributes
    ----------
    host
        None: not known.
    alike
        How many ranks behave alike, of which this is one.
    breakdown_us
        Parts of the iteration.
    last_pct, waited_us
        Share of the collectives to which it comes last, and how long it waits for others; None: not known.
    """

    rank: int
    host: str | UnsetType | None = UNSET
    alike: int | UnsetType = UNSET
    breakdown_us: Mapping[str, float] | UnsetType = UNSET
    last_pct: float | UnsetType | None = UNSET
    waited_us: float | UnsetType | None = UNSET

    @property
    def parts_us(self) -> Mapping[str, float]:
        """Parts of the iteration; empty: not known."""
        return {} if self.breakdown_us is UNSET else self.breakdown_us

    @property
    def title(self) -> str:
        """The name of the rank for people."""
        return f"rank {self.rank}"


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why an iteration takes as long as it does; the answer of the verb `diagnose`.

    Attributes
    ----------
    iteration_us, measured_iteration_us
        The replayed iteration, and what was measured of it; None: nothing was.
    critical_path
        Stretches of the critical path in order of time, or sums by rank and kind of op.
    gains
        What changes would gain, the largest gain first.
    findings
        Sentences with numbers and the setting to change, the costliest first.
    warnings
        Sentences about the recording.
    cluster
        Where the numbers hold, if not where the job was recorded.
    recording_doubt
        Why predictions from the recording are not to be trusted; None: they are.
    command
        The command that predicts the first gain again; None: none does.
    tokens_per_second, ..., not_known
        See `kinds._work.Efficiency`.
    """

    iteration_us: float
    measured_iteration_us: float | None
    critical_path: tuple[PathSegment, ...]
    critical_ops: tuple[CriticalOp, ...]
    ranks: tuple[RankFacts, ...]
    gains: tuple[PredictedGain, ...]
    findings: tuple[str, ...]
    warnings: tuple[str, ...]

    cluster: ClusterFacts | UnsetType = UNSET
    recording_doubt: str | UnsetType | None = UNSET
    command: str | UnsetType | None = UNSET
    tokens_per_second: float | UnsetType | None = UNSET
    tokens_per_second_per_device: float | UnsetType | None = UNSET
    mfu_pct: float | UnsetType | None = UNSET
    cost_per_million_tokens: float | UnsetType | None = UNSET
    cost_per_iteration_usd: float | UnsetType | None = UNSET
    energy_per_iteration_j: float | UnsetType | None = UNSET
    flops_per_device: float | UnsetType | None = UNSET
    price_assumed: str | UnsetType | None = UNSET
    power_assumed: str | UnsetType | None = UNSET
    mfu_doubt: str | UnsetType | None = UNSET
    not_known: Mapping[str, str] | UnsetType = UNSET

    @property
    def mean_us(self) -> float | None:
        """The mean over replayed steps; None: that of the job is no other than the median."""
        return None

    @property
    def tables(self) -> Sequence[Table]:
        """Tables for people."""
        return (critical_table(self.critical_ops), gain_table(self.gains, self.iteration_us))


def rank_facts(trace: Trace, rank_breakdown_us: Sequence[Mapping[str, float]]) -> tuple[RankFacts, ...]:
    """Breakdown of each rank's iteration, how often it comes last to a collective, and how long it waits for others."""
    punctuality = {arrival.rank: arrival for arrival in arrivals(trace)}
    return tuple(
        RankFacts(
            rank=rank,
            host=trace.meta.hosts[rank % len(trace.meta.hosts)],  # other ranks behave like the recorded ones in turn
            breakdown_us=breakdown,
            last_pct=punctuality[rank].last_pct if rank in punctuality else None,
            waited_us=punctuality[rank].waited_us if rank in punctuality else None,
        )
        for rank, breakdown in enumerate(rank_breakdown_us)
    )


def critical_ops(
    timeline: Timeline,
    most: int = 10,
    *,
    numbers: Sequence[int] = (),
    origins: Sequence[Mapping[str, str]] = (),
    row_name: Callable[[str], str] = str,
) -> tuple[CriticalOp, ...]:
    """The ops with the largest part of the critical path; ops of one name (which has the rank) are one.

    Parameters
    ----------
    timeline
        Several iterations, over all of which ops count.
    numbers
        Numbers of the graph's ranks in the job; empty: 0, 1, 2...
    origins
        Origins of the graph's ops (`graph.event_names.origins`); empty: not known.
    row_name
        The name under which an op of some name counts.
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
        row = CriticalOp(
            op=name,
            rank=numbers[rank] if numbers and rank >= 0 else rank,
            kind=OpKind(graph.op_kind[ops[0]]).name,
            share_pct=spent_us[name] / total_us * 100,
            reason=REASONS[Counter(path.reason[on_path].tolist()).most_common(1)[0][0]].value,
            count=len(ops),
            total_us=spent_us[name] / timeline.iterations,
        )
        if origins:
            different = len({tuple(origins[op].items()) for op in ops if origins[op]})
            row = msgspec.structs.replace(row, origins=different, **origins[ops[0]])
        rows.append(row)
    return tuple(rows)


def rank_table(ranks: Sequence[RankFacts]) -> Table:
    """The table of `rank_facts`."""
    rows = [
        (
            str(row.rank),
            *(time_text(row.parts_us[key]) for key in ("compute", "contention", "exposed_communication")),
            "unknown" if row.last_pct is None or row.last_pct is UNSET else percent_text(row.last_pct),
            "unknown" if row.waited_us is None or row.waited_us is UNSET else time_text(row.waited_us),
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


def critical_table(ops: Sequence[CriticalOp]) -> Table:
    """The table of `critical_ops`."""
    several = any(row.count > 1 for row in ops)
    length = _NAME_LENGTH - (_COUNTS_LENGTH if several else 0)
    rows: list[tuple[str, ...]] = []
    for name, row in zip(op_texts([row.op for row in ops], length), ops, strict=True):
        counted = (str(row.count), time_text(row.total_us)) if several else ()
        rows.append((name, *counted, percent_text(row.share_pct), _AFTER[row.reason]))
        if origin := row.origin:
            rows.append((f"  {shortened(origin, length - 2)}", *[""] * (len(rows[-1]) - 1)))
    columns = ("op", *(("ops", "time") if several else ()), "share", "starts after")
    return Table(title="ops on the critical path", columns=columns, rows=rows)


def gain_table(gains: Sequence[PredictedGain], iteration_us: float) -> Table:
    """The table of what-if gains, the largest first."""
    rows = []
    for name, gain in zip(short_names([gain.what_if for gain in gains[:_TOP_GAINS]]), gains, strict=False):
        gain_pct = gain.gain_us / iteration_us * 100 if gain.gain_pct is UNSET else gain.gain_pct
        gained = f"{time_text(gain.gain_us)} ({percent_text(gain_pct)})"
        rows.append((shortened(name, _NAME_LENGTH), time_text(gain.predicted_iteration_us), gained))
    return Table(title="what would it gain", columns=("what if", "iteration", "gain"), rows=rows)
