"""Reading tables of operations of a pipeline-parallel job: which operations are parts of one message or collective."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="Parquet needs pyarrow (extra 'parquet')")
import pyarrow
import pyarrow.parquet
from importer_kit import ImporterConformance, shared_traces

from dpro_search.collect.readers import straggler_analysis
from dpro_search.collect.trace import EventKind, Trace
from dpro_search.errors import InputError, TraceFormatError

COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id")


def operation(
    rank: int, optype: str, start_s: float, length_s: float, *, step: int = 7, seq: int = 0, microbatch: int = -1
) -> tuple:
    """A row of a job with two stages (ranks 0 and 1 are the first) and two data-parallel ranks."""
    return (rank % 2, rank // 2, rank, step, optype, start_s, length_s, seq, 0, microbatch)


def one_microbatch(step: int = 7) -> list[tuple]:
    """Both pipelines send a microbatch forward and back, then reduce their gradients."""
    rows = []
    for rank in (0, 1):
        rows += [
            operation(rank, "forward-compute", 0.0, 0.1, step=step, microbatch=0),
            operation(rank, "forward-send", 0.1, 0.01, step=step),
            operation(rank, "backward-recv", 0.11, 0.39, step=step),
            operation(rank, "backward-compute", 0.5, 0.2, step=step, microbatch=0),
            operation(rank, "grads-reduce-scatter", 0.7, 0.05, step=step),
            operation(rank + 2, "forward-recv", 0.0, 0.11, step=step),
            operation(rank + 2, "forward-compute", 0.11, 0.19, step=step, microbatch=0),
            operation(rank + 2, "backward-compute", 0.3, 0.1, step=step, microbatch=0),
            operation(rank + 2, "backward-send", 0.49, 0.01, step=step),
            operation(rank + 2, "grads-reduce-scatter", 0.51, 0.05, step=step),
        ]
    return rows


def written(path: Path, rows: list[tuple]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))), path)
    return path


def read(path: Path, rows: list[tuple]) -> Trace:
    return straggler_analysis.read([written(path / "job.parquet", rows)])


def parts(trace: Trace) -> set[frozenset[tuple[int, str]]]:
    """Ranks and names of the parts of every message and collective."""
    events = trace.events
    numbers = set(events.collective[events.collective >= 0].tolist())
    return {
        frozenset((int(events.rank[i]), trace.names[events.name[i]]) for i in np.flatnonzero(events.collective == number))
        for number in numbers
    }


class TestStragglerAnalysis(ImporterConformance):
    importer = straggler_analysis.IMPORTER
    ranks_are_seen = False

    @pytest.fixture
    def files(self, tmp_path):
        return [written(tmp_path / "job.parquet", one_microbatch(7) + one_microbatch(9))]


def test_ends_of_a_message_and_parts_of_a_collective_share_a_number(tmp_path):
    assert parts(read(tmp_path, one_microbatch())) == {
        frozenset({(0, "forward-send 0"), (2, "forward-recv 0")}),
        frozenset({(1, "forward-send 0"), (3, "forward-recv 0")}),
        frozenset({(2, "backward-send 0"), (0, "backward-recv 0")}),
        frozenset({(3, "backward-send 0"), (1, "backward-recv 0")}),
        frozenset({(0, "grads-reduce-scatter 0"), (1, "grads-reduce-scatter 0")}),
        frozenset({(2, "grads-reduce-scatter 0"), (3, "grads-reduce-scatter 0")}),
    }


def test_steps_keep_their_numbers_and_lengths_and_follow_each_other(tmp_path):
    trace = read(tmp_path, one_microbatch(9) + one_microbatch(7))
    rank_steps = trace.steps.select(trace.steps.rank == 0)
    assert rank_steps.index.tolist() == [7, 9]
    assert rank_steps.end_us - rank_steps.start_us == pytest.approx([750_000, 750_000])
    assert rank_steps.start_us[1] == rank_steps.end_us[0]


def test_an_operation_needs_what_its_rank_did_before(tmp_path):
    trace = read(tmp_path, one_microbatch())
    names = [trace.names[i] for i in trace.events.name]
    needs = trace.dependencies
    assert ("forward-send 0", "backward-recv 0") in {(names[s], names[t]) for s, t in zip(needs.source, needs.target, strict=True)}
    assert (trace.events.rank[needs.source] == trace.events.rank[needs.target]).all()


def test_a_message_whose_receiver_was_not_recorded_stays_unmatched_and_is_counted(tmp_path):
    trace = read(tmp_path, [row for row in one_microbatch() if row[2] != 2])
    lonely = (trace.events.kind == EventKind.COLLECTIVE) & (trace.events.collective < 0)
    assert sorted(trace.names[i] for i in trace.events.name[lonely]) == ["backward-recv 0", "forward-send 0"]
    assert trace.meta.dropped == {"parts of unmatched collectives (kept, unmatched)": 2}
    assert trace.meta.warnings == ("rank 2 has no rows",)


def test_unusable_rows_are_counted_by_reason(tmp_path):
    bad = [
        operation(0, "forward-compute", 0.0, 0.1, microbatch=0),
        operation(0, "backward-compute", 0.0, -1.0, microbatch=5),
        operation(0, "backward-compute", float("nan"), 0.1, microbatch=6),
        operation(-1, "gc", 0.0, 0.1),
        operation(0, None, 0.0, 0.1),
    ]
    trace = read(tmp_path, one_microbatch() + bad)
    assert len(trace.events) == len(one_microbatch())
    assert trace.meta.dropped == {"out of range": 2, "twice": 1, "without a duration": 1, "wrong type": 1}


def test_another_table_is_refused_with_the_columns_that_it_lacks(tmp_path):
    path = tmp_path / "other.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"rank": [0], "x": [1.0]}), path)
    with pytest.raises(TraceFormatError, match=r"other.parquet: a Parquet table without the columns dp_rank, stage"):
        straggler_analysis.read([path])


def test_one_job_at_a_time(tmp_path):
    paths = [written(tmp_path / name, one_microbatch()) for name in ("a.parquet", "b.parquet")]
    with pytest.raises(InputError, match="one table holds a whole job"):
        straggler_analysis.read(paths)


def test_every_message_and_collective_of_a_real_job_is_matched():
    trace = straggler_analysis.read([shared_traces() / "stragglers" / "trace-ST.parquet"])
    assert (len(trace.events), trace.meta.ranks, len(trace.steps), trace.meta.dropped) == (6784, 8, 8 * 32, {})
    moved = trace.events.collective[trace.events.kind == EventKind.COLLECTIVE]
    assert (moved >= 0).all()
    # Per step: 8 tensor-parallel groups of which one rank is recorded, 6 x 2 x 4 messages + 2 x 4 + 2 pairs, 1 of all ranks.
    assert np.bincount(np.bincount(moved)).tolist() == [0, 256, 1856, 0, 0, 0, 0, 0, 32]
