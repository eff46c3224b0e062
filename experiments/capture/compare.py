"""Captured steps beside what PyTorch's own tools say, and beside described models of the same sizes, as a table.

    python -m experiments.capture.compare --python ENV/bin/python --out FOLDER [MODEL:MESH ...]

Each case is `MODEL:AXIS=N,AXIS=N`, of a pipeline with its schedule behind another colon. Results are kept in the folder: a case
that is there is not run again. `LAYERS=2` gives all transformers two layers, which are enough to compare and take a fraction of the
time; `LAYERS=4` those of interleaved stages.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dpro_search.collect.capture import CapturedGraph, CapturedStep, StepPhase, read_graph, written_graph
from dpro_search.collect.capture.runner import CaptureRequest, capture, parse_mesh
from dpro_search.parallel.captured import captured_model
from dpro_search.parallel.costs.compile import BlockCollective, compile_block
from dpro_search.parallel.layout import layout_of
from dpro_search.parallel.model import (
    Architecture,
    Attention,
    Block,
    Experts,
    FeedForward,
    Layer,
    Model,
    blocks_of,
    model,
    parameters_of,
    published,
)
from dpro_search.parallel.schedule import Schedule, stages_on
from dpro_search.parallel.steps.pipeline import pipeline_orders
from dpro_search.parallel.strategy import Strategy

HERE = Path(__file__).parent
CASES = (
    *("gpt2:", "llama:", "bert:", "resnet50:", "moe:"),
    *("gpt2:dp=8", "llama:dp=8", "bert:dp=8", "resnet50:dp=8"),
    *("gpt2:dp_shard=8", "llama:dp_shard=8", "bert:dp_shard=8", "resnet50:dp_shard=8", "moe:dp_shard=8"),
    *("gpt2:dp_replicate=2,dp_shard=4", "llama:dp_replicate=2,dp_shard=4"),
    *("llama:tp=4", "bert:tp=4", "gpt2:tp=4", "llama:dp_shard=4,tp=2"),
    *("gpt2:pp=2:1f1b", "llama:pp=2:1f1b", "moe:pp=2:1f1b", "llama:pp=2,tp=2:1f1b"),
    *("llama:cp=4", "llama:cp=4:alltoall", "gpt2:cp=2", "moe:cp=2"),
    *("moe:dp=4,ep=4", "moe:dp_shard=4,ep=4"),
)
INTERLEAVED = ("gpt2:pp=2:interleaved", "llama:pp=2:interleaved", "moe:pp=2:interleaved")
"""Need four layers."""
TORCH = {"1f1b": ("Schedule1F1B", 1), "interleaved": ("ScheduleInterleaved1F1B", 2), "gpipe": ("ScheduleGPipe", 1)}
BATCH, SEQUENCE, PRECISION, MICRO_BATCHES = 2, 128, "bf16", 4
VIEWS = ("aten::_unsafe_view", "aten::lift_fresh")  # ops without work, that one of both leaves out
ATTENTION = "scaled_dot_product"
CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("cases", nargs="*", default=CASES)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    more = INTERLEAVED if os.environ.get("LAYERS") == "4" else ()
    for case in asked.cases or (*CASES, *more):
        name, _, rest = case.partition(":")
        mesh, _, how = rest.partition(":")
        for text in rows(Case(name, parse_mesh(mesh), how), asked.python, asked.out):
            print(text, flush=True)


class Case(NamedTuple):
    """What is captured; `how` is the schedule of a pipeline, or how ranks of cp pass keys and values on."""

    name: str
    mesh: dict[str, int]
    how: str = ""

    @property
    def file(self) -> str:
        """Begin of the names of its files."""
        return "-".join([self.name, *(f"{axis}{size}" for axis, size in self.mesh.items()), *filter(None, [self.how])])

    @property
    def reference_mesh(self) -> dict[str, int]:
        """What PyTorch's tools can follow: not DistributedDataParallel."""
        return {axis: size for axis, size in self.mesh.items() if axis != "dp_replicate" or {"dp_shard", "ep"} & self.mesh.keys()}

    @property
    def ranks(self) -> int:
        """Of the mesh; those of ep are those of dp."""
        return math.prod(size for axis, size in self.mesh.items() if axis != "ep")


def rows(case: Case, python: str, out: Path) -> Iterator[str]:
    """Of the table, one for each place in a pipeline; "equal", or both values."""
    graph = _graph(case, python, out)
    if not graph.places:
        yield row(case, graph, graph.under_mesh or graph.plain, 0, python, out)
    for place, step in enumerate(graph.places):
        yield row(case, graph, step, place, python, out)


def row(case: Case, graph: CapturedGraph, step: CapturedStep, place: int, python: str, out: Path) -> str:
    """Of one captured step."""
    mesh = case.mesh
    theirs = _reference(case, place, python, out)
    text = ", ".join(f"{axis} {size}" for axis, size in mesh.items()) or "one device"
    cells = [case.name, f"{text} {case.how}".strip() + (f", place {place}" if graph.places else "")]
    cells.append(_ops(step, theirs))
    ours = sum(op.flops for op in step.ops if CPU_ATTENTION not in op.name)
    cells.append(_same(ours, theirs["flops"], "GFLOP", 1e9))
    cells.append(_same(step.local_parameter_bytes, theirs["parameters_bytes"], "MiB", 2**20))
    own = theirs["parameter_tensors"]  # numbers of storages begin with those of parameters
    cells.append(_same(sum(each.size_bytes for each in step.saved if each.storage >= own), theirs["saved_bytes"], "MiB", 2**20))
    issued = Counter(each.type for each in step.collectives)
    cells.append(_collectives(issued, theirs["collectives"], mesh))
    cells.append(_compiled(case, graph, step, place))
    peak = theirs.get("peak_bytes")
    cells.append(
        f"{(step.peak_bytes / peak - 1) * 100:+.1f} %" if isinstance(peak, int) else "" if peak is None else str(peak)[:40]
    )
    cells.append(_described(case.name, graph) if not mesh else "")
    return "| " + " | ".join(cells) + " |"


def _graph(case: Case, python: str, out: Path) -> CapturedGraph:
    path = out / f"{case.file}.graph.json"
    if not path.exists():
        images = case.name == "resnet50"
        request = CaptureRequest(
            python=python,
            script=HERE / "models.py",
            build=case.name,
            inputs="images" if images else None,
            batch=BATCH,
            sequence=None if images else SEQUENCE,
            precision=PRECISION,
            mesh=case.mesh,
            micro_batches=MICRO_BATCHES,
            schedule=case.how if "pp" in case.mesh else "1f1b",
            rotate=case.how if case.how and "pp" not in case.mesh else "allgather",
        )
        path.write_bytes(written_graph(capture(request)))
    return read_graph(path)


def _reference(case: Case, place: int, python: str, out: Path) -> dict[str, Any]:
    path = out / f"{case.file}-{place}.reference.json"
    if not path.exists():
        asked: dict[str, Any] = {"mesh": case.reference_mesh}
        if "pp" in case.mesh:
            kind, stages = TORCH[case.how]
            asked |= {"rank": place * case.ranks // case.mesh["pp"], "schedule": kind, "stages": stages}
            asked["micro_batches"] = MICRO_BATCHES
        if case.how == "alltoall":
            asked["rotate"] = case.how
        command = [python, str(HERE / "reference.py"), case.name, json.dumps(asked), str(BATCH), str(SEQUENCE), PRECISION]
        with_peak = not case.mesh or ("dp_shard" in case.mesh and "ep" not in case.mesh)
        done = subprocess.run([*command, *(["peak"] if with_peak else [])], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        path.write_text(done.stdout.strip().splitlines()[-1])
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _same(ours: float, theirs: float, unit: str, scale: float) -> str:
    return "equal" if ours == theirs else f"{ours / scale:,.1f}, {theirs / scale:,.1f} {unit}"


def _ops(step: CapturedStep, theirs: dict[str, Any]) -> str:
    ours = Counter(op.name for op in step.ops if op.name not in VIEWS)
    other = Counter({name: count for name, count in theirs["ops"].items() if name not in VIEWS})
    more, less = ours - other, other - ours
    if not more and not less:
        return f"{sum(ours.values()):,}, equal"
    parts = [f"+{count} {name}" for name, count in more.items()] + [f"-{count} {name}" for name, count in less.items()]
    return f"{sum(ours.values()):,}: {', '.join(parts[:4])}"


def _collectives(issued: Counter[str], theirs: dict[str, int], mesh: dict[str, int]) -> str:
    names = {"allgather_base": "all_gather", "reduce_scatter_base": "reduce_scatter", "allreduce": "all_reduce"}
    names |= {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}
    names |= {"all_to_all_single": "all_to_all"}
    found: Counter[str] = Counter()
    for name, count in theirs.items():
        found[names.get(name, name)] += count
    text = ", ".join(f"{count} {name.replace('_', '-')}" for name, count in sorted(issued.items())) or "none"
    if "dp_shard" not in mesh and {"cp", "ep"} & mesh.keys():
        return (
            f"{text}, equal" if issued - found == Counter({"all_reduce": issued["all_reduce"]}) else f"{text}; theirs {dict(found)}"
        )
    if mesh.get("dp_replicate", 1) > 1 and "dp_shard" not in mesh:
        return f"{text} (buckets)"
    return f"{text}, equal" if issued == found else f"{text}; theirs {dict(found)}"


def _compiled(case: Case, graph: CapturedGraph, step: CapturedStep, place: int) -> str:
    """What ranks of one axis exchange beside what the model is compiled to; of a pipeline also FLOPs and parameters of a place."""
    if case.mesh.keys() == {"pp"}:
        return _placed(case, graph, step, place)
    if case.mesh.keys() <= {"dp_replicate", "dp_shard", "ep"} and "ep" in case.mesh:
        strategy, found = Strategy(dp=case.ranks, ep=case.mesh["ep"]), DESCRIBED[case.name]()
        types: tuple[str, ...] = ("all_to_all",)
    elif case.mesh.keys() == {"cp"}:
        rings = case.how == "alltoall"
        strategy, found = Strategy(cp=case.mesh["cp"], cp_ring=rings), DESCRIBED[case.name]()
        types = ("send", "all_to_all", "all_gather", "reduce_scatter")
    elif case.mesh.keys() == {"tp"}:
        strategy, found, types = Strategy(tp=case.mesh["tp"]), captured_model(graph), ()
    else:
        return ""
    expected = _exchanged(found, strategy, graph, types)
    issued: Counter[tuple[str, int]] = Counter()
    for each in step.collectives:
        if not types or each.type in types:
            issued["send" if each.type == "all_to_all" and strategy.cp > 1 else each.type, each.phase] += each.elements
    if issued == expected:
        return "equal"
    return f"{_millions(expected)}; issued {_millions(issued)}"


def _millions(found: Counter[tuple[str, int]]) -> str:
    return ", ".join(
        f"{kind} {('forward', 'backward')[phase]} {count / 1e6:.2f} M" for (kind, phase), count in sorted(found.items())
    )


def _exchanged(found: Model, strategy: Strategy, graph: CapturedGraph, types: Sequence[str]) -> Counter[tuple[str, int]]:
    """Elements by type and phase of what a compiled model exchanges in one micro-batch, but gradients."""
    expected: Counter[tuple[str, int]] = Counter()
    for block in blocks_of(found):
        program = compile_block(block, layout_of(strategy, regather_inputs=False), graph.batch, graph.sequence or 1)
        for phase, steps in ((StepPhase.FORWARD, program.forward), (StepPhase.BACKWARD, program.backward)):
            for each in steps:
                for one in [each] if isinstance(each, BlockCollective) else each.beside:
                    if not types or one.type.name.lower() in types:
                        expected[one.type.name.lower(), phase] += round(one.elements * one.repeats * block.count)
    return expected


def _placed(case: Case, graph: CapturedGraph, step: CapturedStep, place: int) -> str:
    """Messages, FLOPs and parameters of a place in a pipeline beside the predicted ones."""
    kind, stages = Schedule(case.how), TORCH[case.how][1]
    orders = pipeline_orders(kind, case.mesh["pp"], stages, graph.micro_batches)
    count = case.mesh["pp"] * stages
    sent: Counter[tuple[str, int]] = Counter()
    for each in orders[place]:
        forward = each.direction == "F"
        if (each.stage < count - 1) if forward else each.stage > 0:
            sent["send", StepPhase.FORWARD if forward else StepPhase.BACKWARD] += 1
        if each.stage > 0 if forward else each.stage < count - 1:
            sent["recv", StepPhase.FORWARD if forward else StepPhase.BACKWARD] += 1
    issued = Counter((each.type, each.phase) for each in step.collectives)
    elements = {each.elements for each in step.collectives}
    found = captured_model(graph)
    first, *layers, last = blocks_of(found)
    own = [block for block in layers for _ in range(block.count)]
    numbers = stages_on(kind, place, case.mesh["pp"], stages)
    each_stage = len(own) // count
    blocks = [own[number * each_stage + offset] for number in numbers for offset in range(each_stage)]
    blocks += ([first] if 0 in numbers else []) + ([last] if count - 1 in numbers else [])
    parts = [
        "messages equal"
        if sent == issued and elements == {graph.batch * SEQUENCE * int(found.hidden)}
        else f"messages {dict(sent)}",
        _near("products' FLOPs", sum(_product_flops(block, graph) for block in blocks) * graph.micro_batches, _issued_flops(step)),
    ]
    return ", ".join(parts)


def _near(what: str, ours: float, theirs: float) -> str:
    return f"{what} equal" if abs(ours / theirs - 1) < 1e-9 else f"{what} {ours / theirs:.4f}"


def _product_flops(block: Block, graph: CapturedGraph) -> float:
    sizes = block.sizes_at(graph.batch, graph.sequence or 1)
    return sum(op.forward_flops(sizes) for op in block.ops if ATTENTION not in op.name)


def _issued_flops(step: CapturedStep) -> float:
    """Forward, of products alone: of a causal attention models count half."""
    return sum(op.flops for op in step.ops if op.phase == StepPhase.FORWARD and ATTENTION not in op.name)


def _described(name: str, graph: CapturedGraph) -> str:
    """Parameters and forward FLOPs of the described model over those of the captured one."""
    described = DESCRIBED[name]()
    captured = captured_model(graph)
    ours, theirs = (_flops(each, graph) for each in (described, captured))
    return f"{parameters_of(described) / parameters_of(captured):.4f}, {ours / theirs:.4f}"


def _flops(found: Model, graph: CapturedGraph) -> float:
    return sum(
        block.count * op.forward_flops(block.sizes_at(graph.batch, graph.sequence or 1))
        for block in blocks_of(found)
        for op in block.ops
    )


def _layers(found: Architecture) -> Architecture:
    layers = int(os.environ.get("LAYERS", "0"))
    return replace(found, layers=tuple(replace(layer, count=layers or layer.count) for layer in found.layers))


def _llama(layers: int, hidden: int, heads: int, feed_forward: FeedForward | Experts) -> Architecture:
    attention = Attention(heads=heads, kv_heads=4, head_dim=hidden // heads)
    layer = Layer(count=layers, attention=attention, feed_forward=feed_forward)
    return _layers(Architecture(name="llama", hidden=hidden, vocab=32000, layers=(layer,)))


DESCRIBED: dict[str, Callable[[], Model]] = {
    "gpt2": lambda: _layers(published("gpt2")),
    "bert": lambda: _layers(published("bert-base")),
    "resnet50": lambda: model("resnet50"),
    "llama": lambda: _llama(22, 2048, 32, FeedForward(hidden=5632, gated=True)),
    "moe": lambda: _llama(4, 1024, 16, Experts(count=8, top_k=2, hidden=3584)),
}


if __name__ == "__main__":
    main()
