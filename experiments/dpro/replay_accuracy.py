"""Table: predicted iterations beside plain runs, by the replay and by three Daydreams, on every recording.

    python -m experiments.dpro.replay_accuracy RESULTS --recordings DIR...

The truth is what the plain runs beside a recording took, which no prediction uses. `daydream.py` and `worker.py` say what
Daydream is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from dpro_search.analysis.predict import ReplayRequest, replay
from dpro_search.collect.trace import Trace
from dpro_search.errors import InputError
from dpro_search.graph.measured import profiled_iterations_us
from dpro_search.kinds import job_of
from experiments.dpro.daydream import Variant, measured_bytes_per_us, predictions_us
from experiments.dpro.figures import Panel, bars
from experiments.dpro.parts import Options, Section, gathered, script, table
from experiments.dpro.published import SOURCE, replay_errors_pct
from experiments.dpro.recordings import SYSTEMS, Recording, mean_us
from experiments.dpro.worker import worker_of

NAME = "replay-accuracy"
_CLOSE_PCT = 5.0
_DISTURBED_PCT = 20.0  # of a profiler's overhead


class Row(msgspec.Struct, kw_only=True):
    """One recording. Times in us; the bandwidth is what its transfers reached in bytes/us."""

    system: str
    workload: str
    link: str
    machine: str
    recorded_at: str
    plain_us: list[float]
    overhead_pct: float  # of the profiler: its steps over the recording's others
    replayed_us: float
    plain_daydream_us: float
    slip_us: float
    corrected_us: float
    compute_us: float  # of worker 0 in its profile
    bytes_per_us: float

    @property
    def measured_us(self) -> float:
        """The truth."""
        return mean_us(self.plain_us)


Column = Callable[[Row], float]
COLUMNS: dict[str, Column] = {
    "replay": lambda row: row.replayed_us,
    "Daydream": lambda row: row.plain_daydream_us,
    "Daydream, corrected": lambda row: row.corrected_us,
    "Daydream, dPRO's bandwidth": lambda row: row.slip_us,
}


def replay_accuracy(options: Options) -> Section:
    """The section."""
    found = options.recordings()
    if not found:
        named = ", ".join(map(str, options.folders)) or "no folder (name some with --recordings)"
        raise InputError(f"{named}: no recording with plain runs beside it; make them with experiments.validation")
    jobs = {recording.name: lambda recording=recording: row_of(recording) for recording in found}
    rows = list(gathered(options.results / f"{NAME}.json", Row, jobs).values())
    text = "\n".join([_summary(rows), _all_rows(rows)])
    return Section(name=NAME, title="Replay accuracy, beside Daydream", text=text, picture=_picture(rows))


def row_of(recording: Recording) -> Row:
    """All predictions of a recording."""
    trace = recording.load()
    prediction = replay(job_of(trace), ReplayRequest())
    daydream = predictions_us(trace)
    return Row(
        system=recording.system,
        workload=recording.workload,
        link=recording.link,
        machine=trace.meta.machine,
        recorded_at=trace.meta.recorded_at,
        plain_us=recording.plain_us(),
        overhead_pct=overhead_pct(trace),
        replayed_us=prediction.iteration_us,
        plain_daydream_us=daydream[Variant.PLAIN],
        slip_us=daydream[Variant.SLIP],
        corrected_us=daydream[Variant.CORRECTED],
        compute_us=worker_of(trace).compute_us,
        bytes_per_us=measured_bytes_per_us(trace),
    )


def overhead_pct(trace: Trace) -> float:
    """How much longer the profiled steps took than the others of the same job."""
    profiled_us = list(profiled_iterations_us(trace).values())
    return (float(np.median(profiled_us)) / float(np.median(trace.iterations_us())) - 1) * 100


def error_pct(row: Row, column: Column) -> float:
    """Signed error of a prediction against the plain runs."""
    return (column(row) / row.measured_us - 1) * 100


def _summary(rows: Sequence[Row]) -> str:
    """Mean and largest absolute error by system, and dPRO's."""
    lines = []
    for system in (*SYSTEMS, None):
        mine = [row for row in rows if system in (row.system, None)]
        if mine:
            cells = [_error_cell([error_pct(row, column) for row in mine]) for column in COLUMNS.values()]
            lines.append(["**all**" if system is None else SYSTEMS[system], str(len(mine)), *cells])
    calm = [row for row in rows if row.overhead_pct < _DISTURBED_PCT]
    if calm:
        cells = [_error_cell([error_pct(row, column) for row in calm]) for column in COLUMNS.values()]
        lines.append([f"profiled steps less than {_DISTURBED_PCT:.0f} % slower than others", str(len(calm)), *cells])
    theirs, daydreams = replay_errors_pct()
    lines.append([f"the paper's table, {SOURCE}", str(len(theirs)), _error_cell(theirs), "", "", _error_cell(daydreams)])
    machines, days = sorted({row.machine for row in rows}), sorted({row.recorded_at[:10] for row in rows})
    said = f"Recorded on {', '.join(days)} on {'; '.join(machines)}.\n\n"
    return (
        said
        + "Mean / largest absolute error; in brackets how many are within 5 %:\n\n"
        + table(("", "recordings#", *(f"{name}#" for name in COLUMNS)), lines)
    )


def _error_cell(errors_pct: Sequence[float]) -> str:
    size = np.abs(errors_pct)
    return f"{size.mean():.1f} / {size.max():.1f} % ({int((size < _CLOSE_PCT).sum())})"


def _all_rows(rows: Sequence[Row]) -> str:
    lines = [
        [
            SYSTEMS[row.system],
            row.workload,
            row.link,
            ", ".join(f"{us / 1e3:.0f}" for us in row.plain_us),
            *(f"{column(row) / 1e3:.0f} ({error_pct(row, column):+.1f} %)" for column in COLUMNS.values()),
        ]
        for row in rows
    ]
    return table(("system", "workload", "link", "plain runs, ms#", *(f"{name}#" for name in COLUMNS)), lines)


def _picture(rows: Sequence[Row]) -> str:
    panels = [
        Panel(
            title=name,
            groups=tuple(
                (f"{row.workload}, {row.link}", tuple(column(row) / row.measured_us for column in COLUMNS.values()))
                for row in rows
                if row.system == system
            ),
        )
        for system, name in SYSTEMS.items()
        if any(row.system == system for row in rows)
    ]
    return bars("Predicted over measured iteration", tuple(COLUMNS), panels, unit="predicted / measured", top=1.6, line=1.0)


if __name__ == "__main__":
    script(replay_accuracy, __doc__)
