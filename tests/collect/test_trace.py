"""A trace folder: what is written is read again, and a bad one is refused in one line."""

import json
import shutil
import subprocess
import sys
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from sample import HOROVOD_SAMPLE, sample

from dpro_search.collect.sample import samples
from dpro_search.collect.trace import (
    DESCRIPTIONS,
    CollectiveKind,
    EventKind,
    Events,
    ProcessGroup,
    Role,
    Steps,
    Trace,
)
from dpro_search.errors import InputError, TraceFormatError, TraceVersionError
from tests.every_case import every_case
from tests.sample import horovod_trace_path


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(horovod_trace_path(), tmp_path / "trace")


def test_a_saved_trace_loads_equal(tmp_path):
    sample().save(tmp_path / "t")
    again = Trace.load(tmp_path / "t")
    assert again.meta == sample().meta
    assert (again.tensors, again.names, again.graph_of_rank) == (sample().tensors, sample().names, sample().graph_of_rank)
    for kind, ours, theirs in ((Events, sample().events, again.events), (Steps, sample().steps, again.steps)):
        for field in fields(kind):
            np.testing.assert_allclose(getattr(theirs, field.name), getattr(ours, field.name), atol=0.01)
    for ours, theirs in zip(sample().graphs, again.graphs, strict=True):
        np.testing.assert_array_equal(theirs.backward, ours.backward)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t"]


GROUPS = st.builds(
    lambda name, ranks: ProcessGroup(name=name, description="of a mesh", ranks=tuple(sorted(ranks)), size=len(ranks) or 7),
    st.text(max_size=4),
    st.sets(st.integers(0, 10_000), max_size=4),
)
SHAPES = st.lists(st.lists(st.integers(0, 2**40), max_size=3).map(tuple), min_size=1, max_size=3).map(tuple)


def small(**tables) -> Trace:
    """Ten events of the sample, which is of today's format or was brought to it."""
    return replace(sample(), graphs=(), graph_of_rank=(), events=sample().events.select(np.arange(10)), **tables)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_what_events_are_about_is_saved_and_loaded(tmp_path_factory, data):
    tables = {
        "groups": data.draw(st.lists(GROUPS, max_size=300, unique=True).map(tuple)),
        "dtypes": data.draw(st.lists(st.text(max_size=8), max_size=3, unique=True).map(tuple)),
        "shapes": data.draw(st.lists(SHAPES, max_size=5, unique=True).map(tuple)),
    }
    entries = {"group": len(tables["groups"]), "dtype": len(tables["dtypes"]), "shapes": len(tables["shapes"])}
    entries |= {"collective_kind": max(CollectiveKind) + 1, "role": max(Role) + 1}
    trace = small(**tables)
    entries |= dict.fromkeys(("op", "module", "source"), len(trace.names))
    columns = {
        name: np.array(data.draw(st.lists(st.integers(-1, count - 1), min_size=10, max_size=10)), DESCRIPTIONS[name])
        for name, count in entries.items()
    }
    trace = replace(trace, events=replace(trace.events, **columns))
    folder = tmp_path_factory.mktemp("trace") / "t"
    trace.save(folder)
    again = Trace.load(folder)
    assert (again.groups, again.dtypes, again.shapes) == (trace.groups, trace.dtypes, trace.shapes)
    for name, column in columns.items():
        np.testing.assert_array_equal(getattr(again.events, name), column)


def test_a_column_that_tells_nothing_takes_no_room(tmp_path):
    trace = small()
    unknown = {name: np.full(10, -1, dtype) for name, dtype in DESCRIPTIONS.items()}
    replace(trace, events=replace(trace.events, **unknown)).save(tmp_path / "t")
    with np.load(tmp_path / "t" / "trace.npz") as file:
        assert {f"events.{name}" for name in DESCRIPTIONS} & set(file.files) == set()
    assert (Trace.load(tmp_path / "t").events.group == -1).all()


@every_case("name", DESCRIPTIONS)
@every_case("code", [-2, 100_000])
def test_a_code_that_no_table_has_is_one_line(tmp_path, name, code):
    trace = small(groups=(ProcessGroup(name="0"),), dtypes=("float32",), shapes=(((8, 64),),))
    column = np.zeros(10, np.int32)
    column[3] = code
    replace(trace, events=replace(trace.events, **{name: column})).save(tmp_path / "t")
    with pytest.raises(TraceFormatError, match=r"trace\.npz: does not fit together \(events: .*\); record it again") as error:
        Trace.load(tmp_path / "t")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "tables",
    [
        {"groups": (ProcessGroup(ranks=(0, 0), size=2),)},
        {"groups": (ProcessGroup(ranks=(0, -1), size=2),)},
        {"groups": (ProcessGroup(ranks=(0, 1), size=3),)},
        {"groups": (ProcessGroup(size=-2),)},
        {"shapes": (((8, -64),),)},
    ],
)
def test_a_table_with_impossible_entries_is_one_line(tmp_path, tables):
    small(**tables).save(tmp_path / "t")
    with pytest.raises(TraceFormatError, match="does not fit together"):
        Trace.load(tmp_path / "t")


def test_marks_of_the_backward_pass_that_do_not_fit_their_graph_are_one_line(tmp_path):
    first, *others = sample().graphs
    replace(sample(), graphs=(replace(first, backward=first.backward[1:]), *others)).save(tmp_path / "t")
    with pytest.raises(TraceFormatError, match="graph: marks of the backward pass"):
        Trace.load(tmp_path / "t")


def test_a_column_of_another_length_is_one_line(tmp_path):
    small().save(tmp_path / "t")
    with np.load(tmp_path / "t" / "trace.npz") as file:
        columns = dict(file) | {"events.group": np.zeros(3, np.int8)}
    np.savez(tmp_path / "t" / "trace.npz", **columns)
    with pytest.raises(TraceFormatError, match="columns of different lengths"):
        Trace.load(tmp_path / "t")


@pytest.mark.parametrize("text", ["0.029999z", "", "nan", "inf", "1e300", "-1"])
def test_a_knob_that_is_no_number_is_one_line(text):
    meta = structs.replace(sample().meta, knobs={"bucket_cap_mb": text})
    with pytest.raises(InputError, match=r"knobs: bucket_cap_mb=.*: must be a number >= 0"):
        meta.number_knob("bucket_cap_mb", 25)


def test_a_knob_that_was_not_recorded_has_its_own_default():
    meta = structs.replace(sample().meta, knobs={"bucket_cap_mb": "0.03"})
    assert (meta.number_knob("bucket_cap_mb", 25), meta.number_knob("BYTEPS_SCHEDULING_CREDIT", 4)) == (0.03, 4)


def test_an_existing_folder_is_never_overwritten(copy):
    before = (copy / "trace.npz").read_bytes()
    with pytest.raises(InputError, match="exists already"):
        sample().save(copy)
    assert (copy / "trace.npz").read_bytes() == before


def test_a_trace_of_another_version_is_refused(copy):
    meta = json.loads((copy / "meta.json").read_text())
    (copy / "meta.json").write_text(json.dumps(meta | {"version": 99}))
    with pytest.raises(TraceVersionError, match="version 99, this program reads 1 to 2; install a later dpro-search"):
        Trace.load(copy)


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from dpro_search.collect.sample import sample_trace_path
from dpro_search.collect.trace import Trace
from dpro_search.errors import MissingCapabilityError
trace = Trace.load(sample_trace_path("resnet50_2ranks_2gbit"))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    trace.save(Path(sys.argv[1]))
except MissingCapabilityError as error:
    print(error)
"""


def test_a_disk_that_cannot_take_it_is_one_line_and_leaves_nothing(tmp_path):
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path / "t")], capture_output=True, text=True, check=True)
    assert "cannot be written" in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["meta.json", "trace.npz"])
def test_a_missing_file_is_named(copy, name):
    (copy / name).unlink()
    with pytest.raises(InputError, match=name):
        Trace.load(copy)


@pytest.mark.parametrize("kept", [0, 100, 0.5, 0.99])
def test_a_truncated_trace_is_refused(copy, kept):
    data = (copy / "trace.npz").read_bytes()
    (copy / "trace.npz").write_bytes(data[: int(kept * len(data)) if kept < 1 else int(kept)])
    with pytest.raises(TraceFormatError, match=r"trace\.npz"):
        Trace.load(copy)


def test_metadata_that_is_no_json_is_refused(copy):
    (copy / "meta.json").write_text("{")
    with pytest.raises(TraceFormatError, match=r"meta\.json"):
        Trace.load(copy)


class TestTheBundledSample:
    def test_is_real_and_says_where_it_comes_from(self):
        meta = sample().meta
        assert meta.versions["tensorflow"].startswith("2.15")
        assert meta.versions["horovod"] == "0.28.1"
        assert meta.command
        assert meta.machine
        assert meta.recorded_at
        assert "A real recording" in next(one.provenance for one in samples() if one.name == HOROVOD_SAMPLE)

    def test_is_small(self):
        assert sum(path.stat().st_size for path in horovod_trace_path().iterdir()) < 3e6

    def test_has_every_gradient_on_every_rank_in_every_profiled_step(self):
        events = sample().events
        comm = events.select((events.kind == EventKind.COMM) & (events.step >= 0))
        steps = np.unique(sample().steps.index[sample().steps.traced])
        seen = set(zip(comm.rank.tolist(), comm.step.tolist(), comm.tensor.tolist(), strict=True))
        whole = {(r, s, t) for r in range(sample().meta.ranks) for s in steps.tolist() for t in range(len(sample().tensors))}
        assert whole <= seen

    def test_measures_untraced_iterations(self):
        assert len(sample().iterations_us()) >= 10
