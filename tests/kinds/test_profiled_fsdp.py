"""Plans of profiled FSDP jobs: units gather earlier, once, together or in fewer bytes, as the recorded graph is rewritten."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dpro_search.cluster import parse_cluster
from dpro_search.collect.readers.importers import import_trace
from dpro_search.collect.trace import TensorInfo, Trace
from dpro_search.costmodel.collectives.nccl import collective_us, placement_of
from dpro_search.errors import InputError
from dpro_search.kinds import JobInScenario, PlanOptions, job_of, kind_of, profiled_fsdp
from dpro_search.kinds.profiled_fsdp.job import ProfiledFsdp
from dpro_search.replay import replay
from dpro_search.space.plan import Plan
from dpro_search.space.recorded.units import UnitPlan, with_units
from dpro_search.space.scenario import Scenario
from dpro_search.space.transformations import PlanningFacts
from dpro_search.space.transformations.sharding import KeptUnits
from tests.collect.kineto_files import AUTOGRAD, COLLECTIVES, MAIN, START, Profile, distributed
from tests.kinds.conformance import KindConformance
from tests.kinds.verbs import verb
from tests.profiles import replay_of

MIB = 2**20
BYTES = 4 * MIB  # of a unit's parameters; the root has a quarter of them
ACTIVATIONS, RESULT = 16 * MIB, MIB
A100 = "NVIDIA A100-SXM4-40GB"
UNITS = ("", "0", "1", "2")
LATENCY_US, RATE = 50.0, 20_000.0
NAMES = {"AllGather": "_allgather_base", "ReduceScatter": "_reduce_scatter_base", "AllReduce": "allreduce"}
KERNELS = {kind: f"ncclDevKernel_{kind}_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)" for kind in NAMES}


def bytes_of(unit: str) -> int:
    return BYTES if unit else BYTES // 4


def transfer_us(size: int) -> float:
    return LATENCY_US + size / RATE


@dataclass
class Device:
    """A host that enqueues one thing after the other, and the device's streams, each with when it is free."""

    profile: Profile
    now: float
    world: int
    shared_by: int
    compute: float = 0.0
    collectives: float = 0.0
    allocated: int = 0

    def allocate(self, size: int) -> None:
        """The device's allocator hands out bytes, or gets them back (below 0)."""
        self.allocated += size
        args = {"Total Allocated": self.allocated, "Device Type": 1, "Bytes": size}
        self.profile.records.append(
            {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 100, "tid": MAIN, "ts": self.now, "args": args}
        )

    def collective(self, kind: str, size: int, tid: int, *, after: float = 0.0) -> float:
        start = max(self.now + 10, self.collectives, after)
        sent = {"In msg nelems": size // 4 // self.shared_by if kind == "AllGather" else size // 4}
        sent["Out msg nelems"] = size // 4 // self.shared_by if kind == "ReduceScatter" else size // 4
        group, ranks = ("1", self.world // self.shared_by) if kind == "AllReduce" else ("0", self.shared_by)
        more = {"Collective name": NAMES[kind], "dtype": "Float", "Group size": ranks, "Process Group Name": group}
        self.profile.kernel(KERNELS[kind], start, transfer_us(size), launched=self.now, tid=tid, stream=COLLECTIVES, **sent, **more)
        self.collectives = start + transfer_us(size)
        return self.collectives

    def kernel(self, name: str, us: float, tid: int, *, after: float = 0.0) -> float:
        start = max(self.now + 10, self.compute, after)
        self.profile.kernel(name, start, us, launched=self.now, tid=tid)
        self.compute = start + us
        return self.compute


def gather(device: Device, unit: str, tid: int) -> float:
    begun = device.now
    device.now += 10
    device.kernel("copy_in", 5, tid)
    device.now += 10
    end = device.collective("AllGather", bytes_of(unit), tid)
    device.now += 15
    device.profile.add("user_annotation", mark("all_gather", unit), begun, device.now - begun, tid)
    return end


def copy_out(device: Device, unit: str, tid: int, gathered: float) -> None:
    begun = device.now
    device.now += 5
    device.kernel("split_with_sizes_copy", 10, tid, after=gathered)
    device.now += 15
    device.profile.add("user_annotation", mark("all_gather_copy_out", unit), begun, device.now - begun, tid)


def mark(what: str, unit: str) -> str:
    return f"FSDP::{what} ({unit})" if unit else f"FSDP::{what}"


def rank(number: int, *, hybrid: bool = False, steps: int = 4, world: int = 2, shared_by: int | None = None) -> Profile:
    """Steps of four units, the root among them: forward, backward, and a wait for the device at the end.

    A unit's forward pass leaves `ACTIVATIONS`, of which `RESULT` is what the next unit gets. An optimizer keeps as much as the
    parameters take, twice.
    """
    profile = Profile(pid=100 + number, device=number)
    at = float(START)
    for step in range(steps):
        marked = len(profile.records)
        device = Device(profile, at + 10, world, shared_by or world)
        device.allocate(3 * sum(map(bytes_of, UNITS)) // world)
        for unit in UNITS:
            begun = device.now
            device.allocate(bytes_of(unit))
            copy_out(device, unit, MAIN, gather(device, unit, MAIN))
            profile.add("user_annotation", mark("pre_forward", unit), begun, device.now - begun, MAIN)
            device.now += 1
            profile.op("aten::mm", device.now, 20, MAIN, **{"Input Dims": [[RESULT // 4]], "Input type": ["float"]})
            device.kernel("forward", 150, MAIN)
            device.now += 60
            device.allocate(ACTIVATIONS)
            profile.add("user_annotation", mark("post_forward", unit), device.now + 1, 2, MAIN)
            device.now += 4
            if unit:
                device.allocate(-bytes_of(unit))
        for unit in reversed(UNITS):
            begun = device.now
            if unit:
                device.allocate(bytes_of(unit))
                copy_out(device, unit, AUTOGRAD, gather(device, unit, AUTOGRAD))
            device.now += 3
            profile.add("user_annotation", mark("pre_backward", unit), begun, device.now - begun, AUTOGRAD)
            end = device.kernel("backward", 300, AUTOGRAD)
            device.now += 60
            device.allocate(-ACTIVATIONS)
            device.allocate(-bytes_of(unit) + bytes_of(unit) // world)
            begun = device.now
            device.now += 5
            end = device.collective("ReduceScatter", bytes_of(unit), AUTOGRAD, after=end)
            device.now += 10
            if hybrid:
                device.collective("AllReduce", bytes_of(unit) // 2, AUTOGRAD, after=end)
                device.now += 10
            profile.add("user_annotation", mark("post_backward_reduce", unit), begun, device.now - begun, AUTOGRAD)
        device.now += 20
        profile.op("Optimizer.step#SGD.step", device.now, 30)
        device.now += 10
        end = device.kernel("optimizer", 100, MAIN, after=device.collectives)
        device.now += 20
        profile.call("cudaDeviceSynchronize", device.now, end + 5 - device.now)
        begun, at = at, end + 20
        profile.step(step, begun, at - begun)
        profile.records[marked:] = [*profile.records[-2:], *profile.records[marked:-2]]
    return profile


def trace_of(*, world: int = 2, gpu: str = "", **options: Any) -> Trace:
    header = distributed(0, world) | ({"deviceProperties": [{"name": gpu}]} if gpu else {})
    with tempfile.TemporaryDirectory() as folder:
        return import_trace([rank(0, world=world, **options).write(Path(folder) / "rank0.json", header=header)])


@pytest.fixture(scope="module")
def job() -> Any:
    return job_of(trace_of(), PlanOptions(allow_lossy=True))


def changed(job: Any, **plan: Any) -> Any:
    graph = job.timeline(Plan.of(**plan)).graph
    graph.validate()
    return graph


def durations(graph: Any, kind: str) -> list[float]:
    return [float(graph.duration_us[op]) for op in range(len(graph)) if graph.name(op).startswith(KERNELS[kind][:20])]


def test_units_and_their_sizes_come_from_the_marks(job: Any) -> None:
    assert kind_of(job.trace) is profiled_fsdp.KIND
    assert [(tensor.name, tensor.size_bytes) for tensor in job.job.tensors] == [
        (unit or "the root", bytes_of(unit)) for unit in UNITS
    ]
    assert job.job.units.first.program == (
        ("the root", "0", "1", "2"), ("2", "1", "0"), ("2", "1", "0", "the root"),
    )  # fmt: skip


def test_a_plan_that_changes_nothing_gives_the_recorded_replay(job: Any) -> None:
    steps, recorded = job.job.recorded_steps, replay_of(job.job)
    edit = steps.edit(recorded.middle_step)
    with_units(edit, job.job.units, recorded.middle_step, UnitPlan(), steps.prices)
    assert replay(edit.graph()).iteration_us == pytest.approx(recorded.timeline().iteration_us, rel=1e-9)


def test_kept_parameters_are_gathered_once(job: Any) -> None:
    gathers = len(durations(changed(job), "AllGather"))
    assert gathers == 7
    assert len(durations(changed(job, reshard_after_forward=False), "AllGather")) == 4
    assert len(durations(changed(job, kept_last_units=2), "AllGather")) == 5
    kept = [job.predict(Plan.of(kept_last_units=count)).iteration_us for count in (1, 2)]
    every = job.predict(Plan.of(reshard_after_forward=False)).iteration_us
    assert every <= kept[1] <= kept[0] <= job.predict(Plan()).iteration_us


def test_any_units_can_keep_their_parameters(job: Any) -> None:
    units = [each.unit for each in job.job.units.first.backward]
    assert len(durations(changed(job, kept_units=(units[1],)), "AllGather")) == 6
    last = job.predict(Plan.of(kept_last_units=2)).iteration_us
    assert job.predict(Plan.of(kept_units=tuple(units[:2]))).iteration_us == last
    assert job.space.simplest(Plan.of(kept_units=tuple(units[:2]))) == Plan.of(kept_last_units=2)
    assert job.space.simplest(Plan.of(kept_units=tuple(units))) == Plan.of(reshard_after_forward=False)


def test_units_to_keep_are_written_with_a_plus_between_them(job: Any) -> None:
    assert job.job.scenario(["kept_units=1+0"]).plan == Plan.of(kept_units=("1", "0"))


def test_the_search_keeps_the_smallest_units_first() -> None:
    sizes = {"the root": 50, "0": 300, "1": 100, "2": 200}
    tensors = tuple(TensorInfo(name=name, node="", dtype="float32", shape=(), size_bytes=size) for name, size in sizes.items())
    known, unknown = (KeptUnits(PlanningFacts(name="", tensors=some), ["2", "1", "0"]) for some in (tensors, ()))
    assert known.choice.grids["small"] == ({"kept_units": ("1",)}, {"kept_units": ("1", "2")})
    assert "small" not in unknown.choice.grids


def test_units_together_gather_the_bytes_of_both(job: Any) -> None:
    graph = changed(job, units_together=2)
    assert len(durations(graph, "AllGather")) == 3 + 2  # root, 0 and 1, 2; again all but the root
    assert len(durations(graph, "ReduceScatter")) == 3
    assert sum(durations(graph, "AllGather")) < sum(durations(changed(job), "AllGather")) * 1.01


def test_half_the_bytes_are_reduced_in_less_time(job: Any) -> None:
    whole, half = (sum(durations(changed(job, **plan), "ReduceScatter")) for plan in ({}, {"reduce_dtype": "bfloat16"}))
    assert half < whole
    with pytest.raises(InputError, match="changes the numbers; only with --allow-lossy"):
        job_of(job.trace).predict(Plan.of(reduce_dtype="bfloat16"))


def test_prefetched_gathers_are_enqueued_earlier(job: Any) -> None:
    """The host enqueues a gather a unit earlier; the device, which is behind it, gains nothing else."""

    def enqueued(plan: dict[str, Any]) -> list[int]:
        graph = changed(job, **plan)
        names = [graph.name(op) for op in range(len(graph)) if graph.device_name(graph.device[op]).startswith("host thread 1 ")]
        return [place for place, name in enumerate(names) if "AllGather" in name]

    assert enqueued({"prefetch": True, "prefetch_depth": 2}) != enqueued({"prefetch": True}) != enqueued({})
    assert job.predict(Plan.of(prefetch=True)).iteration_us <= job.predict(Plan()).iteration_us + 1


def test_hsdp_says_what_it_does_not_offer() -> None:
    hybrid: Any = job_of(trace_of(hybrid=True))
    assert hybrid.job.units.hybrid
    assert len(hybrid.job.units.first.reductions[0].parts) == 2
    assert any("other shard groups are not offered" in text for text in hybrid.assumptions)
    with pytest.raises(InputError, match=r"shard_ranks: .* needs the machine: the trace does not say on what GPUs.*recorded_on="):
        hybrid.predict(Plan.of(shard_ranks=2))


@pytest.fixture(scope="module")
def four() -> Any:
    """Four ranks of which one was profiled, on GPUs that the profile names."""
    return job_of(trace_of(world=4, gpu=A100))


def test_fewer_ranks_share_the_parameters_and_average_their_gradients_with_the_others(four: Any) -> None:
    before, after = changed(four), changed(four, shard_ranks=2)
    cluster = parse_cluster("dgx-a100-40")
    shared_us = {count: collective_us("all_gather", BYTES, cluster, placement_of(cluster, range(count))) for count in (2, 4)}
    gathers = durations(before, "AllGather"), durations(after, "AllGather")
    assert max(gathers[1]) / max(gathers[0]) == pytest.approx(float(shared_us[2] / shared_us[4]))
    copies = [op for op in range(len(after)) if after.name(op).startswith("all-reduce of ")]
    assert len(copies) == len(UNITS)
    for op in copies:
        needed = [after.name(int(need)) for need in after.pred_idx[after.pred_ptr[op] : after.pred_ptr[op + 1]]]
        assert any(name.startswith(KERNELS["ReduceScatter"][:20]) for name in needed)
    assert four.predict(Plan.of(shard_ranks=2)).iteration_us > 0


def test_the_recorded_number_of_ranks_is_no_change(four: Any) -> None:
    assert four.space.simplest(Plan.of(shard_ranks=4)) == Plan()
    with pytest.raises(InputError, match="4 ranks do not make groups of 3; use 2, 4"):
        four.predict(Plan.of(shard_ranks=3))


def test_a_job_with_copies_shares_among_other_ranks() -> None:
    """Two groups of two ranks become one of four, which needs no all-reduce, or stay."""
    hybrid: Any = job_of(trace_of(world=4, shared_by=2, hybrid=True, gpu=A100))
    assert hybrid.job.units.shared_by == 2
    before, after = changed(hybrid), changed(hybrid, shard_ranks=4)
    assert len(durations(before, "AllReduce")) == len(UNITS)
    assert not durations(after, "AllReduce")
    assert max(durations(after, "AllGather")) > max(durations(before, "AllGather"))
    assert hybrid.space.simplest(Plan.of(shard_ranks=2)) == Plan()
    scatters = [op for op in range(len(after)) if after.name(op).startswith(KERNELS["ReduceScatter"][:20])]
    assert scatters[-1] in after.carry_src  # the host waits for it before the next step


def test_on_more_hosts_shards_within_each_are_gathered_faster() -> None:
    job: Any = job_of(trace_of(world=4, gpu=A100))
    opened_job, _ = job.under(Scenario().on("8xdgx-a100-40"))
    within, across = (opened_job.predict(Plan.of(**plan)).iteration_us for plan in ({"shard_ranks": 8}, {}))
    assert within < across


def test_a_unit_that_is_computed_again_launches_its_forward_pass_before_its_backward_pass(job: Any) -> None:
    graph = changed(job, recomputed_modules=("1",))
    rows = [op for op in range(len(graph)) if graph.device_name(graph.device[op]).startswith("stream 7 ")]
    names = [graph.name(op).partition("@")[0] for op in rows]
    again = names.index("again: forward")
    assert names.count("again: forward") == 1
    assert [name for name in names[again:] if name in ("backward", "forward")] == ["backward"] * 3  # of 1, 0 and the root
    assert float(graph.duration_us[rows[again]]) == 150
    recorded_us = job.predict(Plan()).iteration_us
    three_us = job.predict(Plan(recomputed_modules=("0", "1", "2"))).iteration_us
    assert recorded_us < three_us < recorded_us + 3 * 250


def test_what_is_computed_again_is_a_unit(job: Any) -> None:
    with pytest.raises(InputError, match="'3' cannot be computed again: units that can are 0, 1, 2"):
        job.predict(Plan(recomputed_modules=("3",)))


def peak(job: Any, **plan: Any) -> int:
    prediction = job.predict(Plan.of(**plan)).peak_memory_bytes
    assert isinstance(prediction, int)
    return prediction


def test_memory_is_what_was_counted_and_what_a_plan_changes_of_it(job: Any) -> None:
    """At the end of the forward pass: three times the shards, the root's parameters, and all activations."""
    total = sum(map(bytes_of, UNITS))
    recorded = 3 * total // 2 + bytes_of("") + 4 * ACTIVATIONS + BYTES
    assert peak(job) == recorded
    assert peak(job, kept_last_units=1) == recorded  # its parameters are there at the peak anyway
    assert peak(job, kept_last_units=2) == recorded + BYTES
    assert peak(job, reshard_after_forward=False) == recorded + 2 * BYTES
    assert peak(job, recomputed_modules=("0", "1")) == recorded - 2 * (ACTIVATIONS - RESULT)
    assert peak(job, prefetch=True) == recorded


def test_fewer_shards_take_more_memory(four: Any) -> None:
    total = sum(map(bytes_of, UNITS))
    assert peak(four, shard_ranks=2) - peak(four) == pytest.approx(3 * total // 4, rel=0.2)


def test_a_search_within_a_memory_limit_computes_units_again(job: Any, tmp_path: Path) -> None:
    job.trace.save(tmp_path / "trace")
    limit = peak(job) - ACTIVATIONS
    result = verb("run", tmp_path / "trace", "--trials", 40, "--memory-limit", limit, "--out", tmp_path / "run")
    best = result["plans"][0]
    assert best["plan"]["recomputed_modules"]
    assert best["peak_memory_bytes"] <= limit
    verb("export", tmp_path / "run", "--out", tmp_path / "plan")
    assert {"modules.py", "modules.json"} <= {file.name for file in (tmp_path / "plan").iterdir()}


def test_without_counts_of_memory_what_parameters_take_alone_can_be_too_much() -> None:
    trace = trace_of(world=4, gpu=A100)
    job: Any = job_of(replace(trace, memory=type(trace.memory).none()))
    total = sum(map(bytes_of, UNITS))
    assert job.predict(Plan.of(kept_last_units=1)).peak_memory_bytes is None
    assert any("take 14.5 MiB at least" in text for text in job.assumptions)
    assert 2 * total // 4 + 2 * BYTES == 14.5 * 2**20
    large = tuple(msgspec.structs.replace(tensor, size_bytes=2**35) for tensor in job.job.units.tensors)
    large_job = ProfiledFsdp(job.trace, replace(job.job.units, tensors=large))
    assert (
        JobInScenario(large_job)
        .predict(Plan.of(kept_last_units=1))
        .infeasible.startswith("needs at least 128.0 GiB, and NVIDIA A100")
    )


def test_a_plan_that_needs_more_than_the_device_has_is_infeasible() -> None:
    trace = trace_of(world=4, gpu=A100)
    device = parse_cluster("dgx-a100-40").devices[0]
    counts = trace.memory.allocated_bytes
    full = replace(trace.memory, allocated_bytes=counts + int(device.memory_bytes or 0) - counts.max())
    job: Any = job_of(replace(trace, memory=full))
    assert job.predict(Plan.of(kept_last_units=1)).infeasible is None
    assert job.predict(Plan.of(kept_last_units=2)).infeasible == f"needs 40.0 GiB, and {device.name} has 40.0 GiB"


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"prefetch_depth": 2}, "goes with prefetch=1"),
        ({"kept_last_units": 4}, "3 units of the recorded job give their parameters up"),
        ({"kept_last_units": 1, "reshard_after_forward": False}, "leave out one of them"),
        ({"kept_last_units": 1, "kept_units": ("1",)}, "kept_units goes with neither"),
        ({"kept_units": ("head",)}, "'head' does not give its parameters up; units that do are 2, 1, 0"),
        ({"units_together": 9}, "there are 3 units beside the root"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(job: Any, plan: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        job.predict(Plan.of(**plan))


def test_units_that_are_not_marked_leave_nothing_to_search() -> None:
    profile = rank(0)
    profile.records = [record for record in profile.records if not record["name"].startswith("FSDP::")]
    with tempfile.TemporaryDirectory() as folder:
        trace = import_trace([profile.write(Path(folder) / "rank0.json", header=distributed(0, 2))])
    assert kind_of(trace) is profiled_fsdp.KIND
    assert not job_of(trace).space.fields
    assert "does not mark FSDP's units" in job_of(trace).nothing_to_search


class TestProfiledFsdp(KindConformance):
    kind = profiled_fsdp.KIND
    unmoved = ("compute=0.5", "communication=0", "backward-prefetch", "prefetch")  # the device is never behind its host

    @classmethod
    def recording(cls) -> Trace:
        return trace_of()
