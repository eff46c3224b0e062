"""What the tables of searches count, and the job that all transformations are searched on."""

from __future__ import annotations

import numpy as np
import pytest
from bus_objective import KnobObjective, prediction_of

from benchmarks.search_bert import bert_plans
from dpro_search.collect.trace import Trace
from dpro_search.graph.build import validate
from dpro_search.graph.dataflow import OpKind
from dpro_search.kinds import JobInScenario
from dpro_search.kinds.horovod.job import Horovod
from dpro_search.search.samplers import SAMPLERS
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.transformations import BucketSize, PlanningFacts, PlanSpace
from experiments.search.samplers import Charged, prices_of, searched, table
from tests.sample import horovod_trace_path

REPLAY_S = 2.0


class Laborious:
    """A job whose replays take some time on a clock of its own."""

    def __init__(self) -> None:
        job = PlanningFacts(name="a job with one knob", tensors=KnobObjective().tensors)
        self.space = PlanSpace(job, (BucketSize(job),))
        self.replayed: list[Plan] = []
        self.now_s = 100.0

    def predict(self, plan: Plan) -> Prediction:
        self.replayed.append(plan)
        self.now_s += REPLAY_S
        return prediction_of(1000.0, plan, 0.01)


def test_a_replay_counts_in_every_search_and_is_done_in_one() -> None:
    job = Laborious()
    evaluations = Charged(job, clock=lambda: job.now_s)  # type: ignore[arg-type]
    for _ in range(2):
        evaluations.begin()
        for _ in range(3):
            evaluations.predict(Plan())
        assert evaluations.spent_s == REPLAY_S, "within one search the same plan is evaluated once"
    assert job.replayed == [Plan()]


def test_samplers_are_compared_with_the_best_of_all() -> None:
    case = searched("knob", KnobObjective(), seconds=0.3, seeds=2)  # type: ignore[arg-type]
    assert set(case.found_us) == {*SAMPLERS, "random"} - {"critical-path"}, "nothing guides this job"
    assert all(len(times_us) == 2 for times_us in case.found_us.values())
    assert min(min(case.gaps_pct(sampler)) for sampler in case.found_us) == 0
    assert case.gaps_pct("critical-path") == []
    assert "| knob |" in table([case])


def test_a_recording_is_searched_as_if_its_links_were_slower() -> None:
    trace = Trace.load(horovod_trace_path())
    as_recorded, slower = (prices_of(trace, rate).predict(Plan()).iteration_us for rate in (None, "500mbit"))
    assert slower > 1.1 * as_recorded


@pytest.fixture(scope="module")
def bert() -> JobInScenario:
    return bert_plans()


def test_the_bert_job_is_a_sound_graph_of_the_published_size(bert: JobInScenario) -> None:
    assert isinstance(bert.job, Horovod)
    graph = bert.job.measured.graph
    validate(graph)
    assert len(graph.tensors) == 199
    assert sum(tensor.size_bytes for tensor in graph.tensors) == 4 * 109_482_240
    assert len(graph) / graph.ranks == pytest.approx(5000, rel=0.1)
    assert (np.diff(graph.profiles[0].post_us, axis=1) >= 0).all(), "tensors are numbered in the order of their posts"
    assert {OpKind.FORWARD, OpKind.BACKWARD, OpKind.COMM, OpKind.UPDATE} == set(graph.op_kind.tolist())
    assert bert.predict(Plan()).settled


def test_the_bert_job_can_be_changed_by_every_transformation(bert: JobInScenario) -> None:
    rng = np.random.default_rng(0)
    recorded_us = bert.predict(Plan()).iteration_us
    for transformation in bert.space.transformations:
        plans = (transformation.propose(bert.space.detailed(Plan()), rng, {}) for _ in range(20))
        changed = next(plan for plan in plans if any(plan.get(name) is not None for name in transformation.fields))
        assert bert.space.refusal(changed) is None
        assert bert.predict(changed).iteration_us != recorded_us
