"""The lanes of a step: from a replay's viewer file, and from a recording."""

from __future__ import annotations

import pytest
from report import made
from sample import sample

from dpro_search.report.timeline import Lane, StepTimeline, kinds_by_name, measured_lanes, predicted_lanes, typical_step
from dpro_search.space.tensor_groups import planned_groups, recorded_groups


def thread(pid: int, tid: int, name: str) -> dict:
    return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def slice_(pid: int, tid: int, name: str, kind: str, start: float, length: float) -> dict:
    return {"ph": "X", "name": name, "cat": kind, "pid": pid, "tid": tid, "ts": start, "dur": length}


def test_lanes_of_a_replay_are_its_devices_without_ops_of_no_length():
    events = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "predicted rank 7"}},
        {"ph": "M", "name": "process_name", "pid": 2, "args": {"name": "measured rank 7"}},
        *(thread(1, 10, "core@7"), thread(1, 11, "core@7 (2)"), thread(2, 12, "stream 0")),
        *(slice_(1, 10, "a@7", "FORWARD", 0, 5), slice_(1, 11, "b@7", "COMM", 2, 5), slice_(1, 10, "none@7", "HOST", 3, 0)),
        slice_(2, 12, "a", "measured", 0, 5),
    ]
    (lane,) = predicted_lanes(events)
    assert (lane.rank, lane.measured, lane.name) == (7, False, "core")
    assert lane.names == ["a@7", "b@7"]
    assert lane.kinds == ["compute", "comm"]


def test_lanes_of_the_sample_hold_one_step_from_its_begin():
    step = typical_step(sample())
    lanes = measured_lanes(sample(), step, {})
    assert {lane.rank for lane in lanes} == {0, 1}
    starts = [start for lane in lanes for start in lane.start_us]
    assert min(starts) >= 0
    assert max(starts) < 2 * sample().iterations_us().max()


def test_the_kind_of_a_measured_op_is_that_of_the_replay():
    step = typical_step(sample())
    name = measured_lanes(sample(), step, {})[0].names[0]
    lane = measured_lanes(sample(), step, {f"{name}@{rank}": "update" for rank in (0, 1)})[0]
    assert lane.kinds[0] == "update"


def test_the_longest_slices_stay_and_the_others_are_counted():
    timeline = made.timeline(slices=100, ranks=1)
    data = timeline.compact(most=20)
    kept = [length for lane in data["lanes"] for length in lane["length"]]
    assert data["left_out"] == 0  # equally long: none is the longest
    assert len(kept) == 202
    data = timeline.compact(most=2)
    assert [len(lane["length"]) for lane in data["lanes"]] == [0, 1, 0, 1]
    assert data["left_out"] == 200


def test_names_are_stored_once():
    data = made.timeline(slices=10, ranks=1).compact()
    assert len(data["names"]) == len(set(data["names"])) == 11
    assert data["names"][data["lanes"][0]["text"][0]] == "op 0@0"


def test_recorded_groups_hold_every_tensor_of_the_sample_once():
    groups = recorded_groups(sample(), typical_step(sample()))
    names = [name for group in groups for name in group.tensors]
    assert sorted(names) == sorted(tensor.name for tensor in sample().tensors)
    assert sum(group.size_bytes for group in groups) == sum(tensor.size_bytes for tensor in sample().tensors)


@pytest.mark.parametrize("chosen", [(), ((3, 1),), ((0, 5, 2), (4,))])
def test_planned_groups_hold_every_tensor_once_and_those_left_over_alone(chosen):
    tensors = sample().tensors[:8]
    plan = [[tensors[place].name for place in group] for group in chosen]
    groups = planned_groups(tensors, plan)
    assert sorted(name for group in groups for name in group.tensors) == sorted(tensor.name for tensor in tensors)
    assert len(groups) == len(tensors) - sum(len(group) - 1 for group in chosen)


def test_slices_that_touch_still_touch_after_rounding():
    lane = Lane(rank=0, measured=False, name="core")
    for number in range(50):
        lane.add("op", "compute", number * 1.23456, 1.23456)
    (lane_json,) = StepTimeline(lanes=[lane], step=None).compact()["lanes"]
    ends = [start + length for start, length in zip(lane_json["start"], lane_json["length"], strict=True)]
    assert ends[:-1] == lane_json["start"][1:]


def lane(name: str, *, measured: bool, rank: int = 0) -> Lane:
    return Lane(rank=rank, measured=measured, name=name, names=["op"], kinds=["compute"], start_us=[0.0], length_us=[1.0])


def test_a_name_with_two_kinds_tells_neither():
    forward, backward = lane("stream 7", measured=False), lane("stream 7", measured=False)
    backward.add("op", "backward", 1.0, 1.0)
    backward.add("gradient@0", "backward", 2.0, 1.0)
    assert kinds_by_name([forward]) == {"op": "compute"}
    assert kinds_by_name([forward, backward]) == {"gradient@0": "backward"}


def test_lanes_that_one_side_lacks_are_explained():
    both = [lane("stream 7", measured=side) for side in (False, True)]
    alone = [lane("launches", measured=False), lane("host thread 3", measured=True), lane("stream 9", measured=True, rank=1)]
    assert StepTimeline(lanes=[*both, *alone], step=3).one_sided == (
        "Only predicted: launches (the time from a call to the start of its op, which no event records).",
        "Only measured: host thread 3 (nothing that it does launches an op or waits for one in the replayed step).",
        "Only measured: stream 9.",
        "Ranks with lanes on one side only: 1.",
    )
    assert StepTimeline(lanes=both, step=3).one_sided == ()
    assert StepTimeline(lanes=alone[:1], step=None).one_sided == ()
