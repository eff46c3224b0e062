"""CUDA graphs of layers: the host no longer starts each kernel, and memory stays allocated."""

from __future__ import annotations

import pytest

from dpro_search.parallel.steps.step_prices import step_costs
from dpro_search.space.plan import Plan
from tests.kinds.verbs import refusal, verb
from tests.parallel.jobs import job, prepared, text

# Small layers, for which the host of an eager step takes longest.
SMALL = {"model": "llama3.2-1b", "cluster": "1xhgx-h100", "sequence": 512, "global_batch": 8}
MANY = {"model": "mixtral-8x7b", "cluster": "1xhgx-h100", "sequence": 256, "global_batch": 8}


def both(folder, **values):
    return [job(folder, f"tp = 1\ncuda_graphs = {graphs}", **values) for graphs in ("false", "true")]


def test_a_step_that_waits_for_the_host_is_faster(tmp_path):
    eager, graphs = (each.predict(Plan()).iteration_us for each in both(tmp_path, **SMALL))
    assert graphs < 0.7 * eager


def test_a_step_that_waits_for_the_device_is_as_fast(tmp_path):
    large = {"cluster": "1xhgx-h100", "sequence": 8192, "global_batch": 8}
    eager, graphs = (each.predict(Plan()).iteration_us for each in both(tmp_path, **large))
    assert graphs == pytest.approx(eager, rel=0.01)


def test_experts_wait_for_the_number_of_their_tokens_so_that_the_host_still_starts_them(tmp_path):
    """Beside a dense model of the same layers, which loses nearly all of its time on the host."""

    def gain(**values):
        eager, graphs = (step_costs(each.job.workload(each.scenario)(Plan())).stages[0][1] for each in both(tmp_path, **values))
        return eager.forward_us - graphs.forward_us, graphs.forward_us

    _, with_graphs_us = gain(**MANY)
    started_us = 85 * (16 + 1 + 1 + 1 + 3)  # dispatch, both products and the activation of experts, combine
    assert with_graphs_us >= started_us


def test_activations_need_a_fifth_more(tmp_path):
    """NVIDIA NeMo's documentation: about 20 %."""
    eager, graphs = (each.job.plan_facts(each, Plan()).memory_bytes for each in both(tmp_path, **SMALL))
    assert graphs["activations"] == pytest.approx(1.2 * eager["activations"])
    assert graphs["weights"] == eager["weights"]


def test_a_diagnosis_says_what_graphs_would_gain(tmp_path):
    (tmp_path / "job.toml").write_text(text("tp = 1", **SMALL))
    gains = {gain["what_if"]: gain["predicted_iteration_us"] for gain in verb("diagnose", tmp_path / "job.toml")["gains"]}
    assert gains["cuda_graphs=1"] == pytest.approx(both(tmp_path, **SMALL)[1].predict(Plan()).iteration_us)


def test_a_search_keeps_what_the_job_has_today(tmp_path):
    for graphs, here in zip((False, True), both(tmp_path, **SMALL), strict=True):
        assert {each.cuda_graphs for each in prepared(here).space.candidates} == {graphs}


@pytest.mark.parametrize(
    ("runs", "framework", "said"),
    [
        ("cuda_graphs = true", "torchtitan", "cuda_graphs cannot be true: the framework cannot do that"),
        ("cuda_graphs = true\nzero_stage = 3", "pytorch-2", "graphs need parameters at fixed addresses"),
        ("cuda_graphs = true\noffload_activations = true", "megatron-core", "a graph cannot contain what is offloaded"),
        ("cuda_graph = true", "megatron-core", "cuda_graph: unknown key; did you mean 'cuda_graphs'?"),
    ],
)
def test_graphs_that_cannot_be_are_refused_with_the_reason(tmp_path, runs, framework, said):
    (tmp_path / "job.toml").write_text(text(runs, framework=framework))
    assert said in refusal("replay", tmp_path / "job.toml")
