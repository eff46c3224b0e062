"""A Horovod timeline without a profile: steps from the repetition of tensors, groups, pauses."""

import json
from pathlib import Path

import numpy as np
import pytest
from importer_kit import ImporterConformance, shared_traces

from dpro_search.collect.readers.horovod import importer as horovod_alone
from dpro_search.collect.trace import EventKind, Trace
from dpro_search.errors import InputError, TraceFormatError

STEP_US = 1000


def one_step(t: int, tensors: tuple[int, ...], *, negotiated_by: tuple[int, ...] = ()) -> list[dict]:
    """The tensors are enqueued 10 us apart and travel together in one collective."""
    events: list[dict] = []
    for k, pid in enumerate(tensors):
        events.append({"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": t + 10 * k, "pid": pid})
        events += [{"ph": "X", "name": str(rank), "ts": t + 10 * k, "pid": pid, "dur": 0} for rank in negotiated_by]
    t += 10 * len(tensors)
    events += [{"ph": "E", "ts": t, "pid": pid} for pid in tensors]
    for name, start, end in (
        ("MEMCPY_IN_FUSION_BUFFER", 5, 15),
        ("GLOO_ALLREDUCE", 20, 100),
        ("MEMCPY_OUT_FUSION_BUFFER", 101, 110),
    ):
        if start == 5:
            events += [{"ph": "B", "name": "ALLREDUCE", "ts": t + 2, "pid": pid} for pid in tensors]
        events += [{"ph": "B", "name": name, "ts": t + start, "pid": pid} for pid in tensors]
        events += [{"ph": "E", "ts": t + end, "pid": pid} for pid in tensors]
    return events + [{"ph": "E", "ts": t + 120, "pid": pid, "args": {"dtype": "float32", "shape": "[4, 5]"}} for pid in tensors]


def written(path: Path, steps: list[tuple[int, ...]], tail: str = "\n]") -> Path:
    events: list[dict] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": 1_790_000_000_000_000}}
    ]
    events += [{"name": "process_name", "ph": "M", "pid": pid, "args": {"name": f"grad_{pid}"}} for pid in (1, 2, 3)]
    for number, tensors in enumerate(steps):
        events += one_step(STEP_US * number, tensors, negotiated_by=(0, 1, 2, 3) if number == 0 else ())
    path.write_text("[\n" + ",\n".join(map(json.dumps, events)) + tail)
    return path


def read(folder: Path, steps: list[tuple[int, ...]], tail: str = "\n]") -> Trace:
    return horovod_alone.read([written(folder / "timeline.json", steps, tail)])


def named(trace: Trace, kind: EventKind) -> list[tuple[str, int, int]]:
    """(tensor, step, collective) of the events of a kind."""
    events = trace.events.select(trace.events.kind == kind)
    return [(trace.tensors[t].name, int(s), int(c)) for t, s, c in zip(events.tensor, events.step, events.collective, strict=True)]


class TestHorovodAlone(ImporterConformance):
    importer = horovod_alone.IMPORTER

    @pytest.fixture
    def files(self, tmp_path):
        return [written(tmp_path / "timeline.json", [(1, 2, 3)] * 3)]


def test_a_step_ends_where_a_tensor_is_posted_again_whatever_the_order(tmp_path):
    trace = read(tmp_path, [(1, 2, 3), (3, 1, 2), (2, 3, 1)])
    assert [step for _, step, _ in named(trace, EventKind.COMM)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert trace.steps.start_us.tolist() == [0, STEP_US, 2 * STEP_US]
    assert (trace.steps.end_us - trace.steps.start_us).tolist() == [150, 150, 150]


def test_tensors_that_travelled_together_share_a_collective(tmp_path):
    trace = read(tmp_path, [(1, 2), (1, 2)])
    assert named(trace, EventKind.ALLREDUCE) == [("grad_1", 0, 0), ("grad_2", 0, 0), ("grad_1", 1, 1), ("grad_2", 1, 1)]


def test_the_pause_between_steps_needs_one_and_is_needed_by_the_next(tmp_path):
    trace = read(tmp_path, [(1,), (1,)])
    names = [trace.names[i] for i in trace.events.name]
    pause = names.index(horovod_alone.PAUSE)
    assert (trace.events.start_us[pause], trace.events.end_us[pause]) == (130, STEP_US)
    needs = {(names[s], names[t]) for s, t in zip(trace.dependencies.source, trace.dependencies.target, strict=True)}
    assert needs == {("grad_1", horovod_alone.PAUSE), (horovod_alone.PAUSE, "grad_1")}


def test_the_number_of_ranks_is_that_of_the_negotiation(tmp_path):
    assert read(tmp_path, [(1,)]).meta.ranks == 4


def test_a_last_step_that_is_not_whole_is_no_step(tmp_path):
    trace = read(tmp_path, [(1, 2, 3), (1, 2, 3), (1, 2)], tail=",\n")
    assert trace.steps.index.tolist() == [0, 1]
    assert named(trace, EventKind.COMM)[-2:] == [("grad_1", -1, 2), ("grad_2", -1, 2)]
    assert trace.meta.warnings == (
        "timeline.json ends in step 2: 1 of its 3 all-reduces are missing or not completed, and the 2 that began are in no step; "
        "how many steps followed is not in the file",
    )


def test_a_timeline_without_an_all_reduce(tmp_path):
    with pytest.raises(TraceFormatError, match=r"timeline.json: the timeline holds no all-reduce"):
        read(tmp_path, [])


def test_one_timeline_at_a_time(tmp_path):
    paths = [written(tmp_path / name, [(1,)]) for name in ("a.json", "b.json")]
    with pytest.raises(InputError, match="a job has one Horovod timeline"):
        horovod_alone.read(paths)


@pytest.mark.parametrize(
    ("name", "tensors", "steps", "collectives_a_step"),
    [
        ("tensorflow_horovod_2/timeline_default.json.gz", 40, 26, None),
        ("tensorflow_horovod_2/timeline_cycle50.json.gz", 40, 26, 1),
        ("tensorflow_horovod_2/timeline_fusion0.json.gz", 40, 25, 40),  # the 26th was cut off
        ("tensorflow_horovod_2/timeline_groups4_nofuse.json.gz", 40, 25, 4),
        ("mxnet_kvstore/horovod_mpi_timeline.json.gz", 10, 45, None),
    ],
)
def test_steps_of_real_timelines(name, tensors, steps, collectives_a_step):
    trace = horovod_alone.read([shared_traces() / name])
    assert (len(trace.tensors), len(trace.steps), trace.meta.ranks) == (tensors, steps, 2)
    moved = trace.events.select((trace.events.kind == EventKind.ALLREDUCE) & (trace.events.step >= 0))
    assert np.bincount(moved.step).tolist() == [tensors] * steps
    if collectives_a_step:
        assert [len(np.unique(moved.collective[moved.step == s])) for s in range(steps)] == [collectives_a_step] * steps
    pauses = trace.events.select(trace.events.name == trace.names.index(horovod_alone.PAUSE))
    assert len(pauses) == steps - 1
