"""What a strategy is compiled to is what PyTorch issues: type, elements, group and number of the collectives of a step.

PyTorch runs one rank of up to 64 on its fake process group. Where it does otherwise than Megatron-LM, whose way is the default of
`Strategy`, the test says in which.
"""

import json
import subprocess
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dpro_search.cluster import parse_cluster
from dpro_search.collect.trace import CollectiveKind
from dpro_search.graph.model import Architecture, Attention, Experts, FeedForward, Layer, blocks_of
from dpro_search.space.mesh import Collective, Strategy, compile_block, layout_of, pipeline_orders, step_graph
from dpro_search.space.mesh.exchange import backward_tensors, gradient_buckets, parameter_collectives
from dpro_search.space.mesh.groups import Groups
from dpro_search.space.mesh.step_graph import LayerCosts, StepCosts

pytestmark = [pytest.mark.integration, pytest.mark.one_core]

JOB = Path(__file__).with_name("parallel_job.py")
HIDDEN, SEQUENCE, BATCH, VOCAB, LAYERS, HEADS, KV_HEADS, FFN = 64, 64, 2, 256, 3, 8, 4, 128
STREAM = BATCH * SEQUENCE * HIDDEN
MODEL = Architecture(
    name="small llama",
    hidden=HIDDEN,
    vocab=VOCAB,
    layers=(
        Layer(
            count=LAYERS,
            attention=Attention(heads=HEADS, kv_heads=KV_HEADS, head_dim=HIDDEN // HEADS),
            feed_forward=FeedForward(hidden=FFN, gated=True),
        ),
    ),
)
EXPERTS = replace(MODEL, layers=(replace(MODEL.layers[0], feed_forward=Experts(count=8, top_k=2, hidden=FFN)),))
PYTORCH = {"regather_inputs": False}  # PyTorch keeps what it gathered for the gradients of weights


@dataclass(frozen=True)
class Issued:
    """One kind of collective of a step."""

    phase: str
    type: str
    elements: float
    ranks: tuple[int, ...]


@pytest.fixture
def torchs(torch_python):
    """Collectives that PyTorch issues under some options of the job."""

    def run(**options):
        done = subprocess.run(
            [torch_python, str(JOB), json.dumps(options)], capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found = json.loads(done.stdout)
        return Counter(
            Issued(each["phase"], each["type"], each["elements"], tuple(each["ranks"])) for each in found if len(each["ranks"]) > 1
        )

    return run


def compiled(strategy, model=MODEL):
    """Collectives of one micro-batch as the model is compiled."""
    groups = Groups(strategy, parse_cluster("8xhgx-h100"))
    found = Counter()

    def add(phase, each, times=1):
        ranks = tuple(groups.ranks(each.axis))
        if len(ranks) > 1:
            found[Issued(phase, each.type.name.lower(), each.elements, ranks)] += times * each.repeats

    for block in blocks_of(model):
        program = compile_block(block, layout_of(strategy), BATCH, SEQUENCE)
        for phase, steps in (("forward", program.forward), ("backward", program.backward)):
            for step in steps:
                for each in [step] if isinstance(step, Collective) else step.beside:
                    add(phase, each, block.count)
        for each in parameter_collectives(program, strategy):
            if each.type is CollectiveKind.ALL_GATHER:
                for phase, times in gathers(strategy, block, model).items():
                    add(phase, each, times)
            else:
                add("backward", each, block.count)
    return found


def gathers(strategy, block, model):
    """How often a block's parameters are gathered in each phase of a micro-batch, as `step_graph` has it."""
    one = LayerCosts(forward_us=1, backward_us=1, gather_us=1)
    stage = tuple(
        one if each.name == block.name else replace(one, gather_us=0) for each in blocks_of(model) for _ in range(each.count)
    )
    costs = StepCosts(stages=(stage,), every_pass=strategy.zero_stage == 3, regather=strategy.reshard_after_forward)
    names = step_graph(costs, pipeline_orders(strategy.schedule, 1, 1, 1)).names
    found = [name for name in names if name.startswith("gather for ")]
    return Counter("forward" if "for F" in name else "backward" for name in found)


def of_phase(found, *phases):
    return Counter({each: count for each, count in found.items() if each.phase in phases})


def merged(found, *types):
    """The elements in all of the collectives of some types, by type and group, and the others as they are."""
    totals = Counter()
    for each, count in found.items():
        if each.type in types:
            totals[each.type, each.ranks] += each.elements * count
        else:
            totals[each] += count
    return totals


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel(torchs, tp):
    """The sums of the loss are equal too: of maxima, exponentials and targets."""
    assert torchs(tp=tp) == compiled(Strategy(tp=tp, **PYTORCH))


@pytest.mark.parametrize("tp", [2, 4])
def test_sequence_parallel(torchs, tp):
    assert torchs(tp=tp, sequence_parallel=True) == compiled(Strategy(tp=tp, sequence_parallel=True, **PYTORCH))


def test_sequence_parallel_of_megatron_gathers_inputs_again():
    """One all-gather more for each matmul whose input was gathered: queries, keys and values; feed-forward; head."""
    ours, pytorch = (compiled(Strategy(tp=4, sequence_parallel=True, regather_inputs=again)) for again in (True, False))
    assert ours - pytorch == Counter({Issued("backward", "all_gather", STREAM, (0, 1, 2, 3)): 2 * LAYERS + 1})


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("dp", [4, 64])
def test_fully_sharded(torchs, dp, reshard):
    strategy = Strategy(dp=dp, zero_stage=3, reshard_after_forward=reshard)
    assert torchs(dp=dp, data_parallel="fsdp", reshard_after_forward=reshard) == compiled(strategy)


def test_hybrid_sharded(torchs):
    """Parts are reduced within the ranks that share a copy, and summed over the copies."""
    strategy = Strategy(dp=32, dp_replicate=4, zero_stage=3)
    assert torchs(dp=32, shard=8, data_parallel="fsdp") == compiled(strategy)


def test_fully_sharded_with_tensor_and_sequence_parallel(torchs):
    strategy = Strategy(dp=8, tp=4, zero_stage=3, sequence_parallel=True, **PYTORCH)
    assert torchs(dp=8, tp=4, data_parallel="fsdp", sequence_parallel=True) == compiled(strategy)


def test_fully_sharded_reduces_every_micro_batch(torchs):
    once, thrice = (torchs(dp=4, data_parallel="fsdp", micro_batches=count) for count in (1, 3))
    assert thrice == Counter({each: 3 * count for each, count in once.items()})


@pytest.mark.parametrize("bucket_kib", [8, 64, 25 * 1024])
def test_distributed_data_parallel_sums_buckets(torchs, bucket_kib):
    """Buckets in the order in which gradients are ready; the first one of 1 MiB is larger than this model's others."""
    programs = [
        compile_block(block, layout_of(Strategy(dp=8)), BATCH, SEQUENCE) for block in blocks_of(MODEL) for _ in range(block.count)
    ]
    backward = [[4 * size for size in backward_tensors(program)] for program in reversed(programs)]
    cap = bucket_kib * 1024
    buckets = gradient_buckets(backward, cap, min(cap, 2**20))
    expected = Counter(Issued("backward", "all_reduce", size / 4, tuple(range(8))) for full in buckets for size in full)
    assert torchs(dp=8, data_parallel="ddp", bucket_mib=bucket_kib / 1024) == expected


def test_distributed_data_parallel_sums_once_for_all_micro_batches(torchs):
    assert torchs(dp=8, data_parallel="ddp", micro_batches=3) == torchs(dp=8, data_parallel="ddp")


def test_context_parallel_that_gathers(torchs):
    """PyTorch's flex attention gathers keys and values one by one, and we at once: elements are equal, numbers twice ours."""
    theirs, ours = torchs(cp=4), compiled(Strategy(cp=4, **PYTORCH))
    assert merged(theirs, "all_gather", "reduce_scatter") == merged(gradients_apart(ours), "all_gather", "reduce_scatter")
    assert sum(theirs.values()) == 2 * sum(gradients_apart(ours).values())


def gradients_apart(found):
    """Without what a job without data parallelism leaves out: PyTorch sums gradients over cp by FSDP or DDP, we always do."""
    return Counter({each: count for each, count in found.items() if each.type != "all_reduce"})


def test_ring_of_context_parallel(torchs):
    """PyTorch's ring is an all-to-all in which each rank sends to the next one only: elements and hops are those of ours."""
    theirs = torchs(cp=4, context="alltoall")
    ours = gradients_apart(compiled(Strategy(cp=4, cp_ring=True)))
    assert {each.type for each in theirs} == {"all_to_all"}
    assert {each.type for each in ours} == {"send"}
    assert Counter({replace(each, type="send"): count for each, count in theirs.items()}) == ours


def test_context_parallel_takes_part_in_sharding(torchs):
    strategy = Strategy(dp=4, cp=2, zero_stage=3, **PYTORCH)
    theirs, ours = torchs(dp=4, cp=2, data_parallel="fsdp"), compiled(strategy)
    assert merged(theirs, "all_gather", "reduce_scatter") == merged(ours, "all_gather", "reduce_scatter")


def test_expert_parallel(torchs):
    """The choices of two experts a token travel there and back, forward and backward."""
    theirs, ours = torchs(dp=4, ep=4, experts=8, top_k=2), compiled(Strategy(dp=4, ep=4), EXPERTS)
    assert theirs == Counter({each: count for each, count in ours.items() if each.type == "all_to_all"})


@pytest.mark.parametrize(("options", "ranks"), [({"dp": 8}, [8]), ({"dp": 8, "tp": 4, "sequence_parallel": True}, [8, 4])])
def test_the_norm_of_gradients_is_one_number(torchs, options, ranks):
    """PyTorch sums it along each axis of the mesh, we over all ranks at once."""
    found = of_phase(torchs(data_parallel="fsdp", clip=True, **options), "optimizer")
    assert all(each.type == "all_reduce" and each.elements == 1 for each in found)
    assert sorted(len(each.ranks) for each in found) == sorted(ranks)
