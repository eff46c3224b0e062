"""Plans of every kind of job: prices of real recordings and of small jobs, and a search over each."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from sample import measured, sample, schedule

from dpro_search.collect.trace import GraphTensors, TensorInfo, TensorType, Trace
from dpro_search.costmodel.fused.clusters import ClusterCosts, default_model
from dpro_search.errors import DproSearchError, InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.kinds import Job, JobInScenario, PlanOptions, job_of, searchable
from dpro_search.kinds.byteps.job import Byteps
from dpro_search.kinds.ddp.job import Ddp
from dpro_search.kinds.horovod.job import Horovod, HorovodObjective
from dpro_search.kinds.kvstore.job import Kvstore
from dpro_search.search import run_search
from dpro_search.space.plan import Plan
from dpro_search.space.replay_graph import ReplayGraph
from dpro_search.space.scenario import ClusterChange, Scale, Scenario
from tests.recordings import trace_of
from tests.store_jobs import MIB, kvstore_job, layers_of


@functools.cache
def byteps() -> JobInScenario:
    return job_of(trace_of("byteps_mlp"))


@functools.cache
def ddp() -> JobInScenario:
    return job_of(trace_of("ddp_mlp"))


@functools.cache
def horovod() -> JobInScenario:
    return job_of(sample())


def kvstore() -> JobInScenario:
    """Two workers with 2 MiB in one tensor and 8 small ones, one slow link each, and one server: more servers help."""
    sizes = [2 * MIB, *[4096] * 8]
    layer_us = [1000.0] * len(sizes)
    job = kvstore_job(
        sizes,
        segments=layers_of(layer_us, layer_us),
        bytes_per_us=100.0,
        **dict.fromkeys(("copy_us_per_byte", "sum_us_per_byte", "update_us_per_byte"), 1e-4),
        **dict.fromkeys(("slice_us", "update_call_us", "worker_call_us"), 1.0),
    )
    tensors = [
        TensorInfo(name=f"t{i}", node=f"key{i}", dtype="float32", shape=(s // 4,), size_bytes=s) for i, s in enumerate(sizes)
    ]
    return JobInScenario(Kvstore(job, tensors, rate_bps=800e6))


def on_links(job: JobInScenario, rate_bps: float) -> JobInScenario:
    return job.under(Scenario(cluster=ClusterChange(rate_bps=rate_bps)))[0]


KINDS = {"byteps": byteps, "ddp": ddp, "horovod": horovod, "kvstore": kvstore}


@pytest.mark.parametrize("kind", KINDS)
def test_the_recorded_setting_and_every_starting_point_have_a_price(kind: str) -> None:
    prices = KINDS[kind]()
    recorded = prices.predict(Plan())
    assert recorded.source == "recorded"
    for plan in prices.space.starts(4):
        prediction = prices.predict(prices.space.simplest(plan))
        assert prediction.iteration_us > 0
        assert prediction.interval_us[0] < prediction.iteration_us < prediction.interval_us[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_search_finds_a_plan_that_is_no_slower(kind: str, tmp_path: Path) -> None:
    prices = KINDS[kind]()
    result = run_search(prices.objective(), trials=12, seed=1, out=tmp_path / "run", trace_digest=kind)
    assert result.plans[0].prediction.iteration_us <= 1.01 * result.baseline.iteration_us
    assert set(result.plans[0].plan.settings) <= set(prices.space.fields)


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_of_another_kind_of_job_is_refused_in_one_line(kind: str) -> None:
    prices = KINDS[kind]()
    foreign, owner = ("bucket_cap_bytes", "PyTorch DDP") if kind != "ddp" else ("credit", "BytePS")
    with pytest.raises(InputError, match=f"plan: {prices.space.job.name} has no {foreign}; it knows") as refusal:
        prices.predict(Plan.of(**{foreign: 1}))
    assert f"({foreign} is a setting of {owner})" in str(refusal.value)
    assert "\n" not in str(refusal.value)


class TestDdp:
    def test_half_the_bytes_cost_less_communication(self) -> None:
        prices = on_links(job_of(trace_of("ddp_mlp"), PlanOptions(allow_lossy=True)), 5e6)
        gain_us = prices.predict(Plan()).iteration_us - prices.predict(Plan(compression="fp16")).iteration_us
        assert gain_us > 0.8 * 54_056 / 2 * 8 / 5  # of which bytes a ring of two moves as many over each link
        assert prices.predict(Plan(compression="fp16")).source == "extrapolated"
        with pytest.raises(InputError, match="has no compression"):
            ddp().predict(Plan(compression="fp16"))

    def test_the_empty_plan_is_the_recording_to_the_last_bit(self) -> None:
        prices = job_of(trace_of("ddp_mlp"), PlanOptions(allow_lossy=True))
        assert prices.predict(Plan()) == ddp().predict(Plan())

    def test_factors_cost_less_communication_and_more_compute_and_memory(self) -> None:
        prices = on_links(job_of(trace_of("ddp_mlp"), PlanOptions(allow_lossy=True)), 5e6)
        plain, half, factors = (prices.predict(Plan(compression=kind)) for kind in (None, "fp16", "powersgd-1"))
        assert factors.iteration_us < half.iteration_us
        assert factors.breakdown_us["compute"] > plain.breakdown_us["compute"]
        assert plain.peak_memory_bytes is not None
        assert factors.peak_memory_bytes is not None
        assert factors.peak_memory_bytes > plain.peak_memory_bytes + 54_056  # what is left over of every bucket
        assert factors.source == "extrapolated"

    def test_the_search_chooses_among_all_kinds(self, tmp_path: Path) -> None:
        prices = on_links(job_of(trace_of("ddp_mlp"), PlanOptions(allow_lossy=True)), 5e6)
        kinds = [None, "fp16", "powersgd-4", "powersgd-2", "powersgd-1"]
        best = min(kinds, key=lambda kind: prices.predict(Plan(compression=kind)).iteration_us)
        result = run_search(prices.objective(), trials=60, out=tmp_path / "run", trace_digest="ddp")
        assert result.plans[0].plan.compression == best == "powersgd-1"

    def test_gradients_that_powersgd_cannot_take_are_refused(self) -> None:
        measured = Ddp.measured_step(trace_of("ddp_mlp"))

        def refusal(**changes: object) -> str:
            tensors = tuple(msgspec.structs.replace(tensor, **changes) for tensor in measured.graph.tensors)
            changed = dataclasses.replace(measured, graph=dataclasses.replace(measured.graph, tensors=tensors))
            space = Ddp(changed, PlanOptions(allow_lossy=True)).plans(Scenario())
            kinds = [
                point["compression"] for choice in space.choices for point in choice.grids.get("set", ()) if "compression" in point
            ]
            assert kinds == ["fp16"]  # nothing to choose that would be refused
            return str(space.refusal(Plan(compression="powersgd-2")))

        assert "known of float32 gradients, and this job has float64" in refusal(dtype="float64")
        assert "has none" in refusal(shape=())
        assert "would compress no gradient" in refusal(shape=(10,))

    def test_what_a_hook_cannot_do_is_refused(self) -> None:
        prices, measured = job_of(trace_of("ddp_mlp"), PlanOptions(allow_lossy=True)), Ddp.measured_step(trace_of("ddp_mlp"))
        assert "has fp16" in str(prices.space.refusal(Plan(compression="2bit")))

        def recorded_with(**changes: object) -> JobInScenario:
            graph = dataclasses.replace(measured.graph, **changes)
            return JobInScenario(Ddp(dataclasses.replace(measured, graph=graph), PlanOptions(allow_lossy=True)))

        hooked = recorded_with(compression=0.5)
        with pytest.raises(InputError, match="takes only one"):
            hooked.predict(Plan(compression="fp16"))
        with pytest.raises(InputError, match="has the communication hook own_hook, and a model takes only one"):
            recorded_with(comm_hook="own_hook").predict(Plan(compression="powersgd-1"))
        assert "takes only one" in str(hooked.space.refusal(Plan(compression="fp16")))


def test_a_second_server_takes_half_of_what_is_cut() -> None:
    prices = kvstore()
    one = prices.predict(Plan()).iteration_us
    uncut = prices.predict(Plan(servers=2)).iteration_us
    cut = prices.predict(Plan.of(servers=2, bigarray_bound=1000)).iteration_us
    slices = prices.predict(Plan.of(servers=2, p3=True, slice_threshold=100_000)).iteration_us
    assert cut < uncut <= one * 1.01
    assert slices < uncut


def test_the_search_finds_a_plan_as_good_as_cutting_the_large_tensor(tmp_path: Path) -> None:
    prices = kvstore()
    result = run_search(prices.objective(), trials=60, out=tmp_path / "run", trace_digest="kvstore")
    assert result.plans[0].prediction.iteration_us <= prices.predict(Plan.of(servers=2, bigarray_bound=1000)).iteration_us
    best = result.plans[0].plan
    assert (best.servers or 1) > 1 or best.servers_on_workers


def test_two_bits_push_a_sixteenth_and_pull_all() -> None:
    recorded = kvstore().job
    assert isinstance(recorded, Kvstore)
    job = recorded.recorded_job
    prices = JobInScenario(Kvstore(job, recorded.tensors, rate_bps=800e6, allow_lossy=True))
    assert prices.predict(Plan()) == kvstore().predict(Plan())
    gain_us = prices.predict(Plan()).iteration_us - prices.predict(Plan(compression="2bit")).iteration_us
    pushes_us = 2 * job.tensor_bytes.sum() / 100.0  # of two workers into one link
    assert 0.5 * pushes_us < gain_us < pushes_us
    on_another_link = on_links(prices, 100e6)
    assert on_another_link.predict(Plan(compression="2bit")).iteration_us < on_another_link.predict(Plan()).iteration_us
    with pytest.raises(InputError, match="does not compress priority slices"):
        prices.predict(Plan.of(compression="2bit", p3=True))
    with pytest.raises(InputError, match="has no compression"):
        kvstore().predict(Plan(compression="2bit"))


def test_gradients_of_other_types_are_not_compressed_by_kvstore() -> None:
    recorded = kvstore().job
    assert isinstance(recorded, Kvstore)
    tensors = [msgspec.structs.replace(tensor, dtype="float16") for tensor in recorded.tensors]
    space = Kvstore(recorded.recorded_job, tensors, allow_lossy=True).plans(Scenario())
    assert "float32 gradients only, and this job has float16" in str(space.refusal(Plan(compression="2bit")))


def graph_of(job: Job, scenario: Scenario) -> ReplayGraph:
    assert isinstance(job, Byteps)
    return job.replay_of(scenario).graph


class TestHalvesOfBytePS:
    """A real recording of two workers and two servers, without links; its gradients are float32."""

    def prices(self, **meta: Any) -> JobInScenario:
        trace = trace_of("byteps_mlp")
        changed = dataclasses.replace(trace, meta=msgspec.structs.replace(trace.meta, **meta))
        return job_of(changed, PlanOptions(allow_lossy=True))

    def test_without_compression_the_job_is_replayed_as_before_to_the_last_bit(self) -> None:
        allowed, plain = self.prices(), job_of(trace_of("byteps_mlp"))
        ours, theirs = (graph_of(each.job, Scenario()) for each in (allowed, plain))
        assert list(ours.names) == list(theirs.names)
        np.testing.assert_array_equal(ours.duration_us, theirs.duration_us)
        np.testing.assert_array_equal(ours.flow_bytes, theirs.flow_bytes)
        assert allowed.predict(Plan()) == plain.predict(Plan())
        with pytest.raises(InputError, match="a job with BytePS has no compression"):
            plain.predict(Plan(compression="fp16"))

    def test_halves_gain_where_the_link_is_what_limits_and_cost_two_casts_of_each_gradient(self) -> None:
        half = Plan(compression="fp16")
        slow = on_links(self.prices(), 2e6)
        assert slow.predict(half).iteration_us < 0.75 * slow.predict(Plan()).iteration_us
        assert slow.predict(half).source == "extrapolated"
        names = list(graph_of(slow.job, Scenario(plan=half)).names)
        assert [sum(f".{way}@" in name for name in names) for way in ("half", "whole")] == [2 * len(slow.job.tensors)] * 2

    def test_a_search_finds_them_on_a_slow_link(self, tmp_path: Path) -> None:
        result = run_search(self.prices(rate_bps=2e6).objective(), trials=30, out=tmp_path / "run", trace_digest="byteps")
        assert result.plans[0].plan.compression == "fp16"

    def test_what_is_not_known_is_refused_with_the_reason(self) -> None:
        prices = self.prices()
        assert isinstance(prices.job, Byteps)
        tensors = [msgspec.structs.replace(tensor, dtype="float64") for tensor in prices.job.tensors]
        foreign = JobInScenario(Byteps(prices.job.recorded_job, tensors, allow_lossy=True))
        assert "known of float32 gradients, and this job has float64" in str(foreign.space.refusal(Plan(compression="fp16")))
        assert "compression" not in [choice.name for choice in foreign.space.choices if "set" in choice.grids]
        recorded = self.prices(knobs={"compression": "onebit"})
        assert "compressed already (onebit)" in str(on_links(recorded, 1e9).space.refusal(Plan(compression="fp16")))
        assert "a job with BytePS has fp16" in str(prices.space.refusal(Plan(compression="2bit")))


def test_a_slower_link_and_faster_workers_change_every_price() -> None:
    prices = kvstore()
    slower = on_links(prices, 100e6)
    assert slower.predict(Plan()).iteration_us > prices.predict(Plan()).iteration_us
    assert slower.predict(Plan()).source == "extrapolated"
    faster, _ = prices.under(Scenario(scales=(Scale.parse("compute=0.5"),)))
    assert faster.predict(Plan()).iteration_us < prices.predict(Plan()).iteration_us


class TestHorovod:
    """The bundled sample: TensorFlow, two ranks."""

    def test_communication_alone_is_priced_by_the_replay_of_its_schedule(self) -> None:
        plan = Plan.of(fusion_threshold_bytes=MIB, cycle_time_us=2000.0)
        assert horovod().predict(plan).iteration_us == schedule(plan).iterations().iteration_us

    def test_exchanges_are_in_order_and_whole(self) -> None:
        prices = horovod()
        plan = prices.space.starts(3)[2]
        objective = prices.objective()
        assert isinstance(objective, HorovodObjective)
        exchanges = objective.exchanges(plan)
        assert {frozenset(e.tensors) for e in exchanges} == {frozenset(group) for group in plan.tensor_groups or ()}
        assert [e.posted_us for e in exchanges] == sorted(e.posted_us for e in exchanges)
        for exchange in exchanges:
            assert exchange.ready_us[-1] == pytest.approx(exchange.posted_us)
            assert list(exchange.ready_us) == sorted(exchange.ready_us)
            assert exchange.ended_us > exchange.posted_us
        assert exchanges[-1].ended_us < 1.2 * prices.predict(plan).iteration_us

    def test_half_the_bytes_cost_less_communication(self) -> None:
        prices = job_of(sample(), PlanOptions(allow_lossy=True))
        slow = Plan.of(fusion_threshold_bytes=0)
        half = Plan.of(fusion_threshold_bytes=0, compression="fp16")
        assert prices.predict(half).iteration_us < prices.predict(slow).iteration_us
        with pytest.raises(InputError, match="has no compression"):
            horovod().predict(half)

    def test_parts_of_a_batch_cost_time(self) -> None:
        prices = job_of(sample(), PlanOptions(compute=frozenset({"accumulation"}), allow_lossy=True))
        assert prices.predict(Plan(micro_batches=4)).iteration_us > prices.predict(Plan()).iteration_us
        assert prices.predict(Plan(micro_batches=4)).source == "extrapolated"

    def test_recomputing_everything_costs_at_most_a_forward_pass(self) -> None:
        prices = job_of(sample(), PlanOptions(compute=frozenset({"recomputation"})))
        (choice,) = (choice for choice in prices.space.choices if choice.name == "recomputation")
        plan = choice.put(Plan(), "segments", 0)
        base, changed = prices.predict(Plan()).iteration_us, prices.predict(plan).iteration_us
        graph = measured().graph
        forward_us = float(graph.op_work_us[:, (graph.op_kind == OpKind.FORWARD) & (graph.op_rank == 0)].sum(axis=1).max())
        assert base < changed < base + 1.5 * forward_us

    def test_ops_can_be_fused_with_a_model_of_what_that_takes(self) -> None:
        try:
            prices = job_of(sample(), PlanOptions(compute=frozenset({"op-fusion"})))
        except DproSearchError as error:
            pytest.skip(f"no model of fused ops: {error}")
        rng = np.random.default_rng(0)
        proposed = (prices.space.propose(Plan(), rng) for _ in range(400))  # few: on this job's CPU fusing hardly ever pays
        plan = next(plan for plan in proposed if plan.op_clusters)
        prediction = prices.predict(plan)
        assert prediction.iteration_us > 0
        assert prediction.interval_us[0] < prediction.iteration_us < prediction.interval_us[1]

    def test_where_a_recording_has_shapes_clusters_are_priced_by_them(self) -> None:
        trace = sample()
        graph = trace.graphs[trace.graph_of_rank[0]]
        edges = np.zeros(len(graph.input_idx), dtype=np.int64)  # each carries the first result of an op, all of one type
        tensors = GraphTensors(
            types=(TensorType("float32", (64, 64)),),
            input_port=edges,
            input_type=edges,
            workspace_bytes=np.zeros(len(graph.name), dtype=np.int64),
        )
        shaped = dataclasses.replace(trace, graphs=(dataclasses.replace(graph, tensors=tensors),) * len(trace.graphs))
        options = PlanOptions(compute=frozenset({"op-fusion"}))
        with_shapes, without = (JobInScenario(Horovod(measured(), trace.horovod_settings, options, one)) for one in (shaped, trace))
        rng = np.random.default_rng(0)
        plan = next(plan for _ in range(400) if (plan := with_shapes.space.propose(Plan(), rng)).op_clusters)
        costs = ClusterCosts(default_model(), measured().graph, recorded=shaped.graphs[0])
        assert costs.times(plan.op_clusters or ()).shaped.all()
        assert with_shapes.predict(plan).interval_us != without.predict(plan).interval_us
        assert with_shapes.predict(plan).source == "extrapolated"

    def test_a_memory_limit_makes_plans_infeasible_with_the_reason(self) -> None:
        peak = horovod().predict(Plan()).peak_memory_bytes
        assert peak is not None
        prices = job_of(sample(), PlanOptions(memory_limit_bytes=peak - MIB))
        assert re.fullmatch(r"needs ([\d,.]+ [MG]iB), and may have (?!\1)[\d,.]+ [MG]iB", str(prices.predict(Plan()).infeasible))
        assert job_of(sample(), PlanOptions(memory_limit_bytes=peak)).predict(Plan()).infeasible is None

    def test_options_that_make_no_sense_are_refused(self) -> None:
        with pytest.raises(InputError, match="transformation 'magic' is unknown"):
            PlanOptions(compute=frozenset({"magic"}))
        with pytest.raises(InputError, match="memory limit"):
            PlanOptions(memory_limit_bytes=0)
        with pytest.raises(InputError, match="only jobs of TensorFlow"):
            job_of(trace_of("byteps_mlp"), PlanOptions(compute=frozenset({"precision"})))
        with pytest.raises(InputError, match="does not tell how much memory"):
            job_of(trace_of("byteps_mlp"), PlanOptions(memory_limit_bytes=1))
        with pytest.raises(InputError, match="precision: name a table"):
            job_of(sample(), PlanOptions(compute=frozenset({"precision"})))


def test_a_trace_of_no_known_kind_has_nothing_to_search(tmp_path: Path) -> None:
    trace = sample()
    other = Trace(**{name: getattr(trace, name) for name in trace.__dataclass_fields__} | {
        "meta": msgspec.structs.replace(trace.meta, settings=None, format="chakra")
    })  # fmt: skip
    with pytest.raises(InputError, match=r"the trace \(chakra\) is of a job whose knobs are not known"):
        searchable(job_of(other))
