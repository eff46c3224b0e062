"""Prices of plans of jobs with parameter servers: what the specification says, found without the times of every op."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.collect.assemble.kvstore_slices import Slicing
from dpro_search.collect.trace import TensorInfo
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.kinds import JobInScenario
from dpro_search.kinds.byteps.job import Byteps
from dpro_search.kinds.kvstore.job import Kvstore
from dpro_search.replay import replay
from dpro_search.replay.engine import Engine
from dpro_search.replay.reference import replay_reference
from dpro_search.replay.replayer import settled_us, varied_us
from dpro_search.replay.server_replay import step_factors
from dpro_search.replay.steady import settled_distance, unrolled
from dpro_search.space.plan import Plan
from dpro_search.space.replay_graph import ReplayGraph
from dpro_search.space.scenario import ClusterChange, Scenario
from dpro_search.space.servers.byteps_job import BytepsJob, byteps_graph
from dpro_search.space.servers.cost_spread import CostFactors, CostSpread
from dpro_search.space.servers.kvstore_job import KvstoreJob, kvstore_graph
from dpro_search.space.servers.store_job import Segment
from tests.every_case import every_case
from tests.store_jobs import byteps_job, kvstore_job, layers_of

SIZES = st.lists(st.integers(1, 300).map(lambda kilobytes: 4000 * kilobytes), min_size=1, max_size=4)
RATES = st.sampled_from([None, 60.0, 250.0])


def segments(tensors: int) -> tuple[Segment, ...]:
    return layers_of([1100.0 + 70 * i for i in range(tensors)], [2100.0 + 30 * i for i in range(tensors)])


def tensors_of(sizes: list[int]) -> list[TensorInfo]:
    return [
        TensorInfo(name=f"w{i}", node=f"key{i}", dtype="float32", shape=(size // 4,), size_bytes=size)
        for i, size in enumerate(sizes)
    ]


def bits_per_s(bytes_per_us: float | None) -> float | None:
    return None if bytes_per_us is None else bytes_per_us * 8e6


def on_links(job: Kvstore | Byteps, rate_bps: float) -> JobInScenario:
    """The job on links of a rate; `math.inf`: without limit."""
    return JobInScenario(job).under(Scenario(cluster=ClusterChange(rate_bps=rate_bps)))[0]


def processes(job: Kvstore | Byteps, plan: Plan) -> KvstoreJob | BytepsJob:
    """Workers and servers under a plan."""
    return job.replay_of(Scenario(plan=plan)).job


def graph_of(job: Kvstore | Byteps, plan: Plan) -> ReplayGraph:
    return job.replay_of(Scenario(plan=plan)).graph


def kvstore(sizes: list[int], rate: float | None) -> Kvstore:
    """Servers share the workers' cores."""
    job = kvstore_job(
        sizes,
        segments=segments(len(sizes)),
        server_core=(0,),
        slicing=Slicing(servers=1, bound=100_000),
        bytes_per_us=rate,
        comm_us_per_byte=0.0007,
        beside_us_per_byte=(0.0003, 0.0004),
        copy_us_per_byte=0.0002,
        sum_us_per_byte=0.0003,
        update_us_per_byte=0.0005,
        slice_us=40.0,
        update_call_us=30.0,
        worker_call_us=1.0,
    )
    return Kvstore(job, tensors_of(sizes), rate_bps=bits_per_s(rate))


def byteps(sizes: list[int], rate: float | None) -> Byteps:
    job = byteps_job(
        sizes,
        segments=segments(len(sizes)),
        declared_key=np.arange(len(sizes)),
        group=np.arange(len(sizes)) // 2,
        order=np.arange(len(sizes))[::-1].copy(),
        scale_us=np.full((2, len(sizes)), 90.0),
        update_us=np.full((2, len(sizes)), 130.0),
        server_core=(0, 1),
        worker_polling=0.1,
        server_polling=0.05,
        partition_bytes=200_000,
        bytes_per_us=rate,
        cpu_us_per_byte=0.0006,
        message_us=60.0,
        reduce_us=300.0,
        before_push_us=110.0,
        reply_us=70.0,
        after_pull_us=220.0,
    )
    return Byteps(job, tensors_of(sizes), rate_bps=bits_per_s(rate), allow_lossy=True)


PLANS = {
    kvstore: [
        Plan(),
        Plan(servers=3, servers_on_workers=True),
        Plan.of(bigarray_bound=1000, servers=2),
        Plan.of(p3=True, slice_threshold=20_000),
    ],
    byteps: [
        Plan(),
        Plan(servers=1, servers_on_workers=True),
        Plan.of(partition_bytes=65_536),
        Plan.of(credit=2),
        Plan.of(credit=1, partition_bytes=400_000),
        Plan.of(compression="fp16", partition_bytes=100_000),
    ],
}


@pytest.mark.parametrize("kind", PLANS, ids=lambda kind: kind.__name__)
@settings(max_examples=12, deadline=None)
@given(sizes=SIZES, rate=RATES, data=st.data())
def test_a_price_is_the_specification_s_to_the_last_bit(kind, sizes, rate, data):
    prices = kind(sizes, rate)
    graph = graph_of(prices, data.draw(st.sampled_from(PLANS[kind])))
    iterations = 8
    times = replay_reference(unrolled(graph, iterations))
    expected = settled_distance(times.end_us.reshape(iterations, -1).max(axis=1))
    price_us = settled_us(graph)
    assert price_us == (replay(graph).iteration_us, replay(graph).settled)
    if expected[1]:
        assert price_us == expected


@every_case("kind", PLANS, ids=lambda kind: kind.__name__)
@every_case("number", range(4))
def test_a_slow_down_that_never_happens_changes_no_time_of_larger_jobs(kind, number):
    job = kind([4_000_000, 300_000, 1_700_000, 40_000, 8_000_000, 900_000], 125.0)
    graph = graph_of(job, PLANS[kind][number])
    slowdown = np.ones((len(OpKind), len(OpKind)))
    assert not (graph.op_kind == OpKind.IO).any()
    slowdown[OpKind.IO, OpKind.IO] = 2.0
    ours, theirs = (Engine(one, 5).first.times() for one in (graph, replace(graph, slowdown=slowdown)))
    for name in ("ready_us", "start_us", "moved_us", "end_us"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


def test_a_price_says_whether_it_has_settled_and_has_no_breakdown():
    prediction = JobInScenario(kvstore([400_000], 125.0)).predict(Plan(servers=2))
    assert prediction.settled
    assert prediction.breakdown_us == {}


@pytest.mark.parametrize("kind", PLANS, ids=lambda kind: kind.__name__)
@settings(max_examples=12, deadline=None)
@given(sizes=SIZES, rate=RATES, servers=st.sampled_from([None, 1, 3]), placed=st.sampled_from([None, False, True]))
def test_a_plan_that_is_followed_twice_is_followed_once(kind, sizes, rate, servers, placed):
    prices = kind(sizes, rate)
    plan = Plan(servers=servers, servers_on_workers=placed)
    once = processes(prices, plan)
    twice = processes(type(prices)(once, prices.tensors), plan)
    assert (twice.server_core, twice.server_host) == (once.server_core, once.server_host)
    assert processes(prices, Plan()) == prices.recorded_job
    graph_of(prices, plan).validate()
    here = JobInScenario(prices)
    assert here.predict(here.space.simplest(plan)).iteration_us == here.predict(plan).iteration_us


@pytest.mark.parametrize("kind", PLANS, ids=lambda kind: kind.__name__)
def test_more_servers_than_recorded_go_where_the_recorded_ones_were(kind):
    prices = kind([400_000], 125.0)
    together = type(prices)(processes(prices, Plan(servers=2, servers_on_workers=True)), prices.tensors)
    assert together.recorded_job.server_host == (1, 0)
    assert processes(together, Plan(servers=3)).server_host == (1, 0, 0)
    assert processes(together, Plan(servers=3, servers_on_workers=False)).server_host == (2, 3, 4)
    assert processes(prices, Plan(servers=3)).server_host == (2, 3, 4)


def test_a_server_on_a_worker_s_host_has_its_core_where_servers_had_workers_cores():
    prices = byteps([400_000], 125.0)
    assert processes(prices, Plan(servers=3, servers_on_workers=True)).server_core == (1, 0, 0)
    separate_cores = Byteps(replace(prices.recorded_job, server_core=(2, 3)), prices.tensors)
    assert processes(separate_cores, Plan(servers_on_workers=True)).server_core == (2, 3)


@pytest.mark.parametrize("kind", PLANS, ids=lambda kind: kind.__name__)
def test_without_a_limit_of_links_it_is_all_the_same_where_servers_are(kind):
    free, limited = kind([400_000, 90_000], None), kind([400_000, 90_000], 60.0)
    on_workers = Plan(servers_on_workers=True)
    assert free.plans(Scenario()).simplest(on_workers) == Plan()
    assert limited.plans(Scenario()).simplest(on_workers) == on_workers
    assert on_links(free, 500e6).space.simplest(on_workers) == on_workers
    assert on_links(limited, math.inf).space.simplest(on_workers) == Plan()


LAYERS = [4_000_000, 300_000, 1_700_000, 40_000, 8_000_000, 900_000]
SURE = CostSpread(common=0.0, worker=0.0, message=0.0, server=0.0, step=0.0)


@pytest.mark.parametrize("kind", PLANS, ids=lambda kind: kind.__name__)
def test_costs_that_are_the_same_in_all_recordings_judge_a_plan_as_it_is_priced(kind, monkeypatch):
    job = kind(LAYERS, 125.0)
    prices = JobInScenario(job).objective()
    monkeypatch.setattr(type(job), "cost_spread", SURE)
    for plan in PLANS[kind]:
        price, reevaluated = prices.predict(plan), prices.reevaluated(plan)
        # Ten iterations hold turns of a long cycle that a price has left behind.
        assert reevaluated.iteration_us == pytest.approx(price.iteration_us, rel=0.01)
        assert reevaluated.interval_us == pytest.approx(price.interval_us, rel=0.01)


@pytest.mark.parametrize("kind", PLANS, ids=lambda kind: kind.__name__)
def test_reevaluation_gives_the_mean_over_resampled_costs_and_an_interval_with_their_spread(kind):
    prices = JobInScenario(kind(LAYERS, None)).objective()
    for plan in PLANS[kind]:
        if plan.servers_on_workers is not None:  # without limited links hosts make no difference, and are no choice
            continue
        times_us, price, reevaluated = prices.sampled(plan, samples=16), prices.predict(plan), prices.reevaluated(plan)
        assert times_us.std() > 0.02 * times_us.mean()  # cores are the limit
        assert reevaluated.iteration_us == pytest.approx(times_us.mean())
        assert np.diff(reevaluated.interval_us) / reevaluated.iteration_us > np.diff(price.interval_us) / price.iteration_us
        assert (reevaluated.source, reevaluated.settled) == (price.source, price.settled)


@pytest.mark.parametrize("kind", PLANS, ids=lambda kind: kind.__name__)
def test_plans_are_sampled_at_the_same_costs(kind):
    prices = JobInScenario(kind(LAYERS, 125.0)).objective()
    few, many = prices.sampled(PLANS[kind][0], samples=3, seed=4), prices.sampled(PLANS[kind][0], samples=8, seed=4)
    assert few.tolist() == many[:3].tolist()
    assert prices.sampled(PLANS[kind][0], samples=3, seed=5).tolist() != few.tolist()
    with pytest.raises(InputError, match="servers"):
        prices.sampled(Plan(servers=0), samples=2)


@pytest.mark.parametrize("kind", PLANS, ids=lambda kind: kind.__name__)
def test_a_job_whose_every_cost_doubles_takes_twice_as_long(kind):
    """Where nothing but cores takes time; the time of a quantum of a core stays, so that it is about twice."""
    job = kind(LAYERS, None).recorded_job
    others = ("reduce_us", "before_push_us", "reply_us", "after_pull_us", "worker_call_us")
    job = replace(job, **{name: 0.0 for name in others if hasattr(job, name)})
    twice = job.at_costs(CostFactors(compute=np.full(2, 2.0), message=2.0, server=2.0, step=np.ones((1, 2))))
    graph = byteps_graph if kind is byteps else kvstore_graph
    assert settled_us(graph(twice))[0] == pytest.approx(2 * settled_us(graph(job))[0], rel=0.05)


@pytest.mark.parametrize("kind", PLANS, ids=lambda kind: kind.__name__)
def test_only_a_worker_s_operators_vary_from_iteration_to_iteration(kind):
    """A worker whose operators take twice as long in every iteration: as if it had been recorded so."""
    prices = kind(LAYERS, 125.0)
    job, graph = prices.recorded_job, graph_of(prices, Plan())
    build = byteps_graph if kind is byteps else kvstore_graph
    slow = CostFactors(compute=np.array([1.0, 2.0]), message=1.0, server=1.0, step=np.ones((1, 2)))
    longer = step_factors(graph, job, np.tile([1.0, 2.0], (10, 1)))
    assert set(np.unique(longer)) == {1.0, 2.0}
    assert varied_us(graph, longer) == pytest.approx(settled_us(build(job.at_costs(slow)))[0], rel=0.03)
