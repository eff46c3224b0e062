"""Jobs with BytePS as graphs: where partitions go, in which order, what an iteration takes, what changes do."""

import gzip
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.errors import GraphError, InputError
from dpro_search.replay import replay
from dpro_search.space.servers.byteps_job import BytepsJob, HalfGradients, byteps_graph, hash_of
from dpro_search.space.servers.byteps_recorded import recorded_byteps_job
from dpro_search.space.servers.recorded_workers import untraced_us
from tests.recordings import trace_of
from tests.store_jobs import MIB
from tests.store_jobs import byteps_job as job

SHARED = Path(__file__).resolve().parents[4] / "shared" / "traces" / "byteps_mxnet_2x2"
PAGE = 4096
SIZES = st.lists(st.integers(1, 5 * MIB), min_size=1, max_size=6)
FREE_CASTS = HalfGradients(call_us=0.0, us_per_byte=0.0)


def iteration_us(job: BytepsJob) -> float:
    return replay(byteps_graph(job)).iteration_us


def times_us(job: BytepsJob, ending: str) -> dict[str, tuple[float, float]]:
    """Start and end of the ops of the first iteration whose name ends so."""
    timeline = replay(byteps_graph(job), iterations=1)
    names = list(timeline.graph.names)
    span = zip(timeline.times.start_us, timeline.times.end_us, strict=True)
    return {name: times for name, times in zip(names, span, strict=True) if name.endswith(ending)}


@given(sizes=SIZES, bound=st.integers(1, 2 * MIB), servers=st.integers(1, 5))
def test_partitions_hold_each_byte_once_and_have_keys_of_their_own(sizes, bound, servers):
    cut = job(sizes, partition_bytes=bound, servers=servers)
    parts = [cut.parts(tensor) for tensor in range(len(sizes))]
    whole_pages = -(-bound // PAGE) * PAGE
    assert [sum(part.size_bytes for part in of) for of in parts] == sizes
    assert [len(of) for of in parts] == [-(-size // whole_pages) for size in sizes]
    assert all(0 < part.size_bytes <= whole_pages and 0 <= part.server < servers for of in parts for part in of)
    keys = [part.key for of in parts for part in of]
    assert len(set(keys)) == len(keys)
    assert [key >> 16 for key in keys] == [1 + 2 * tensor for tensor, of in enumerate(parts) for _ in of]


def test_the_hash_sends_keys_where_real_servers_had_them():
    if not SHARED.is_dir():
        pytest.skip("real traces are not beside the repository (shared/traces)")
    for path in sorted(SHARED.glob("van_server_*.log.gz")):
        head, *lines = gzip.decompress(path.read_bytes()).decode().splitlines()
        server = (int(head.rpartition("=")[2]) - 8) // 2
        assert {hash_of(int(line.split()[4]), "djb2") % 2 for line in lines} == {server}


def test_without_communication_an_iteration_is_its_compute():
    assert iteration_us(job([MIB])) == pytest.approx(20_000)


def test_an_exposed_exchange_is_pushed_summed_and_pulled():
    """At 10 bytes/us 1 MiB takes 104.9 ms to the server, which both workers share, and as long back."""
    alone = iteration_us(job([MIB], workers=1, bytes_per_us=10.0))
    assert alone == pytest.approx(20_000 + 2 * MIB / 10, rel=1e-6)
    both = iteration_us(job([MIB], workers=2, bytes_per_us=10.0))
    assert both == pytest.approx(20_000 + 4 * MIB / 10, rel=1e-6)


def test_what_the_servers_hold_is_spread_by_more_of_them():
    sizes = [MIB] * 8
    assert iteration_us(job(sizes, servers=2, bytes_per_us=10.0)) < iteration_us(job(sizes, servers=1, bytes_per_us=10.0))


def test_a_pull_is_asked_for_behind_the_pushes_that_wait():
    """The first partition is acknowledged early, but its request leaves after the last push."""
    two = job([2 * MIB], workers=1, bytes_per_us=10.0)
    pushed = max(end for _, end in times_us(two, ".push@0").values())
    assert min(start for start, _ in times_us(two, ".request@0").values()) == pytest.approx(pushed)


@settings(max_examples=25, deadline=None)
@given(sizes=SIZES, servers=st.integers(1, 3), credit=st.integers(0, 3))
def test_every_partition_is_summed_of_all_workers_and_answered_to_all(sizes, servers, credit):
    graph = byteps_graph(job(sizes, servers=servers, credit=credit, bytes_per_us=100.0))
    names = list(graph.names)
    parts = sum(-(-size // MIB) for size in sizes)
    for stage in ("reduce", "push", "request", "pull"):
        assert sum(f".{stage}@" in name for name in names) == 2 * parts
    moved = np.array([".push@" in name or ".pull@" in name for name in names])
    assert graph.flow_bytes[moved].sum() == pytest.approx(4 * sum(sizes))
    assert graph.flow_bytes[~moved].sum() == 0
    graph.validate()


def test_what_a_worker_exchanges_with_the_server_on_its_host_crosses_no_link():
    alone = job([MIB], workers=1, bytes_per_us=0.1, server_host=(0,))
    assert iteration_us(alone) == pytest.approx(20_000)
    graph = byteps_graph(alone)
    graph.validate()
    assert graph.flow_bytes.sum() == 0


@settings(max_examples=25, deadline=None)
@given(sizes=SIZES, server_host=st.lists(st.integers(0, 4), min_size=1, max_size=3))
def test_links_carry_what_processes_of_different_hosts_exchange(sizes, server_host):
    placed = job(sizes, servers=len(server_host), bytes_per_us=100.0, server_host=tuple(server_host))
    graph = byteps_graph(placed)
    graph.validate()
    parts = [part for tensor in range(len(sizes)) for part in placed.parts(tensor)]
    crossing = sum(part.size_bytes for part in parts for worker in range(2) if server_host[part.server] != worker)
    assert graph.flow_bytes.sum() == pytest.approx(2 * crossing), "pushed and pulled"


def test_a_server_on_a_worker_s_host_shares_its_link():
    """At 10 bytes/us 1 MiB takes 104.9 ms from the other worker and as long back; its own worker's part crosses nothing."""
    assert iteration_us(job([MIB], bytes_per_us=10.0, server_host=(1,))) == pytest.approx(20_000 + 2 * MIB / 10, rel=1e-6)


def test_with_credit_the_first_parameters_partitions_are_taken_first():
    late_first = {"order": np.array([2, 1, 0]), "reduce_us": 1000.0}
    taken = {name: start for name, (start, _) in times_us(job([MIB] * 3, credit=1, **late_first), ".reduce@0").items()}
    # The one that came first is taken at once, of those that wait the one of the first parameter.
    assert sorted(taken, key=taken.__getitem__) == ["tensor2.0.reduce@0", "tensor0.0.reduce@0", "tensor1.0.reduce@0"]
    free = times_us(job([MIB] * 3, credit=0, **late_first), ".reduce@0")
    assert len({start for start, _ in free.values()}) == 1


@settings(max_examples=25, deadline=None)
@given(sizes=SIZES, credit=st.integers(1, 4))
def test_the_stage_reduce_holds_no_more_bytes_than_the_credit(sizes, credit):
    held = job(sizes, credit=credit, reduce_us=1000.0)
    took_us = [start for start, _ in sorted(times_us(held, ".reduce@0").values())]
    bytes_total = sum(sizes)
    window = max(took_us) - min(took_us)
    last = max(part.size_bytes for tensor in range(len(sizes)) for part in held.parts(tensor))
    assert (bytes_total - last) / (credit * MIB) <= window / 1000.0 + 1 + 1e-9


def test_looking_for_work_slows_what_shares_the_core():
    assert iteration_us(job([MIB], worker_polling=0.2)) == pytest.approx(20_000 / 0.8)
    shared = job([MIB], server_core=(0,), server_polling=0.3, worker_polling=0.2)
    assert iteration_us(shared) == pytest.approx(20_000 / 0.5)


def test_weights_are_updated_when_the_last_gradient_of_their_group_is_back():
    two = job([MIB, MIB], group=np.array([0, 0]), bytes_per_us=100.0, update_us=np.full((2, 2), 500.0))
    back = times_us(two, ".copied@0")
    (updated,) = times_us(two, "group0.update@0").values()
    assert updated[0] == pytest.approx(max(end for _, end in back.values()))
    assert updated[1] - updated[0] == pytest.approx(1000.0)


@pytest.mark.parametrize(
    "wrong",
    [{"server_core": ()}, {"partition_bytes": 0}, {"credit": -1}, {"bytes_per_us": 0.0}, {"hash_name": "built_in"}],
)
def test_jobs_that_cannot_be_are_refused(wrong):
    with pytest.raises(InputError):
        replace(job([MIB]), **wrong)


@given(sizes=SIZES, bound=st.integers(1, 2 * MIB))
def test_halves_are_cut_by_their_own_length_at_the_same_bound(sizes, bound):
    """`InitTensor` of BytePS counts the bytes of what it is handed, and its bound stays in whole pages."""
    cut = job([2 * size for size in sizes], partition_bytes=bound, halves=FREE_CASTS)
    plain = job(sizes, partition_bytes=bound)
    assert [cut.parts(tensor) for tensor in range(len(sizes))] == [plain.parts(tensor) for tensor in range(len(sizes))]


@settings(max_examples=25, deadline=None)
@given(sizes=SIZES, credit=st.integers(0, 2))
def test_half_the_bytes_of_gradients_are_pushed_and_pulled_as_halves(sizes, credit):
    halves = byteps_graph(job([2 * size for size in sizes], halves=FREE_CASTS, bytes_per_us=50.0, credit=credit))
    halves.validate()
    moved = [".push@" in name or ".pull@" in name for name in halves.names]
    assert halves.flow_bytes[moved].sum() == halves.flow_bytes.sum() == pytest.approx(4 * sum(sizes))


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 5 * MIB))
def test_a_half_whose_casts_cost_nothing_takes_as_long_as_a_gradient_of_half_the_bytes(size):
    shared = {"bytes_per_us": 50.0, "cpu_us_per_byte": 0.001, "message_us": 20.0}
    half = iteration_us(job([2 * size], halves=FREE_CASTS, **shared))
    assert half == pytest.approx(iteration_us(job([size], **shared)), rel=1e-6)


def test_a_gradient_is_made_a_half_behind_its_scaling_and_whole_before_its_update():
    costs = HalfGradients(call_us=100.0, us_per_byte=1e-3)
    fields = {"scale_us": np.full((2, 1), 70.0), "update_us": np.full((2, 1), 500.0), "bytes_per_us": 50.0}
    cast = job([MIB], halves=costs, **fields)
    one_way_us = (100.0 + MIB * 1e-3) / 2
    ((_, scaled),) = times_us(cast, ".scale@0").values()
    ((begun, halved),) = times_us(cast, ".half@0").values()
    assert (begun, halved) == (scaled, pytest.approx(scaled + one_way_us))
    assert min(start for start, _ in times_us(cast, ".reduce@0").values()) == pytest.approx(halved)
    back = max(end for _, end in times_us(cast, ".copied@0").values())
    ((begun, whole),) = times_us(cast, ".whole@0").values()
    assert (begun, whole) == (pytest.approx(back), pytest.approx(back + one_way_us))
    ((updated, _),) = times_us(cast, "group0.update@0").values()
    assert updated == pytest.approx(whole)


def test_a_recording_with_halves_is_replayed_with_them_and_its_casts_are_among_its_operators():
    trace = trace_of("byteps_mlp")
    meta = msgspec.structs.replace(trace.meta, knobs={**trace.meta.knobs, "compression": "fp16"})
    byteps_job, plain = recorded_byteps_job(replace(trace, meta=meta)), recorded_byteps_job(trace)
    assert (byteps_job.halves, byteps_job.recorded_compression) == (FREE_CASTS, "fp16")
    assert (byteps_job.sent_bytes == plain.sent_bytes / 2).all()
    assert plain.halves is None


def test_a_recorded_job_is_what_was_recorded():
    trace = trace_of("byteps_mlp")
    byteps_job = recorded_byteps_job(trace)
    assert (len(byteps_job.workers), len(byteps_job.server_core), byteps_job.partition_bytes, byteps_job.credit) == (2, 2, 8192, 0)
    assert byteps_job.group.tolist() == [0, 0, 0, 0, 1, 1]
    assert sorted(byteps_job.order.tolist()) == list(range(6))
    for worker, segments in enumerate(byteps_job.workers):
        used = sorted(tensor for segment in segments for tensor in segment.uses)
        assert used == list(range(6))
        total_us = (
            sum(segment.work_us for segment in segments) + byteps_job.scale_us[worker].sum() + byteps_job.update_us[worker].sum()
        )
        assert total_us == pytest.approx(untraced_us(trace, worker, trace.steps.compute_cpu_us))
    assert iteration_us(byteps_job) > 0


def test_a_trace_without_sizes_is_refused():
    trace = trace_of("byteps_mlp")
    with pytest.raises(GraphError, match="no known key and size"):
        recorded_byteps_job(replace(trace, tensors=()))
