"""A recorded DistributedDataParallel job becomes a trace: a real two-rank recording of a small model with batch normalisation."""

import contextlib
import gzip
import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from damage import damaged_copies
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.collect.assemble.torch.host_spans import read_host_spans
from dpro_search.collect.assemble.torch.job import assemble_torch
from dpro_search.collect.trace import EventKind, Trace
from dpro_search.errors import DproSearchError, InputError, TraceFormatError
from tests.recordings import DATA

RECORDING = "ddp_mlp"
RAW = DATA / RECORDING
TRACED = [8, 9, 10, 11, 12]


def of_kind(trace: Trace, kind: EventKind, rank: int = 0, step: int | None = None):
    events = trace.events
    mask = (events.kind == kind) & (events.rank == rank)
    return events.select(mask if step is None else mask & (events.step == step))


def test_the_trace_says_what_it_is(trace):
    meta = trace.meta
    assert (meta.framework, meta.comm, meta.format, meta.ranks) == ("pytorch", "ddp", "pytorch-ddp", 2)
    assert meta.settings is None
    assert meta.hosts == ("h0", "h1")
    assert meta.rate_bps == 1e9
    assert meta.versions["torch"].startswith("2.13.0")
    assert trace.steps.index[trace.steps.traced & (trace.steps.rank == 1)].tolist() == TRACED


def test_gradients_are_in_the_order_in_which_they_become_ready_each_with_its_bucket(trace):
    names = [tensor.name for tensor in trace.tensors]
    assert names[:2] == ["9.bias", "9.weight"] or names[:2] == ["9.weight", "9.bias"]  # the last layer's come first
    assert set(names[-2:]) == {"0.weight", "0.bias"}
    assert sum(tensor.size_bytes for tensor in trace.tensors) == 54056
    assert [tensor.node for tensor in trace.tensors] == sorted(tensor.node for tensor in trace.tensors)
    assert len({tensor.node for tensor in trace.tensors}) == 2
    for rank in range(2):
        for step in TRACED:
            ready = of_kind(trace, EventKind.COMM, rank, step)
            assert (np.diff(ready.start_us[np.argsort(ready.tensor)]) >= 0).all()


def test_every_bucket_is_one_collective_on_every_rank(trace):
    for step in TRACED:
        numbers = []
        for rank in range(2):
            buckets = of_kind(trace, EventKind.COLLECTIVE, rank, step)
            reduced = np.array([trace.names[name] == "allreduce" for name in buckets.name])
            assert buckets.size_bytes[reduced].sum() == 54056
            assert sorted(buckets.size_bytes[~reduced].tolist()) == [24, 1536]  # running statistics, and three counters
            numbers.append(buckets.collective.tolist())
        assert numbers[0] == numbers[1]


def test_a_transfer_begins_when_the_last_rank_has_taken_it_up(trace):
    for step in TRACED:
        enqueues = [of_kind(trace, EventKind.COLLECTIVE, rank, step) for rank in range(2)]
        moves = [of_kind(trace, EventKind.ALLREDUCE, rank, step) for rank in range(2)]
        last_enqueue_us = np.maximum(enqueues[0].start_us, enqueues[1].start_us)
        for rank in range(2):
            np.testing.assert_array_equal(moves[rank].end_us, enqueues[rank].end_us)
            assert (moves[rank].start_us >= np.minimum(last_enqueue_us, enqueues[rank].end_us) - 1e-6).all()


def test_ops_are_named_by_phase_and_do_not_overlap_on_a_thread(trace):
    ops = of_kind(trace, EventKind.OP, 0, 10)
    names = {trace.names[name] for name in ops.name}
    assert {"DistributedDataParallel.forward/aten::linear", "backward/AddmmBackward0"} <= names
    assert any(name.startswith("Optimizer.step#SGD.step/") for name in names)
    main = ops.select(ops.stream == 0)
    assert (main.start_us[1:] >= main.end_us[:-1] - 1e-3).all()


def test_clocks_of_one_kernel_are_one(trace):
    assert trace.meta.clock.offset_us == (0, 0)
    assert max(trace.meta.clock.residual_us) < 100


def test_it_is_saved_and_read_again(trace, tmp_path):
    trace.save(tmp_path / "t")
    again = Trace.load(tmp_path / "t")
    assert again.meta == trace.meta
    np.testing.assert_allclose(again.events.start_us, trace.events.start_us, atol=0.006)


def test_what_is_left_out_is_counted(trace):
    threads = "execution nodes of processes and threads"
    assert set(trace.meta.dropped) == {"metadata", "flows", "category Trace", "instants", threads}


def edited(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_missing_rank_is_named(raw):
    shutil.rmtree(raw / "rank1")
    with pytest.raises(InputError, match=r"rank1/hook\.json: missing"):
        assemble_torch(raw)


def test_a_missing_profile_is_named(raw):
    (raw / "rank1" / "kineto.json.gz").unlink()
    with pytest.raises(InputError, match=r"rank1/kineto\.json\.gz: missing"):
        assemble_torch(raw)


def test_a_job_that_was_not_profiled_says_so(raw):
    edited(raw / "rank0" / "hook.json", lambda hook: hook.update(marks=[]))
    with pytest.raises(InputError, match="none was profiled"):
        assemble_torch(raw)


def test_raw_files_of_another_kind_are_refused(raw):
    edited(raw / "job.json", lambda job: job.update(format="tensorflow-horovod"))
    with pytest.raises(InputError, match="tensorflow-horovod"):
        assemble_torch(raw)


def test_buckets_that_name_a_gradient_twice_are_refused(raw):
    edited(raw / "rank0" / "hook.json", lambda hook: hook["ddp"]["buckets"].append([0]))
    with pytest.raises(TraceFormatError, match="at most once"):
        assemble_torch(raw)


def test_a_profile_that_lacks_an_all_reduce_is_refused(raw):
    path = raw / "rank1" / "kineto.json.gz"
    profile = json.loads(gzip.decompress(path.read_bytes()))
    place = next(i for i, event in enumerate(profile["traceEvents"]) if event.get("name") == "gloo:all_reduce")
    del profile["traceEvents"][place]
    path.write_bytes(gzip.compress(json.dumps(profile).encode()))
    with pytest.raises(TraceFormatError, match="20 collectives were enqueued in the profiled steps, Gloo ran 19"):
        assemble_torch(raw)


def test_a_profile_need_not_be_compressed(tmp_path):
    whole = RAW / "rank0" / "kineto.json.gz"
    plain = tmp_path / "kineto.json"
    plain.write_bytes(gzip.decompress(whole.read_bytes()))
    assert len(read_host_spans(plain)) == len(read_host_spans(whole))


@pytest.mark.parametrize("name", ["job.json", "rank0/hook.json", "rank1/kineto.json.gz"])
@pytest.mark.parametrize("share", [0, 0.2, 0.5, 0.99])
def test_a_file_that_is_cut_off_is_named(raw, name, share):
    path = raw / name
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(TraceFormatError, match=name):
        assemble_torch(raw)


class Records(msgspec.Struct):
    """All records of a profile, undecoded."""

    traceEvents: list[msgspec.Raw]  # noqa: N815


WHOLE = gzip.decompress((RAW / "rank0" / "kineto.json.gz").read_bytes())


@settings(deadline=None, max_examples=40)
@given(damaged_copies(WHOLE))
def test_flipped_bytes_of_a_profile_never_crash_the_reader(tmp_path_factory, damaged):
    path = tmp_path_factory.mktemp("flipped") / "kineto.json"
    path.write_bytes(damaged)
    try:
        spans = read_host_spans(path)
    except DproSearchError:
        return
    assert len(spans) + sum(spans.dropped.values()) == len(msgspec.json.decode(damaged, type=Records).traceEvents)


values = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5), st.just([]))
records = st.dictionaries(st.sampled_from(["ph", "cat", "name", "ts", "dur", "tid"]), values)
plausible = st.fixed_dictionaries(
    {"ph": st.sampled_from(["X", "M", "s"]), "cat": st.sampled_from(["cpu_op", "user_annotation", "kernel"])},
    optional={"tid": values, "ts": values, "dur": values, "name": st.text(max_size=3)},
)


@settings(deadline=None, max_examples=100)
@given(st.lists(records | plausible, max_size=5))
def test_wrong_types_are_refused_or_counted(tmp_path_factory, events):
    path = tmp_path_factory.mktemp("typed") / "kineto.json"
    path.write_text(json.dumps({"traceEvents": events}))
    try:
        spans = read_host_spans(path)
    except TraceFormatError:
        return
    assert len(spans) + sum(spans.dropped.values()) == len(events)


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_a_hook_file_with_a_wrong_value_never_crashes_the_assembly(tmp_path_factory, data):
    raw = shutil.copytree(RAW, tmp_path_factory.mktemp("hook") / "raw")
    hook = json.loads((raw / "rank1" / "hook.json").read_text())
    key = data.draw(st.sampled_from(sorted(hook)))
    inner = hook[key]
    if isinstance(inner, dict) and data.draw(st.booleans()):
        inner[data.draw(st.sampled_from(sorted(inner)))] = data.draw(values)
    else:
        hook[key] = data.draw(values)
    (raw / "rank1" / "hook.json").write_text(json.dumps(hook))
    with contextlib.suppress(DproSearchError):
        assert len(assemble_torch(raw).events)
