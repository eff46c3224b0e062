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
from dpro_search.parallel.costs.compile import BlockCollective, compile_block
from dpro_search.parallel.costs.exchange import backward_tensors, gradient_buckets, parameter_collectives, shared_elements
from dpro_search.parallel.costs.groups import Groups
from dpro_search.parallel.layout import layout_of
from dpro_search.parallel.model import Architecture, Attention, Experts, FeedForward, Layer, blocks_of
from dpro_search.parallel.steps.pipeline import pipeline_orders
from dpro_search.parallel.steps.step_costs import LayerCosts, StepCosts
from dpro_search.parallel.steps.step_graph import step_graph
from dpro_search.parallel.strategy import Strategy

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


@dataclass(frozen=True)
class Issued:
    """One kind of collective of a step."""

    phase: str
    type: str
    elements: float
    ranks: tuple[int, ...]


CASES = {
    "tp 2": {"tp": 2},
    "tp 4": {"tp": 4},
    "sp 2": {"tp": 2, "sequence_parallel": True},
    "sp 4": {"tp": 4, "sequence_parallel": True},
    "fsdp 4": {"dp": 4, "data_parallel": "fsdp"},
    "fsdp 64": {"dp": 64, "data_parallel": "fsdp"},
    "fsdp 64, 8 heads": {"dp": 64, "data_parallel": "fsdp", "kv_heads": 8},
    "fsdp 4, kept": {"dp": 4, "data_parallel": "fsdp", "reshard_after_forward": False},
    "fsdp 4, 3 micro-batches": {"dp": 4, "data_parallel": "fsdp", "micro_batches": 3},
    "hsdp 4 x 8": {"dp": 32, "shard": 8, "data_parallel": "fsdp"},
    "fsdp 8, sp 4": {"dp": 8, "tp": 4, "data_parallel": "fsdp", "sequence_parallel": True, "clip": True},
    "fsdp 8": {"dp": 8, "data_parallel": "fsdp", "clip": True},
    "ddp 8 KiB": {"dp": 8, "data_parallel": "ddp", "bucket_mib": 1 / 128},
    "ddp 64 KiB": {"dp": 8, "data_parallel": "ddp", "bucket_mib": 1 / 16},
    "ddp 25600 KiB": {"dp": 8, "data_parallel": "ddp"},
    "ddp, 3 micro-batches": {"dp": 8, "data_parallel": "ddp", "micro_batches": 3},
    "cp 4": {"cp": 4},
    "ring 4": {"cp": 4, "context": "alltoall"},
    "fsdp 4, cp 2": {"dp": 4, "cp": 2, "data_parallel": "fsdp"},
    "ep 4": {"dp": 4, "ep": 4, "experts": 8, "top_k": 2},
}


@pytest.fixture(scope="module")
def torchs(torch_python, tmp_path_factory):
    """Collectives that PyTorch issues in each case."""
    folder = tmp_path_factory.mktemp("issued")
    cases = json.dumps(list(CASES.values()))
    done = subprocess.run([torch_python, str(JOB), cases, str(folder)], capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: counted(json.loads((folder / f"{number}.json").read_text())) for number, name in enumerate(CASES)}


def counted(found):
    return Counter(
        Issued(each["phase"], each["type"], each["elements"], tuple(each["ranks"])) for each in found if len(each["ranks"]) > 1
    )


def compiled(strategy, model=MODEL, *, regather_inputs=False):
    """Collectives of one micro-batch, as compiled for PyTorch: it keeps what it gathered for the gradients of weights."""
    groups = Groups(strategy, parse_cluster("8xhgx-h100"))
    counts = Counter()

    def add(phase, each, times=1):
        ranks = tuple(groups.ranks(each.axis))
        if len(ranks) > 1:
            counts[Issued(phase, each.type.name.lower(), each.elements, ranks)] += times * each.repeats

    for block in blocks_of(model):
        program = compile_block(block, layout_of(strategy, regather_inputs=regather_inputs), BATCH, SEQUENCE)
        for phase, steps in (("forward", program.forward), ("backward", program.backward)):
            for step in steps:
                for each in [step] if isinstance(step, BlockCollective) else step.beside:
                    add(phase, each, block.count)
        for each in parameter_collectives(program, strategy):
            if each.type is CollectiveKind.ALL_GATHER:
                for phase, times in gathers(strategy, block, model).items():
                    add(phase, each, times)
            else:
                add("backward", each, block.count)
    return counts


def gathers(strategy, block, model):
    """How often a block's parameters are gathered in each phase of a micro-batch, as `step_graph` has it."""
    one = LayerCosts(forward_us=1, backward_us=1, gather_us=1)
    stage = tuple(
        one if each.name == block.name else replace(one, gather_us=0) for each in blocks_of(model) for _ in range(each.count)
    )
    costs = StepCosts(stages=(stage,), gathers_every_pass=strategy.zero_stage == 3, regather=strategy.reshard)
    names = step_graph(costs, pipeline_orders(strategy.schedule, 1, 1, 1)).names
    gathered = [name for name in names if name.startswith("gather for ")]
    return Counter("forward" if "for F" in name else "backward" for name in gathered)


def with_kv_heads(count):
    (layer,) = MODEL.layers
    return replace(MODEL, layers=(replace(layer, attention=replace(layer.attention, kv_heads=count)),))


def without_gradients(found):
    """The job has no data parallelism, which we always have: the sum of gradients over all ranks with the same parameters."""
    return Counter({each: count for each, count in found.items() if each.type != "all_reduce"})


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
    assert torchs[f"tp {tp}"] == compiled(Strategy(tp=tp))


@pytest.mark.parametrize("tp", [2, 4])
def test_sequence_parallel(torchs, tp):
    assert torchs[f"sp {tp}"] == compiled(Strategy(tp=tp, sequence_parallel=True))


def test_sequence_parallel_of_megatron_gathers_inputs_again():
    """One all-gather more for each matmul whose input was gathered: queries, keys and values; feed-forward; head."""
    ours, pytorch = (compiled(Strategy(tp=4, sequence_parallel=True), regather_inputs=again) for again in (True, False))
    assert ours - pytorch == Counter({Issued("backward", "all_gather", STREAM, (0, 1, 2, 3)): 2 * LAYERS + 1})


def test_fully_sharded(torchs):
    """The head, which is used last and first, is gathered once."""
    assert torchs["fsdp 4"] == compiled(Strategy(dp=4, zero_stage=3))
    assert torchs["fsdp 64, 8 heads"] == compiled(Strategy(dp=64, zero_stage=3), with_kv_heads(8))


def test_fully_sharded_parameters_that_are_kept_are_gathered_once(torchs):
    assert torchs["fsdp 4, kept"] == compiled(Strategy(dp=4, zero_stage=3, reshard=False))


def test_fully_sharded_rows_are_padded(torchs):
    """PyTorch fills up the first dim of a tensor to a multiple of the ranks; we do not: here 32 rows of keys and values to 64."""
    theirs, ours = torchs["fsdp 64"], compiled(Strategy(dp=64, zero_stage=3))
    padding = 2 * (64 - KV_HEADS * HIDDEN // HEADS) * HIDDEN
    layers = {each for each, count in ours.items() if count == LAYERS}
    assert len(layers) == 3
    filled = {each: replace(each, elements=each.elements + padding) for each in layers}
    assert theirs == Counter({filled.get(each, each): count for each, count in ours.items()})


def test_hybrid_sharded(torchs):
    """Parts are reduced within the ranks that share a copy, and summed over the copies."""
    assert torchs["hsdp 4 x 8"] == compiled(Strategy(dp=32, dp_replicate=4, zero_stage=3))


def test_fully_sharded_with_tensor_and_sequence_parallel(torchs):
    """PyTorch sums the gradients of each norm over the tensor parallel ranks at once; we, as Megatron-LM, of all at the end."""
    strategy = Strategy(dp=8, tp=4, zero_stage=3, sequence_parallel=True)
    theirs = of_phase(torchs["fsdp 8, sp 4"], "forward", "backward")
    norms = theirs - compiled(strategy)
    assert norms == Counter({Issued("backward", "all_reduce", HIDDEN, (0, 1, 2, 3)): 2 * LAYERS + 1})
    assert theirs - norms == compiled(strategy)
    programs = [
        compile_block(block, layout_of(strategy), BATCH, SEQUENCE) for block in blocks_of(MODEL) for _ in range(block.count)
    ]
    assert sum(map(shared_elements, programs)) == sum(each.elements * count for each, count in norms.items())


def test_fully_sharded_reduces_every_micro_batch(torchs):
    assert torchs["fsdp 4, 3 micro-batches"] == Counter({each: 3 * count for each, count in torchs["fsdp 4"].items()})


@pytest.mark.parametrize("bucket_kib", [8, 64, 25 * 1024])
def test_distributed_data_parallel_sums_buckets(torchs, bucket_kib):
    """Buckets in the order in which gradients are ready; the first one is of 1 MiB, or of the size of all where that is less."""
    programs = [
        compile_block(block, layout_of(Strategy(dp=8)), BATCH, SEQUENCE) for block in blocks_of(MODEL) for _ in range(block.count)
    ]
    backward = [[4 * size for size in backward_tensors(program)] for program in reversed(programs)]
    cap = bucket_kib * 1024
    buckets = gradient_buckets(backward, cap, min(cap, 2**20))
    expected = Counter(Issued("backward", "all_reduce", size / 4, tuple(range(8))) for full in buckets for size in full)
    assert torchs[f"ddp {bucket_kib} KiB"] == expected


def test_distributed_data_parallel_sums_once_for_all_micro_batches(torchs):
    assert torchs["ddp, 3 micro-batches"] == torchs["ddp 25600 KiB"]


def test_context_parallel_that_gathers(torchs):
    """PyTorch's flex attention gathers keys and values one by one, and we at once: elements are equal, numbers twice ours."""
    theirs, ours = torchs["cp 4"], without_gradients(compiled(Strategy(cp=4)))
    assert merged(theirs, "all_gather", "reduce_scatter") == merged(ours, "all_gather", "reduce_scatter")
    assert sum(theirs.values()) == 2 * sum(ours.values())


def test_ring_of_context_parallel(torchs):
    """PyTorch's ring is an all-to-all in which each rank sends to the next one only: elements and hops are those of ours."""
    theirs = torchs["ring 4"]
    ours = without_gradients(compiled(Strategy(cp=4, cp_ring=True)))
    assert {each.type for each in theirs} == {"all_to_all"}
    assert {each.type for each in ours} == {"send"}
    assert Counter({replace(each, type="send"): count for each, count in theirs.items()}) == ours


def test_context_parallel_takes_part_in_sharding(torchs):
    theirs, ours = torchs["fsdp 4, cp 2"], compiled(Strategy(dp=4, cp=2, zero_stage=3))
    assert merged(theirs, "all_gather", "reduce_scatter") == merged(ours, "all_gather", "reduce_scatter")


def test_expert_parallel(torchs):
    """The choices of two experts a token travel there and back, forward and backward."""
    assert torchs["ep 4"] == without_gradients(compiled(Strategy(dp=4, ep=4), EXPERTS))


@pytest.mark.parametrize(("case", "ranks"), [("fsdp 8", [8]), ("fsdp 8, sp 4", [4, 8])])
def test_norms_of_gradients_are_summed_before_the_update(torchs, case, ranks):
    """PyTorch sums one number for each parameter along each axis of the mesh, Megatron-LM and we one over all ranks at once."""
    collectives = of_phase(torchs[case], "optimizer")
    assert sorted(len(each.ranks) for each in collectives) == ranks
    parameters = 9 * LAYERS + 3
    assert {(each.type, each.elements, count) for each, count in collectives.items()} == {("all_reduce", parameters, 1)}
