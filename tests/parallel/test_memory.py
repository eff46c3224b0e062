"""The ledger of a rank's memory: closed forms of small cases, and what may never shrink it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.cluster import parse_cluster
from dpro_search.errors import InputError
from dpro_search.parallel.gpu_ops import AttentionKernels, Kernels
from dpro_search.parallel.legality import check_stages_by_cost
from dpro_search.parallel.memory.peak import peak_memory, rank_memories
from dpro_search.parallel.memory.rules import MemoryRules
from dpro_search.parallel.model import Adapters, Architecture, Attention, Experts, FeedForward, Layer, Positions, model, published
from dpro_search.parallel.runtime import Runtime
from dpro_search.parallel.strategy import Recompute, Strategy
from dpro_search.parallel.workload import Workload

HIDDEN, HEADS, SEQUENCE, VOCAB = 512, 8, 1024, 50304
GIB = 2**30


def gpt(layers=12, gated=False, dropout=0.1):
    attention = Attention(heads=HEADS, kv_heads=HEADS, head_dim=HIDDEN // HEADS, bias=True)
    layer = Layer(count=layers, attention=attention, feed_forward=FeedForward(hidden=4 * HIDDEN, gated=gated, bias=not gated))
    return Architecture(
        name="gpt",
        hidden=HIDDEN,
        vocab=VOCAB,
        layers=(layer,),
        positions=Positions.LEARNED,
        max_positions=SEQUENCE,
        tied=True,
        norm_bias=True,
        dropout=dropout,
    )


def mixture(layers=12, gated=False):
    dense = gpt(layers)
    experts = Experts(count=8, top_k=2, hidden=4 * HIDDEN, gated=gated)
    return replace(dense, layers=(replace(dense.layers[0], feed_forward=experts),))


def workload(model=None, cluster="8xhgx-h100", flash=True, rules=None, **degrees):
    kernels = Kernels(attention=AttentionKernels.NEWEST if flash else AttentionKernels.SCORES)
    runtime = Runtime(kernels=kernels, memory=rules or MemoryRules())
    strategy = Strategy(**{"global_batch": 64, **degrees})
    return Workload(model=model or gpt(), sequence=SEQUENCE, strategy=strategy, cluster=parse_cluster(cluster), runtime=runtime)


@pytest.mark.parametrize(("flash", "per_score"), [(True, 0), (False, 5)])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_layer_keeps_34_sbh_and_5_as2b(flash, per_score, batch):
    """Korthikanti et al. 2022, equation 1, with statistics of two norms and of fused attention in fp32."""
    few, many = (
        max(rank_memories(workload(gpt(layers), flash=flash, dp=8, micro_batch=batch)), key=lambda m: m.total_bytes)
        for layers in (4, 12)
    )
    tokens = SEQUENCE * batch
    statistics = 4 * tokens * (2 + HEADS)
    layer = 34 * tokens * HIDDEN + per_score * HEADS * SEQUENCE * tokens + statistics
    assert (many.activations_bytes - few.activations_bytes) / 8 == pytest.approx(layer, rel=1e-9)


def test_tensor_and_sequence_parallel_ranks_keep_a_share():
    """34 sbh / t with sequence parallelism, (10 + 24 / t) sbh without (Korthikanti et al. 2022, table 2)."""

    def layer(**degrees):
        few, many = (peak_memory(workload(gpt(layers), dp=1, tp=4, **degrees)).activations_bytes for layers in (4, 12))
        return (many - few) / 8 / (SEQUENCE * HIDDEN)

    assert layer(sequence_parallel=True) == pytest.approx(34 / 4, rel=0.01)
    assert layer() == pytest.approx(10 + 24 / 4, rel=0.01)


def test_logits_are_held_in_16_bits_and_in_fp32():
    assert peak_memory(workload(dp=8)).logits_bytes == 6 * SEQUENCE * VOCAB


@pytest.mark.parametrize(
    ("degrees", "gpu", "measured"),
    [  # bytes that Megatron-LM's functional tests log after a step (mem-allocated-bytes) on an A100 and an H100
        ({"dp": 8, "zero_stage": 1, "micro_batch": 4}, "dgx-a100-80", 552_128_512),
        ({"dp": 8, "zero_stage": 1, "micro_batch": 4}, "hgx-h100", 581_489_664),
        ({"dp": 8, "micro_batch": 4, "recompute": Recompute.FULL}, "dgx-a100-80", 1_234_585_088),
    ],
)
def test_states_and_workspaces_are_those_that_megatron_logs(degrees, gpu, measured):
    deterministic = MemoryRules(matmul_workspace_bytes=32 * 2**20, dummy_gradients=False)  # --no-gradient-accumulation-fusion
    memory_use = peak_memory(workload(cluster=gpu, rules=deterministic, **degrees))
    states = memory_use.weights_bytes + memory_use.gradients_bytes + memory_use.optimizer_bytes + memory_use.workspace_bytes
    assert states == pytest.approx(measured, rel=0.01)


def test_fused_gradients_leave_a_tensor_for_each_shape_of_a_weight():
    def workspaces(**rules):
        return peak_memory(workload(rules=MemoryRules(**rules), dp=8)).workspace_bytes

    of_layer = HIDDEN * (3 * HIDDEN + HIDDEN + 4 * HIDDEN + 4 * HIDDEN)
    assert workspaces() - workspaces(dummy_gradients=False) == 2 * (of_layer + HIDDEN * VOCAB)
    assert workspaces(transformer_engine=False) == workspaces(transformer_engine=False, dummy_gradients=False)


@pytest.mark.parametrize(("gpu", "workspace"), [("dgx-a100-80", 4), ("hgx-h100", 32)])
def test_grouped_experts_have_a_workspace_for_each_of_four_streams(gpu, workspace):
    def workspaces(**rules):
        rules = MemoryRules(dummy_gradients=False, **rules)
        return peak_memory(workload(mixture(gated=True), cluster=gpu, rules=rules, dp=8, ep=8)).workspace_bytes

    assert workspaces() - workspaces(grouped_workspaces=0) == 4 * workspace * 2**20


@pytest.mark.parametrize(("gated", "kept"), [(True, -HIDDEN), (False, 4 * HIDDEN - HIDDEN)])
def test_weights_of_tokens_are_kept_with_activations_in_place_of_what_experts_give(gated, kept):
    """One kernel does both where activations are gated; otherwise what is activated is kept beside the product."""

    def layer(weighted):
        rules = MemoryRules(weighted_activations=weighted)
        few, many = (peak_memory(workload(mixture(layers, gated), rules=rules, dp=8, ep=8)) for layers in (4, 12))
        return (many.activations_bytes - few.activations_bytes) / 8

    assert layer(True) - layer(False) == 2 * SEQUENCE * 2 * kept  # each token visits two experts


def test_layers_without_transformer_engine_share_a_buffer_of_their_scores():
    def workspaces(shared):
        rules = MemoryRules(transformer_engine=False, shared_scores=shared)
        return peak_memory(workload(rules=rules, flash=False, dp=4, tp=2, micro_batch=4)).workspace_bytes

    assert workspaces(True) - workspaces(False) == 2 * 4 * HEADS / 2 * SEQUENCE**2


def test_flash_attention_keeps_a_copy_of_its_output_before_hopper():
    def layer(gpu, **rules):
        rules = MemoryRules(**rules)
        few, many = (peak_memory(workload(gpt(layers), cluster=gpu, rules=rules, dp=8)) for layers in (4, 12))
        return (many.activations_bytes - few.activations_bytes) / 8

    of_output = 2 * SEQUENCE * HIDDEN
    assert layer("8xdgx-a100-80") - layer("8xhgx-h100") == of_output
    assert layer("8xhgx-h100", flash_copy=True) - layer("8xhgx-h100") == of_output
    assert layer("8xdgx-a100-80", transformer_engine=False) == layer("8xhgx-h100")


def test_full_recomputation_keeps_the_inputs_of_layers_and_one_layer():
    kept = peak_memory(workload(dp=8, micro_batch=4, recompute=Recompute.FULL)).activations_bytes
    inputs = 12 * 2 * 4 * SEQUENCE * HIDDEN
    assert inputs < kept < inputs + 80 * 4 * SEQUENCE * HIDDEN


def test_a_tied_head_on_another_stage_is_a_copy():
    def last(layers):
        return rank_memories(workload(gpt(layers), dp=2, pp=4))[-1].weights_bytes

    assert last(4) - (last(8) - last(4)) == pytest.approx(2 * HIDDEN * (VOCAB + 2))


def test_reducer_buckets_are_there_without_zero_only():
    rules = MemoryRules(bucket_bytes=2.0)
    plain, split = (peak_memory(workload(rules=rules, dp=8, zero_stage=stage)) for stage in (0, 1))
    assert (plain.buckets_bytes, split.buckets_bytes) == (plain.weights_bytes, 0)


def test_buffers_of_collectives_stay_for_as_many_layers_as_the_host_is_ahead():
    def cached(layers_ahead):
        rules = MemoryRules(layers_ahead=layers_ahead)
        return peak_memory(workload(rules=rules, tp=8, sequence_parallel=True, global_batch=1)).cached_bytes

    tensor = 2 * SEQUENCE * HIDDEN  # two reduce-scatters a layer
    assert [cached(ahead) for ahead in (0, 3, 100)] == [0, 3 * 2 * tensor, 12 * 2 * tensor]


def test_cached_blocks_are_given_back_rather_than_to_fail():
    memory_use = replace(peak_memory(workload(dp=8)), cached_bytes=GIB)
    assert memory_use.reserved_within(80 * GIB) == memory_use.allocated_bytes + memory_use.fragments_bytes + GIB
    assert memory_use.reserved_within(memory_use.allocated_bytes + GIB) == memory_use.allocated_bytes + memory_use.fragments_bytes


degrees = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4]),
        "pp": st.sampled_from([1, 2, 4]),
        "dp": st.sampled_from([1, 2, 4]),
        "zero_stage": st.sampled_from([0, 1, 3]),
        "micro_batch": st.sampled_from([1, 2]),
        "recompute": st.sampled_from(list(Recompute)),
        "sequence_parallel": st.booleans(),
    }
)
# Each of these splits or drops what a rank holds, or leaves it as it is; its opposite never saves memory.
SAVINGS = (
    {"zero_stage": 3},
    {"recompute": Recompute.FULL},
    {"sequence_parallel": True},
    {"micro_batch": 1},
)


@settings(max_examples=40, deadline=None)
@given(degrees, st.sampled_from(["gpt2", "llama3.2-1b"]), st.booleans())
def test_memory_never_grows_with_what_saves_it(plan, model, flash):
    job = workload(published(model), flash=flash, **plan)
    before = max(memory.weights_bytes + memory.optimizer_bytes + memory.activations_bytes for memory in rank_memories(job))
    for saving in SAVINGS:
        after = replace(job, strategy=replace(job.strategy, **saving))
        saved_bytes = max(
            memory.weights_bytes + memory.optimizer_bytes + memory.activations_bytes for memory in rank_memories(after)
        )
        assert saved_bytes <= before * (1 + 1e-9), saving
    longer = replace(job, sequence=2 * job.sequence)
    assert peak_memory(longer).total_bytes > peak_memory(job).total_bytes


@settings(max_examples=20, deadline=None)
@given(degrees)
def test_the_categories_are_all_that_is_held(plan):
    for memory in rank_memories(workload(**plan)):
        assert memory.allocated_bytes <= memory.reserved_bytes
        assert memory.allocated_bytes < memory.total_bytes
        assert all(getattr(memory, name) >= 0 for name in memory.__dataclass_fields__)


def test_adapters_need_what_their_attention_reads_and_what_ops_without_weights_need():
    def layer(frozen, **rules):
        adapters = Adapters() if frozen else None
        few, many = (
            workload(replace(gpt(layers, dropout=0.0), adapters=adapters), rules=MemoryRules(**rules), dp=8) for layers in (4, 12)
        )
        return (peak_memory(many).activations_bytes - peak_memory(few).activations_bytes) / 8

    # the inputs of both matrices of the feed-forward network: h and 4 h, in 16 bits
    assert layer(frozen=False) - layer(frozen=True) == 2 * 5 * SEQUENCE * HIDDEN
    # After dropout adapters keep the inputs of attention's two matrices, with a byte of its mask; without it the first one is kept
    # alone, for the second one is attention's output.
    dropped = layer(frozen=True, adapter_mask_bytes=1.0)
    assert dropped - layer(frozen=True) == (2 * 3 - 2) * SEQUENCE * HIDDEN


def test_weights_that_nothing_updates_are_in_8_bits_where_matmuls_are():
    job = workload(replace(gpt(), adapters=Adapters()), dp=8)
    whole, half = (replace(job, precision=precision) for precision in ("bf16", "fp8"))
    assert peak_memory(half).weights_bytes == peak_memory(whole).weights_bytes / 2


def test_flat_buffers_are_of_their_size_or_of_the_parameters():
    def buckets(flat_elements):
        return peak_memory(workload(rules=MemoryRules(flat_elements=flat_elements), dp=8, zero_stage=1))

    assert buckets(1e6).buckets_bytes == 2 * 2 * 1e6
    assert buckets(1e12).buckets_bytes == 2 * buckets(1e12).weights_bytes


def test_a_decoder_of_short_targets_keeps_its_share():
    def held(share):
        model = replace(published("t5-base"), target_share=share)
        return peak_memory(replace(workload(dp=8), model=model)).activations_bytes

    assert held(0.25) < 0.7 * held(1.0)


def test_a_decoder_keeps_the_keys_and_values_of_all_of_its_encoders_tokens():
    whole = replace(published("t5-base"), target_share=1 / SEQUENCE)  # one token
    encoder, decoder = whole.layers

    def held(layers):
        model = replace(whole, layers=(encoder, replace(decoder, count=layers)))
        return peak_memory(replace(workload(dp=8), model=model)).activations_bytes

    attention = decoder.cross_attention
    keys_values = 2 * 2 * attention.kv_heads * attention.head_dim * SEQUENCE
    assert (held(12) - held(4)) / 8 == pytest.approx(keys_values, rel=0.02)


def test_frozen_stages_of_a_detector_keep_nothing():
    strategy = Strategy(dp=8, micro_batch=8, global_batch=64)
    job = Workload(model=model("retinanet-mlperf"), sequence=1, strategy=strategy, cluster=parse_cluster("1xhgx-h100"))
    blocks = {block.name: block for block in job.model.blocks}
    assert not any(op.saves for op in blocks["stem"].ops + blocks["stage1.1"].ops)
    assert any(op.saves for op in blocks["stage2.1"].ops)
    assert peak_memory(job).activations_bytes > 0


def per_layer(attribute="activations_bytes", model_of=gpt, rank=0, **options):
    """Bytes that each layer adds."""
    few, many = (rank_memories(workload(model_of(layers), **options))[rank] for layers in (4, 12))
    return (getattr(many, attribute) - getattr(few, attribute)) / 8


def rotary(layers):
    return replace(gpt(layers), positions=Positions.ROTARY)


def test_matmuls_in_8_bits_keep_their_inputs_in_8_bits():
    def layer(precision):
        few, many = (replace(workload(gpt(layers), dp=8), precision=precision) for layers in (4, 12))
        return (peak_memory(many).activations_bytes - peak_memory(few).activations_bytes) / 8

    # h, h and 4 h of two norms and of the activation a byte less; attention's output stays in 16 bits, and is there in 8 as well
    assert layer("bf16") - layer("fp8") == (1 + 1 + 4 - 1) * SEQUENCE * HIDDEN


def test_keys_and_values_that_go_round_a_ring_are_kept_instead_of_the_projection():
    engine, other = (
        per_layer(model_of=rotary, rules=MemoryRules(transformer_engine=engine), dp=4, cp=2) for engine in (True, False)
    )
    assert other - engine == 2 * 2 * SEQUENCE / 2 * HIDDEN  # the rotated queries and keys beside what they were made of


def test_a_stage_may_keep_what_it_sent():
    keeps, frees = (
        rank_memories(workload(rules=MemoryRules(keeps_outputs=keeps), dp=2, pp=4))[0].activations_bytes for keeps in (True, False)
    )
    assert keeps - frees == 4 * 2 * SEQUENCE * HIDDEN  # of four micro-batches in flight


def test_copies_of_a_part_of_the_gradients_are_cached_beside_activations():
    split = peak_memory(workload(rules=MemoryRules(part_bytes=6.0), dp=8, zero_stage=1))
    assert split.cached_bytes == 6 * split.weights_bytes / 2 / 8
    assert peak_memory(workload(rules=MemoryRules(part_bytes=6.0), dp=8, zero_stage=0)).cached_bytes == 0


def test_gradients_that_are_dropped_are_not_there_with_the_activations_of_one_micro_batch():
    def held(batch, **rules):
        return peak_memory(workload(rules=MemoryRules(**rules), zero_stage=0, dp=8, micro_batch=8, global_batch=batch))

    assert held(64, drops_gradients=True).gradients_bytes == 0
    assert held(128, drops_gradients=True).gradients_bytes == held(128).gradients_bytes == 2 * held(128).weights_bytes
    small = replace(workload(rules=MemoryRules(drops_gradients=True), zero_stage=0, dp=64), sequence=16)
    assert peak_memory(small).gradients_bytes > 0  # after the backward pass more is there than with the activations


def test_parameters_and_gradients_may_have_a_type_of_their_own():
    usual = peak_memory(workload(dp=8))
    narrow = peak_memory(workload(rules=MemoryRules(layer_weight_bytes=1.0, kept_gradient_bytes=2.0), dp=8))
    embeddings = 2 * HIDDEN * (VOCAB + SEQUENCE + 2)
    assert narrow.weights_bytes == pytest.approx((usual.weights_bytes - embeddings) / 2 + embeddings, rel=1e-3)
    assert narrow.gradients_bytes == usual.gradients_bytes * 6 / 4


def test_ranks_that_share_the_vocabulary_may_hold_more_of_each_logit():
    def logits(tp):
        rules = MemoryRules(logits_bytes=14.0, split_logits_bytes=18.0)
        return rank_memories(workload(rules=rules, tp=tp, dp=8 // tp, micro_batch=8))[-1].logits_bytes

    assert logits(2) / logits(1) == pytest.approx(18 / 14 / 2)


def test_gathered_inputs_have_buffers_that_all_layers_share():
    def workspace(buffers):
        options = {"tp": 8, "sequence_parallel": True, "global_batch": 1}
        return peak_memory(workload(rules=MemoryRules(gather_buffers=buffers), **options)).workspace_bytes

    assert workspace(2) - workspace(0) == 2 * 2 * SEQUENCE * HIDDEN


def test_hosts_that_check_each_collective_are_ahead_behind_messages_only():
    def cached(pp, check_rank_us):
        job = workload(rules=MemoryRules(layers_ahead=100.0), tp=2, pp=pp, sequence_parallel=True, global_batch=16)
        host = replace(job.runtime.host, check_rank_us=check_rank_us)
        return rank_memories(replace(job, runtime=replace(job.runtime, host=host)))[0].cached_bytes

    sent = 2 * 2 * SEQUENCE * HIDDEN  # two reduce-scatters of a layer
    assert cached(4, 1e6) == (4 - 2) * 3 * sent  # of all micro-batches but two
    assert cached(2, 1e6) == 0
    assert cached(4, 0.0) > cached(4, 1e6)


def test_stages_that_end_by_their_costs_may_leave_the_last_rank_without_work():
    plan = Strategy(pp=8, dp=1, global_batch=8)
    check_stages_by_cost(plan, replace(gpt(12), vocab=1024))
    with pytest.raises(InputError, match="pp 8 leaves the last rank without work"):
        check_stages_by_cost(plan, gpt(12))
