"""LoRA and QLoRA: what adapters of a rank beside some matrices add to a described job, in memory and in time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpro_search.cluster import parse_cluster
from dpro_search.parallel.costs.pricer import Pricer
from dpro_search.parallel.frameworks import FRAMEWORKS, as_compiled
from dpro_search.parallel.memory.peak import peak_memory
from dpro_search.parallel.model import Adapters, blocks_of, parameters_of, published
from dpro_search.parallel.strategy import Strategy
from dpro_search.parallel.workload import Workload
from dpro_search.space.plan import Plan
from tests.kinds.verbs import refusal, verb
from tests.parallel.jobs import job, prepared, text

MODEL = published("llama3-8b")
ATTENTION = ("q_proj", "v_proj")
EVERYWHERE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def workload(rank=0, targets=(), framework="torchtune", frozen_bytes=0.0, **settings):
    model = replace(MODEL, adapters=Adapters(rank=rank, targets=targets, frozen_bytes=frozen_bytes))
    degrees = {"global_batch": 8, "dp": 8, **settings.pop("degrees", {})}
    runtime = as_compiled(FRAMEWORKS[framework].runtime, compiled=True)
    strategy = Strategy(**degrees)
    cluster = parse_cluster("1xhgx-h100")
    return Workload(model=model, sequence=4096, strategy=strategy, cluster=cluster, runtime=runtime, **settings)


def layer(job):
    block = next(block for block in blocks_of(job.model) if block.name == "layer")
    return Pricer(job).layer(block)


@pytest.mark.parametrize(
    ("targets", "each"),
    [
        (("q_proj",), 4096 + 4096),
        (("linear_qkv",), 4096 + 6144),
        (("q_proj", "k_proj", "v_proj"), 3 * 4096 + 6144),  # three adapters in place of one
        (("o_proj", "down_proj"), 2 * 4096 + 14336 + 4096),
    ],
)
def test_an_adapter_has_rank_rows_and_columns_of_its_matrix(targets, each):
    """Llama 3 8B: 32 layers, hidden size 4,096, 1,024 columns of keys and of values, feed-forward width 14,336."""
    adapted = replace(MODEL, adapters=Adapters(rank=16, targets=targets))
    assert parameters_of(adapted) - parameters_of(MODEL) == 32 * 16 * each


def test_only_adapters_have_gradients_and_an_optimizers_state():
    """torchtune keeps both in 16 bits: 2 bytes of a gradient, 2 of each moment; gradients stay from one micro-batch to the next."""
    memory = peak_memory(workload(16, EVERYWHERE, degrees={"global_batch": 16}))
    trained = parameters_of(replace(MODEL, adapters=Adapters(rank=16, targets=EVERYWHERE))) - parameters_of(MODEL)
    assert (memory.gradients_bytes, memory.optimizer_bytes) == (2 * trained, 4 * trained)


def test_zero_splits_the_states_of_adapters():
    whole, split = (peak_memory(workload(16, ATTENTION, degrees={"zero_stage": stage})) for stage in (0, 1))
    assert split.optimizer_bytes == whole.optimizer_bytes / 8


def test_a_layer_keeps_the_inputs_of_matrices_with_adapters_and_not_of_others():
    """Queries and values share the norm's output; the others read the feed-forward norm's and the activation's."""
    few, many = (peak_memory(workload(16, targets)).activations_bytes for targets in (ATTENTION, EVERYWHERE))
    narrow = 16 * (7 - 2)  # what each adapter's second matrix reads
    # attention's output is kept anyway, for attention
    assert many - few == pytest.approx(32 * 4096 * 2 * (4096 + 14336 + narrow), rel=1e-6)


def test_adapters_make_both_passes_longer_and_more_matrices_more_so():
    none, few, many = (layer(workload(rank, targets)) for rank, targets in ((0, ()), (16, ATTENTION), (16, EVERYWHERE)))
    assert none.forward_us < few.forward_us < many.forward_us < 1.5 * none.forward_us
    assert none.backward_us < few.backward_us < many.backward_us < 1.5 * none.backward_us


def test_data_parallel_ranks_exchange_the_gradients_of_adapters_alone():
    full = replace(workload(), model=MODEL)
    none, few, many = (layer(workload(rank, targets)).reduce_us for rank, targets in ((0, ()), (16, ATTENTION), (256, ATTENTION)))
    assert none == 0
    assert 0 < few < many < layer(full).reduce_us


def test_weights_in_four_bits_are_made_whole_for_each_pass_and_gathered_as_they_are():
    """A layer's weights are read in NF4 and written in 16 bits, forward and backward."""
    nf4 = 0.5 + 1 / 64
    half, quantized = (workload(16, ATTENTION, frozen_bytes=each) for each in (0.0, nf4))
    least_us = 218e6 * (nf4 + 2) / 3.35e12 * 1e6
    assert layer(quantized).forward_us - layer(half).forward_us > least_us
    assert layer(quantized).backward_us - layer(half).backward_us > least_us
    sharded = [layer(replace(each, strategy=replace(each.strategy, zero_stage=3))).gather_us for each in (half, quantized)]
    assert sharded[1] < 0.5 * sharded[0]


def test_a_file_says_rank_and_matrices(tmp_path):
    runs, setup = "zero_stage = 0", {"framework": "torchtune", "compiled": True, "cluster": "1xhgx-h100"}
    unknown, known = (
        job(tmp_path, runs, **setup, **keys)
        for keys in ({"adapters": True}, {"lora_rank": 16, "lora_targets": ["q_proj", "v_proj"]})
    )
    assert unknown.predict(Plan()).iteration_us < known.predict(Plan()).iteration_us
    assert "assumed" not in verb("replay", tmp_path / "job.toml")


def test_a_usual_plan_counts_with_quantized_weights(tmp_path):
    """Llama 3 70B has 140 GB in 16 bits, and 36 GB in NF4, which one device of 80 GB holds."""
    setup = {"model": "llama3-70b", "cluster": "1xhgx-h100", "framework": "torchtune", "compiled": True, "sequence": 1024}
    adapters = {"lora_rank": 8, "lora_targets": ["q_proj"]}
    half, quantized = (
        prepared(job(tmp_path, None, global_batch=8, **setup, **adapters, **keys)).space.today
        for keys in ({}, {"frozen_weights": "nf4"})
    )
    assert (half.zero_stage, quantized.zero_stage) == (3, 0)


def test_a_rank_that_is_not_given_is_said_with_what_it_leaves_out(tmp_path):
    (tmp_path / "job.toml").write_text(text(adapters=True))
    said = " ".join(verb("replay", tmp_path / "job.toml")["assumed"])
    assert "'lora_rank' and 'lora_targets' not given: the adapters themselves are not counted" in said
    assert "of rank 16 on attention they have 9.44 million parameters" in said


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"lora_rank": 16, "lora_targets": ["q_porj"]}, "lora_targets: 'q_porj' is not known; did you mean 'q_proj'?"),
        ({"lora_rank": 0, "lora_targets": ["q_proj"]}, "lora_rank: must be from 1 to the hidden size 4096, not 0"),
        ({"model": "mixtral-8x7b", "lora_rank": 8, "lora_targets": ["up_proj"]}, "'up_proj' is no matrix of this model"),
        (
            {"model": "resnet50", "lora_rank": 8, "lora_targets": ["q_proj"]},
            "resnet50 has no layers of a transformer",
        ),
        ({"frozen_weights": "nf4"}, "frozen_weights: only a job with lora_rank, or adapters = true,"),
        ({"lora_r": 16}, "lora_r: adapters are said by lora_rank and lora_targets"),
    ],
)
def test_adapters_that_a_model_cannot_have_are_refused(tmp_path, keys, said):
    (tmp_path / "job.toml").write_text(text(None, **keys))
    assert said in refusal("replay", tmp_path / "job.toml")
