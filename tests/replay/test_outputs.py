"""A timeline for other programs keeps their rules."""

import csv
import itertools
import json
from collections import defaultdict
from dataclasses import replace

import networkx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from sample import sample
from timelines import data_parallel, timeline_of, timelines

from dpro_search.errors import InputError
from dpro_search.replay.kernels.executed import dependencies, executed
from dpro_search.replay.outputs import MeasuredOps, measured_ops, perfetto_json, table, to_networkx, write_csv
from dpro_search.space.replay_graph import OrderPolicy

many = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
HOSTILE = '=1+1,"</script>\n\x00\ud800 \u202e'


def events_by_phase(data):
    content = json.loads(data)
    assert set(content) == {"traceEvents", "displayTimeUnit"}
    by_phase = defaultdict(list)
    for event in content["traceEvents"]:
        by_phase[event["ph"]].append(event)
    return by_phase


def check_rules(data):
    """The rules of the trace event format that the viewer relies on."""
    by_phase = events_by_phase(data)
    assert set(by_phase) <= {"M", "X", "s", "f", "C"}
    named = {(event["name"], event["pid"], event.get("tid")) for event in by_phase["M"]}
    slices = defaultdict(list)
    for event in by_phase["X"]:
        assert event["dur"] >= 0
        assert ("process_name", event["pid"], None) in named
        assert ("thread_name", event["pid"], event["tid"]) in named
        slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for of_thread in slices.values():
        of_thread.sort()
        assert all(before[1] <= after[0] + 1e-6 for before, after in itertools.pairwise(of_thread))
    starts, finishes = ({event["id"]: event for event in by_phase[phase]} for phase in "sf")
    assert len(starts) == len(by_phase["s"]) == len(by_phase["f"])
    assert set(starts) == set(finishes)
    for number, start in starts.items():
        finish = finishes[number]
        assert start["ts"] <= finish["ts"]
        for event in (start, finish):
            assert any(begin <= event["ts"] <= end for begin, end in slices[event["pid"], event["tid"]])
    threads = [(event["pid"], event["tid"]) for event in by_phase["M"] if event["name"] == "thread_name"]
    assert len({tid for _, tid in threads}) == len(threads)
    return by_phase


@many
@given(timelines(buffers=True))
def test_a_perfetto_file_keeps_the_rules_of_its_format(timeline):
    events = check_rules(perfetto_json(timeline))
    assert len([event for event in events["s"] if event["cat"] == "dependency"]) == len(dependencies(timeline)[0])
    assert len([event for event in events["X"] if event["cat"] != "wait"]) == len(timeline.times.end_us)
    assert bool(events["C"]) == bool(len(timeline.graph.buffer_op))


def test_measurement_and_prediction_are_two_groups_of_processes():
    timeline = timeline_of(data_parallel())
    events = check_rules(perfetto_json(timeline, measured=measured_ops(sample(), 14)))
    names = {event["args"]["name"]: event["pid"] for event in events["M"] if event["name"] == "process_name"}
    assert list(names) == ["predicted rank 0", "predicted rank 1", "measured rank 0", "measured rank 1"]
    assert len(set(names.values())) == 4
    measured = [event for event in events["X"] if event["cat"] == "measured"]
    assert min(event["ts"] for event in measured) >= 0
    assert any(event["name"].startswith("communication of ") for event in measured)


def test_waiting_for_other_ranks_is_a_slice_of_its_own():
    events = check_rules(perfetto_json(timeline_of(data_parallel(forward_us=(10.0, 30.0)))))
    slices = {event["name"]: (event["cat"], event["ts"], event["dur"]) for event in events["X"]}
    assert slices["waits for other ranks: all-reduce@0"] == ("wait", 30, 20)
    assert slices["all-reduce@0"] == slices["all-reduce@1"] == ("COMM", 50, 40)
    assert "waits for other ranks: all-reduce@1" not in slices


def test_ops_that_overlap_on_a_device_without_bounds_get_threads_of_their_own():
    graph = data_parallel(
        forward_us=(10.0,),
        policy=np.full(2, int(OrderPolicy.UNBOUNDED), np.int8),
        pred_ptr=np.zeros(5, np.int32),
        pred_idx=np.zeros(0, np.int32),
    )
    events = check_rules(perfetto_json(timeline_of(graph)))
    threads = [event["args"]["name"] for event in events["M"] if event["name"] == "thread_name"]
    assert threads == ["compute@0", "compute@0 (2)", "compute@0 (3)", "network@0"]


def with_memory():
    return data_parallel(
        forward_us=(10.0,),
        carry_src=np.array([3], np.int32),
        carry_dst=np.array([0], np.int32),
        buffer_op=np.array([0, 0], np.int32),
        buffer_bytes=np.array([100.0, 7.0]),
        buffer_ptr=np.array([0, 1, 1], np.int32),
        buffer_use=np.array([1], np.int32),
    )


def test_memory_is_a_counter():
    events = check_rules(perfetto_json(timeline_of(with_memory())))
    assert [(event["name"], event["ts"], event["args"]["bytes"]) for event in events["C"]] == [
        ("memory", 0, 107),
        ("memory", 30, 7),
    ]


def test_iterations_that_have_not_settled_are_left_out():
    timeline = timeline_of(with_memory(), iterations=3)
    events = check_rules(perfetto_json(timeline, first_iteration=2))
    assert {event["args"]["iteration"] for event in events["X"]} == {2}
    assert min(event["ts"] for event in events["X"]) == 0
    assert [(event["ts"], event["args"]["bytes"]) for event in events["C"]] == [(0, 107), (30, 7)]
    with pytest.raises(InputError, match="iterations 0 to 2"):
        perfetto_json(timeline, first_iteration=3)


def test_hostile_names_stay_text(tmp_path):
    graph = data_parallel(forward_us=(10.0,), names=(HOSTILE,) * 4, device_names=(HOSTILE,) * 2)
    measured = MeasuredOps(
        name=[HOSTILE], rank=np.array([0]), stream=np.array([3]), start_us=np.array([0.0]), end_us=np.array([1.5])
    )
    events = check_rules(perfetto_json(timeline_of(graph), measured=measured))
    text = HOSTILE.replace("\ud800", "\\ud800")
    assert {event["name"] for event in events["X"]} == {text}
    write_csv(timeline_of(graph), tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as lines:
        assert {row["name"] for row in csv.DictReader(lines)} == {text}


def test_the_step_of_a_measurement_must_have_been_traced():
    with pytest.raises(InputError, match="step 2 was not traced: steps 13 to "):
        measured_ops(sample(), 2)


@many
@given(timelines())
def test_the_table_splits_each_ops_time(timeline):
    columns = table(timeline)
    assert {len(column) for column in columns.values()} == {len(timeline.times.end_us)}
    parts = columns["ready_us"] + columns["queue_us"] + columns["wait_us"] + columns["work_us"]
    assert parts == pytest.approx(columns["end_us"])
    for name in ("queue_us", "wait_us", "work_us", "slack_us"):
        assert (columns[name] >= 0).all()
    assert (columns["iteration"] * len(timeline.graph) + columns["op"] == np.arange(len(timeline.times.end_us))).all()


def test_a_csv_file_holds_the_table(tmp_path):
    timeline = timeline_of(data_parallel())
    write_csv(timeline, tmp_path / "new" / "timeline.csv")
    with (tmp_path / "new" / "timeline.csv").open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    columns = table(timeline)
    assert list(rows[0]) == list(columns)
    assert [row["name"] for row in rows] == list(timeline.graph.names)
    assert [float(row["end_us"]) for row in rows] == timeline.times.end_us.tolist()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["timeline.csv"]


@many
@given(timelines())
def test_the_executed_graph_has_no_cycle_and_says_why_ops_follow_each_other(timeline):
    graph = to_networkx(timeline)
    assert networkx.is_directed_acyclic_graph(graph)
    assert len(graph) == len(timeline.times.end_us)
    needed = set(zip(*(column.tolist() for column in dependencies(timeline)), strict=True))
    assert {edge for edge, cause in networkx.get_edge_attributes(graph, "cause").items() if cause == "dependency"} == needed
    previous = executed(timeline).previous
    served = {(int(previous[op]), int(op)) for op in np.flatnonzero(previous >= 0)}
    assert set(graph.edges) == needed | served
    for before, op in graph.edges:
        assert graph.nodes[before]["end_us"] <= graph.nodes[op]["start_us"]


def test_nodes_carry_names_and_times():
    graph = to_networkx(timeline_of(replace(data_parallel(forward_us=(10.0, 30.0)), carry_src=np.zeros(0, np.int32))))
    assert graph.nodes[2] == {
        "name": "all-reduce@0",
        "rank": 0,
        "device": "network@0",
        "kind": "COMM",
        "iteration": 0,
        "ready_us": 30,
        "start_us": 30,
        "moved_us": 50,
        "end_us": 90,
        "queue_us": 0,
        "wait_us": 20,
        "work_us": 40,
        "slack_us": 0,
        "collective": 0,
    }
    assert graph.edges[0, 1] == {"cause": "dependency"}
    assert graph.edges[1, 3] == {"cause": "device"}
