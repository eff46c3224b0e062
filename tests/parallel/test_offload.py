"""Memory that waits on the host: what leaves the device, what copies and the host's processors add to a step."""

from __future__ import annotations

import pytest

from dpro_search.parallel.steps.step_prices import step_costs
from dpro_search.space.plan import Plan
from tests.kinds.verbs import refusal, verb
from tests.parallel.jobs import job, prepared, text

PARAMETERS = 8.03e9
COPIED = 63e9 * 0.88  # bytes a second of PCIe 5 x16
HOST = 614e9 * 0.45  # bytes a second that an update on the host's processors moves
ONE_HOST = {"cluster": "1xhgx-h100", "global_batch": 64}
TUNE = {"framework": "torchtune", "compiled": True, **ONE_HOST}


def parts(folder, runs, **values):
    """Memory by purpose, and costs of a step."""
    here = job(folder, runs, **values)
    ready = prepared(here)
    strategy = ready.space.today
    return here.job.plan_facts(here, Plan()).memory_bytes, step_costs(ready.prices.workload_of(strategy)), ready, strategy


def test_the_states_of_megatrons_optimizer_are_on_the_host(tmp_path):
    """Twelve bytes of each parameter, split over eight ranks; gradients stay on the device."""
    usual, *_ = parts(tmp_path, "tp = 1", **ONE_HOST)
    memory, _, ready, strategy = parts(tmp_path, "tp = 1\noffload_optimizer = true", **ONE_HOST)
    assert memory == {**usual, "optimizer": 0.0}
    assert ready.host_memory(strategy) == (pytest.approx(12 * PARAMETERS, rel=0.01), 2 * 10**12)


def test_the_host_updates_the_parameters_of_all_its_ranks(tmp_path):
    """Adam moves 30 bytes of each; gradients in fp32 come over PCIe, and parameters go back in 16 bits."""
    _, usual, *_ = parts(tmp_path, "tp = 1", **ONE_HOST)
    _, costs, *_ = parts(tmp_path, "tp = 1\noffload_optimizer = true", **ONE_HOST)
    expected_s = 30 * PARAMETERS / HOST + PARAMETERS / 8 * (4 + 2) / COPIED
    assert costs.update_us[0] == pytest.approx(expected_s * 1e6, rel=0.01)
    assert costs.stages == usual.stages


def test_parameters_and_gradients_of_fsdp_are_on_the_host_too_and_are_copied_beside_the_passes(tmp_path):
    usual, before, *_ = parts(tmp_path, "tp = 1", framework="fsdp", **ONE_HOST)
    memory, costs, *_ = parts(tmp_path, "tp = 1\noffload_optimizer = true", framework="fsdp", **ONE_HOST)
    assert [memory[name] for name in ("weights", "gradients", "optimizer")] == [0, 0, 0]
    assert memory["activations"] == usual["activations"]
    layer, plain = costs.stages[0][1], before.stages[0][1]
    assert layer.gather_us - plain.gather_us == pytest.approx(218.1e6 / 8 * 2 / COPIED * 1e6, rel=0.01)
    assert layer.reduce_us > plain.reduce_us
    assert (layer.forward_us, layer.backward_us) == (plain.forward_us, plain.backward_us)


def test_activations_on_the_host_leave_two_layers_on_the_device(tmp_path):
    usual, *_ = parts(tmp_path, "micro_batch = 1", **TUNE)
    memory, _, ready, strategy = parts(tmp_path, "micro_batch = 1\noffload_activations = true", **TUNE)
    assert memory["activations"] < 0.2 * usual["activations"]
    assert ready.host_memory(strategy)[0] == pytest.approx(8 * usual["activations"], rel=0.02)


@pytest.mark.parametrize(("framework", "beside"), [("torchtune", True), ("fsdp", False)])
def test_activations_are_copied_beside_the_passes_or_by_their_stream(tmp_path, framework, beside):
    """torchtune has a stream for copies; `save_on_cpu` has not."""
    setup = {**TUNE, "framework": framework}
    _, before, *_ = parts(tmp_path, "micro_batch = 1", **setup)
    _, costs, ready, strategy = parts(tmp_path, "micro_batch = 1\noffload_activations = true", **setup)
    copy_us = ready.host_memory(strategy)[0] / 8 / 32 / COPIED * 1e6
    plain, layer = before.stages[0][1], costs.stages[0][1]
    expected_us = max(plain.forward_us, copy_us) if beside else plain.forward_us + copy_us
    assert layer.forward_us == pytest.approx(expected_us, rel=1e-6)
    assert layer.backward_us > plain.backward_us or beside


def test_with_full_recomputation_only_the_inputs_of_layers_are_copied(tmp_path):
    _, _, ready, strategy = parts(tmp_path, 'micro_batch = 1\nrecompute = "full"\noffload_activations = true', **TUNE)
    assert ready.host_memory(strategy)[0] == 8 * 32 * 4096 * 4096 * 2


def test_a_search_moves_memory_to_the_host_where_nothing_else_fits(tmp_path):
    """70 billion parameters have 1.1 TB of weights, gradients and states: too much for eight devices of 80 GB."""
    (tmp_path / "job.toml").write_text(text(None, model="llama3-70b", cluster="1xhgx-h100", global_batch=8))
    result = verb("run", tmp_path / "job.toml", "--trials", 20, "--out", tmp_path / "run")
    best = result["plans"][0]
    assert best["strategy"]["offload_optimizer"] is True
    assert best["peak_memory_bytes"] < 80 * 2**30


def test_a_search_leaves_memory_on_the_device_where_it_fits(tmp_path):
    (tmp_path / "job.toml").write_text(text(None, **ONE_HOST))
    result = verb("run", tmp_path / "job.toml", "--trials", 20, "--out", tmp_path / "run")
    assert not any(plan["strategy"]["offload_optimizer"] for plan in result["plans"])


@pytest.mark.parametrize(
    ("runs", "keys", "said"),
    [
        (
            "offload_optimizer = true\nzero_stage = 0",
            {},
            "goes with zero_stage 1 or more in the framework, not 0",
        ),
        (
            "offload_optimizer = true",
            {"framework": "nanotron"},
            "runs.offload_optimizer: offload_optimizer cannot be true: the",
        ),
        ("offload_activations = true", {"framework": "torchtitan"}, "offload_activations cannot be true: the framework"),
        ("offload_optimizer = true", {"cluster": "2xp4d.24xlarge"}, "give the cluster's file host_memory_rate"),
        ("offload_activations = true", {"cluster": "apart.toml"}, "give the cluster's file pcie.rate or host_link_rate"),
        ("offload_optimiser = true", {}, "runs.offload_optimiser: unknown key; did you mean 'offload_optimizer'?"),
    ],
)
def test_offloading_that_cannot_be_is_refused_with_the_reason(tmp_path, runs, keys, said):
    (tmp_path / "apart.toml").write_text('base = "hgx-h100"\npcie = false\n')
    (tmp_path / "job.toml").write_text(text(runs, **keys))
    assert said in refusal("replay", tmp_path / "job.toml")


def test_a_host_that_has_too_little_memory_makes_a_plan_infeasible(tmp_path):
    (tmp_path / "small.toml").write_text('base = "hgx-h100"\nhost_memory = "64 GB"\n')
    here = job(tmp_path, "tp = 1\noffload_optimizer = true", cluster="small.toml", global_batch=64)
    assert here.predict(Plan()).infeasible.startswith("the host needs 89.7 GiB, and may have 59.6 GiB")
