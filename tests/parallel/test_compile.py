"""What ranks exchange under a layout is what Megatron-LM exchanges; what they compute and hold is a share of the whole."""

from collections import Counter
from dataclasses import replace

import pytest

from dpro_search.collect.trace import CollectiveKind
from dpro_search.parallel.costs.compile import BlockCollective, LocalOp, compile_block
from dpro_search.parallel.layout import layout_of
from dpro_search.parallel.model import blocks_of, elements, parameters_of, published
from dpro_search.parallel.strategy import Strategy

SEQUENCE = 1024
STREAM = SEQUENCE * 4096  # elements of the residual stream of a model with 4,096 hidden


def program(model, block, regather_inputs=True, **degrees):
    (chosen,) = (block_of_name for block_of_name in blocks_of(published(model)) if block_of_name.name == block)
    return compile_block(chosen, layout_of(Strategy(**degrees), regather_inputs=regather_inputs), 1, SEQUENCE)


def exchanged(steps):
    return Counter((step.type.name, step.axis, step.elements) for step in steps if isinstance(step, BlockCollective))


def test_tensor_parallel_layers_all_reduce_twice_each_way():
    """Shoeybi et al. 2019, figure 3: g in the forward, f in the backward pass, of attention and feed-forward."""
    block_program = program("llama3-8b", "layer", tp=4)
    assert exchanged(block_program.forward) == {("ALL_REDUCE", "tp", STREAM): 2}
    assert exchanged(block_program.backward) == {("ALL_REDUCE", "tp", STREAM): 2}


def test_sequence_parallel_layers_gather_and_scatter_instead():
    """Korthikanti et al. 2022, section 4.2.2: inputs of which a part was kept are gathered again for the gradients of weights."""
    block_program = program("llama3-8b", "layer", tp=4, sequence_parallel=True)
    assert exchanged(block_program.forward) == {("ALL_GATHER", "tp", STREAM): 2, ("REDUCE_SCATTER", "tp", STREAM): 2}
    assert exchanged(block_program.backward) == {("ALL_GATHER", "tp", STREAM): 4, ("REDUCE_SCATTER", "tp", STREAM): 2}


def test_experts_exchange_the_tokens_of_each_of_their_choices():
    block_program = program("mixtral-8x7b", "layer", dp=4, ep=4)
    assert exchanged(block_program.forward) == exchanged(block_program.backward) == {("ALL_TO_ALL", "ep", 2 * STREAM): 2}


KEYS_VALUES = 2 * SEQUENCE * 8 * 128  # elements of llama3-8b


def test_context_parallel_attention_gathers_keys_and_values_and_scatters_their_gradients():
    block_program = program("llama3-8b", "layer", cp=2)
    assert exchanged(block_program.forward) == {("ALL_GATHER", "cp", KEYS_VALUES): 1}
    assert exchanged(block_program.backward) == {("ALL_GATHER", "cp", KEYS_VALUES): 1, ("REDUCE_SCATTER", "cp", KEYS_VALUES): 1}
    assert exchanged(program("llama3-8b", "layer", cp=2, regather_inputs=False).backward) == {
        ("REDUCE_SCATTER", "cp", KEYS_VALUES): 1
    }


def test_in_a_ring_keys_and_values_go_round_beside_the_attention():
    """Liu et al. 2023: one hop less than ranks; the gradients go all the way round to the rank of their keys and values."""
    block_program = program("llama3-8b", "layer", cp=4, cp_ring=True)
    assert not exchanged(block_program.forward)
    ((sent,),) = (step.beside for step in block_program.forward if step.beside)
    assert (sent.type, sent.axis, sent.elements, sent.repeats) == (CollectiveKind.SEND, "cp", KEYS_VALUES / 4, 3)
    ((again, gradients),) = (step.beside for step in block_program.backward if step.beside)
    assert (again.repeats, gradients.repeats) == (3, 4)
    assert gradients.gradient


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_the_end_of_a_causal_sequence_attends_to_most(cp):
    """Without a part of the start and one of the end on every rank, the last of p has (2 p - 1) / p times the mean."""

    def context(**how):
        steps = program("llama3-8b", "layer", cp=cp, cp_ring=True, **how).forward
        return next(step.op.forward_flops(step.sizes) for step in steps if step.op.type == "attention")

    rows, keys = SEQUENCE / cp, SEQUENCE
    last = 2 * (2 * 32 * 128) * sum(keys - row for row in range(int(rows)))  # multiply-adds of both products, counted one by one
    assert context() == pytest.approx(context(cp_balanced=False) * cp / (2 * cp - 1))
    assert context(cp_balanced=False) == pytest.approx(last, rel=0.01)


def test_the_ranks_of_the_busiest_experts_compute_and_exchange_more():
    (block,) = (busiest for busiest in blocks_of(published("mixtral-8x7b")) if busiest.name == "layer")
    layout = layout_of(Strategy(dp=4, ep=4))
    even, uneven = (compile_block(block, replace(layout, expert_load=load), 1, SEQUENCE).forward for load in (1.0, 1.5))
    for one, other in zip(even, uneven, strict=True):
        if isinstance(one, BlockCollective):
            assert other.elements == 1.5 * one.elements
        elif one.op.name.startswith("experts."):
            assert other.op.forward_flops(other.sizes) == pytest.approx(1.5 * one.op.forward_flops(one.sizes))
        elif "capacity" not in one.op.dims:
            assert other.op.forward_flops(other.sizes) == one.op.forward_flops(one.sizes)


def test_the_loss_of_a_split_vocabulary_sums_thrice():
    """The maximum, the sum of exponentials and the target's logit (Shoeybi et al. 2019, section 3; Megatron-LM's cross entropy)."""
    block_program = program("llama3-8b", "head", tp=4)
    assert [step.repeats for step in block_program.forward if isinstance(step, BlockCollective)] == [3]


def test_inputs_that_are_not_gathered_again_are_kept_whole():
    again, kept = (program("llama3-8b", "layer", tp=4, sequence_parallel=True, regather_inputs=how) for how in (True, False))
    assert exchanged(kept.backward) == {("ALL_GATHER", "tp", STREAM): 2, ("REDUCE_SCATTER", "tp", STREAM): 2}
    assert sum(kept.saved.values()) - sum(again.saved.values()) == 2 * STREAM * 3 / 4


@pytest.mark.parametrize("model", ["llama3-8b", "gpt2-xl", "mixtral-8x7b", "deepseek-v3", "t5-base", "gpt-oss-120b"])
def test_a_job_on_one_device_exchanges_nothing(model):
    for block in blocks_of(published(model)):
        block_program = compile_block(block, layout_of(Strategy()), 1, SEQUENCE)
        assert not exchanged(block_program.forward)
        assert not exchanged(block_program.backward)


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
    block_program = program("gpt3-6.7b", "layer", tp=8, sequence_parallel=True)
    bytes_held = 2 * sum(block_program.saved.values()) + block_program.saved_bytes
    stream = SEQUENCE * 4096
    assert bytes_held == pytest.approx(34 * stream / 8, rel=0.03)


def test_weights_that_split_sequences_share_are_summed_over_their_ranks():
    block_program = program("llama3-8b", "layer", tp=4, sequence_parallel=True)
    assert {weight.op: weight.shared for weight in block_program.weights if weight.shared} == {
        "attention_norm": frozenset({"tp"}),
        "feed_forward_norm": frozenset({"tp"}),
    }
    assert CollectiveKind.ALL_REDUCE not in {step.type for step in block_program.forward if isinstance(step, BlockCollective)}
