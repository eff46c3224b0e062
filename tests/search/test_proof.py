"""A plan's gain as predicted and as measured, from what a validation left; and clusters of ops that are named by a pattern."""

import numpy as np
import pytest
from compute_graphs import Factor, layered

from dpro_search.collect.launch.step_times import StepTimes
from dpro_search.collect.trace import CommSettings
from dpro_search.deploy.jobs import Run
from dpro_search.deploy.losses import Equivalence, Loss
from dpro_search.deploy.validate import MeasuredPlan, RefusedPlan, Validation, validate
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.transformations import PlanSpace, horovod_facts, horovod_space
from dpro_search.space.transformations.compute import ComputeGraph
from dpro_search.space.transformations.op_fusion import OpFusion
from experiments.search.proof import KeptRuns, Proof, named_clusters, proof_of, table

SAME = Equivalence(verdict="same", compared=20, difference=1e-6, tolerance=1e-4, reason="20 losses are the same")
FUSED = MeasuredPlan(
    plan=Plan.of(fusion_threshold_bytes=2**26),
    predicted_us=400_000.0,
    interval_us=(380_000.0, 420_000.0),
    measured_us=450_000.0,
    spread_us=1.0,
    error_pct=-11.1,
    speedup_predicted=1.25,
    speedup_measured=1.2,
    speedup_interval=(1.1, 1.3),
    beyond_noise=True,
    losses=SAME,
)
GRAPH = layered(3)


def price(us: float) -> Prediction:
    return Prediction(
        iteration_us=us, interval_us=(0.95 * us, 1.05 * us), breakdown_us={}, peak_memory_bytes=None, source="extrapolated"
    )


def made(validation: Validation, predicted_us: float = 400_000.0) -> Proof:
    prices = (price(predicted_us), price(500_000.0))
    return proof_of(validation, prices, workload="bert", rate="2gbit", start={}, machine="m", recorded_at="", trials=300)


def measured(*plans: MeasuredPlan, refused: tuple[RefusedPlan, ...] = ()) -> Validation:
    return Validation(
        baseline_us=540_000.0,
        baseline_predicted_us=500_000.0,
        baseline_error_pct=-7.4,
        noise_pct=1.0,
        rounds=2,
        plans=plans,
        refused=refused,
    )


def test_a_gain_is_the_share_of_the_time_that_is_saved():
    proof = made(measured(FUSED))
    assert proof.predicted_gain_pct == pytest.approx(20.0)
    assert proof.measured_gain_pct == pytest.approx(100 * (1 - 450 / 540))
    assert proof.predicted_interval_pct == pytest.approx((16.0, 24.0))
    assert proof.measured_interval_pct == pytest.approx((100 * (1 - 1 / 1.1), 100 * (1 - 1 / 1.3)))
    assert proof.difference_points == pytest.approx(20 - 16.667, abs=0.001)
    assert proof.agrees
    row = "| bert | 2gbit | defaults | fusion 64.0 MiB | 500, 400 | 540, 450 | 20.0 % | 16.7 % (9.1-23.1) | +3.3 | 1.0 % | same |"
    assert table([proof]).splitlines()[-1] == row


def test_real_runs_judge_a_prediction_that_came_after_them():
    proof = made(measured(FUSED), predicted_us=300_000.0)
    assert proof.predicted_gain_pct == pytest.approx(40.0)
    assert not proof.agrees


def test_a_plan_that_trains_something_else_proves_nothing():
    other = Equivalence(verdict="different", compared=20, difference=0.5, tolerance=1e-4, reason="losses differ by 50 %")
    refused = RefusedPlan(plan=FUSED.plan, predicted_us=400_000.0, measured_us=450_000.0, losses=other)
    with pytest.raises(SystemExit, match="losses differ by 50 %"):
        made(measured(refused=(refused,)))


class Breaking:
    """A job that ends for good after some runs, each 10 us longer than the one before."""

    def __init__(self, most: int) -> None:
        self.most, self.ran = most, 0

    def run(self, plan: Plan, *, warmup: int, timeout_s: float | None = None) -> Run:
        if self.ran == self.most:
            raise KeyboardInterrupt
        self.ran += 1
        steps = np.full(30, 500.0 + 10 * self.ran)
        return Run(times=StepTimes(iteration_us=steps, compute_cpu_us=steps, comm_cpu_us=steps), losses=(Loss(0.5, 0.01),) * 20)


def test_real_runs_that_were_interrupted_go_on_where_they_ended(tmp_path):
    plans, baseline = [(FUSED.plan, price(400_000.0))], price(500_000.0)
    with pytest.raises(KeyboardInterrupt):
        validate(KeptRuns(Breaking(4), tmp_path), baseline, plans)
    rest = Breaking(2)
    found = validate(KeptRuns(rest, tmp_path), baseline, plans)
    assert rest.ran == 2
    assert found.plans[0].losses.verdict == "same"
    assert found.baseline_us == np.median([510, 530, 540, 520]), "of the runs that were kept, and of those that began anew"


def test_real_runs_can_be_made_in_parts(tmp_path):
    plans, baseline, job = [(FUSED.plan, price(400_000.0))], price(500_000.0), Breaking(6)
    for kept in (2, 4):
        with pytest.raises(SystemExit, match=f"{kept} real runs are kept"):
            validate(KeptRuns(job, tmp_path, most=2), baseline, plans)
    assert validate(KeptRuns(job, tmp_path, most=2), baseline, plans).rounds == 2
    assert job.ran == 6


def test_runs_of_another_plan_are_not_taken(tmp_path):
    KeptRuns(Breaking(1), tmp_path).run(Plan(), warmup=5)
    with pytest.raises(SystemExit, match="another plan"):
        KeptRuns(Breaking(0), tmp_path).run(FUSED.plan, warmup=5)


def space() -> PlanSpace:
    facts = horovod_facts(GRAPH.tensors, CommSettings(fusion_threshold_bytes=2**20, cycle_time_us=1000.0))
    fusion = OpFusion(facts, ComputeGraph(GRAPH), Factor(GRAPH))
    return horovod_space(GRAPH.tensors, CommSettings(fusion_threshold_bytes=2**20, cycle_time_us=1000.0), others=(fusion,))


def test_ops_are_clustered_by_what_the_pattern_names():
    assert named_clusters(GRAPH, space(), "(f)[01]") == Plan(op_clusters=(("f0", "f1"),))
    assert named_clusters(GRAPH, space(), "([fcu])").op_clusters == (("f0", "f1", "f2"),)


def test_a_cluster_that_cannot_be_is_left_out(capsys):
    with pytest.raises(SystemExit, match="no such cluster"):
        named_clusters(GRAPH, space(), "()f[02]")
    assert "not convex" in capsys.readouterr().out
