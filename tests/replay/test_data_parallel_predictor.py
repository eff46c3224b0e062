"""Plans of a data-parallel job of ops, by the names of its tensors."""

import numpy as np
import pytest

from dpro_search.errors import InputError
from dpro_search.replay.data_parallel_predictor import DataParallelPredictor
from dpro_search.search.samplers import sampler_for
from dpro_search.space.data_parallel import Network, Ring, layered_step, replicated
from dpro_search.space.plan import Plan


def predictor(**options):
    step = layered_step(
        [4000.0, 2000.0, 1000.0, 8000.0], forward_us=100.0, backward_us=50.0, update_us=2.0, tensor_names=("d", "c", "b", "a")
    )
    return DataParallelPredictor(replicated(step, 4, Ring(), network=Network.uniform(4, 100.0, latency_us=5.0), **options))


def test_the_empty_plan_has_the_jobs_own_groups():
    grouped = predictor(groups=((0, 1), (2, 3)))
    assert grouped.recorded.groups == (("d", "c"), ("b", "a"))
    plan = Plan(tensor_groups=(("d", "c"), ("b", "a")))
    assert grouped.predict(Plan()).iteration_us == predictor().predict(plan).iteration_us


def test_a_tensor_in_no_group_goes_alone():
    assert predictor().group_of(Plan(tensor_groups=(("c", "a"),))).tolist() == [1, 0, 2, 0]


def test_a_threshold_makes_groups_of_neighbours():
    assert predictor().group_of(Plan.of(fusion_threshold_bytes=6000)).tolist() == [0, 0, 1, 2]
    assert predictor().group_of(Plan.of(fusion_threshold_bytes=0)).tolist() == [0, 1, 2, 3]


def test_compute_and_exposed_communication_are_the_iteration():
    prediction = predictor().predict(Plan())
    assert prediction.breakdown_us["compute"] == 100.0 + 4 * 52.0
    assert sum(prediction.breakdown_us.values()) == pytest.approx(prediction.iteration_us)


def test_what_the_job_does_not_have_is_named():
    with pytest.raises(InputError, match="no tensor 'e'"):
        predictor().predict(Plan(tensor_groups=(("e",),)))
    with pytest.raises(InputError, match="no cycle_time_us"):
        predictor().predict(Plan.of(cycle_time_us=1000.0))


@pytest.mark.parametrize("name", ["mcmc", "optuna"])
def test_samplers_search_its_space(name):
    job = predictor()
    sampler = sampler_for(job.space, name, 0)
    sampler.observe(Plan(), job.predict(Plan()))
    found = []
    for _ in range(40):
        proposal = sampler.ask()
        prediction = job.predict(proposal.plan)
        sampler.tell(proposal, prediction)
        found.append(prediction.iteration_us)
    assert min(found) < job.predict(Plan()).iteration_us
    assert np.isfinite(found).all()


def test_a_guided_search_learns_when_collectives_begin_and_end():
    job = predictor()
    first, second = job.exchanges(Plan(tensor_groups=(("d", "b"), ("c", "a"))))
    assert (first.tensors, first.ready_us, first.size_bytes) == (("d", "b"), (150.0, 250.0), 5000.0)
    assert second.posted_us == 300.0
    steps = 2 * 3
    assert first.ended_us >= first.posted_us + steps * (5.0 + first.size_bytes / 4 / 100.0)
    assert second.ended_us + 2.0 <= job.predict(Plan(tensor_groups=(("d", "b"), ("c", "a")))).iteration_us
