"""A recorded fully sharded job becomes a trace and a graph: real two-rank recordings of a small model of three units and a root."""

import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.collect.assemble.torch.job import assemble_torch
from dpro_search.collect.trace import EventKind, Trace
from dpro_search.costmodel.collectives.ddp import fit_fsdp_costs
from dpro_search.errors import DproSearchError, GraphError, InputError, TraceFormatError
from dpro_search.graph.fsdp import CollectiveMark, Purpose, build_fsdp_graph
from dpro_search.graph.main_thread import covered
from tests.recordings import DATA, trace_of

RECORDING = "fsdp_mlp"
RAW = DATA / RECORDING
TRACED = [8, 9, 10, 11, 12]
BLOCK, HEAD = 4 * (64 * 64 + 64), 4 * (64 * 10 + 10)
IN_TURN = [
    "all_gather of the root", "all_gather of 0", "all_gather of 1", "all_gather of 2",
    "all_gather of 2 for backward", "all_gather of 1 for backward", "reduce_scatter of 2", "all_gather of 0 for backward",
    "reduce_scatter of 1", "reduce_scatter of the root", "reduce_scatter of 0",
]  # fmt: skip


@pytest.fixture(scope="module")
def prefetching() -> Trace:
    return trace_of("fsdp_mlp_prefetch")


def of_kind(trace: Trace, kind: EventKind, rank: int = 0, step: int = 10):
    events = trace.events
    chosen_events = events.select((events.kind == kind) & (events.rank == rank) & (events.step == step))
    return chosen_events.select(np.argsort(chosen_events.collective, kind="stable"))


def names(trace: Trace, events) -> list[str]:
    return [trace.names[name] for name in events.name]


def edited(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_the_trace_says_what_it_is(trace, prefetching):
    meta = trace.meta
    assert (meta.framework, meta.comm, meta.format, meta.ranks) == ("pytorch", "fsdp", "pytorch-fsdp", 2)
    assert meta.knobs == {"units": "4", "resharding_units": "3", "prefetch": "0"}
    assert prefetching.meta.knobs["prefetch"] == "1"
    assert meta.warnings == prefetching.meta.warnings == ()
    assert trace.steps.index[trace.steps.traced & (trace.steps.rank == 1)].tolist() == TRACED


def test_units_gather_their_parameters_for_each_pass_and_scatter_their_gradients(trace):
    for step in TRACED:
        for rank in range(2):
            collectives = of_kind(trace, EventKind.COLLECTIVE, rank, step)
            assert names(trace, collectives) == IN_TURN
            assert collectives.size_bytes.tolist() == [HEAD if "root" in name else BLOCK for name in IN_TURN]
    for rank in range(2):
        numbers = trace.events.collective[(trace.events.kind == EventKind.COLLECTIVE) & (trace.events.rank == rank)]
        assert len(np.unique(numbers)) == len(numbers) == len(TRACED) * len(IN_TURN)


def test_gradients_go_with_the_reduce_scatter_of_their_unit(trace):
    assert [(tensor.name, tensor.node) for tensor in trace.tensors][-2:] == [("2.0.weight", "2"), ("2.0.bias", "2")]
    gradients, collectives = of_kind(trace, EventKind.COMM), of_kind(trace, EventKind.COLLECTIVE)
    assert sorted(gradients.tensor.tolist()) == list(range(8))
    of_number = dict(zip(collectives.collective.tolist(), names(trace, collectives), strict=True))
    for tensor, number in zip(gradients.tensor.tolist(), gradients.collective.tolist(), strict=True):
        assert of_number[number] == f"reduce_scatter of {trace.tensors[tensor].node}"


def test_the_main_thread_runs_no_op_while_it_waits(trace, prefetching):
    for recorded in (trace, prefetching):
        for step in TRACED:
            ops, waits = of_kind(recorded, EventKind.OP, 1, step), of_kind(recorded, EventKind.SYNC, 1, step)
            main = ops.select(ops.stream == 0)
            main = main.select(np.argsort(main.start_us))
            assert (main.start_us[1:] >= main.end_us[:-1] - 1e-3).all()
            rows = np.stack((waits.start_us, waits.end_us), axis=1)
            assert not covered((main.start_us + main.end_us) / 2, rows).any()


def test_a_wait_begins_with_the_post_or_where_the_parameters_are_needed(trace, prefetching):
    for recorded, late in ((trace, False), (prefetching, True)):
        enqueues, waits = of_kind(recorded, EventKind.COLLECTIVE), of_kind(recorded, EventKind.SYNC)
        gathers = np.array([name.startswith("all_gather") for name in names(recorded, enqueues)])
        np.testing.assert_array_equal(waits.collective, enqueues.collective)
        assert ((waits.start_us > enqueues.start_us) == (gathers & late)).all()
        assert (waits.end_us >= waits.start_us).all()


def test_bytes_do_not_need_an_execution_trace(trace, raw):
    for rank in range(2):
        (raw / f"rank{rank}" / "execution.json.gz").unlink()
    again = assemble_torch(raw)
    assert again.graphs == ()
    np.testing.assert_array_equal(again.events.size_bytes, trace.events.size_bytes)


def test_the_program_of_a_rank_has_all_its_core_time(trace):
    graph = build_fsdp_graph(trace)
    assert [graph.labels[i] for i in np.flatnonzero(graph.purpose == Purpose.BACKWARD)] == [
        "all-gather of 2 for backward", "all-gather of 1 for backward", "all-gather of 0 for backward",
    ]  # fmt: skip
    assert (graph.work_us >= 0).all()
    assert graph.mark.tolist().count(CollectiveMark.READY) == 7
    untraced = ~trace.steps.traced & (trace.steps.index >= 4)
    for rank in range(2):
        counted = float(np.median(trace.steps.compute_cpu_us[untraced & (trace.steps.rank == rank)]))
        used = graph.work_us[:, rank].sum(axis=1) + graph.after_us[:, rank]
        assert 0.5 * counted < float(np.median(used)) < 2 * counted


def test_a_gather_counts_as_an_all_reduce_of_half_its_size(trace):
    graph = build_fsdp_graph(trace)
    assert graph.moved_bytes.sum() == 3 * 2 * BLOCK + 1.5 * HEAD
    assert fit_fsdp_costs(trace, graph).beta_tail_us > 0


def test_steps_that_communicate_otherwise_are_refused(trace):
    events = trace.events
    dropped = (events.step == 9) & (events.rank == 1) & (events.collective == events.collective[events.step == 9].max())
    with pytest.raises(GraphError, match="rank 1 communicated differently in step 9"):
        build_fsdp_graph(replace(trace, events=events.select(~dropped)))


def test_raw_files_of_the_other_kind_are_refused(raw):
    edited(raw / "job.json", lambda job: job.update(format="pytorch-ddp"))
    with pytest.raises(InputError, match="record it with --comm fsdp"):
        assemble_torch(raw)


def test_units_that_are_sharded_over_some_ranks_are_refused(raw):
    edited(raw / "rank1" / "hook.json", lambda hook: hook["fsdp"]["units"][1].update(ranks=1))
    with pytest.raises(InputError, match=r"rank1/hook\.json: a unit is sharded over some of the ranks only"):
        assemble_torch(raw)


def test_a_parameter_of_two_units_is_refused(raw):
    edited(raw / "rank0" / "hook.json", lambda hook: hook["fsdp"]["units"][0]["parameters"].append(0))
    with pytest.raises(TraceFormatError, match=r"fsdp\.units does not name each parameter at most once"):
        assemble_torch(raw)


values = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5), st.just([]))


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_units_with_a_wrong_value_never_crash_the_assembly(tmp_path_factory, data):
    raw = shutil.copytree(RAW, tmp_path_factory.mktemp("hook") / "raw")
    path = raw / f"rank{data.draw(st.integers(0, 1))}" / "hook.json"
    hook = json.loads(path.read_text())
    facts = hook["fsdp"]
    where = data.draw(st.sampled_from([facts, facts["units"][1], facts["parameters"][2]]))
    where[data.draw(st.sampled_from(sorted(where)))] = data.draw(values)
    path.write_text(json.dumps(hook))
    with contextlib.suppress(DproSearchError):
        assert len(assemble_torch(raw).events)
