"""`captured_model`: the blocks of a captured model, and what it cannot be split along."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dpro_search.collect.capture import CapturedGraph
from dpro_search.collect.capture.graph_file import CapturedParameter
from dpro_search.errors import InputError
from dpro_search.parallel.captured.blocks import BlockMaker
from dpro_search.parallel.captured.flow import Flow, flow_of, segments_of
from dpro_search.parallel.captured.regions import Regions, is_matmul, least_inputs, regions_of
from dpro_search.parallel.model import Block, CapturedModel


def captured_model(graph: CapturedGraph) -> CapturedModel:
    """The model of a captured step.

    Raises
    ------
    InputError
        The step has too few ops, or an op has not what its kind reads.
    """
    flow = flow_of(graph)
    for op in flow.ops.values():
        if len(op.inputs) < least_inputs(op):
            raise InputError(f"{graph.model}: {op.name} reads {len(op.inputs)} tensors, not {least_inputs(op)}: capture it again")
    if len(flow.ops) < 2:
        raise InputError(f"{graph.model}: the captured step has {len(flow.ops)} ops, too few to make blocks of")
    segments, uncut = segments_of(flow, graph.plain.units)
    sequence = graph.sequence or 1
    regions = [regions_of(flow, segment, graph.plain.layouts) for segment in segments]
    weights = _weights(flow, segments, graph)
    tied = _tied_op(graph, flow, segments[0], weights)
    made: list[Block] = []
    hidden = 0.0
    for place, segment in enumerate(segments):
        before = frozenset(segments[place - 1]) if place else frozenset()
        stream = _stream(flow, before, segment) / (graph.batch * sequence)
        hidden = max(hidden, stream if place > 1 else 0.0)
        maker = BlockMaker(flow, segment, regions[place], graph.batch, sequence, before, weights, tokens=tied if not place else -1)
        made.append(maker.block("", stream))
    blocks = _counted(made)
    parameters = sum(each.elements for each in graph.plain.parameters)
    trained = sum(each.elements for each in graph.plain.parameters if each.trained)
    return CapturedModel(
        name=graph.model,
        blocks=blocks,
        hidden=hidden,
        heads=_divided(flow, segments, regions),
        unsplit=tuple(_unsplit(flow, segments, regions, uncut, graph.plain.layouts)),
        tied=tied >= 0,
        tied_weight=_head_matrix(flow, segments[-1], blocks[-1]) if tied >= 0 else "",
        batch=graph.batch,
        sequence=graph.sequence,
        grows=graph.grows,
        parameter_bytes=graph.parameter_bytes / max(parameters, 1),
        gradient_bytes=graph.plain.gradient_bytes / max(trained, 1),
        state_bytes=graph.plain.optimizer_bytes / max(trained, 1),
        notes=tuple(dict.fromkeys(region.refused for region in regions if region.refused)),
    )


def _stream(flow: Flow, before: frozenset[int], segment: Sequence[int]) -> float:
    """Elements that a block reads of what the one before made, for its samples: not masks and rotations."""
    read = {source for number in segment for source in flow.sources[number] if source in before}
    results = [tensor for source in read for tensor in flow.ops[source].outputs[:1]]
    return float(sum(tensor.elements for tensor in results if tensor.powers[0] or not tensor.grows))


def _counted(made: Sequence[Block]) -> tuple[Block, ...]:
    """Blocks with names; equal ones that follow each other as one."""
    first, *layers, last = made
    blocks: list[Block] = []
    for block in layers:
        if blocks and replace(blocks[-1], name="", count=1) == block:
            blocks[-1] = replace(blocks[-1], count=blocks[-1].count + 1)
        else:
            blocks.append(replace(block, name=f"layer{len(blocks)}"))
    return (replace(first, name="embedding"), *blocks, replace(last, name="head"))


def _weights(flow: Flow, segments: Sequence[Sequence[int]], graph: CapturedGraph) -> Mapping[int, tuple[CapturedParameter, ...]]:
    """Parameters by op: a product of their own module, else its first op, else the first of the nearest module around it."""
    products: dict[str, int] = {}
    first: dict[str, int] = {}
    order = [number for segment in segments for number in segment]
    for number in order:
        op = flow.ops[number]
        if is_matmul(op) or op.name == "aten::convolution":
            products.setdefault(op.module, number)
        path = op.module
        while path and path not in first:
            first[path] = number
            path = path.rpartition(".")[0]
    parameters_of: dict[int, list[CapturedParameter]] = defaultdict(list)
    for parameter in graph.plain.parameters:
        path = parameter.name.rpartition(".")[0]
        while path and path not in products and path not in first:
            path = path.rpartition(".")[0]
        parameters_of[products.get(path, first.get(path, order[0]))].append(parameter)
    return {number: tuple(parameters) for number, parameters in parameters_of.items()}


def _tied_op(graph: CapturedGraph, flow: Flow, segment: Sequence[int], weights: Mapping[int, Sequence[CapturedParameter]]) -> int:
    """The op of the first block whose parameter the head uses too; -1: none."""
    if not graph.plain.tied:
        return -1
    return next((number for number in segment if flow.ops[number].name == "aten::embedding" and weights.get(number)), -1)


def _head_matrix(flow: Flow, segment: Sequence[int], block: Block) -> str:
    """The name of the last product of the head."""
    place = max((place for place, number in enumerate(segment) if is_matmul(flow.ops[number])), default=None)
    if place is None:
        return ""
    name = flow.ops[segment[place]].name.rpartition(":")[2]
    return next((op.name for op in block.ops if op.name == f"{place}:{name}"), "")


def _divided(flow: Flow, segments: Sequence[Sequence[int]], regions: Sequence[Regions]) -> tuple[tuple[str, int], ...]:
    """The sizes that tensor-parallel degrees must divide."""
    sizes: dict[tuple[str, int], None] = {}
    for segment, region in zip(segments, regions, strict=True):
        for number in segment:
            op = flow.ops[number]
            if number in region.columns:
                sizes["the columns of linear layers", op.inputs[-1].shape[-1]] = None
            elif number in region.split and "scaled_dot_product" in op.name:
                sizes["heads", op.inputs[0].shape[-3]] = sizes["heads of keys and values", op.inputs[1].shape[-3]] = None
    return tuple(sizes)


def _unsplit(
    flow: Flow, segments: Sequence[Sequence[int]], regions: Sequence[Regions], uncut: str, layouts: Mapping[str, str]
) -> list[tuple[str, str]]:
    reasons = []
    if not any(region.rows for region in regions):
        refused = next((region.refused for region in regions if region.refused), "")
        why = refused or ("no linear layers of known names follow each other" if not layouts else "no layers are split by rows")
        reasons.append(("tp", f"{why}; 'dpro-search capture --tp-plan' takes a plan for parallelize_module"))
    if uncut:
        reasons += [("pp", uncut), ("virtual_stages", uncut)]
    attends = [number for segment in segments for number in segment if "scaled_dot_product" in flow.ops[number].name]
    squares = [op for op in flow.ops.values() if any(tensor.powers[1] > 1 for tensor in op.outputs)]
    if not attends or squares:
        reasons.append(("cp", "its attention is not scaled_dot_product_attention" if squares else "it has no attention"))
    reasons += [(axis, "its experts are not known from its ops") for axis in ("ep", "etp")]
    return reasons
