"""Captured steps of small models: what PyTorch issues, what models are compiled to, and one line for what cannot be captured."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from dpro_search.collect.capture import CapturedStep, StepPhase, read_graph
from dpro_search.collect.capture.runner import CaptureRequest, capture, parse_mesh
from dpro_search.errors import InputError
from dpro_search.kinds import job_of, load_source
from dpro_search.parallel.captured import captured_model
from dpro_search.parallel.costs.compile import BlockCollective, compile_block
from dpro_search.parallel.layout import layout_of
from dpro_search.parallel.model import blocks_of
from dpro_search.parallel.strategy import Strategy
from dpro_search.space.plan import Plan

pytestmark = [pytest.mark.integration, pytest.mark.one_core]

MODELS = Path(__file__).with_name("captured_models.py")
BATCH, SEQUENCE, HIDDEN, LAYERS = 2, 64, 64, 3


def captured(python, build="llama", mesh="", **more):
    request = {"batch": BATCH, "sequence": SEQUENCE, "precision": "fp32", **more}
    return capture(CaptureRequest(python=python, script=MODELS, build=build, mesh=parse_mesh(mesh), **request))


@pytest.fixture(scope="module")
def tensor_parallel(torch_python):
    return captured(torch_python, mesh="tp=4")


@pytest.fixture(scope="module")
def larger(torch_python):
    """At another size, with a plan of the script."""
    return captured(torch_python, batch=3, sequence=32, tp_plan="plan", optimizer="none")


def issued(step: CapturedStep) -> Counter[tuple[str, StepPhase, int, tuple[int, ...]]]:
    return Counter((each.type, each.phase, each.elements, each.ranks) for each in step.collectives)


def test_the_command_writes_a_job_that_every_verb_takes(torch_python, tmp_path):
    out = tmp_path / "captured"
    command = [sys.executable, "-m", "dpro_search.cli", "capture", f"{MODELS}:llama", "--python", torch_python, "--json"]
    options = ["--batch", "2", "--sequence", "64", "--mesh", "dp_shard=4", "--out", str(out)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    graph = read_graph(out / "graph.json")
    assert facts["parameters_bytes"] == graph.parameter_bytes == 4 * facts["parameters"]
    assert facts["ops"] == len(graph.under_mesh.ops)
    assert facts["flops"] == graph.under_mesh.flops() == graph.plain.flops()
    assert {name: each["count"] for name, each in facts["collectives"].items()} == {"all_gather": 7, "reduce_scatter": 4}
    job = job_of(load_source(out / "job.toml"))
    assert job.cluster.ranks == 4
    assert job.predict(Plan()).infeasible is None
    assert job.predict(Plan.of(pp=2)).iteration_us > 0


def test_flops_are_those_of_the_products(tensor_parallel):
    """A multiply-add is two; the backward pass of a product is two, that of attention two and a half."""
    tokens, head = BATCH * SEQUENCE, 256 * HIDDEN
    products = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2 + 3 * HIDDEN * 128) + head
    attention = LAYERS * 2 * BATCH * SEQUENCE * SEQUENCE * HIDDEN * 2
    assert tensor_parallel.plain.flops(StepPhase.FORWARD) == 2 * tokens * products + attention
    assert tensor_parallel.plain.flops(StepPhase.BACKWARD) == 4 * tokens * products + attention * 5 // 2


def test_tensor_parallel_collectives_are_those_that_the_model_is_compiled_to(tensor_parallel):
    """Each linear layer that is split by columns sums the gradient of its input, as `ColwiseParallel` does alone."""
    model, counts = captured_model(tensor_parallel), Counter()
    for block in blocks_of(model):
        program = compile_block(block, layout_of(Strategy(tp=4), regather_inputs=False), BATCH, SEQUENCE)
        for phase, steps in ((StepPhase.FORWARD, program.forward), (StepPhase.BACKWARD, program.backward)):
            for each in steps:
                if isinstance(each, BlockCollective):
                    counts["all_reduce", phase, each.elements, (0, 1, 2, 3)] += block.count
                    assert each.type.name == "ALL_REDUCE"
    assert counts == issued(tensor_parallel.under_mesh)
    assert sum(counts.values()) == 7 * LAYERS


def test_a_rank_of_four_computes_a_fourth_of_what_is_split(tensor_parallel):
    tokens, head = BATCH * SEQUENCE, 256 * HIDDEN
    whole = tensor_parallel.plain.flops(StepPhase.FORWARD) - 2 * tokens * head
    assert tensor_parallel.under_mesh.flops(StepPhase.FORWARD) == whole / 4 + 2 * tokens * head


def test_how_tensors_grow_with_batch_and_sequence(tensor_parallel, larger):
    """A model captured at one size has the sizes of one that was captured at another."""
    ours, theirs = captured_model(tensor_parallel), captured_model(larger)
    for our_block, other in zip(blocks_of(ours), blocks_of(theirs), strict=True):
        programs = [compile_block(block, layout_of(Strategy()), 5, 48) for block in (our_block, other)]
        assert programs[0].saved_bytes == pytest.approx(programs[1].saved_bytes)
        flops = [sum(op.forward_flops(block.sizes_at(5, 48)) for op in block.ops) for block in (our_block, other)]
        assert flops[0] == pytest.approx(flops[1])


def test_a_plan_of_the_script_says_what_is_split(larger):
    assert {name.split(".")[2] for name in larger.plain.layouts} == {"feed_forward"}
    assert dict(captured_model(larger).heads) == {"the columns of linear layers": 128}


@pytest.mark.parametrize(
    ("build", "more", "said"),
    [
        ("branching", {}, "captured_models.py:119: 'if x.sum() > 0:  # depends on data' needs the values of a tensor"),
        ("no_model", {}, "Tensor, not a torch.nn.Module"),
        ("llama", {"sequence": None}, "give a --sequence"),
    ],
)
def test_what_cannot_be_captured_is_said_in_one_line(torch_python, build, more, said):
    with pytest.raises(InputError) as raised:
        captured(torch_python, build, **more)
    assert said in str(raised.value)
