"""Plans of profiled DDP jobs: buckets are rewritten in the recorded graph, and the recorded ones give the recorded replay."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpro_search.collect.readers.importers import import_trace
from dpro_search.collect.readers.parameters import with_parameters
from dpro_search.collect.trace import MemorySamples, Trace
from dpro_search.errors import InputError
from dpro_search.kinds import PlanOptions, job_of, kind_of, profiled_ddp
from dpro_search.replay import replay
from dpro_search.space.plan import Plan
from dpro_search.space.recorded.buckets import BucketPlan, with_buckets
from dpro_search.space.scenario import Scenario
from tests.collect.kineto_files import AUTOGRAD, COLLECTIVES, START, Profile, distributed
from tests.every_case import every_case
from tests.profiles import replay_of, under
from tests.recordings import DATA, imported

SHARED = Path(__file__).parents[3] / "shared" / "traces"
GLOO_STEP = Path(__file__).parents[1] / "data" / "gloo_ddp_bert"  # of a recording on two cores, links without a limit
KIB, MIB = 2**10, 2**20
SIZES = (MIB, 2 * MIB, MIB, 4 * MIB)  # of the gradients, in the order in which they become ready
RATE_BYTES_PER_US = 2_000.0
LATENCY_US = 20.0


def transfer_us(size: int) -> float:
    return LATENCY_US + size / RATE_BYTES_PER_US


def gpu_rank(rank: int, *, buckets: tuple[int, ...] = (2, 2), steps: int = 4, find_unused: bool = False) -> Profile:
    """Steps of a GPU job with DDP's marks: a forward kernel, gradients, two buckets, copies back, an optimizer.

    Kernels are short, and the host launches one every 100 us; at the end of a step it waits for the device.
    """
    profile = Profile(pid=100 + rank, device=rank)
    at = float(START)
    for number in range(steps):
        marked = len(profile.records)
        profile.op("DistributedDataParallel.forward", at + 5, 200)
        if find_unused:
            profile.op("torch.distributed.ddp.reducer::search_unused_parameters", at + 150, 50)
        profile.kernel("forward", at + 30, 100, launched=at + 15)
        now, gradient, posted = at + 400.0, 0, 0.0
        ends = []
        for members in buckets:
            for _ in range(members):
                profile.kernel("backward", now + 10, 80, launched=now, tid=AUTOGRAD)
                profile.op("torch::autograd::AccumulateGrad", now + 20, 10, tid=AUTOGRAD)
                profile.op("torch::distributed::reducer::mul_out", now + 32, 20, tid=AUTOGRAD)
                profile.kernel("multiply", now + 91, 2, launched=now + 35, tid=AUTOGRAD)
                gradient += 1
                now += 100
            size = sum(SIZES[gradient - members : gradient])
            profile.op("c10d::allreduce_", now - 40, 30, tid=AUTOGRAD)
            begin = max(now, posted)
            posted = begin + transfer_us(size)
            ends.append((posted, members))
            profile.kernel(
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)",
                begin,
                transfer_us(size),
                launched=now - 30,
                tid=AUTOGRAD,
                stream=COLLECTIVES,
                **{"Collective name": "allreduce", "In msg nelems": size // 4, "Out msg nelems": size // 4, "dtype": "Float"},
            )
        gradient, free = 0, 0.0
        for end, members in ends:
            for _ in range(members):
                profile.op("torch.distributed.ddp.reducer::copy_bucket_to_grad", now, 40, tid=AUTOGRAD)
                free = max(now + 20, end, free)
                profile.kernel(
                    "Memcpy DtoD (Device -> Device)", free, 5, launched=now + 10, tid=AUTOGRAD,
                    cat="gpu_memcpy", call="cudaMemcpyAsync", bytes=SIZES[gradient],
                )  # fmt: skip
                free += 5
                gradient += 1
                now += 50
        profile.op("Optimizer.step#SGD.step", now + 10, 60)
        begin = max(now + 30, free)
        profile.kernel("optimizer", begin, 100, launched=now + 20)
        profile.call("cudaDeviceSynchronize", now + 40, begin + 105 - (now + 40))
        begun, at = at, begin + 120
        profile.step(number, begun, at - begun)
        profile.records[marked:] = [*profile.records[-2:], *profile.records[marked:-2]]
    return profile


def steps_us(job: Any, plan: Plan | None = None) -> list[float]:
    """Replay of each recorded step under a plan."""
    return [step.iteration_us for step in replay_of(job.job, plan=plan).replayed.values()]


def trace_of(**options: Any) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        return import_trace([gpu_rank(0, **options).write(Path(folder) / "rank0.json", header=distributed(0, 2))])


@pytest.fixture(scope="module")
def trace() -> Trace:
    return trace_of()


@pytest.fixture(scope="module")
def job(trace: Trace) -> Any:
    return job_of(trace)


def test_sizes_come_from_the_copies_out_of_the_buckets(trace: Trace, job: Any) -> None:
    assert kind_of(trace) is profiled_ddp.KIND
    assert tuple(tensor.size_bytes for tensor in job.job.tensors) == SIZES
    assert job.job.gradients.bucket_of.tolist() == [0, 0, 1, 1]
    assert "copies" in job.job.gradients.why


def test_the_recorded_buckets_give_the_recorded_replay(job: Any) -> None:
    again = Plan.of(bucket_cap_bytes=3 * MIB)
    assert job.job.bucket_of(again).tolist() == [0, 0, 1, 1]
    assert steps_us(job, again) == pytest.approx(steps_us(job), rel=1e-9)


@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared traces")
def test_the_recorded_buckets_of_a_real_job_give_its_recorded_replay() -> None:
    job: Any = job_of(imported(SHARED / "kineto_single" / "ddp_resnet50_a100_rank0of2.json.gz"))
    assert sum(tensor.size_bytes for tensor in job.job.tensors) == 4 * 25_557_032
    assert len(job.job.tensors) == 161
    again = Plan.of(first_bucket_bytes=MIB, bucket_cap_bytes=25 * MIB)
    assert (job.job.bucket_of(again) == job.job.gradients.bucket_of).all()
    assert steps_us(job, again) == pytest.approx(steps_us(job), rel=1e-9)
    assert job.predict(Plan.of(gradient_as_bucket_view=True)).iteration_us < job.predict(Plan()).iteration_us
    assert any("the job has 2 ranks, but only 1 was imported" in text for text in job.assumptions)


@every_case("first_mib", [1, 8, 32])
@every_case("cap_mib", [1, 8, 64])
def test_what_posts_a_bucket_does_not_need_it(first_mib: int, cap_mib: int) -> None:
    """A step of BERT on Gloo, buckets of 4 MiB: rank 0 waits for the first before it posts the second, which 8 MiB join."""
    prediction = job_of(Trace.load(GLOO_STEP)).predict(Plan.of(first_bucket_bytes=first_mib * MIB, bucket_cap_bytes=cap_mib * MIB))
    assert 350e3 < prediction.iteration_us < 500e3


@given(cuts=st.lists(st.booleans(), min_size=3, max_size=3))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_plan_is_the_profile_of_the_job_that_follows_it(job: Any, cuts: list[bool]) -> None:
    """The same host and kernels with other buckets, profiled, take what the plan is predicted to take."""
    bucket_of = np.concatenate(([0], np.cumsum(cuts)))
    planned_us = replay(_rewritten(job, bucket_of)).iteration_us
    counts = tuple(np.bincount(bucket_of).tolist())
    followed = job_of(trace_of(buckets=counts))
    assert planned_us == pytest.approx(followed.predict(Plan()).iteration_us, rel=0.02)


def _rewritten(job: Any, bucket_of: Any) -> Any:
    steps, step = job.job.recorded_steps, replay_of(job.job).middle_step
    edit = steps.edit(step)
    with_buckets(edit, job.job.gradients, step, BucketPlan(bucket_of=bucket_of), steps.prices)
    graph = edit.graph()
    graph.validate()
    return graph


def test_every_bucket_is_a_collective_of_its_bytes(job: Any) -> None:
    graph = _rewritten(job, np.arange(4))
    durations_us = [
        graph.duration_us[op] for op in range(len(graph)) if graph.name(op).startswith("bucket ") or "nccl" in graph.name(op)
    ]
    priced = sorted(us for us in durations_us if us >= LATENCY_US + MIB / RATE_BYTES_PER_US - 1)
    assert priced == pytest.approx(sorted(transfer_us(size) for size in SIZES), rel=0.1)


def test_views_of_buckets_are_not_copied(job: Any) -> None:
    graph = job.timeline(Plan.of(gradient_as_bucket_view=True)).graph
    copies = [op for op in range(len(graph)) if graph.name(op).startswith("Memcpy DtoD")]
    assert len(copies) == len(SIZES)
    assert not graph.duration_us[copies].any()


def test_halves_move_half_the_bytes_and_are_cast_twice(job: Any) -> None:
    lossy, plan = job.under(Scenario(plan=Plan(compression="bf16")))
    names = [name for name in lossy.timeline(plan).graph.names if name.startswith("cast")]
    assert len([name for name in names if "back" in name]) == len(names) / 2 == 2
    with pytest.raises(InputError, match="changes the numbers; only with --allow-lossy"):
        job.predict(Plan(compression="bf16"))


def test_memory_is_what_was_counted_without_what_views_save_and_with_halves() -> None:
    """Counted once in a step's forward pass, and once at its end, when all gradients are there beside their buckets."""
    trace, end = trace_of(), 80 * MIB
    steps = trace.steps
    counted = MemorySamples(
        rank=np.zeros(2 * len(steps.index), np.int64),
        time_us=np.concatenate((steps.start_us + 100, steps.end_us - 110)),
        allocated_bytes=np.repeat((50 * MIB, end), len(steps.index)),
    )
    job: Any = job_of(replace(trace, memory=counted), PlanOptions(allow_lossy=True))
    views, halves = Plan.of(gradient_as_bucket_view=True), Plan(compression="fp16")
    assert job.predict(Plan()).peak_memory_bytes == end
    assert job.predict(views).peak_memory_bytes == end - sum(SIZES)
    assert end <= job.predict(halves).peak_memory_bytes <= end + sum(SIZES) // 2
    assert job.predict(Plan.of(bucket_cap_bytes=MIB)).peak_memory_bytes == end


def test_without_counts_memory_is_not_known_but_for_what_gradients_and_parameters_take(job: Any) -> None:
    assert job.predict(Plan.of(gradient_as_bucket_view=True)).peak_memory_bytes is None
    assumed = job.assumptions
    assert any("profile with profile_memory=True; parameters, gradients" in text and "24.0 MiB" in text for text in assumed)


def test_a_static_graph_takes_the_search_for_unused_parameters_away() -> None:
    with pytest.raises(InputError, match="searches no unused parameters"):
        job_of(trace_of()).predict(Plan.of(static_graph=True))
    searching: Any = job_of(trace_of(find_unused=True))
    before_us, after_us = (searching.timeline(plan).graph.duration_us.sum() for plan in (Plan(), Plan.of(static_graph=True)))
    assert after_us == pytest.approx(before_us - 50, abs=1)


def test_a_what_if_about_recorded_collectives_does_not_go_with_a_plan(job: Any) -> None:
    changes = ["collectives.all_reduce=0", "bucket_cap_bytes=1MiB"]
    changed, plan = job.under(job.job.scenario(changes))
    with pytest.raises(InputError, match="use communication= with it"):
        changed.predict(plan)


def parameters(folder: Path, rows: Any) -> Path:
    path = folder / "parameters.json"
    path.write_bytes(msgspec.json.encode(rows))
    return path


def test_sizes_can_be_given_to_import(tmp_path: Path) -> None:
    profile = gpu_rank(0)
    for record in profile.records:
        record["args"].pop("bytes", None)
    bare = import_trace([profile.write(tmp_path / "rank0.json", header=distributed(0, 2))])
    unknown: Any = job_of(bare)
    assert not unknown.job.gradients.known
    assert len(unknown.job.tensors) == 2, "a bucket counts as one gradient"
    rows = [[f"layer{i}.weight", [size // 4], "torch.float32"] for i, size in enumerate(SIZES[::-1])]
    named: Any = job_of(with_parameters(bare, parameters(tmp_path, rows)))
    assert [tensor.name for tensor in named.job.tensors] == ["layer3.weight", "layer2.weight", "layer1.weight", "layer0.weight"]
    assert named.job.gradients.known
    wrong: Any = job_of(with_parameters(bare, parameters(tmp_path, [[n, [7], d] for n, _, d in rows])))
    assert "do not add up" in wrong.job.gradients.why


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([["a", [1], "torch.float32"]], "1 parameters, but a step of the profile makes 4 gradients"),
        ({"a": 1}, r"not a list of \[name, shape, dtype\].*model.named_parameters"),
        ([["a", [1], "int7"]] * 4, "a: int7 is no type of a parameter"),
        ([["a", [-1], "torch.float32"]] * 4, "not a list"),
    ],
)
def test_a_wrong_file_of_parameters_is_one_line(trace: Trace, rows: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=reason):
        with_parameters(trace, parameters(tmp_path, rows))


def only(profile: Profile, *names: str) -> Profile:
    """The profile without the records whose names begin so."""
    profile.records = [record for record in profile.records if not record["name"].startswith(names)]
    return profile


def other_kind(profile: Profile) -> Profile:
    for record in profile.records:
        if record["name"].startswith("ncclDevKernel"):
            record["name"] = record["name"].replace("AllReduce", "SendRecv")
            record["args"] |= {"Collective name": "all_to_allv"}
    return profile


@pytest.mark.parametrize(
    ("profile", "reason"),
    [
        (lambda: only(gpu_rank(0), "nccl"), "shows no collective .one process, inference,"),
        (lambda: other_kind(gpu_rank(0)), "collectives .all-to-all. are neither DDP's buckets nor FSDP's units"),
    ],
)
def test_what_is_neither_says_what_can_still_be_asked(profile: Any, reason: str, tmp_path: Path) -> None:
    opened_job = job_of(import_trace([profile().write(tmp_path / "rank0.json", header=distributed(0, 2))]))
    assert not opened_job.space.fields
    with pytest.raises(InputError, match=reason):
        raise InputError(opened_job.nothing_to_search)
    assert opened_job.diagnose().gains


def test_half_a_step_is_left_out_and_the_others_tell_the_buckets(tmp_path: Path) -> None:
    profile = gpu_rank(0)
    last = max(record["ts"] for record in profile.records if record["name"].startswith("ProfilerStep"))
    profile.records = [record for record in profile.records if record["ts"] < last + 600]
    opened_job = job_of(import_trace([profile.write(tmp_path / "rank0.json", header=distributed(0, 2))]))
    assert "bucket_cap_bytes" in opened_job.space.fields
    assert any("it was cut off, and is left out" in warning for warning in opened_job.trace.meta.warnings)


def test_ranks_of_two_jobs_are_refused(tmp_path: Path) -> None:
    files = [gpu_rank(rank).write(tmp_path / f"rank{rank}.json", header=distributed(rank, 2 + rank)) for rank in range(2)]
    with pytest.raises(InputError, match="import one job at a time"):
        import_trace(files)


@pytest.fixture(scope="module")
def of_an_h200():
    """The job of the profile of an H200."""
    return job_of(imported(DATA / "ddp_resnet50_h200.json.gz"), PlanOptions())


class TestProfileOfAnH200:
    """ResNet-50, batch 32, DistributedDataParallel of one rank on NCCL: steps 7 to 9 of `experiments/validation/gpu_jobs.md`."""

    def test_its_gradients_and_buckets_are_known(self, of_an_h200):
        assert of_an_h200.title == profiled_ddp.KIND.title
        assert (len(of_an_h200.job.gradients.tensors), of_an_h200.job.gradients.buckets) == (161, 5)
        assert sum(tensor.size_bytes for tensor in of_an_h200.job.tensors) == 4 * 25_557_032

    def test_its_steps_are_replayed_as_they_were(self, of_an_h200):
        assert of_an_h200.job.compared(None).error_pct < 0.1

    def test_its_own_buckets_give_the_recorded_step(self, of_an_h200):
        recorded_buckets = Plan.of(first_bucket_bytes=MIB, bucket_cap_bytes=25 * MIB)
        assert of_an_h200.predict(recorded_buckets).iteration_us == pytest.approx(of_an_h200.predict(Plan()).iteration_us, rel=0.01)

    def test_the_gain_of_a_plan_is_near_the_measured_one(self, of_an_h200):
        """44.6 ms without the profiler, 42.3 ms with gradients in buckets: 5 % measured."""
        plain = under(of_an_h200.job, "measured=44.61ms")
        gain = 1 - plain.predict(Plan.of(gradient_as_bucket_view=True)).iteration_us / plain.predict(Plan()).iteration_us
        assert gain == pytest.approx(0.05, abs=0.03)
