"""Figure: predictions with and without aligned clocks, where a host's clock is off by a known time.

    python -m experiments.dpro.alignment RESULTS --recordings DIR...

All ranks of our recordings ran on one machine, and so on one clock: the truth is known. What the ranks after the first recorded is
shifted, as if their host's clock were ahead; Horovod's timeline, which rank 0 writes, is not. Then predictions are made from the
trace as it is, and once more after `align_clocks` has estimated the shift from the collectives, as the assembly of a recording
does.

Two predictions: the replay, which takes little from one clock to the other; and a plain one that takes collectives as dPRO does,
from the last rank's post to the end on each rank, and is otherwise `daydream.CORRECTED`. Jobs with parameter servers are left out:
what the replay takes of each process are durations on its own clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from dpro_search.analysis import predict
from dpro_search.collect.assemble.common import aligned, joined, shifted
from dpro_search.collect.assemble.torch.job import transfers_of
from dpro_search.collect.trace import ClockReport, EventKind, Trace
from dpro_search.errors import DproSearchError
from dpro_search.graph.recorded_collectives import arrivals
from dpro_search.kinds import job_of
from dpro_search.replay.replayer import replay
from experiments.dpro.daydream import daydream_graph, exchange_of, recorded_units
from experiments.dpro.figures import Panel, bars
from experiments.dpro.parts import Options, Section, gathered, script, table
from experiments.dpro.published import ALIGNMENT_PCT, SOURCE
from experiments.dpro.recordings import SYSTEMS, Recording, mean_us
from experiments.dpro.worker import worker_of

NAME, TITLE = "alignment", "Alignment of clocks"
SHIFTS_US = (1e3, -1e3, 1e4, -1e4, 1e5, -1e5)
OF_COLLECTIVES = ("tensorflow", "horovod", "ddp")


class Told(msgspec.Struct, kw_only=True):
    """What a trace tells: iterations in us, None where it cannot be replayed; and how often rank 1 posts last, in %."""

    replayed_us: float | None
    from_spans_us: float
    late_pct: float


class Row(msgspec.Struct, kw_only=True):
    """One recording with one shift of all ranks but the first; times in us."""

    system: str
    workload: str
    link: str
    shift_us: float
    plain_us: list[float]
    recorded: Told
    off: Told
    back: Told  # shifted, and aligned
    recovered_us: float  # what was estimated of the shift
    residual_us: float  # what that may be off by, as the alignment says

    def error_pct(self, us: float | None) -> float | None:
        """Signed error against the plain runs."""
        return None if us is None else (us / mean_us(self.plain_us) - 1) * 100


def alignment(options: Options) -> Section:
    """The section."""
    jobs = {}
    for recording in options.at_base(OF_COLLECTIVES):
        for shift_us in SHIFTS_US:
            jobs[f"{recording.name}/{shift_us:+.0f}"] = lambda one=(recording, shift_us): row_of(*one)
    rows = list(gathered(options.results / f"{NAME}.json", Row, jobs).values())
    if not rows:
        return Section(name=NAME, title=TITLE, text="Not measured: no recording at the base rate was named.\n")
    text = "\n".join([_by_shift(rows), _recovered(rows), _theirs()])
    return Section(name=NAME, title=TITLE, text=text, picture=_picture(rows))


def row_of(recording: Recording, shift_us: float) -> Row:
    """What a recording tells as it is, shifted, and shifted and aligned."""
    trace = recording.load()
    off = with_clocks(trace, [0.0] + [shift_us] * (trace.meta.ranks - 1))
    report = aligned(off.events, tuple(f"host{rank}" for rank in range(trace.meta.ranks)), [0.0] * trace.meta.ranks)
    return Row(
        system=recording.system,
        workload=recording.workload,
        link=recording.link,
        shift_us=shift_us,
        plain_us=recording.plain_us(),
        recorded=_told(trace),
        off=_told(off),
        back=_told(with_clocks(off, [-offset_us for offset_us in report.offset_us])),
        recovered_us=report.offset_us[1],
        residual_us=report.residual_us[1],
    )


def with_clocks(trace: Trace, ahead_us: Sequence[float]) -> Trace:
    """The trace of the same job if each rank's clock were ahead by so much; of PyTorch, transfers follow from the shifted posts."""
    events = trace.events
    of_ranks = trace.meta.format.startswith("pytorch")
    if of_ranks:
        events = events.select(events.kind != EventKind.ALLREDUCE)
    clock = ClockReport(offset_us=tuple(-us for us in ahead_us), residual_us=(0.0,) * len(ahead_us), method="shifted")
    events, steps = shifted(events, trace.steps, clock)
    return replace(trace, events=joined([events, transfers_of(events)]) if of_ranks else events, steps=steps)


def from_spans_us(trace: Trace) -> float:
    """The first worker's step where collectives are as fast as they seem from one rank to the other.

    A collective takes from its last rank's post, or the end of the one before, to its end, mean over the ranks.
    """
    comm = trace.events.select((trace.events.kind == EventKind.COMM) & (trace.events.collective >= 0))
    numbers, row = np.unique(comm.collective, return_inverse=True)
    post = np.full((len(numbers), trace.meta.ranks), -np.inf)
    end = np.full((len(numbers), trace.meta.ranks), np.inf)
    size = np.zeros(len(numbers))
    np.maximum.at(post, (row, comm.rank), comm.start_us)
    np.minimum.at(end, (row, comm.rank), comm.end_us)
    np.add.at(size, row[comm.rank == 0], comm.size_bytes[comm.rank == 0])
    whole = np.isfinite(post).all(axis=1) & np.isfinite(end).all(axis=1)
    order = np.argsort(end[whole][:, 0], kind="stable")
    post, end, size = post[whole][order], end[whole][order], size[whole][order]
    before = np.vstack([np.full((1, end.shape[1]), -np.inf), np.maximum.accumulate(end, axis=0)[:-1]])
    taken_us = np.maximum(end - np.maximum(post.max(axis=1, keepdims=True), before), 0.0).mean(axis=1)
    worker, exchange = worker_of(trace), exchange_of(trace)
    rate = float(size.sum()) * exchange.volume / max(float(taken_us.sum()), 1.0)
    return replay(daydream_graph(worker, recorded_units(trace, worker), exchange, rate)).iteration_us


def _told(trace: Trace) -> Told:
    try:
        replayed_us = predict.replay(job_of(trace), predict.ReplayRequest()).iteration_us
    except DproSearchError:
        replayed_us = None
    late = [arrival.last_pct for arrival in arrivals(trace) if arrival.rank == 1]
    return Told(replayed_us=replayed_us, from_spans_us=from_spans_us(trace), late_pct=late[0])


def _by_shift(rows: Sequence[Row]) -> str:
    """Mean absolute errors by system and size of the shift, and what is said of rank 1."""
    lines = []
    for system in OF_COLLECTIVES:
        for size_us in sorted({abs(us) for us in SHIFTS_US}):
            mine = [row for row in rows if row.system == system and abs(row.shift_us) == size_us]
            if not mine:
                continue
            told = [[getattr(row, state) for row in mine] for state in ("recorded", "off", "back")]
            cells = [_cell(row.error_pct(one.replayed_us) for row, one in zip(mine, column, strict=True)) for column in told]
            cells += [_cell(row.error_pct(one.from_spans_us) for row, one in zip(mine, column, strict=True)) for column in told]
            cells += [_misplaced(mine, column) for column in told[1:]]
            lines.append([SYSTEMS[system], f"± {size_us / 1e3:g} ms", str(len(mine)), *cells])
    columns = (
        *("system", "clock off by", "cases#", "replay: one clock#", "off#", "aligned#"),
        *("from spans: one clock#", "off#", "aligned#", "late: off#", "aligned#"),
    )
    note = (
        "Mean / largest absolute error against plain runs, link of 2 Gbit/s. *Late*: by how many points the share of collectives "
        "that rank 1 posts last differs from that on one clock, which decides who is called a straggler.\n\n"
    )
    return note + table(columns, lines)


def _misplaced(rows: Sequence[Row], told: Sequence[Told]) -> str:
    return f"{np.mean([abs(one.late_pct - row.recorded.late_pct) for row, one in zip(rows, told, strict=True)]):.0f}"


def _cell(errors_pct: Iterable[float | None]) -> str:
    errors = list(errors_pct)
    size = np.abs([error for error in errors if error is not None])
    failed = f", {len(errors) - len(size)} cannot be replayed" if len(size) < len(errors) else ""
    return (f"{size.mean():.1f} / {size.max():.1f} %" if len(size) else "-") + failed


def _recovered(rows: Sequence[Row]) -> str:
    off_us = np.array([abs(row.recovered_us - row.shift_us) for row in rows])
    inside = sum(abs(row.recovered_us - row.shift_us) <= row.residual_us for row in rows)
    residual_us = np.array([row.residual_us for row in rows])
    return (
        f"The shift was estimated with an error of {np.median(off_us):.0f} us in the median, {off_us.max():.0f} us at most; "
        f"{inside} of {len(rows)} lie within the residual that the alignment reports "
        f"({np.median(residual_us):.0f} us in the median).\n"
    )


def _theirs() -> str:
    lines = [[str(gpus), f"{with_:.1f} %", f"{without:.1f} %"] for gpus, (with_, without) in ALIGNMENT_PCT.items()]
    return f"Theirs, BERT on V100s of several machines ({SOURCE}):\n\n" + table(
        ("GPUs#", "error with alignment#", "without#"), lines
    )


def _picture(rows: Sequence[Row]) -> str:
    panels = []
    for system in OF_COLLECTIVES:
        groups = []
        for row in (row for row in rows if row.system == system):
            values = (row.off.replayed_us, row.back.replayed_us, row.off.from_spans_us, row.back.from_spans_us)
            errors = [row.error_pct(us) for us in values]
            size = tuple(None if error is None else abs(error) for error in errors)
            groups.append((f"{row.workload}, {row.shift_us / 1e3:+g} ms", size))
        if groups:
            panels.append(Panel(title=SYSTEMS[system], groups=tuple(groups)))
    series = ("replay, clock off", "replay, aligned", "from spans, clock off", "from spans, aligned")
    return bars("Error with and without alignment", series, panels, unit="|error| in %", top=50.0)


if __name__ == "__main__":
    script(alignment, __doc__)
