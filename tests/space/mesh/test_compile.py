"""What ranks exchange under a layout is what Megatron-LM exchanges; what they compute and hold is a share of the whole."""

from collections import Counter

import pytest

from dpro_search.collect.trace import CollectiveKind
from dpro_search.graph.model import blocks_of, elements, parameters_of, published
from dpro_search.space.mesh import Collective, LocalOp, Strategy, compile_block, layout_of

SEQUENCE = 1024
STREAM = SEQUENCE * 4096  # elements of the residual stream of a model with 4,096 hidden


def program(model, block, **degrees):
    (chosen,) = (found for found in blocks_of(published(model)) if found.name == block)
    return compile_block(chosen, layout_of(Strategy(**degrees)), 1, SEQUENCE)


def exchanged(steps):
    return Counter((step.type.name, step.axis, step.elements) for step in steps if isinstance(step, Collective))


def test_tensor_parallel_layers_all_reduce_twice_each_way():
    """Shoeybi et al. 2019, figure 3: g in the forward, f in the backward pass, of attention and feed-forward."""
    found = program("llama3-8b", "layer", tp=4)
    assert exchanged(found.forward) == {("ALL_REDUCE", "tp", STREAM): 2}
    assert exchanged(found.backward) == {("ALL_REDUCE", "tp", STREAM): 2}


def test_sequence_parallel_layers_gather_and_scatter_instead():
    """Korthikanti et al. 2022, section 4.2.2: inputs of which a part was kept are gathered again for the gradients of weights."""
    found = program("llama3-8b", "layer", tp=4, sequence_parallel=True)
    assert exchanged(found.forward) == {("ALL_GATHER", "tp", STREAM): 2, ("REDUCE_SCATTER", "tp", STREAM): 2}
    assert exchanged(found.backward) == {("ALL_GATHER", "tp", STREAM): 4, ("REDUCE_SCATTER", "tp", STREAM): 2}


def test_experts_exchange_the_tokens_of_each_of_their_choices():
    found = program("mixtral-8x7b", "layer", dp=4, ep=4)
    assert exchanged(found.forward) == exchanged(found.backward) == {("ALL_TO_ALL", "ep", 2 * STREAM): 2}


def test_context_parallel_attention_needs_all_keys_and_values():
    found = program("llama3-8b", "layer", cp=2)
    assert exchanged(found.forward) == {("ALL_GATHER", "cp", 2 * SEQUENCE * 8 * 128): 1}


@pytest.mark.parametrize("model", ["llama3-8b", "gpt2-xl", "mixtral-8x7b", "deepseek-v3", "t5-base", "gpt-oss-120b"])
def test_a_job_on_one_device_exchanges_nothing(model):
    for block in blocks_of(published(model)):
        found = compile_block(block, layout_of(Strategy()), 1, SEQUENCE)
        assert not exchanged(found.forward)
        assert not exchanged(found.backward)


@pytest.mark.parametrize(
    "degrees", [{"tp": 8}, {"tp": 8, "sequence_parallel": True}, {"tp": 4, "cp": 2, "sequence_parallel": True}]
)
@pytest.mark.parametrize("model", ["llama3-8b", "llama2-7b"])
def test_matmuls_and_attention_of_all_ranks_are_those_of_one(model, degrees):
    strategy = Strategy(**degrees)
    for block in blocks_of(published(model)):
        alone = compile_block(block, layout_of(Strategy()), 1, SEQUENCE).forward
        shared = [step for step in compile_block(block, layout_of(strategy), 1, SEQUENCE).forward if isinstance(step, LocalOp)]
        for one, many in zip(alone, shared, strict=True):
            if one.op.type in ("matmul", "attention"):
                assert many.op.forward_flops(many.sizes) * strategy.devices == pytest.approx(
                    one.op.forward_flops(one.sizes), rel=1e-4
                )


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_rank_holds_its_share_of_the_parameters(tp):
    model = published("llama3-8b")
    held = sum(
        block.count * sum(weight.elements for weight in compile_block(block, layout_of(Strategy(tp=tp)), 1, SEQUENCE).weights)
        for block in blocks_of(model)
    )
    norms = sum(
        block.count * elements(op.weight, block.sizes) for block in blocks_of(model) for op in block.ops if "norm" in op.name
    )
    assert held == (parameters_of(model) - norms) / tp + norms


def test_activations_of_a_layer_are_those_of_the_formula():
    """34 s b h bytes, the masks of dropout among them (Korthikanti et al. 2022, table 2, without scores)."""
    found = program("gpt3-6.7b", "layer", tp=8, sequence_parallel=True)
    bytes_held = 2 * sum(found.saved.values()) + found.saved_bytes
    stream = SEQUENCE * 4096
    assert bytes_held == pytest.approx(34 * stream / 8, rel=0.03)


def test_weights_that_split_sequences_share_are_summed_over_their_ranks():
    found = program("llama3-8b", "layer", tp=4, sequence_parallel=True)
    assert {weight.op: weight.shared for weight in found.weights if weight.shared} == {
        "attention_norm": frozenset({"tp"}),
        "feed_forward_norm": frozenset({"tp"}),
    }
    assert CollectiveKind.ALL_REDUCE not in {step.type for step in found.forward if isinstance(step, Collective)}
