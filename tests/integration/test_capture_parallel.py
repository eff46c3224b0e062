"""Captured pipelines, context and expert parallel ranks: what PyTorch issues is what is predicted, and what is not said is told."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from dpro_search.collect.capture import StepPhase
from dpro_search.collect.capture.runner import CaptureRequest, capture, parse_mesh
from dpro_search.errors import InputError
from dpro_search.parallel.costs.compile import BlockCollective, compile_block
from dpro_search.parallel.file.captured import captured_job_toml
from dpro_search.parallel.layout import layout_of
from dpro_search.parallel.model import Architecture, Attention, Experts, FeedForward, Layer, blocks_of
from dpro_search.parallel.schedule import Schedule
from dpro_search.parallel.steps.pipeline import pipeline_orders
from dpro_search.parallel.strategy import Strategy

pytestmark = [pytest.mark.integration, pytest.mark.one_core]

MODELS = Path(__file__).with_name("captured_models.py")
BATCH, SEQUENCE, HIDDEN, MICRO_BATCHES = 2, 64, 64, 4
LAYER = Layer(count=3, attention=Attention(heads=8, kv_heads=4, head_dim=8), feed_forward=FeedForward(hidden=128, gated=True))
LLAMA = Architecture(name="llama", hidden=HIDDEN, vocab=256, layers=(LAYER,))
MIXTURE = replace(LLAMA, layers=(replace(LAYER, feed_forward=Experts(count=8, top_k=2, hidden=128)),))


def captured(python, build, mesh, **more):
    request = {"batch": BATCH, "sequence": SEQUENCE, "precision": "fp32", "optimizer": "sgd", **more}
    return capture(CaptureRequest(python=python, script=MODELS, build=build, mesh=parse_mesh(mesh), **request))


@pytest.fixture(scope="module")
def pipeline(torch_python):
    return captured(torch_python, "four_layers", "pp=2", schedule="interleaved", micro_batches=MICRO_BATCHES)


def exchanged(model, strategy):
    """Elements by type and phase, as compiled, of one micro-batch and without the sums of gradients."""
    counts = Counter()
    for block in blocks_of(model):
        program = compile_block(block, layout_of(strategy, regather_inputs=False), BATCH, SEQUENCE)
        for phase, steps in ((StepPhase.FORWARD, program.forward), (StepPhase.BACKWARD, program.backward)):
            for step in steps:
                for each in [step] if isinstance(step, BlockCollective) else step.beside:
                    counts[each.type.name.lower(), phase] += each.elements * each.repeats * block.count
    return counts


def issued(step):
    counts = Counter()
    for each in step.collectives:
        counts[each.type, each.phase] += each.elements
    return counts


def test_places_of_a_pipeline_do_together_what_one_device_does(pipeline):
    """Each of the micro-batches is of the captured batch."""
    assert len(pipeline.places) == 2
    assert sum(place.flops() for place in pipeline.places) == MICRO_BATCHES * pipeline.plain.flops()
    assert sum(place.local_parameter_bytes for place in pipeline.places) == pipeline.parameter_bytes


def test_messages_of_a_pipeline_are_those_of_its_predicted_order(pipeline):
    orders = pipeline_orders(Schedule.INTERLEAVED, 2, 2, MICRO_BATCHES)
    for rank, place in enumerate(pipeline.places):
        expected = Counter()
        for each in orders[rank]:
            forward = each.direction == "F"
            last, first = each.stage == 3, each.stage == 0
            phase = StepPhase.FORWARD if forward else StepPhase.BACKWARD
            expected["send", phase, (rank, 1 - rank)] += not (last if forward else first)
            expected["recv", phase, (1 - rank, rank)] += not (first if forward else last)
        assert Counter((each.type, each.phase, each.ranks) for each in place.collectives) == expected
        assert {each.elements for each in place.collectives} == {BATCH * SEQUENCE * HIDDEN}


def test_ops_of_a_stage_have_the_names_of_the_whole_model(pipeline):
    layers = {op.module.split(".")[1] for op in pipeline.places[1].ops if op.module.startswith("layers.")}
    assert layers == {"1", "3"}


def test_a_captured_pipeline_is_described_as_it_ran(pipeline):
    text = captured_job_toml(pipeline, "graph.json", None)
    assert 'schedule = "interleaved"' in text
    assert "virtual_stages = 2" in text
    assert f"batch_per_replica = {BATCH * MICRO_BATCHES}" in text


def test_a_ring_of_context_parallel_ranks_passes_on_what_is_compiled(torch_python):
    """PyTorch's ring is an all-to-all in which each rank sends to the next one only; gradients are summed over the same ranks."""
    graph = captured(torch_python, "llama", "cp=4", rotate="alltoall")
    counts = issued(graph.under_mesh)
    assert counts.pop(("all_reduce", StepPhase.BACKWARD)) == graph.parameter_bytes // 4
    expected = {key: elements for key, elements in exchanged(LLAMA, Strategy(cp=4, cp_ring=True)).items() if key[0] == "send"}
    assert {("send", phase): elements for (_, phase), elements in counts.items()} == expected


def test_tokens_travel_to_their_experts_as_is_compiled(torch_python):
    graph = captured(torch_python, "mixture", "dp=4,ep=4")
    counts = issued(graph.under_mesh)
    assert counts["all_to_all", StepPhase.FORWARD] > 0
    expected = exchanged(MIXTURE, Strategy(dp=4, ep=4))
    for phase in (StepPhase.FORWARD, StepPhase.BACKWARD):
        assert counts["all_to_all", phase] == expected["all_to_all", phase]
    experts = sum(each.elements for each in graph.plain.parameters if ".grouped." in each.name)
    whole = graph.parameter_bytes // 4
    assert graph.under_mesh.local_parameter_bytes == 4 * (whole - experts + experts // 4)
    assert counts["all_reduce", StepPhase.BACKWARD] == whole - experts  # each rank has experts of its own


@pytest.mark.parametrize(
    ("build", "mesh", "more", "said"),
    [
        ("whole_only", "pp=2", {}, "lacks a module here: let the forward pass skip modules that are None"),
        ("llama", "dp=4,ep=4", {}, "no module has parameters of experts alone"),
        ("llama", "pp=8", {}, "8 stages need as many layers in a ModuleList or Sequential, and 3 are found"),
        ("llama", "pp=2", {"schedule": "interleaved", "micro_batches": 3}, "--micro-batches 3: stages that are interleaved need"),
        ("llama", "cp=3", {}, "--mesh cp=3: give a --sequence that twice as many parts divide"),
    ],
)
def test_a_mesh_that_the_model_cannot_have_is_refused_in_one_line(torch_python, build, mesh, more, said):
    with pytest.raises(InputError) as raised:
        captured(torch_python, build, mesh, **more)
    assert said in str(raised.value)
