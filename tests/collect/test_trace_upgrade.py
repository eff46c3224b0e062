"""Traces of version 1 load: what they say in names becomes the columns that a reader of today fills."""

from pathlib import Path

import numpy as np
import pytest

from dpro_search import Recording
from dpro_search.collect.assemble.byteps import assemble_byteps
from dpro_search.collect.trace import TRACE_VERSION, CollectiveKind, EventKind, Role, Trace
from dpro_search.kinds import assemble_raw
from tests.sample import horovod_trace_path

DATA = Path(__file__).parents[1] / "data"
OLD = {"ddp_mlp": assemble_raw, "fsdp_mlp": assemble_raw, "byteps_mlp": assemble_byteps}


@pytest.fixture(params=OLD)
def name(request) -> str:
    return request.param


def old(name: str) -> Trace:
    return Trace.load(DATA / "traces_v1" / name)


def columns_of(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / "traces_v1" / name / "trace.npz") as file:
        return dict(file)


def written(folder: Path, name: str, columns: dict[str, np.ndarray]) -> Path:
    """A trace of version 1 with other columns."""
    (folder / "meta.json").write_bytes((DATA / "traces_v1" / name / "meta.json").read_bytes())
    np.savez(folder / "trace.npz", **columns)
    return folder


def test_the_files_are_of_version_1(name):
    assert b'"version": 1,' in (DATA / "traces_v1" / name / "meta.json").read_bytes()


def test_it_tells_the_same_as_a_recording_that_is_read_today(name):
    before, now = old(name).events, OLD[name](DATA / name).events
    for column in ("kind", "rank", "step", "tensor", "collective", "size_bytes", "collective_kind", "role"):
        np.testing.assert_array_equal(getattr(before, column), getattr(now, column), err_msg=column)


def test_it_predicts_the_same(name):
    before, now = (
        Recording(folder=DATA, source=trace).replay(changes={"rate": "500mbit"}) for trace in (old(name), OLD[name](DATA / name))
    )
    assert before.iteration_us == pytest.approx(now.iteration_us, rel=1e-4)  # files hold hundredths of a microsecond
    assert before.iteration_us > 0


def test_what_it_never_told_is_unknown(name):
    trace = old(name)
    assert (trace.groups, trace.dtypes, trace.shapes) == ((), (), ())
    assert max(column.max() for column in (trace.events.group, trace.events.dtype, trace.events.shapes)) == -1


@pytest.mark.parametrize("number", [2**30, 2**60])
def test_a_huge_number_of_a_collective_takes_no_memory(name, number, tmp_path):
    columns = columns_of(name)
    collective = columns["events.collective"].astype(np.int64)
    columns["events.collective"] = np.where(collective == collective.max(), number, collective)
    trace = Trace.load(written(tmp_path, name, columns))
    assert (trace.events.collective == number).any()
    np.testing.assert_array_equal(trace.events.collective_kind, old(name).events.collective_kind)


def test_one_without_collectives_loads(name, tmp_path):
    columns = columns_of(name)
    columns["events.kind"] = np.full_like(columns["events.kind"], EventKind.OP)
    assert (Trace.load(written(tmp_path, name, columns)).events.collective_kind == CollectiveKind.UNKNOWN).all()


def test_saved_again_it_is_of_today(name, tmp_path):
    old(name).save(tmp_path / "t")
    assert old(name).meta.version == TRACE_VERSION
    again = Trace.load(tmp_path / "t")
    assert again.meta == old(name).meta
    np.testing.assert_array_equal(again.events.role, old(name).events.role)


def test_nodes_of_the_backward_pass_are_told_by_the_scope_of_their_names():
    for graph in Trace.load(horovod_trace_path()).graphs:
        marked = {name for name, backward in zip(graph.name, graph.backward, strict=True) if backward}
        assert marked == {name for name in graph.name if "gradient_tape/" in name}
        assert marked


def test_the_bundled_sample_tells_its_all_reduces():
    events = Trace.load(horovod_trace_path()).events
    communicates = np.isin(events.kind, (EventKind.COMM, EventKind.ALLREDUCE, EventKind.NEGOTIATE))
    assert (events.collective_kind[communicates] == CollectiveKind.ALL_REDUCE).all()
    assert (events.collective_kind[np.isin(events.kind, (EventKind.OP, EventKind.CYCLE))] == CollectiveKind.UNKNOWN).all()
    assert (events.role == Role.UNKNOWN).all()
