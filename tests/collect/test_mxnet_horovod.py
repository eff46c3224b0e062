"""A recorded MXNet + Horovod job becomes a trace: a real two-rank recording of a small network with shortcuts, on MPI."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpro_search.collect.assemble.mxnet_horovod import assemble_mxnet_horovod
from dpro_search.collect.trace import EventKind, Trace
from dpro_search.errors import DproSearchError, InputError, TraceFormatError
from dpro_search.graph.build import build_graph
from dpro_search.kinds import JobInScenario, PlanOptions
from dpro_search.kinds.horovod.job import Horovod
from dpro_search.space.plan import Plan
from tests.recordings import raw_copy

RECORDING = "mxnet_horovod_mlp"
STEPS, TENSORS = [7, 8, 9], 12


def comm_of(trace: Trace, rank: int, step: int):
    events = trace.events
    return events.select((events.kind == EventKind.COMM) & (events.rank == rank) & (events.step == step))


def test_the_trace_says_what_it_is(trace):
    meta = trace.meta
    assert (meta.framework, meta.comm, meta.format, meta.ranks) == ("mxnet", "horovod", "mxnet-horovod", 2)
    assert meta.hosts == ("h0", "h1")
    assert meta.settings is not None
    assert meta.settings.cycle_time_us == 1000
    assert meta.knobs["HOROVOD_CONTROLLER"] == "mpi"
    assert trace.steps.index[trace.steps.traced & (trace.steps.rank == 1)].tolist() == STEPS


def test_every_gradient_travels_once_in_every_step_of_every_rank(trace):
    for rank in (0, 1):
        for step in STEPS:
            assert sorted(comm_of(trace, rank, step).tensor.tolist()) == list(range(TENSORS))
    assert {tensor.name.rpartition("_")[0]: tensor.size_bytes for tensor in trace.tensors if tensor.name.endswith("weight")} == {
        "dense0": 4 * 96 * 32,
        "dense1": 4 * 10 * 96,
    } | {
        tensor.name.rpartition("_")[0]: 4 * 96 * 96
        for tensor in trace.tensors
        if "shortcut" in tensor.name and "weight" in tensor.name
    }


def test_a_tensor_is_in_one_collective_on_all_ranks_and_comes_back_after_it(trace):
    transfers = trace.events.select(trace.events.kind == EventKind.ALLREDUCE)
    end_us = dict(zip(transfers.collective.tolist(), transfers.end_us.tolist(), strict=True))
    for step in STEPS:
        first, second = (comm_of(trace, rank, step) for rank in (0, 1))
        by_tensor = [dict(zip(part.tensor.tolist(), part.collective.tolist(), strict=True)) for part in (first, second)]
        assert by_tensor[0] == by_tensor[1]
        assert all(ended >= end_us[number] for ended, number in zip(first.end_us, first.collective.tolist(), strict=True))


def test_a_gradient_is_posted_after_its_operator_and_updates_wait_for_theirs(trace):
    graph = trace.graphs[0]
    needs = {
        name: {graph.name[i] for i in graph.input_idx[graph.input_ptr[n] : graph.input_ptr[n + 1]]}
        for n, name in enumerate(graph.name)
    }
    for tensor in trace.tensors:
        (producer,) = needs[tensor.node]
        assert "backward" in producer
        assert sum(tensor.node in row for row in needs.values()) == 1
    updates = [name for name in needs if "_update" in name]
    assert sum(len(needs[name]) for name in updates) == TENSORS


def test_operators_of_shortcuts_are_known_by_their_node(trace):
    layers = {name for name, op in zip(trace.graphs[0].name, trace.graphs[0].op, strict=True) if op == "FullyConnected"}
    assert len(layers) == 6
    assert {f"{layer} backward" for layer in layers} <= set(trace.names)


def test_steps_do_not_overlap_on_a_rank(trace):
    for rank in (0, 1):
        rank_steps = trace.steps.select((trace.steps.rank == rank) & trace.steps.traced)
        assert (np.diff(rank_steps.start_us) > 0).all()
        assert (rank_steps.end_us > rank_steps.start_us).all()


def test_it_can_be_built_and_replayed(trace):
    graph = build_graph(trace)
    assert [len(profile.releases) for profile in graph.profiles] == [3, 3]  # four parameters an update
    job = Horovod.of(trace, PlanOptions())
    assert JobInScenario(job).predict(Plan()).iteration_us > 0
    assert 0 < job.measured.costs.poll_share < 1


def test_saving_keeps_it(trace, tmp_path):
    trace.save(tmp_path / "t")
    assert Trace.load(tmp_path / "t").meta == trace.meta


@pytest.mark.parametrize(
    ("name", "message"),
    [("job.json", "--keep-raw"), ("rank1/hook.json", "DistributedTrainer"), ("horovod_timeline.json", "horovod_timeline")],
)
def test_a_missing_file_is_named(raw, name, message):
    (raw / name).unlink()
    with pytest.raises(InputError, match=message):
        assemble_mxnet_horovod(raw)


def test_raw_files_of_another_recorder_are_refused(raw):
    job = json.loads((raw / "job.json").read_text())
    (raw / "job.json").write_text(json.dumps({**job, "format": "mxnet-kvstore"}))
    with pytest.raises(InputError, match="of 'mxnet-kvstore', not of mxnet-horovod"):
        assemble_mxnet_horovod(raw)


def test_without_the_network_operators_are_known_by_type_and_that_is_reported(raw):
    (raw / "rank0" / "symbol.json").unlink()
    trace = assemble_mxnet_horovod(raw)
    assert any("no graph of the network" in warning for warning in trace.meta.warnings)
    assert "FullyConnected#0" in trace.names
    assert JobInScenario(Horovod.of(trace, PlanOptions())).predict(Plan()).iteration_us > 0


def test_a_profile_of_other_steps_is_refused(raw):
    hook = json.loads((raw / "rank1" / "hook.json").read_text())
    for step in hook["steps"][6:7]:
        step[4] = True
    (raw / "rank1" / "hook.json").write_text(json.dumps(hook))
    with pytest.raises((InputError, TraceFormatError), match="all-reduce"):
        assemble_mxnet_horovod(raw)


FILES = ("job.json", "horovod_timeline.json", "rank0/hook.json", "rank1/worker.json", "rank0/worker.json", "rank0/symbol.json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return raw_copy(RECORDING, tmp_path_factory.mktemp("whole"))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), data=st.data())
def test_damaged_files_give_a_trace_or_a_line(whole, name, data):
    path = whole / name
    content = path.read_bytes()
    damaged = bytearray(content)
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(damaged))) :]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(damaged))
    try:
        with contextlib.suppress(DproSearchError):
            assemble_mxnet_horovod(whole)
    finally:
        path.write_bytes(content)
