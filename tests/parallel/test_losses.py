"""The key `loss` of a job.toml: how much of the logits is held at a time."""

from __future__ import annotations

import pytest

from dpro_search.space.plan import Plan
from tests.kinds.verbs import refusal
from tests.parallel.jobs import job, text

TOKENS, VOCABULARY, HIDDEN = 8192, 128256, 4096
SETUP = {"framework": "fsdp", "compiled": True, "cluster": "1xhgx-h100", "global_batch": 8, "sequence": TOKENS}


def logits_bytes(folder, loss, **values):
    keys = {} if loss is None else {"loss": loss}
    here = job(folder, 'recompute = "full"', **SETUP | keys | values)
    return here.job.plan_facts(here, Plan()).memory_bytes["logits"]


def test_a_whole_loss_has_logits_in_16_bits_and_three_times_in_fp32(tmp_path):
    """PyTorch's cross-entropy: a copy, its log-softmax, and their gradient."""
    assert logits_bytes(tmp_path, "whole") == TOKENS * VOCABULARY * (2 + 3 * 4)


def test_a_chunked_loss_has_an_eighth_of_that_in_fp32(tmp_path):
    """torchtune's CEWithChunkedOutputLoss: logits and their gradients stay in 16 bits."""
    assert logits_bytes(tmp_path, "chunked") == TOKENS * VOCABULARY * (2 + 2 + 3 * 4 / 8)


def test_a_tiled_loss_has_as_many_logits_as_the_head_has_inputs(tmp_path):
    """Liger: tokens over vocabulary / hidden size, up to a power of two; gradients of the input and of the weight are whole."""
    chunk = 256  # 8,192 / 32
    expected = 2 * (chunk * VOCABULARY + TOKENS * HIDDEN + VOCABULARY * HIDDEN)
    assert logits_bytes(tmp_path, "tiled") == expected


def test_a_tiled_loss_of_adapters_needs_no_gradient_of_the_head(tmp_path):
    adapters = {"lora_rank": 16, "lora_targets": ["q_proj"]}
    trained, frozen = (logits_bytes(tmp_path, "tiled", **keys) for keys in ({}, adapters))
    assert trained - frozen == 2 * VOCABULARY * HIDDEN


@pytest.mark.parametrize(("framework", "usual"), [("fsdp", "whole"), ("torchtune", "chunked"), ("litgpt", "chunked")])
def test_a_framework_has_a_loss_of_its_own_where_nothing_is_said(tmp_path, framework, usual):
    given, none = (logits_bytes(tmp_path, loss, framework=framework) for loss in (usual, None))
    assert given == none


def test_one_kernel_for_the_loss_is_faster_than_pytorchs(tmp_path):
    tiled, whole = (
        job(tmp_path, "micro_batch = 1", loss=loss, **SETUP).predict(Plan()).iteration_us for loss in ("tiled", "whole")
    )
    assert tiled < whole


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"loss": "tiled"}, "loss: megatron-core has a loss of its own (those that have PyTorch's: fsdp, "),
        ({"loss": "liger", "framework": "fsdp"}, "loss: 'liger' is not known"),
        ({"liger": True}, "liger: how the loss is computed is said by loss = one of whole, chunked, tiled"),
    ],
)
def test_a_loss_that_cannot_be_is_refused_with_the_reason(tmp_path, keys, said):
    (tmp_path / "job.toml").write_text(text(**keys))
    assert said in refusal("replay", tmp_path / "job.toml")
