"""DualPipe of DeepSeek-V3 in a described job: two copies of each stage, half of the micro-batches from each end."""

from __future__ import annotations

import pytest

from dpro_search.errors import InputError
from dpro_search.parallel.export.workloads import refuse_details
from dpro_search.parallel.steps.step_prices import step_costs
from dpro_search.space.plan import Plan
from tests.kinds.verbs import refusal, verb
from tests.parallel.jobs import job, prepared, text

JOB = {"model": "qwen3-30b-a3b", "cluster": "4xhgx-h100", "global_batch": 256, "sequence": 4096}
RUNS = 'pp = 4\nep = 8\nrecompute = "none"\n'


def under(folder, schedule, more=""):
    return job(folder, f'{RUNS}schedule = "{schedule}"\n{more}', **JOB)


def memory(here):
    return here.job.plan_facts(here, Plan()).memory_bytes


def test_each_rank_has_two_stages_of_the_same_model(tmp_path):
    plain, dual = (memory(under(tmp_path, schedule)) for schedule in ("1f1b", "dual-pipe"))
    assert dual["weights"] == pytest.approx(2 * plain["weights"], rel=0.15)  # embedding and head are on one rank, as a copy each


def test_a_step_has_a_smaller_bubble_than_1f1b(tmp_path):
    few = {**JOB, "global_batch": 64}
    plain, dual = (job(tmp_path, f'{RUNS}schedule = "{name}"', **few).predict(Plan()) for name in ("1f1b", "dual-pipe"))
    assert dual.iteration_us < plain.iteration_us


def test_every_rank_does_as_much_as_under_1f1b(tmp_path):
    """Of twice the stages it has half of the micro-batches; the rest of a step is what the copies exchange, and the bubble."""
    parts = {name: verb("replay", saved(tmp_path, name))["breakdown_us"]["compute"] for name in ("1f1b", "dual-pipe")}
    assert parts["dual-pipe"] == pytest.approx(parts["1f1b"], rel=0.1)


def saved(folder, schedule):
    under(folder, schedule)
    return folder / "job.toml"


def test_gradients_of_both_copies_are_summed(tmp_path):
    ready = prepared(under(tmp_path, "dual-pipe"))
    costs = step_costs(ready.prices.workload_of(ready.space.today))
    assert costs.copies_us > 0
    assert len(costs.stages) == 2 * 4
    assert costs.stages[:4] == costs.stages[4:]


def test_tokens_travel_to_experts_beside_the_other_direction(tmp_path):
    """Of layers that are large enough for the host not to be waited for."""
    large = {**JOB, "model": "mixtral-8x7b"}
    runs = f'{RUNS}schedule = "dual-pipe"\n'
    apart, beside = (job(tmp_path, runs + more, **large).predict(Plan()) for more in ("", "overlap_experts = true"))
    assert beside.iteration_us < apart.iteration_us


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ('pp = 2\nschedule = "dual-pipe"\nvirtual_stages = 2', "an even number of ranks with one stage in two copies"),
        ('pp = 4\nschedule = "dual-pipe"\nmicro_batch = 8', "dual-pipe needs at least 8 micro-batches"),
    ],
)
def test_numbers_for_which_it_does_not_exist_are_refused(tmp_path, runs, said):
    (tmp_path / "job.toml").write_text(text(runs, **JOB))
    assert said in refusal("replay", tmp_path / "job.toml")


def test_no_target_can_express_it(tmp_path):
    with pytest.raises(InputError, match="DualPipe is DeepSeek's own code: set schedule=dual-pipe-v"):
        refuse_details("megatron", prepared(under(tmp_path, "dual-pipe")).space.today)
