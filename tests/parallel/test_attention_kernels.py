"""The key `attention` of a job.toml: which kernel, where it exists, and what each is worth."""

from __future__ import annotations

import pytest

from dpro_search.kinds import Wanted, description_text
from dpro_search.space.plan import Plan
from tests.kinds.verbs import refusal, verb
from tests.parallel.jobs import job, text

LONG = {"sequence": 16384, "global_batch": 16, "cluster": "1xhgx-h100", "model": "llama3.2-1b"}


def prediction(folder, attention, framework="megatron-core", **values):
    keys = {} if attention is None else {"attention": attention}
    return job(
        folder, "zero_stage = 1" if framework == "megatron-core" else "zero_stage = 3", framework=framework, **keys, **LONG | values
    ).predict(Plan())


def test_newer_kernels_are_faster_on_hopper_and_stored_scores_are_slowest(tmp_path):
    steps_us = [prediction(tmp_path, name).iteration_us for name in ("flash3", "flash2", "unfused")]
    assert steps_us == sorted(steps_us)
    assert steps_us[0] < 0.9 * steps_us[1]


def test_stored_scores_need_memory_that_grows_with_the_square_of_the_sequence(tmp_path):
    def more(sequence):
        unfused, flash = (prediction(tmp_path, name, sequence=sequence).peak_memory_bytes for name in ("unfused", "flash2"))
        return unfused - flash

    assert more(8192) == pytest.approx(4 * more(4096), rel=0.01)


@pytest.mark.parametrize(("framework", "usual"), [("megatron-core", "flash3"), ("fsdp", "flash2"), ("fsdp", "sdpa")])
def test_a_framework_has_a_kernel_of_its_own_where_nothing_is_said(tmp_path, framework, usual):
    """PyTorch's `scaled_dot_product_attention` is flash-attention 2 on Hopper; Transformer Engine has the newest."""
    assert prediction(tmp_path, usual, framework).iteration_us == prediction(tmp_path, None, framework).iteration_us


def test_a_written_description_says_the_kernel_of_its_framework_and_device():
    for cluster, framework, kernel in (
        ("hgx-h100", "megatron-core", "flash3"),
        ("hgx-b200", "megatron-core", "cudnn"),
        ("hgx-h100", "torchtitan", "flash2"),
        ("hgx-h100", "megatron-deepspeed", "unfused"),
    ):
        written = description_text(Wanted(model="llama3-8b", cluster=cluster, framework=framework))
        assert f'# attention = "{kernel}"  # flash2, flash3, sdpa, cudnn, unfused\n' in written


def test_flash_attention_leaves_a_copy_of_its_output_beside_transformer_engine(tmp_path):
    """Sixteen layers of 2,048 columns for 16,384 tokens, in 16 bits."""
    flash, cudnn = (prediction(tmp_path, name).peak_memory_bytes for name in ("flash3", "cudnn"))
    assert flash - cudnn == pytest.approx(16 * 16384 * 2048 * 2, rel=0.05)


@pytest.mark.parametrize(
    ("attention", "cluster", "said"),
    [
        ("flash3", "1xdgx-a100-80", "attention: attention flash3: flash-attention 3 is for Hopper GPUs"),
        ("flash3", "1xhgx-b200", "not NVIDIA B200"),
        ("flash2", "1xdgx-1-v100", "flash2 needs a GPU from Ampere on, and NVIDIA V100"),
        ("cudnn", "1xmi300x-platform", "cuDNN is NVIDIA's, not for AMD Instinct MI300X"),
        ("flash", "1xhgx-h100", "attention: 'flash' is not known; did you mean 'flash3'?"),
    ],
)
def test_a_kernel_that_a_device_lacks_is_refused_with_the_reason(tmp_path, attention, cluster, said):
    precision = "fp16" if "v100" in cluster else "bf16"
    (tmp_path / "job.toml").write_text(text(attention=attention, cluster=cluster, precision=precision))
    assert said in refusal("replay", tmp_path / "job.toml")


def test_an_unknown_speed_is_said(tmp_path):
    (tmp_path / "job.toml").write_text(text(attention="flash2", cluster="1xhgx-b200"))
    assert "how much slower flash-attention 2 is" in " ".join(verb("replay", tmp_path / "job.toml")["assumed"])
