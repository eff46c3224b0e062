"""Parameters and gradients: which ranks sum what, in which pieces, and what is left for the end of a step."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.cluster import parse_cluster
from dpro_search.errors import InputError
from dpro_search.parallel.costs.compile import compile_block
from dpro_search.parallel.costs.exchange import gradient_buckets, parameter_collectives
from dpro_search.parallel.costs.groups import Groups
from dpro_search.parallel.layout import layout_of
from dpro_search.parallel.legality import check_strategy
from dpro_search.parallel.memory.peak import peak_memory
from dpro_search.parallel.model import blocks_of, parameters_of, published
from dpro_search.parallel.runtime import Runtime
from dpro_search.parallel.schedule import Schedule
from dpro_search.parallel.steps.step_prices import step_costs
from dpro_search.parallel.strategy import Strategy
from dpro_search.parallel.workload import Workload, ranks_of, stages_of


def workload(model="gpt2-xl", cluster="2xhgx-h100", **degrees):
    options = {name: degrees.pop(name) for name in ("runtime",) if name in degrees}
    strategy = Strategy(**{"global_batch": 64, **degrees})
    model_facts = published(model)
    check_strategy(strategy, model_facts, 1024)
    return Workload(model=model_facts, sequence=1024, strategy=strategy, cluster=parse_cluster(cluster), **options)


def exchanged(model, **degrees):
    strategy = Strategy(**degrees)
    (block,) = (plan_exchange for plan_exchange in blocks_of(published(model)) if plan_exchange.name == "layer")
    program = compile_block(block, layout_of(strategy), 1, 1024)
    groups = Groups(strategy, parse_cluster("8xhgx-h100"))
    return [
        (plan_exchange.type.name, list(groups.ranks(plan_exchange.axis)), plan_exchange.elements)
        for plan_exchange in parameter_collectives(program, strategy)
    ], sum(weight.elements for weight in program.weights)


def test_copies_of_what_is_sharded_sum_the_parts():
    """HSDP: four hosts' worth of copies, each over 8 ranks."""
    exchange, elements = exchanged("llama3-8b", dp=32, dp_replicate=4, zero_stage=3)
    assert exchange == [
        ("ALL_GATHER", list(range(8)), elements),
        ("REDUCE_SCATTER", list(range(8)), elements),
        ("ALL_REDUCE", [0, 8, 16, 24], elements / 8),
    ]


def test_experts_are_summed_over_their_own_replicas():
    exchange, _ = exchanged("mixtral-8x7b", dp=8, ep=4)
    assert [(kind, ranks) for kind, ranks, _ in exchange] == [("ALL_REDUCE", list(range(8))), ("ALL_REDUCE", [0, 4])]


def test_context_parallel_ranks_have_the_same_parameters():
    exchange, _ = exchanged("llama3-8b", dp=2, cp=2, tp=2)
    assert [ranks for _, ranks, _ in exchange] == [[0, 2, 4, 6]]


@given(
    tensors=st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=4), min_size=1, max_size=6),
    cap=st.integers(1, 100),
    first=st.integers(1, 100),
)
def test_buckets_hold_every_gradient_once_and_are_full_but_the_last(tensors, cap, first):
    buckets = gradient_buckets(tensors, cap, first)
    sizes = [size for full in buckets for size in full]
    assert sum(sizes) == sum(map(sum, tensors))
    for number, size in enumerate(sizes[:-1]):
        assert size >= (first if number == 0 else cap)
    for layer in range(len(tensors)):
        assert sum(map(sum, buckets[: layer + 1])) <= sum(map(sum, tensors[: layer + 1])), (
            "none is full before its gradients are ready"
        )


def test_buckets_cost_more_the_smaller_they_are():
    small, large = (
        sum(
            layer.reduce_us
            for stage in step_costs(workload(dp=16, runtime=Runtime(bucket_bytes=size, first_bucket_bytes=size))).stages
            for layer in stage
        )
        for size in (2**20, 25 * 2**20)
    )
    assert small > 1.2 * large


class TestTiedEmbeddings:
    def test_the_last_stage_has_a_copy_of_the_matrix(self):
        job = workload(pp=4, dp=4)
        model, layers = job.model, step_costs(job)
        held = [sum(block.parameters() for block in blocks) for blocks in ranks_of(job)]
        assert sum(held) == parameters_of(model) + model.vocab * model.hidden
        assert layers.tied_us > 0

    @pytest.mark.parametrize(
        "degrees",
        [
            {"pp": 1, "dp": 16},
            {"pp": 4, "dp": 4, "virtual_stages": 2, "schedule": Schedule.ZERO_BUBBLE_V},  # both ends of the V are on one rank
        ],
    )
    def test_on_one_rank_there_is_one_matrix(self, degrees):
        job = workload(**degrees)
        assert sum(block.parameters() for stage in stages_of(job) for block in stage) == parameters_of(job.model)
        assert step_costs(job).tied_us == 0

    def test_heads_of_their_own_have_nothing_to_sum(self):
        assert step_costs(workload("llama3-8b", pp=4, dp=4)).tied_us == 0


class TestUnevenStages:
    def test_stages_have_the_layers_that_they_are_given(self):
        stages = stages_of(workload(pp=4, dp=4, stage_layers=(9, 13, 13, 13)))
        assert [sum(block.name == "layer" for block in stage) for stage in stages] == [9, 13, 13, 13]
        assert (stages[0][0].name, stages[-1][-1].name) == ("embedding", "head")

    def test_fewer_layers_beside_the_head_make_a_step_shorter(self):
        """The stages that take longest decide: a head over 128,256 tokens takes as long as two layers."""
        even, uneven = (
            max(sum(layer.forward_us + layer.backward_us for layer in stage) for stage in step_costs(job).stages)
            for job in (workload("llama3-8b", pp=4, dp=4), workload("llama3-8b", pp=4, dp=4, stage_layers=(9, 9, 8, 6)))
        )
        assert uneven < even

    @pytest.mark.parametrize(
        ("layers", "said"),
        [
            ((12, 12, 24), "3 stages, and pp x virtual_stages is 4: use 12,12,12,12"),
            ((12, 12, 12, 10), "46 layers, and gpt2-xl has 48: use 12,12,12,12"),
            ((16, 0, 16, 16), "only the first and the last stage may be without layers"),
            ((-1, 17, 16, 16), "at least 0"),
        ],
    )
    def test_what_does_not_add_up_is_refused(self, layers, said):
        with pytest.raises(InputError, match=said):
            workload(pp=4, dp=4, stage_layers=layers)


def test_the_norm_of_gradients_costs_more_the_more_ranks_there_are():
    few, many = (step_costs(workload(dp=ranks, cluster=f"{ranks // 8}xhgx-h100", global_batch=512)).norm_us for ranks in (8, 512))
    assert 0 < few < many
    assert step_costs(workload(dp=8, runtime=Runtime(clip_gradients=False))).norm_us == 0


def test_norms_of_sequence_parallel_ranks_are_summed_at_the_end():
    assert step_costs(workload("llama3-8b", tp=8, dp=2, sequence_parallel=True)).shared_us > 0
    assert step_costs(workload("llama3-8b", tp=8, dp=2)).shared_us == 0


def layer_us(job):
    layer = step_costs(job).stages[0][1]
    return layer.forward_us + layer.backward_us


def test_a_ring_hides_what_a_gather_waits_for():
    """Keys and values of 8 ranks over the network, beside an attention that takes longer."""
    degrees = {"cluster": "8xhgx-h100", "tp": 8, "cp": 8, "global_batch": 8, "sequence_parallel": True}
    gathered, ring, uneven = (
        layer_us(replace(job, sequence=65536))
        for job in (
            workload("llama3-8b", **degrees),
            workload("llama3-8b", cp_ring=True, **degrees),
            workload("llama3-8b", cp_ring=True, cp_balanced=False, **degrees),
        )
    )
    assert ring < gathered < uneven


def test_the_busiest_experts_decide():
    even, uneven = (workload("mixtral-8x7b", dp=16, ep=8, expert_load=load) for load in (1.0, 1.5))
    assert 1.1 < layer_us(uneven) / layer_us(even) < 1.5
    assert peak_memory(uneven).activations_bytes > peak_memory(even).activations_bytes


def test_the_ends_of_a_pipeline_may_be_on_one_host():
    """Ranks 0 and 6 of a host of 8."""
    strategy = Strategy(pp=4, dp=2)
    placement = Groups(strategy, parse_cluster("hgx-h100")).placements["first and last stage"]
    assert (placement.ranks_per_node, placement.nodes, placement.stride) == (2, 1, 6)


def test_without_interference_groups_have_links_alone_and_slow_no_compute():
    """Four groups of data parallel ranks share the one card of a host."""
    job = replace(workload("llama3-8b", cluster="2xp3.16xlarge", tp=4, dp=4), precision="fp16")
    shared, alone = step_costs(job), step_costs(replace(job, interference=False))
    assert alone.stages[0][1].reduce_us < shared.stages[0][1].reduce_us
    assert (alone.slowed, shared.slowed > 0) == (0, True)
