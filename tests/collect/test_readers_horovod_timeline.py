"""Reading Horovod's timeline: phases, fused collectives, and files of killed jobs."""

import functools
import gzip
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpro_search.collect.readers.horovod.timeline import HorovodTimeline, TimelinePhase, read_horovod_timeline
from dpro_search.errors import InputError, TraceFormatError
from tests.every_case import every_case

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces" / "tensorflow_horovod_2"
recorded = pytest.mark.skipif(not TRACES.is_dir(), reason="needs the recorded traces, which are not part of the project")
STEPS = 26  # of each recorded timeline; the model has 40 gradients


def events_of_one_step(t: int) -> list[dict]:
    """Tensors 1 and 2 travel together, then tensor 3 alone."""

    def begin(name: str, ts: int, *pids: int) -> list[dict]:
        return [{"ph": "B", "name": name, "ts": t + ts, "pid": pid} for pid in pids]

    def end(ts: int, *pids: int, **args: str) -> list[dict]:
        return [{"ph": "E", "ts": t + ts, "pid": pid} | ({"args": args} if args else {}) for pid in pids]

    return [
        *begin("NEGOTIATE_ALLREDUCE", 0, 1, 2, 3),
        *end(100, 1, 2, 3),
        {"ph": "i", "name": "CYCLE_START", "ts": t + 101, "s": "g"},
        *begin("ALLREDUCE", 110, 1, 2),
        *begin("MEMCPY_IN_FUSION_BUFFER", 120, 1, 2),
        *end(130, 1, 2),
        *begin("GLOO_ALLREDUCE", 131, 1),
        *begin("GLOO_ALLREDUCE", 180, 2),  # the writer was interrupted between two tensors of one collective
        *end(200, 1, 2),
        *begin("MEMCPY_OUT_FUSION_BUFFER", 201, 1, 2),
        *end(210, 1, 2),
        *end(215, 1, dtype="float32", shape="[4, 5]"),
        *end(216, 2, dtype="float16", shape="[]"),
        *begin("ALLREDUCE", 220, 3),
        *begin("GLOO_ALLREDUCE", 221, 3),
        *end(260, 3),
        *end(265, 3, dtype="int64", shape="[10]"),
    ]


def written_timeline(path: Path, steps: int = 2, tail: str = "]") -> Path:
    events = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": 1_790_000_000_000_000}}]
    for pid in (1, 2, 3):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": f"grad_{pid}"}})
        events.append({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}})
    events += [event for step in range(steps) for event in events_of_one_step(1000 * step)]
    path.write_text("[\n" + ",\n".join(map(json.dumps, events)) + tail)
    return path


def rows(timeline: HorovodTimeline) -> list[tuple[str, int, float, float]]:
    names = [timeline.tensors[i].name for i in timeline.tensor]
    return list(zip(names, timeline.phase.tolist(), timeline.start_us.tolist(), timeline.end_us.tolist(), strict=True))


def transfers(timeline: HorovodTimeline) -> list[list[int]]:
    """Rows of the transfers of each collective."""
    of = timeline.collective[timeline.phase == TimelinePhase.TRANSFER]
    return [np.flatnonzero(timeline.phase == TimelinePhase.TRANSFER)[of == i].tolist() for i in range(of.max() + 1)]


@pytest.fixture
def timeline(tmp_path):
    return read_horovod_timeline(written_timeline(tmp_path / "timeline.json"))


def test_phases_of_a_fused_tensor(timeline):
    phases = {TimelinePhase(phase): (start, end) for name, phase, start, end in rows(timeline) if name == "grad_1" and end < 1000}
    assert phases == {
        TimelinePhase.NEGOTIATE: (0, 100),
        TimelinePhase.QUEUE: (100, 120),
        TimelinePhase.MEMCPY_IN: (120, 130),
        TimelinePhase.TRANSFER: (131, 200),
        TimelinePhase.MEMCPY_OUT: (201, 210),
        TimelinePhase.WHOLE: (110, 215),
    }


def test_a_tensor_that_waits_for_an_earlier_collective_queues_until_its_own_begins(timeline):
    assert ("grad_3", TimelinePhase.QUEUE, 100, 221) in rows(timeline)


def test_a_tensor_alone_is_not_copied(timeline):
    assert {TimelinePhase(phase) for name, phase, *_ in rows(timeline) if name == "grad_3"} == {
        TimelinePhase.NEGOTIATE,
        TimelinePhase.QUEUE,
        TimelinePhase.TRANSFER,
        TimelinePhase.WHOLE,
    }


def test_tensors_of_one_collective_share_its_number_in_all_their_phases(timeline):
    members = {(int(i), timeline.tensors[t].name) for i, t in zip(timeline.collective, timeline.tensor, strict=True)}
    assert members == {(0, "grad_1"), (0, "grad_2"), (1, "grad_3"), (2, "grad_1"), (2, "grad_2"), (3, "grad_3")}


def test_sizes_follow_from_dtype_and_shape(timeline):
    assert {tensor.name: tensor.size_bytes for tensor in timeline.tensors} == {"grad_1": 80, "grad_2": 2, "grad_3": 80}
    assert timeline.tensors[0].shape == (4, 5)
    assert len(timeline.size_bytes) == len(timeline.tensor)


def test_times_are_relative_to_the_start_of_the_recording(timeline):
    assert timeline.origin_ns == 1_790_000_000_000_000_000
    assert timeline.cycle_us.tolist() == [101, 1101]


@pytest.mark.parametrize("tail", ["", ",", ",\n", ",\n]", "\n]\n"])
def test_the_end_of_a_killed_jobs_file_may_be_missing(tmp_path, timeline, tail):
    read_timeline = read_horovod_timeline(written_timeline(tmp_path / "killed.json", tail=tail))
    assert rows(read_timeline) == rows(timeline)
    assert not read_timeline.truncated


def test_phases_that_were_not_ended_are_counted(tmp_path):
    tail = ',{"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 5000, "pid": 1}'
    assert read_horovod_timeline(written_timeline(tmp_path / "killed.json", tail=tail)).unfinished == 1


def test_other_operations_are_skipped_and_counted(tmp_path):
    tail = "".join(
        f",{json.dumps(event)}"
        for event in (
            {"ph": "B", "name": "BROADCAST", "ts": 9000, "pid": 1},
            {"ph": "B", "name": "MEMCPY_IN_FUSION_BUFFER", "ts": 9001, "pid": 1},
            {"ph": "E", "ts": 9002, "pid": 1},
            {"ph": "E", "ts": 9003, "pid": 1},
        )
    )
    read_timeline = read_horovod_timeline(written_timeline(tmp_path / "t.json", tail=tail))
    assert read_timeline.skipped == {"BROADCAST": 1, "MEMCPY_IN_FUSION_BUFFER": 1}
    assert read_timeline.end_us.max() < 9000


@every_case("content", ["", "{}", "[", "[]", "hello", '{"traceEvents": []}', '[{"ph": "X", "ts": 1, "name": "op"}]'])
def test_a_file_that_is_no_timeline_is_refused(tmp_path, content):
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(TraceFormatError, match=r"other\.json: not a Horovod timeline"):
        read_horovod_timeline(tmp_path / "other.json")


@pytest.mark.parametrize("line", range(1, 40))
def test_a_damaged_record_costs_its_tensors_spans_at_that_time(tmp_path, timeline, line):
    path = written_timeline(tmp_path / "t.json")
    lines = path.read_text().splitlines()
    if '"ts"' not in lines[line % len(lines)]:
        return
    lines[line % len(lines)] = lines[line % len(lines)].replace('"ts"', "ts")
    path.write_text("\n".join(lines))
    read_timeline = read_horovod_timeline(path)
    assert read_timeline.dropped[f"damaged records of {tmp_path.name}/t.json"] == 1
    assert len(rows(timeline)) - len(rows(read_timeline)) <= 6
    assert not read_timeline.truncated


def test_an_end_without_a_beginning_is_counted(tmp_path, timeline):
    path = written_timeline(tmp_path / "t.json", tail=',{"ph": "E", "ts": 7, "pid": 3}]')
    read_timeline = read_horovod_timeline(path)
    assert rows(read_timeline) == rows(timeline)
    assert read_timeline.dropped == {f"spans that a lost record leaves open in {tmp_path.name}/t.json": 1}


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"gone\.json"):
        read_horovod_timeline(tmp_path / "gone.json")


def check_cut(path: Path, whole: HorovodTimeline, data: bytes, complete: int | None = None) -> None:
    """A cut file gives the first rows of the whole one (at least `complete`), or is refused with a `TraceFormatError`."""
    path.write_bytes(data)
    try:
        cut = read_horovod_timeline(path)
    except TraceFormatError:
        assert not complete
        return
    remaining = rows(cut)
    assert remaining == rows(whole)[: len(remaining)]
    assert complete is None or len(remaining) == complete


@given(where=st.floats(min_value=0, max_value=1))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_cut_at_any_byte_gives_every_phase_that_was_complete(tmp_path, timeline, where):
    data = written_timeline(tmp_path / "whole.json").read_bytes()
    data = data[: round(where * len(data))]
    whole_lines = [line for line in data.decode().splitlines() if line.rstrip(",]").count("{") == line.count("}") > 0]
    check_cut(tmp_path / "cut.json", timeline, data, number_of_rows([json.loads(line.rstrip(",]")) for line in whole_lines]))


def number_of_rows(events: list[dict]) -> int:
    """One row when a span ends, and one when a tensor's queueing ends because its first copy or transfer begins."""
    ends = sum(event["ph"] == "E" for event in events)
    started = [(event["pid"], event["name"]) for event in events if event["ph"] == "B"]
    copies = sum(name == "MEMCPY_IN_FUSION_BUFFER" for _, name in started)
    return ends + copies + sum(name == "GLOO_ALLREDUCE" and pid == 3 for pid, name in started)


@functools.cache
def _recorded(setting: str) -> HorovodTimeline:
    return read_horovod_timeline(TRACES / f"timeline_{setting}.json.gz")


@recorded
@given(where=st.floats(min_value=0, max_value=1), compressed=st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_recorded_file_cut_at_any_byte_gives_its_beginning(tmp_path, where, compressed):
    data = (TRACES / "timeline_groups4_nofuse.json.gz").read_bytes()
    if not compressed:
        data = gzip.decompress(data)
    check_cut(tmp_path / "cut.json", _recorded("groups4_nofuse"), data[: round(where * len(data))])


@recorded
@pytest.mark.parametrize("setting", ["default", "fusion0", "fusion1MB", "cycle50", "groups4_nofuse"])
def test_recorded_phases_of_a_tensor_follow_each_other(setting):
    read_timeline = _recorded(setting)
    assert len(read_timeline.tensors) == 40
    assert (read_timeline.phase == TimelinePhase.NEGOTIATE).sum() == STEPS * 40
    assert (read_timeline.end_us >= read_timeline.start_us).all()
    for tensor in range(40):
        of_tensor = (read_timeline.tensor == tensor) & (read_timeline.phase != TimelinePhase.WHOLE)
        assert (np.diff(read_timeline.start_us[of_tensor]) >= 0).all()


@recorded
def test_without_fusion_every_collective_has_one_tensor():
    read_timeline = _recorded("fusion0")
    assert {len(collective) for collective in transfers(read_timeline)} == {1}
    assert not np.isin(read_timeline.phase, (TimelinePhase.MEMCPY_IN, TimelinePhase.MEMCPY_OUT)).any()


@recorded
def test_four_groups_are_four_collectives_a_step():
    collectives = transfers(_recorded("groups4_nofuse"))
    assert len(collectives) == STEPS * 4 - 1  # the job was killed in the last one
    assert {len(collective) for collective in collectives} == {10}


@recorded
@pytest.mark.parametrize(("setting", "threshold"), [("fusion1MB", 2**20), ("default", 128 * 2**20)])
def test_a_fused_collective_stays_within_the_threshold(setting, threshold):
    read_timeline = _recorded(setting)
    assert max(int(read_timeline.size_bytes[collective].sum()) for collective in transfers(read_timeline)) <= threshold


@recorded
@pytest.mark.parametrize("setting", ["default", "fusion1MB", "cycle50", "groups4_nofuse"])
def test_collectives_run_one_at_a_time_and_their_transfers_overlap(setting):
    read_timeline = _recorded(setting)
    spans = [
        (
            read_timeline.start_us[c].min(),
            read_timeline.start_us[c].max(),
            read_timeline.end_us[c].min(),
            read_timeline.end_us[c].max(),
        )
        for c in transfers(read_timeline)
    ]
    assert all(last_start <= first_end for _, last_start, first_end, _ in spans)
    assert all(last_end <= start for (*_, last_end), (start, *_) in itertools.pairwise(spans))


@pytest.mark.parametrize("shape", ["[99999999, 99999999, 99999999]", "9" * 5000])
def test_an_impossible_shape_is_a_size_that_is_not_known(tmp_path, shape):
    path = written_timeline(tmp_path / "t.json")
    path.write_text(path.read_text().replace('"[4, 5]"', f'"{shape}"'))
    assert read_horovod_timeline(path).size_bytes.min() == -1


def test_a_file_cut_at_any_byte_of_its_last_record_says_so(tmp_path):
    """Also behind a bracket in a string, as of a shape: the list does not end there."""
    data = written_timeline(tmp_path / "whole.json").read_bytes()
    begin = data.rindex(b'{"ph"')
    assert b"[10]" in data[begin:]
    for length in range(begin + 1, len(data) - 2):
        (tmp_path / "cut.json").write_bytes(data[:length])
        assert read_horovod_timeline(tmp_path / "cut.json").truncated, data[begin:length]
