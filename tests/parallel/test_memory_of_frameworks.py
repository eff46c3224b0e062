"""Memory that a framework keeps: selective recomputation, whole gradients of pipeline stages, logits, decoders of other lengths."""

from __future__ import annotations

import pytest

from dpro_search.space.plan import Plan
from tests.kinds.verbs import refusal
from tests.parallel.jobs import job, prepared, text

GIB = 2**30
A100 = {"cluster": "1xdgx-a100-80", "global_batch": 8, "sequence": 8192}


def memory(folder, runs, **values):
    here = job(folder, runs, **values)
    return here.job.plan_facts(here, Plan()).memory_bytes


def test_selective_recomputation_of_pytorch_computes_every_second_matmul_again(tmp_path):
    """A layer keeps its input, and the outputs of queries, values, attention, the gate and the second feed-forward matmul."""
    elements = 4096 + 4096 + 1024 + 4096 + 14336 + 4096
    runs = [f'micro_batch = 1\nrecompute = "{which}"' for which in ("none", "selective", "full")]
    jobs = [job(tmp_path, each, framework="fsdp", **A100) for each in runs]
    none, selective, full = (each.predict(Plan()) for each in jobs)
    assert full.peak_memory_bytes < selective.peak_memory_bytes < none.peak_memory_bytes
    assert none.iteration_us < selective.iteration_us < full.iteration_us
    kept = memory(tmp_path, runs[1], framework="fsdp", **A100)["activations"]
    assert kept == pytest.approx(32 * 8192 * elements * 2, rel=0.05)


def test_selective_recomputation_of_llama_3_8b_needs_what_was_measured(tmp_path):
    """torchtitan on eight A100 without compilation: 47.6 GiB, which its allocator reports, without the context."""
    peak_bytes = memory(tmp_path, 'micro_batch = 1\nrecompute = "selective"', framework="fsdp", **A100)
    assert sum(peak_bytes.values()) - peak_bytes["context"] == pytest.approx(47.6 * GIB, rel=0.05)


@pytest.mark.parametrize(
    ("keys", "state_bytes"),
    [
        ({}, 12),
        ({"optimizer_state": "fp32"}, 8 + 4),
        ({"optimizer_state": "bf16"}, 4 + 4),
        ({"optimizer_state": "int8", "main_parameters": "none"}, 2),
        ({"framework": "torchtune"}, 2 + 2),
        ({"framework": "torchtune", "optimizer_state": "int8"}, 1 + 1),  # it has no copy of the parameters
        ({"framework": "torchtune", "main_parameters": "fp32"}, 2 + 2 + 4),
    ],
)
def test_states_of_the_optimizer_have_the_type_that_the_file_or_the_framework_gives(tmp_path, keys, state_bytes):
    """Each of eight devices holds the states of 8.03 billion parameters, without ZeRO."""
    held = memory(tmp_path, "zero_stage = 0", **A100, **keys)
    assert held["optimizer"] == pytest.approx(state_bytes * 8.03e9, rel=0.001)


def test_experts_of_megatron_before_0_12_keep_what_they_give(tmp_path):
    """Weights of tokens multiplied what experts give; since then they multiply what goes into their second matrix."""
    setup = {"model": "mixtral-8x7b", "cluster": "1xhgx-h100", "global_batch": 8}
    old, new, newest = (
        memory(tmp_path, "ep = 8", **setup, **keys)["activations"]
        for keys in ({"framework_version": "0.11"}, {"framework_version": "0.12"}, {})
    )
    assert old > new == newest


def test_adapters_leave_the_model_without_gradients_and_its_layers_may_be_quantized(tmp_path):
    """6.98 of 8.03 billion parameters are in layers: NF4 has 4 bits for each, and a byte for 64."""
    runs, keys = "zero_stage = 0", {"framework": "torchtune", "compiled": True, **A100}
    full, lora = memory(tmp_path, runs, **keys), memory(tmp_path, runs, adapters=True, **keys)
    assert (lora["gradients"], lora["optimizer"]) == (0, 0)
    assert lora["weights"] == full["weights"]
    quantized = memory(tmp_path, runs, adapters=True, frozen_weights="nf4", **keys)
    assert quantized["weights"] == pytest.approx(6.98e9 * (0.5 + 1 / 64) + 1.05e9 * 2, rel=0.01)


def test_full_training_in_16_bits_needs_what_torchtune_measured(tmp_path):
    """Llama 3.2 3B on one A100, two sequences of 4,096 tokens, the loss in chunks: 42.9 GiB (its README), compiled."""
    setup = {"model": "llama3.2-3b", "cluster": "1xa100-sxm-80gb", "global_batch": 2, "sequence": 4096, "compiled": True}
    held = memory(tmp_path, "micro_batch = 2", framework="torchtune", **setup)
    assert sum(held.values()) - held["context"] == pytest.approx(42.9 * GIB, rel=0.2)


def test_selective_recomputation_of_megatron_is_of_the_scores_which_fused_attention_never_stores(tmp_path):
    none, selective = (memory(tmp_path, f'recompute = "{which}"', **A100) for which in ("none", "selective"))
    assert none == selective


def test_the_search_proposes_selective_recomputation_where_it_computes_anything_again(tmp_path):
    for framework, expected in (("fsdp", True), ("megatron-core", False)):
        proposed = {strategy.recompute.value for strategy in job(tmp_path, None, framework=framework, **A100).space.candidates}
        assert ("selective" in proposed) is expected


def test_stages_of_a_pipeline_with_fsdp_hold_whole_gradients(tmp_path):
    """In fp32, until the last micro-batch: 405B on 512 H100 of 96 GB in eight micro-batches took 82.5 GiB with torchtitan."""
    (tmp_path / "h100_96.toml").write_text('base = "hgx-h100"\ndevice.memory = "96 GB"\ndevice.memory_rate = "2400 GB/s"\n')
    setup = {"model": "llama3-405b", "cluster": "64xh100_96.toml", "global_batch": 256, "sequence": 8192, "precision": "fp8"}
    runs = 'zero_stage = 3\nmicro_batch = 4\ntp = 8\npp = 8\nrecompute = "full"\nreshard = false'
    peak_bytes = memory(tmp_path, runs, framework="torchtitan", **setup)
    assert peak_bytes["gradients"] == pytest.approx(405.9e9 / 64 * 4, rel=0.1)
    assert sum(peak_bytes.values()) - peak_bytes["context"] == pytest.approx(82.5 * GIB, rel=0.15)
    reduced = job(tmp_path, runs, framework="torchtitan", **setup)
    assert not prepared(reduced).prices.costs(reduced.space.today).reduces_every_pass


def test_the_loss_of_pytorch_keeps_logits_in_fp32_with_fsdp_too(tmp_path):
    """Sequences of 65,536 tokens over two ranks take 84.2 GiB with torchtitan's FSDP on H100 of 96 GB."""
    (tmp_path / "h100_96.toml").write_text('base = "hgx-h100"\ndevice.memory = "96 GB"\ndevice.memory_rate = "2400 GB/s"\n')
    setup = {"cluster": "1xh100_96.toml", "global_batch": 4, "sequence": 65536, "precision": "fp8"}
    peak_bytes = memory(tmp_path, 'cp = 2\nrecompute = "full"', framework="fsdp", **setup)
    assert sum(peak_bytes.values()) - peak_bytes["context"] == pytest.approx(84.2 * GIB, rel=0.05)


def test_a_decoder_reads_as_many_tokens_as_the_file_says(tmp_path):
    setup = {"model": "t5-base", "cluster": "rtx-3090", "global_batch": 20, "sequence": 512, "framework": "pytorch"}
    whole = job(tmp_path, "micro_batch = 20", **setup)
    assert any("'target_sequence' is not given" in warning for warning in whole.diagnose().warnings)
    short = job(tmp_path, "micro_batch = 20", target_sequence=128, **setup)
    assert whole.predict(Plan()).infeasible is not None
    assert short.predict(Plan()).infeasible is None
    assert not any("target_sequence" in warning for warning in short.diagnose().warnings)
    (tmp_path / "job.toml").write_text(text(target_sequence=128))
    assert "target_sequence: llama3-8b has no encoder" in refusal("replay", tmp_path / "job.toml")


def test_old_libraries_are_slower_on_hopper_and_what_is_not_known_widens_the_interval(tmp_path):
    setup = {"framework": "pytorch-2", "compiled": True, "cluster": "1xhgx-h100"}
    new, old, unknown = (
        job(tmp_path, "tp = 8", **setup, **cuda).predict(Plan()) for cuda in ({"cuda": "13.0"}, {"cuda": "12.4"}, {})
    )
    assert old.iteration_us > 1.05 * new.iteration_us
    assert unknown.iteration_us == new.iteration_us
    assert unknown.interval_us == (new.interval_us[0], old.interval_us[1])
    ampere = [job(tmp_path, "tp = 8", **{**setup, **A100}, **cuda).predict(Plan()) for cuda in ({"cuda": "12.4"}, {})]
    assert ampere[0].interval_us == ampere[1].interval_us


def test_compiled_layers_are_faster_and_what_is_not_known_widens_the_interval(tmp_path):
    jobs = [job(tmp_path, "tp = 8", framework="torchtitan", compiled=compiled, **A100) for compiled in (True, False)]
    compiled, eager = (each.predict(Plan()) for each in jobs)
    assert compiled.iteration_us < eager.iteration_us
    unknown = job(tmp_path, "tp = 8", framework="torchtitan", **A100)
    low_us, high_us = unknown.predict(Plan()).interval_us
    assert low_us <= compiled.interval_us[0]
    assert high_us >= eager.interval_us[1]
    assert any("'compiled' is not given" in warning for warning in unknown.diagnose().warnings)
    assert not any("'compiled'" in warning for warning in jobs[0].diagnose().warnings)
    (tmp_path / "job.toml").write_text(text(compiled=True))
    assert "compiled: megatron-core has no eager and compiled form" in refusal("replay", tmp_path / "job.toml")


def test_a_vendor_with_few_published_runs_has_a_wider_interval(tmp_path):
    """MI300X with PyTorch took 1.5 to 3.4 times as long as predicted in 2024."""
    widths = []
    for cluster in ("1xhgx-h100", "1xmi300x-platform"):
        planned = job(tmp_path, "tp = 1\nmicro_batch = 1", cluster=cluster, global_batch=8, model="gpt2-xl", sequence=1024)
        low_us, high_us = planned.predict(Plan()).interval_us
        widths.append(high_us / low_us)
    assert widths[1] > 2 * widths[0]
    assert "few are of GPUs of AMD" in planned.calibration.on


def test_adapters_compute_no_gradients_of_weights_which_the_mfu_does_not_count(tmp_path):
    """A matmul with frozen weights has two passes of three; attention has all."""
    setup = {**A100, "sequence": 512, "framework": "torchtune"}
    full, lora = (job(tmp_path, "zero_stage = 0", adapters=adapters, **setup) for adapters in (False, True))
    assert prepared(lora).work.flops == pytest.approx(prepared(full).work.flops * 2 / 3, rel=0.02)
    assert prepared(lora).work.flops > prepared(full).work.flops * 2 / 3


def test_a_search_proposes_no_degrees_that_the_framework_lacks(tmp_path):
    candidates = job(tmp_path, None, framework="torchtune", compiled=True, **A100).space.candidates
    split = {name for name in ("tp", "pp", "cp", "ep") for strategy in candidates if getattr(strategy, name) > 1}
    assert split == {"tp", "cp"}
