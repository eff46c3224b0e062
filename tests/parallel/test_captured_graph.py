"""A captured model (of tests/integration/captured_models.py): blocks from modules, what ranks split, what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from dpro_search.collect.capture import CapturedGraph, StepPhase, read_graph, written_graph
from dpro_search.collect.trace import CollectiveKind
from dpro_search.errors import InputError
from dpro_search.parallel.captured import captured_model
from dpro_search.parallel.costs.compile import BlockCollective, compile_block
from dpro_search.parallel.layout import layout_of
from dpro_search.parallel.model import OpType, blocks_of, parameters_of
from dpro_search.parallel.strategy import Strategy

CAPTURED = Path(__file__).parents[1] / "data" / "captured" / "llama.json"
BATCH, SEQUENCE, HIDDEN, LAYERS = 2, 64, 64, 3


@pytest.fixture(scope="module")
def graph() -> CapturedGraph:
    return read_graph(CAPTURED)


def test_equal_layers_are_one_block(graph):
    blocks = blocks_of(captured_model(graph))
    assert [(block.name, block.count) for block in blocks] == [("embedding", 1), ("layer0", LAYERS), ("head", 1)]


def test_every_parameter_belongs_to_a_block(graph):
    assert parameters_of(captured_model(graph)) == sum(each.elements for each in graph.plain.parameters)


def test_flops_are_the_captured_ones_but_for_what_a_causal_mask_leaves_out(graph):
    counted = Counter()
    for block in blocks_of(captured_model(graph)):
        for op in block.ops:
            counted[op.type] += block.count * op.forward_flops(block.sizes_at(BATCH, SEQUENCE))
    attention = sum(op.flops for op in graph.plain.ops if op.phase is StepPhase.FORWARD and "attention" in op.name)
    assert counted[OpType.ATTENTION] == attention / 2
    assert counted[OpType.MATMUL] == graph.plain.flops(StepPhase.FORWARD) - attention


def test_kept_activations_are_the_captured_ones(graph):
    programs = [
        (block.count, compile_block(block, layout_of(Strategy()), BATCH, SEQUENCE)) for block in blocks_of(captured_model(graph))
    ]
    inputs = {saved.storage for saved in graph.plain.saved} & {*graph.plain.input_tensors}
    kept = graph.plain.activation_bytes - sum(each.size_bytes for each in graph.plain.saved if each.storage in inputs)
    assert sum(count * program.saved_bytes for count, program in programs) == kept


@pytest.mark.parametrize("ways", [2, 4])
def test_tensor_parallel_ranks_have_a_part_of_what_is_between_columns_and_rows(graph, ways):
    layer = blocks_of(captured_model(graph))[1]
    whole, part = (compile_block(layer, layout_of(Strategy(tp=tp)), BATCH, SEQUENCE) for tp in (1, ways))
    sizes = [  # FLOPs
        sum(step.op.forward_flops(step.sizes) for step in each.forward if not isinstance(step, BlockCollective))
        for each in (whole, part)
    ]
    assert sizes[0] / sizes[1] == ways
    sums = [step for step in part.forward if isinstance(step, BlockCollective)]
    assert [(each.type, each.axis, each.elements) for each in sums] == [
        (CollectiveKind.ALL_REDUCE, "tp", BATCH * SEQUENCE * HIDDEN)
    ] * 2


def test_sequence_parallel_reduces_to_parts_of_the_sequence(graph):
    layer = blocks_of(captured_model(graph))[1]
    program = compile_block(layer, layout_of(Strategy(tp=2, sequence_parallel=True)), BATCH, SEQUENCE)
    counts = Counter(each.type for each in program.forward if isinstance(each, BlockCollective))
    assert counts[CollectiveKind.REDUCE_SCATTER] == 2
    assert counts[CollectiveKind.ALL_REDUCE] == 0


def test_without_known_layouts_nothing_is_split_and_the_reason_is_said(graph):
    unknown = msgspec.structs.replace(graph, plain=msgspec.structs.replace(graph.plain, layouts={}))
    model = captured_model(unknown)
    with pytest.raises(InputError, match=r"tp 2: Llama is not split over tp: no linear layers of known names .* --tp-plan"):
        model.check({"tp": 2}, SEQUENCE, BATCH)


def test_a_layer_whose_rows_are_split_alone_is_not(graph):
    layouts = {name: kind for name, kind in graph.plain.layouts.items() if kind == "rows"}
    model = captured_model(msgspec.structs.replace(graph, plain=msgspec.structs.replace(graph.plain, layouts=layouts)))
    assert not model.splits("tp")
    assert "is split by rows, and what it reads is not split" in model.notes[0]


def test_modules_that_do_not_repeat_make_no_pipeline(graph):
    flat = msgspec.structs.replace(graph, plain=msgspec.structs.replace(graph.plain, units=()))
    model = captured_model(flat)
    assert len(blocks_of(model)) == 2
    with pytest.raises(InputError, match="pp 2: Llama is not split over pp: it has no modules that repeat"):
        model.check({"pp": 2}, SEQUENCE, BATCH)


def test_sizes_of_which_the_growth_is_not_known_are_refused(graph):
    model = captured_model(msgspec.structs.replace(graph, grows=("batch",)))
    model.check({}, SEQUENCE, 8)
    with pytest.raises(InputError, match="sequence 128: Llama was captured with 64, and its growth is not known"):
        model.check({}, 128, BATCH)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"{", "not a graph that 'dpro-search capture' wrote"),
        (b'{"version": 1}', "not a graph that 'dpro-search capture' wrote: Object missing required field"),
        (b'{"version": 2}', "version 2, this reads 1: capture the model again"),
    ],
)
def test_another_file_is_refused_in_one_line(tmp_path, data, said):
    path = tmp_path / "graph.json"
    path.write_bytes(data)
    with pytest.raises(InputError) as raised:
        read_graph(path)
    assert str(path) in str(raised.value)
    assert said in str(raised.value)


def test_a_tensor_that_grows_in_a_way_that_is_not_known_is_refused(graph, tmp_path):
    path = tmp_path / "graph.json"
    first, *others = graph.plain.ops
    tensor = msgspec.structs.replace(first.outputs[0], grows="P")
    op = msgspec.structs.replace(first, outputs=(tensor, *first.outputs[1:]))
    damaged = msgspec.structs.replace(graph, plain=msgspec.structs.replace(graph.plain, ops=(op, *others)))
    path.write_bytes(msgspec.json.encode(damaged))
    with pytest.raises(InputError, match=r"Expected `str` matching regex .* at `\$\.plain\.ops\[0\]"):
        read_graph(path)


def test_a_product_of_one_matrix_is_refused(graph):
    ops = tuple(msgspec.structs.replace(op, inputs=op.inputs[:1]) if op.name == "aten::mm" else op for op in graph.plain.ops)
    damaged = msgspec.structs.replace(graph, plain=msgspec.structs.replace(graph.plain, ops=ops))
    with pytest.raises(InputError, match="aten::mm reads 1 tensors, not 2: capture it again"):
        captured_model(damaged)


def test_a_written_graph_is_read_as_it_was(graph, tmp_path):
    path = tmp_path / "graph.json"
    path.write_bytes(written_graph(graph))
    assert read_graph(path) == graph
