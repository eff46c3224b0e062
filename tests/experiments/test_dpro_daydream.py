"""Daydream's arithmetic on steps that can be worked out by hand, and what it looks at of real recordings."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from sample import sample

from dpro_search.collect.trace import EventKind, TensorInfo, Trace
from dpro_search.replay import replay
from experiments.dpro.daydream import (
    PARAMETER_SERVER,
    Unit,
    Variant,
    all_reduce,
    covered_us,
    daydream_graph,
    measured_bytes_per_us,
    predictions_us,
    recorded_units,
    single_units,
)
from experiments.dpro.worker import Stretch, Worker, worker_of
from tests.recordings import trace_of

JOBS = ("tensorflow", "mxnet-horovod", "ddp", "byteps")


def tensors(*sizes: int) -> tuple[TensorInfo, ...]:
    return tuple(
        TensorInfo(name=f"t{i}", node=f"t{i}", dtype="float32", shape=(size // 4,), size_bytes=size) for i, size in enumerate(sizes)
    )


def iteration_us(worker, exchange, bytes_per_us, units=None):
    return replay(daydream_graph(worker, units or single_units(worker), exchange, bytes_per_us)).iteration_us


# Gradient 0 after 100 us of backward pass, 1 after 200 us; updates of 10 us each; 5 us of script.
BOTH = Worker(
    tensors=tensors(1000, 1000),
    chain=(Stretch(work_us=100, makes=(0,)), Stretch(work_us=100, makes=(1,)), Stretch(work_us=0)),
    updates=(Stretch(work_us=10, needs=(0,)), Stretch(work_us=10, needs=(1,))),
    script_us=5,
)


def test_a_gradient_is_sent_when_it_is_made_and_its_update_waits_for_it():
    # 100-200 gradient 0, 200-300 gradient 1, its update until 310
    assert iteration_us(BOTH, all_reduce(2), bytes_per_us=10) == pytest.approx(315)


def test_the_channel_takes_one_gradient_at_a_time():
    # 100-300 gradient 0, 300-500 gradient 1
    assert iteration_us(BOTH, all_reduce(2), bytes_per_us=5) == pytest.approx(515)


def test_a_ring_of_four_moves_one_and_a_half_bytes_for_each():
    # 100-250, 250-400
    assert iteration_us(BOTH, all_reduce(4), bytes_per_us=10) == pytest.approx(415)


def test_what_is_fused_waits_for_its_last_gradient():
    # 200-400 both, then both updates one after the other
    assert iteration_us(BOTH, all_reduce(2), 10, [Unit(tensors=(0, 1), size_bytes=2000)]) == pytest.approx(425)


def test_updates_wait_for_the_core():
    # Nothing to send: update 0 runs once the backward pass has freed the core at 200, or between its stretches at 100.
    assert iteration_us(BOTH, all_reduce(2), bytes_per_us=1e9) == pytest.approx(225)


def test_a_step_that_waits_for_its_bucket_runs_the_copies_after_it():
    worker = Worker(
        tensors=tensors(1000),
        chain=(Stretch(work_us=100, makes=(0,)), Stretch(work_us=40), Stretch(work_us=20, needs=(0,))),
        script_us=5,
    )
    # 100-200 the gradient, copies until 220
    assert iteration_us(worker, all_reduce(2), bytes_per_us=10) == pytest.approx(225)
    # 100-110 the gradient, the backward pass ends at 140, copies until 160
    assert iteration_us(worker, all_reduce(2), bytes_per_us=100) == pytest.approx(165)


def store_step(size_of_first: int) -> Worker:
    """Forward 2 x 50 us, which want weights 0 and 1; backward 2 x 100 us, which make gradients 1 and 0."""
    return Worker(
        tensors=tensors(size_of_first, 1000),
        chain=(
            Stretch(work_us=50, wants=(0,)), Stretch(work_us=50, wants=(1,)),
            Stretch(work_us=100, makes=(1,)), Stretch(work_us=100, makes=(0,)),
        ),
    )  # fmt: skip


def test_a_pull_follows_its_push_beside_the_next_push_and_the_next_step_waits_for_the_weights_it_wants():
    # pushes 200-300 and 300-400, pulls 300-400 and 400-500; the next step wants weights 0 first
    assert iteration_us(store_step(1000), PARAMETER_SERVER, bytes_per_us=10) == pytest.approx(500)
    # push of gradient 0 300-310, its pull behind the other 400-410
    assert iteration_us(store_step(100), PARAMETER_SERVER, bytes_per_us=10) == pytest.approx(410)


def test_parts_of_a_gradient_are_pulled_while_others_are_pushed():
    worker = Worker(tensors=tensors(1000), chain=(Stretch(work_us=50, wants=(0,)), Stretch(work_us=50, makes=(0,))))
    halves = [Unit(tensors=(0,), size_bytes=500)] * 2
    assert iteration_us(worker, PARAMETER_SERVER, bytes_per_us=10) == pytest.approx(300)
    # pushes 100-150 and 150-200, pulls 150-200 and 200-250
    assert iteration_us(worker, PARAMETER_SERVER, 10, halves) == pytest.approx(250)


def test_a_worker_that_updates_uses_weights_only_then():
    worker = Worker(
        tensors=tensors(1000),
        chain=(Stretch(work_us=50, wants=(0,)), Stretch(work_us=50, makes=(0,))),
        updates=(Stretch(work_us=30, needs=(0,)),),
    )
    assert iteration_us(worker, PARAMETER_SERVER, bytes_per_us=10) == pytest.approx(330)


def test_time_that_spans_cover_counts_once():
    start, end = np.array([40.0, 0.0, 5.0, 20.0]), np.array([50.0, 10.0, 8.0, 45.0])
    assert covered_us(start, end) == pytest.approx(40)


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    bundled = (sample(), trace_of("mxnet_horovod_mlp"), trace_of("ddp_mlp"), trace_of("byteps_mlp"))
    return dict(zip(JOBS, bundled, strict=True))


@pytest.mark.parametrize("job", JOBS)
def test_the_units_of_a_recording_hold_every_gradient_once(traces, job):
    worker = worker_of(traces[job])
    units = recorded_units(traces[job], worker)
    held = np.zeros(len(worker.tensors))
    for unit in units:
        sizes = np.array([worker.tensors[tensor].size_bytes for tensor in unit.tensors], dtype=float)
        held[list(unit.tensors)] += unit.size_bytes * sizes / sizes.sum()
    assert held == pytest.approx([tensor.size_bytes for tensor in worker.tensors])


@pytest.mark.parametrize("job", JOBS)
def test_every_gradient_is_made_once_and_every_prediction_holds_the_compute(traces, job):
    worker = worker_of(traces[job])
    assert sorted(tensor for stretch in worker.chain for tensor in stretch.makes) == list(range(len(worker.tensors)))
    assert min(predictions_us(traces[job]).values()) >= worker.compute_us * 0.999  # a distance settles to within so much


@pytest.mark.parametrize("job", JOBS)
def test_neither_other_ranks_nor_counts_of_cpu_time_are_looked_at(traces, job):
    trace = traces[job]
    first = (trace.events.rank == 0) | (trace.events.kind == EventKind.SERVER)
    doubled = replace(trace.steps, compute_cpu_us=2 * trace.steps.compute_cpu_us, comm_cpu_us=np.full(len(trace.steps), 1e6))
    shown = replace(trace, events=trace.events.select(first), steps=doubled) if job != "byteps" else replace(trace, steps=doubled)
    assert worker_of(shown) == worker_of(trace)


def test_a_slower_link_takes_longer_and_nothing_else_changes():
    slow = replace(sample(), meta=msgspec.structs.replace(sample().meta, rate_bps=sample().meta.rate_bps / 2))
    before, after = predictions_us(sample()), predictions_us(slow)
    assert after[Variant.PLAIN] > before[Variant.PLAIN]
    assert after[Variant.CORRECTED] == before[Variant.CORRECTED]  # the bandwidth that was measured
    assert before[Variant.SLIP] < before[Variant.PLAIN]


def test_the_measured_bandwidth_is_below_the_links():
    assert measured_bytes_per_us(sample()) < sample().meta.rate_bps / 8e6
