"""Measured all-reduces as points: from recorded jobs of every kind, from tables, from published measurements."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from sample import sample

from dpro_search.collect.readers.importers import import_trace
from dpro_search.collect.tables.all_reduces import AllReduceRow, CommHeader, CommTable
from dpro_search.collect.trace import EventKind
from dpro_search.costmodel.collectives.counts import Algorithm
from dpro_search.costmodel.collectives.model_file import CommunicationModel
from dpro_search.costmodel.collectives.series import Series, nccl_series, table_series, trace_series
from dpro_search.errors import InputError, TraceFormatError
from dpro_search.graph.core_time import collective_spans
from tests.recordings import trace_of

SHARED = Path(__file__).parents[3] / "shared" / "traces"


def test_a_horovod_job_gives_its_fused_all_reduces():
    series = trace_series(sample())
    spans = collective_spans(sample().events.select(sample().events.step >= 0))
    assert (series.name, series.algorithms) == ("gloo in a job", (Algorithm.RING,))
    np.testing.assert_array_equal(np.sort(series.points.size_bytes), np.sort(spans["size_bytes"]))
    assert series.duration_us.sum() == pytest.approx((spans["end_us"] - spans["start_us"]).sum())
    assert set(series.points.link_bytes_per_us) == {2e9 / 8e6}
    assert set(series.points.cores) == {2}


def test_a_ddp_job_moves_each_gradient_once_a_step():
    trace = trace_of("ddp_mlp")
    series = trace_series(trace)
    steps = len(np.unique(trace.events.step[trace.events.kind == EventKind.ALLREDUCE]))
    assert series.points.size_bytes.sum() >= steps * sum(tensor.size_bytes for tensor in trace.tensors)
    assert (series.duration_us > 0).all()


def test_pushes_and_pulls_have_workers_for_ranks():
    series = trace_series(trace_of("byteps_mlp"))
    assert series.algorithms == (Algorithm.PARAMETER_SERVER,)
    assert set(series.points.ranks) == {2}
    assert ((series.points.servers >= 1) & (series.points.servers <= 2)).all()


def test_transfers_that_overlap_are_one_point():
    trace = trace_of("ddp_mlp")
    events = trace.events
    moves = events.kind == EventKind.ALLREDUCE
    step = events.step[moves][0]
    chosen_events = moves & (events.step == step)
    one = replace(
        events, start_us=np.where(chosen_events, 0.0, events.start_us), end_us=np.where(chosen_events, 100.0, events.end_us)
    )
    series = trace_series(replace(trace, events=one.select(chosen_events)))
    assert len(series.duration_us) == 1
    assert series.duration_us[0] == 100.0


def test_a_trace_without_all_reduces_is_refused():
    trace = sample()
    with pytest.raises(InputError, match="no all-reduce of known size"):
        trace_series(replace(trace, events=trace.events.select(trace.events.kind == EventKind.OP)))


def test_a_model_is_trained_on_a_recorded_job():
    model = CommunicationModel.train([trace_series(sample())], ["sample"])
    (info,) = model.info.series
    assert info.mape_pct is not None
    assert info.coverage is not None


def table(*rows: AllReduceRow) -> CommTable:
    header = CommHeader(machine="m", cores=2, versions={}, started_at="2026-01-01")
    return CommTable(header=header, rows=rows, dropped={})


def row(**fields) -> AllReduceRow:
    usual = {
        "backend": "kvstore", "algorithm": "push-pull", "ranks": 4, "servers": 4, "size_bytes": 1 << 20,
        "rounds_us": (10.0, 30.0, 11.0), "calls": 3, "sent_bytes": 1,
    }  # fmt: skip
    return AllReduceRow(**(usual | fields))


def test_a_small_tensor_goes_to_one_server_and_a_large_one_to_all():
    (series,) = table_series(table(row(), row(size_bytes=3_999_996), row(size_bytes=4_000_000), row(size_bytes=1 << 24)))
    assert series.points.servers.tolist() == [1, 1, 4, 4]
    (series,) = table_series(table(row(backend="byteps"), row(backend="byteps", size_bytes=1 << 23)))
    np.testing.assert_allclose(series.points.servers, [1, (1 << 23) / 4_096_000])  # two whole parts and a little one


def test_rounds_give_a_duration_and_what_chance_makes_of_it():
    (series,) = table_series(table(row(rate_bps=8e8)))
    assert (series.duration_us[0], series.points.link_bytes_per_us[0], series.points.cores[0]) == (11.0, 100.0, 2)
    assert series.spread_pct[0] == pytest.approx(abs((10 + 11) / 2 - 30) / 2 / 11 * 100)
    (once,) = table_series(table(row(rounds_us=(10.0,))))
    assert np.isnan(once.spread_pct[0])


def test_series_of_one_name_are_taken_together():
    first, second = table_series(table(row())), table_series(table(row(size_bytes=4096), row(backend="gloo", algorithm="ring")))
    joined = Series.joined([*first, *second])
    assert {one.name: len(one.duration_us) for one in joined} == {"kvstore push-pull": 2, "gloo ring": 1}


def test_published_tables_of_nccl_are_read():
    folder = SHARED / "tables" / "nccl_allreduce_a100"
    if not folder.is_dir():
        pytest.skip("the published NCCL measurements are not here")
    (series,) = nccl_series(folder)
    assert len(series.duration_us) == 7 * 1024
    assert sorted(set(series.points.ranks)) == [2, 3, 4, 5, 6, 7, 8]


def test_collectives_on_devices_count_where_all_ranks_were_seen():
    folder = SHARED / "kineto_dlrm_8ranks"
    if not folder.is_dir():
        pytest.skip("the shared real traces are not here")
    series = trace_series(import_trace([folder]))
    assert series.name == "nccl in a job"
    assert set(series.points.ranks) == {8}
    assert 1 <= len(series.duration_us) <= 8


def test_a_folder_that_is_neither_and_a_damaged_table_are_refused(tmp_path):
    with pytest.raises(InputError, match="neither a trace nor"):
        nccl_series(tmp_path)
    (tmp_path / "AR_GPU2_1M_1024M_LUT").write_text("size(B),count\n1048576,2,float,oops\n")
    with pytest.raises(TraceFormatError, match="line 2"):
        nccl_series(tmp_path)


def test_all_reduces_of_several_ranks_on_a_host_are_series_of_their_own():
    several = [row(backend="mpi", algorithm="ring", ranks=4, ranks_per_host=2, size_bytes=2**power) for power in range(10, 15)]
    one = [msgspec.structs.replace(measured, ranks_per_host=1) for measured in several]
    measured = table_series(table(*several, *one))
    assert [series.name for series in measured] == ["mpi ring", "mpi ring, 2 ranks a host"]
    model = CommunicationModel.train(measured, ("table",))
    assert [series.cost.ranks_per_host for series in model.info.series] == [1, 2]


def test_a_job_of_several_ranks_on_a_host_is_none_of_one():
    meta = msgspec.structs.replace(sample().meta, hosts=("a", "a", "b", "b"))
    assert trace_series(replace(sample(), meta=meta)).name == "gloo in a job, 2 ranks a host"
