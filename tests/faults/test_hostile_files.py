"""Files that are damaged or made to do harm: a value or one line of error, never a crash, nothing written elsewhere."""

import io
import json
import shutil
import sys
import zipfile
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample import horovod

from dpro_search import load_run
from dpro_search.collect.assemble.torch.job import assemble_torch
from dpro_search.collect.trace import Trace
from dpro_search.errors import DproSearchError, InputError, TraceFormatError
from dpro_search.kinds import JobInScenario, recorded_job
from dpro_search.search import SearchResult
from dpro_search.space.plan import Plan, setting_names
from tests.cli.facts import replayed
from tests.faults.processes import RAW, SEARCH
from tests.in_process import dpro, fails_in_one_line, succeeds
from tests.sample import horovod_trace_path

FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
SLOW = settings(FUZZ, max_examples=40)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["fp16", "2bit", "a#0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)
DEEP = 200_000  # brackets; more than any recursive reader stands


def one_line(error: DproSearchError, where: object = "") -> None:
    assert "\n" not in str(error)
    assert str(where) in str(error)


def read_plan(raw: bytes) -> Plan | None:
    try:
        return Plan.from_json(raw, "p.json")
    except InputError as error:
        one_line(error, "p.json")
        return None


NAMES = st.sampled_from((*setting_names(), "scheme", "name"))


class TestPlans:
    @FUZZ
    @given(fields=st.dictionaries(NAMES | st.text(max_size=5), VALUES, max_size=4), own=st.dictionaries(NAMES, VALUES, max_size=2))
    def test_any_object_is_a_plan_or_one_line(self, fields, own):
        scheme = {"scheme": {"name": "horovod", **own}} if own else {}
        plan = read_plan(json.dumps({"version": 2, **scheme, **fields}).encode())
        assert plan is None or Plan.from_json(plan.to_json()) == plan

    @FUZZ
    @given(
        raw=st.binary(max_size=60) | st.binary(max_size=20).map(lambda raw: b'{"version": 1, "tensor_groups": [["' + raw + b'"]]}')
    )
    def test_any_bytes_are_a_plan_or_one_line(self, raw):
        read_plan(raw)

    @pytest.mark.parametrize(
        "raw",
        [
            b"[" * DEEP,
            b'{"version":1,"tensor_groups":' + b"[" * DEEP,
            b'{"a":' * DEEP,
            b'{"version":' + b"[" * DEEP + b"]" * DEEP + b"}",
        ],
    )
    def test_nesting_without_end_is_one_line(self, raw):
        assert read_plan(raw) is None

    @FUZZ
    @given(
        threshold=st.none() | st.integers(0, 2**200),
        cycle_us=st.none() | st.floats(0, exclude_min=True, allow_infinity=False),
    )
    def test_a_plan_of_any_numbers_is_priced_or_refused(self, threshold, cycle_us):
        try:
            plan = Plan.of(fusion_threshold_bytes=threshold, cycle_time_us=cycle_us)
            prediction = JobInScenario(horovod()).predict(plan)
        except DproSearchError as error:
            one_line(error)
        else:
            assert np.isfinite(prediction.iteration_us)


@cache
def columns(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "trace.npz") as data:
        return dict(data)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """A small real trace."""
    folder = tmp_path_factory.mktemp("recorded") / "trace"
    assemble_torch(RAW).save(folder)
    return folder


def replayed_or_one_line(folder: Path) -> None:
    try:
        trace = Trace.load(folder)
        replayed(trace)
    except DproSearchError as error:
        one_line(error)


class TestTraces:
    @SLOW
    @given(seed=st.integers(0, 2**32 - 1), flips=st.integers(1, 30))
    def test_bytes_may_be_wrong(self, recorded, tmp_path_factory, seed, flips):
        folder = shutil.copytree(recorded, tmp_path_factory.mktemp("flipped") / "trace")
        rng = np.random.default_rng(seed)
        for name in ("trace.npz", "meta.json"):
            data = np.frombuffer((folder / name).read_bytes(), np.uint8).copy()
            data[rng.integers(0, len(data), flips)] = rng.integers(0, 256, flips)
            (folder / name).write_bytes(data.tobytes())
            replayed_or_one_line(folder)
            shutil.copyfile(recorded / name, folder / name)

    @SLOW
    @given(data=st.data())
    def test_columns_may_hold_anything(self, recorded, tmp_path_factory, data):
        damaged_columns = dict(columns(recorded))
        name = data.draw(st.sampled_from(sorted(damaged_columns)))
        column = damaged_columns[name]
        change = data.draw(st.sampled_from(["value", "shorter", "type", "shape", "gone"]))
        if change == "value" and column.dtype.kind != "b":
            column = column.copy()
            places = data.draw(st.lists(st.integers(0, max(len(column) - 1, 0)), min_size=1, max_size=3))
            worst = [0, -1, -2, 10**6, 2**31 - 1] if column.dtype.kind in "iu" else [0.0, -1e30, 1e300, float("nan"), float("inf")]
            for place in places if len(column) else ():
                column[place] = np.asarray(data.draw(st.sampled_from(worst))).astype(column.dtype)
        elif change == "shorter":
            column = column[: len(column) // 2]
        elif change == "type":
            column = column.astype(data.draw(st.sampled_from([str, np.complex128, np.bool_, np.float32])))
        elif change == "shape":
            column = column[None]
        damaged_columns[name] = column
        if change == "gone":
            del damaged_columns[name]
        folder = tmp_path_factory.mktemp("changed")
        shutil.copyfile(recorded / "meta.json", folder / "meta.json")
        np.savez(folder / "trace.npz", **damaged_columns)
        replayed_or_one_line(folder)

    @FUZZ
    @given(data=st.data())
    def test_metadata_may_hold_anything(self, recorded, tmp_path_factory, data):
        meta = json.loads((recorded / "meta.json").read_bytes())
        meta[data.draw(st.sampled_from(sorted(meta)))] = data.draw(VALUES)
        folder = tmp_path_factory.mktemp("meta")
        shutil.copyfile(recorded / "trace.npz", folder / "trace.npz")
        (folder / "meta.json").write_text(json.dumps(meta))
        try:
            Trace.load(folder)
        except DproSearchError as error:
            one_line(error)

    def test_columns_that_would_fill_the_memory_are_refused(self, recorded, tmp_path):
        shutil.copyfile(recorded / "meta.json", tmp_path / "meta.json")
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (2**40,)})
        with zipfile.ZipFile(tmp_path / "trace.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("strings.npy", header.getvalue() + bytes(100))
        with pytest.raises(TraceFormatError, match="damaged"):
            Trace.load(tmp_path)

    def test_a_pickle_is_not_read(self, recorded, tmp_path):
        shutil.copyfile(recorded / "meta.json", tmp_path / "meta.json")
        np.savez(tmp_path / "trace.npz", **{**columns(recorded), "strings": np.array([_Evil(tmp_path / "harm")], dtype=object)})
        with pytest.raises(TraceFormatError):
            Trace.load(tmp_path)
        assert not (tmp_path / "harm").exists()


def of_a_stranger(folder: Path, **changed: object) -> Path:
    """The bundled recording with a changed meta.json."""
    trace = shutil.copytree(horovod_trace_path(), folder / "trace")
    meta = json.loads((trace / "meta.json").read_bytes())
    (trace / "meta.json").write_text(json.dumps(meta | changed))
    return trace


class TestJobsOfStrangers:
    def test_the_command_of_a_trace_is_shown_and_not_run(self, searched, tmp_path):
        trace = of_a_stranger(tmp_path, command=["touch", str(tmp_path / "harm done")])
        line = fails_in_one_line(2, "validate", searched, "--trace", trace)
        assert f"touch '{tmp_path}/harm done'" in line
        assert "--run-recorded-command" in line
        with pytest.raises(InputError, match="add run_recorded_command"):
            load_run(searched).validate(trace=trace)
        succeeds("doctor", trace)
        assert not (tmp_path / "harm done").exists()

    def test_it_is_shown_and_run_on_request(self, searched, tmp_path):
        trace = of_a_stranger(tmp_path, command=[sys.executable, "-c", "'here'"])
        done = dpro("validate", searched, "--trace", trace, "--run-recorded-command")
        assert f"running the command of the trace: {sys.executable} -c" in done.stderr
        assert "tensorflow" in done.stderr.splitlines()[-1]  # this interpreter has none

    def test_a_knob_that_is_neither_a_number_nor_a_name_is_refused(self, tmp_path):
        trace = of_a_stranger(tmp_path, knobs={"HOROVOD_CONTROLLER": "gloo\nX=1"})
        with pytest.raises(InputError, match="knobs: HOROVOD_CONTROLLER"):
            recorded_job(Trace.load(trace), ("python", "train.py"))


class _Evil:
    """Does harm when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


@pytest.fixture(scope="module")
def searched(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("searched")
    succeeds(*SEARCH, 20, "--out", folder / "run")
    return folder / "run"


def content(path: Path) -> dict[Path, bytes]:
    """Of a file, or of all files of a folder."""
    files = path.iterdir() if path.is_dir() else [path]
    return {file: file.read_bytes() for file in files}


@pytest.fixture
def run(searched, tmp_path) -> Path:
    return shutil.copytree(searched, tmp_path / "mine" / "run")


class TestRunFolders:
    @SLOW
    @given(data=st.data())
    def test_any_file_of_a_run_may_hold_anything(self, searched, tmp_path_factory, data):
        folder = shutil.copytree(searched, tmp_path_factory.mktemp("changed") / "run")
        path = folder / data.draw(st.sampled_from(["run.json", "result.json"]))
        fields = json.loads(path.read_bytes())
        fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(VALUES)
        path.write_text(json.dumps(fields))
        try:
            load_run(folder)
        except DproSearchError as error:
            one_line(error, path)

    @SLOW
    @given(raw=st.binary(max_size=100) | st.just(b"[" * DEEP))
    @pytest.mark.parametrize("name", ["run.json", "result.json"])
    def test_bytes_of_a_run_may_be_anything(self, name, searched, tmp_path_factory, raw):
        folder = shutil.copytree(searched, tmp_path_factory.mktemp("bytes") / "run")
        (folder / name).write_bytes(raw)
        with pytest.raises(DproSearchError) as refusal:
            load_run(folder)
        one_line(refusal.value, folder / name)

    @pytest.mark.parametrize("name", ["trials.jsonl", "run.json"])
    def test_a_journal_of_anything_is_one_line(self, name, run):
        (run / name).write_bytes(b"[" * DEEP + b"\n")
        assert str(run / name) in fails_in_one_line(2, *SEARCH, 20, "--out", run)

    def test_what_a_run_names_elsewhere_is_not_written_to(self, run, tmp_path):
        away = tmp_path / "away"
        result = SearchResult.load(run)
        (run / "result.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(result, run=str(away))))
        loaded_run = load_run(run)
        loaded_run.result.save()
        loaded_run.export(tmp_path / "tuned")
        assert not away.exists()

    @pytest.mark.parametrize("name", ["trials.jsonl", "plans", "run.json", "topn.csv"])
    def test_a_link_in_a_run_folder_is_not_followed(self, name, run, tmp_path):
        outside = tmp_path / "outside"
        (run / name).rename(outside)
        if name == "trials.jsonl":
            outside.write_bytes(b"somebody's only line")
        (run / name).symlink_to(outside)
        before = content(outside)
        dpro(*SEARCH, 30, "--out", run)
        assert content(outside) == before

    def test_a_moved_sample_is_refused_by_its_digest(self, run):
        assert horovod_trace_path().is_dir()
        fields = json.loads((run / "run.json").read_bytes())
        (run / "run.json").write_text(json.dumps({**fields, "trace": str(run)}))
        assert "no longer there" in fails_in_one_line(2, "report", run, "--out", run / "page.html")
