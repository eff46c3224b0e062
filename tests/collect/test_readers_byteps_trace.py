"""BytePS's traces: stages of partitions, steps, and what the logs of messages and servers add."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from importer_kit import FUZZ, ImporterConformance, read_or_one_line, shared_traces

from dpro_search.collect.readers.byteps import importer as byteps_trace
from dpro_search.collect.trace import EventKind, Trace
from dpro_search.errors import TraceFormatError

EPOCH = 1_795_000_000_000_000
STEP_US = 10_000
KEY = 3 << 16
STAGES = {
    "REDUCE": (0, 10),
    "COPYD2H": (10, 20),
    "PUSH": (50, 150),
    "PULL": (160, 400),
    "COPYH2D": (400, 410),
    "BROADCAST": (410, 420),
}
WORKERS = (9, 11)  # as the message logs number them; the server is 8


def comm_file(path: Path, *, steps: int = 2, late_us: int = 0, clock_us: int = 0) -> Path:
    """One tensor of one partition; this worker is `late_us` later than others, and its clock is ahead by `clock_us`."""
    events = []
    for step in range(steps):
        t = EPOCH + clock_us + STEP_US * step
        tensor = "Comm.byteps.gradient_1"
        common = {"ph": "X", "pid": tensor, "cat": "Comm", "args": {"name": tensor}}
        events.append(common | {"name": tensor, "tid": "total", "ts": t + late_us, "dur": 430 - late_us})
        for stage, (start, end) in STAGES.items():
            starts_late = late_us if stage in ("REDUCE", "COPYD2H", "PUSH", "PULL") else 0
            ends_late = starts_late if stage != "PULL" else 0
            span = {"ts": t + start + starts_late, "dur": end + ends_late - start - starts_late}
            events.append(common | span | {"name": f"{tensor}.{stage}", "tid": str(KEY)})
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=1))
    return path


def logs(folder: Path, *, steps: int = 2, late_us: tuple[int, int] = (0, 40), server_clock_us: int = 0) -> list[Path]:
    """Messages of both workers and the server; the wire takes 30 us, the server copies for 20 us and sums for 50."""
    lines: dict[str, list[tuple[int, str]]] = {"worker0": [], "worker1": [], "server": [], "sums": []}
    for step in range(steps):
        t = EPOCH + STEP_US * step
        for worker, node in enumerate(WORKERS):
            sent = t + 60 + late_us[worker]
            lines[f"worker{worker}"] += [
                (sent, f"True True True {KEY} {node} 8"),
                (sent + 70, f"False True False {KEY} 8 {node}"),
                (t + 390, f"False False False {KEY} 8 {node}"),
            ]
            lines["server"] += [
                (sent + 30, f"False True True {KEY} {node} 8"),
                (sent + 40, f"True True False {KEY} 8 {node}"),
                (t + 360, f"True False False {KEY} 8 {node}"),
            ]
        first = t + 60 + late_us[0] + 30
        for name, start, end in (
            ("COPY_FIRST", first + 5, first + 25),
            ("SUM", first + 60, first + 110),
            ("COPY_MERGED", first + 111, first + 112),
        ):
            lines["sums"] += [(start, f"start, {KEY}, {name}, 0"), (end, f"end, {KEY}, {name}, 0")]
    files = []
    for name, rows in lines.items():
        shift = 0 if name.startswith("worker") else server_clock_us
        mark = ": " if name == "sums" else " "
        header = "" if name == "sums" else f"role={name[:6]}, id={8 if name == 'server' else WORKERS[int(name[-1])]}\n"
        files.append(folder / f"log_{name}.txt")
        files[-1].write_text(header + "".join(f"{t + shift}{mark}{text}\n" for t, text in sorted(rows)))
    return files


def job(folder: Path, *, with_logs: bool = True, **options: int) -> list[Path]:
    files = [comm_file(folder / "0_comm.json"), comm_file(folder / "1_comm.json", late_us=40)]
    return files + (logs(folder, **options) if with_logs else [])


def named(trace: Trace, name: str, rank: int | None = None) -> list[tuple[float, float]]:
    events = trace.events
    chosen = [i for i in range(len(events)) if trace.names[events.name[i]] == name and rank in (None, events.rank[i])]
    return [(float(events.start_us[i]), float(events.end_us[i])) for i in chosen]


class TestBytePS(ImporterConformance):
    importer = byteps_trace.IMPORTER

    @pytest.fixture
    def files(self, tmp_path):
        return job(tmp_path)


def test_without_logs_a_partition_goes_through_its_stages_on_every_worker(tmp_path):
    trace = byteps_trace.read(job(tmp_path, with_logs=False))
    assert trace.meta.ranks == 2
    assert named(trace, "byteps.gradient_1[0] PUSH", rank=0) == [(50, 150), (STEP_US + 50, STEP_US + 150)]
    assert named(trace, "byteps.gradient_1[0] wait for push", rank=1)[0] == (60, 90)
    assert any("wire time within PUSH and PULL is not known" in warning for warning in trace.meta.warnings)


def test_steps_are_the_repetition_of_tensors(tmp_path):
    trace = byteps_trace.read(job(tmp_path, with_logs=False))
    rank_steps = trace.steps.select(trace.steps.rank == 0)
    assert (rank_steps.index.tolist(), rank_steps.start_us.tolist(), rank_steps.end_us.tolist()) == (
        [0, 1],
        [0, STEP_US],
        [430, STEP_US + 430],
    )


def test_a_partition_is_back_only_after_every_worker_pushed_it(tmp_path):
    trace = byteps_trace.read(job(tmp_path, with_logs=False))
    events, needs = trace.events, trace.dependencies
    across = events.rank[needs.source] != events.rank[needs.target]
    pairs = {
        (trace.names[events.name[s]].split()[1], trace.names[events.name[t]].split()[1])
        for s, t in zip(needs.source[across], needs.target[across], strict=True)
    }
    assert pairs == {("PUSH", "COPYH2D")}


def test_message_logs_separate_the_wire_from_the_server(tmp_path):
    trace = byteps_trace.read(job(tmp_path))
    assert trace.meta.ranks == 3
    assert named(trace, "byteps.gradient_1[0] PUSH wire")[:2] == [(60, 90), (STEP_US + 60, STEP_US + 90)]
    assert named(trace, "byteps.gradient_1[0] PULL wire")[0] == (360, 390)
    logged = trace.events.collective[trace.events.kind == EventKind.COLLECTIVE] >= 0
    assert (len(logged), logged.all()) == (16, True)  # a PUSH and a PULL, and the wire times of both, of 2 workers in 2 steps


def test_server_logs_tell_what_was_summed_after_which_arrival_and_what_waited(tmp_path):
    trace = byteps_trace.read(job(tmp_path))
    assert named(trace, "byteps.gradient_1[0] COPY_FIRST")[0] == (95, 115)
    assert named(trace, "byteps.gradient_1[0] wait for server")[:2] == [(90, 95), (130, 150)]
    names = [trace.names[i].removeprefix("byteps.gradient_1[0] ") for i in trace.events.name]
    events, needs = trace.events, trace.dependencies
    chain = {(names[s], names[t]) for s, t in zip(needs.source, needs.target, strict=True) if 2 in (events.rank[s], events.rank[t])}
    assert chain == {
        ("COPYD2H", "PUSH wire"), ("PUSH wire", "COPY_FIRST"), ("PUSH wire", "SUM"), ("COPY_FIRST", "SUM"), ("SUM", "COPY_MERGED"),
        ("COPY_MERGED", "PULL wire"), ("PULL wire", "COPYH2D"),
    }  # fmt: skip


def test_nothing_recorded_contradicts_a_dependency(tmp_path):
    trace = byteps_trace.read(job(tmp_path))
    assert (trace.events.start_us[trace.dependencies.target] >= trace.events.end_us[trace.dependencies.source]).all()


def test_a_servers_clock_is_found_from_its_messages(tmp_path):
    trace = byteps_trace.read(job(tmp_path, server_clock_us=5_000_000))
    assert trace.meta.clock.offset_us[2] == pytest.approx(5_000_000, abs=trace.meta.clock.residual_us[2] + 1e-6)
    assert trace.meta.clock.residual_us[2] <= 30  # what a symmetric wire allows
    assert named(trace, "byteps.gradient_1[0] PUSH wire")[0] == pytest.approx((60, 90), abs=30)


def test_a_workers_clock_is_kept_while_nothing_contradicts_it_and_found_otherwise(tmp_path):
    kept = byteps_trace.read(job(tmp_path, with_logs=False))
    assert kept.meta.clock.offset_us == (0, 0)
    ahead = 11_500_000
    files = [comm_file(tmp_path / "0.json", steps=12), comm_file(tmp_path / "1.json", steps=12, late_us=40, clock_us=ahead)]
    clock = byteps_trace.read(files).meta.clock
    assert clock.offset_us[1] == pytest.approx(ahead, abs=clock.residual_us[1] + 1)


def test_gradients_get_their_parameters_names_from_a_list(tmp_path):
    (tmp_path / "names.txt").write_text("net_a_weight\nnet_b_weight\n")
    trace = byteps_trace.read([*job(tmp_path, with_logs=False), tmp_path / "names.txt"])
    assert [tensor.name for tensor in trace.tensors] == ["net_b_weight"]


def test_a_file_without_a_push_pull(tmp_path):
    (tmp_path / "comm.json").write_text(
        '{"traceEvents": [{"ph": "X", "name": "Comm.a.PUSH", "pid": "Comm.a", "tid": "1", "ts": 1}]}'
    )
    with pytest.raises(TraceFormatError, match=r"comm.json: no push-pull of BytePS"):
        byteps_trace.read([tmp_path / "comm.json"])


def mxnet_profile(path: Path, *, steps: int = 2, late_us: int = 0) -> Path:
    """A profile of MXNet of the same worker: one operator before and one after the push-pull of each marked iteration."""
    events: list[dict] = [{"ph": "M", "args": {"name": "cpu pinned/"}, "pid": 2, "name": "process_name"}]
    for step in range(steps):
        t = EPOCH + STEP_US * step
        push_pull = ("BytePSPushPull", late_us + 1, 435)
        for name, start, end in (("_backward_FullyConnected", -500, -10), push_pull, ("sgd_update", 440, 460)):
            events += [
                {"ph": ph, "name": name, "cat": "operator", "ts": t + ts, "pid": 0, "tid": 3}
                for ph, ts in (("B", start), ("E", end))
            ]
        for ph, ts in (("b", -600), ("e", 500)):
            events.append({"ph": ph, "name": f"iter{step + 5}", "cat": "train", "ts": t + ts, "pid": 9, "tid": 4, "id": 4})
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_mxnets_profiles_add_the_computation_and_whole_steps(tmp_path):
    profiles = [mxnet_profile(tmp_path / "m1.json", late_us=40), mxnet_profile(tmp_path / "m0.json")]
    trace = byteps_trace.read([*job(tmp_path, with_logs=False), *profiles])
    rank_steps = trace.steps.select(trace.steps.rank == 0)
    assert (rank_steps.end_us - rank_steps.start_us).tolist() == [1100, 1100]
    names = [trace.names[i] for i in trace.events.name]
    needs = {(names[s], names[t]) for s, t in zip(trace.dependencies.source, trace.dependencies.target, strict=True)}
    assert {("_backward_FullyConnected", "byteps.gradient_1"), ("byteps.gradient_1", "sgd_update")} <= needs
    assert (trace.meta.framework, trace.meta.dropped) == ("mxnet", {"push-pulls written twice": 4})


@FUZZ
@given(seed=st.integers(0, 2**32 - 1), share=st.floats(0, 1))
def test_logs_may_be_damaged_and_cut_off(tmp_path_factory, seed, share):
    files = job(tmp_path_factory.mktemp("job"))
    rng = np.random.default_rng(seed)
    for path in files[2:]:
        data = np.frombuffer(path.read_bytes(), np.uint8).copy()
        data[rng.integers(0, len(data), 10)] = rng.integers(0, 256, 10)
        path.write_bytes(data.tobytes()[: int(len(data) * share)])
    read_or_one_line(byteps_trace.IMPORTER, files)


def test_everything_of_a_real_job_is_matched():
    folder = shared_traces() / "byteps_mxnet_2x2"
    files = sorted(path for path in folder.iterdir() if "_mxnet" not in path.name)
    trace = byteps_trace.read(files)
    events = trace.events
    assert (trace.meta.ranks, len(trace.tensors), len(trace.steps), trace.meta.dropped) == (4, 10, 2 * 11, {})
    moved = events.collective[events.kind == EventKind.COLLECTIVE]
    assert len(moved) == 2 * (2 * 2 * 14 * 11)  # push and pull, and their wire times, of 2 workers, 14 partitions, 11 steps
    assert (moved >= 0).all()
    whole = np.bincount(events.collective[events.kind == EventKind.COMM])
    assert whole.tolist() == [2] * (10 * 11)  # each tensor on both workers in each step
    served = events.select((events.kind == EventKind.SERVER) & (events.step >= 0))
    assert len(served) == 3 * 14 * 11  # a copy, a sum and a merge of every partition in every step
    assert (events.start_us[trace.dependencies.target] >= events.end_us[trace.dependencies.source]).all()
    computed = byteps_trace.read(sorted(folder.iterdir()))
    ops = computed.events.select(computed.events.kind == EventKind.OP)
    assert np.bincount(ops.step).tolist() == [2 * 47] * 11  # operators of both workers in each step
    assert len(computed.events) == len(events) + len(ops)
    alone = byteps_trace.read([path for path in files if "_comm" in path.name])
    assert set(alone.events.collective[alone.events.kind == EventKind.COLLECTIVE]) == {-1}
    assert len(alone.events) == len(events) - len(events.select(events.rank >= 2))
