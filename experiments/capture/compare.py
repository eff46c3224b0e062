"""Captured steps beside what PyTorch's own tools say, and beside described models of the same sizes, as a table.

    python -m experiments.capture.compare --python ENV/bin/python --out FOLDER [MODEL:MESH ...]

Each case is `MODEL:AXIS=N,AXIS=N`. Results are kept in the folder: a case that is there is not run again.
`LAYERS=2` gives all transformers two layers, which are enough to compare and take a fraction of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpro_search.collect.capture import CapturedGraph, CapturedStep, read_graph, written_graph
from dpro_search.collect.capture.runner import CaptureRequest, capture, parse_mesh
from dpro_search.graph.captured import captured_model
from dpro_search.graph.model import (
    Architecture,
    Attention,
    Experts,
    FeedForward,
    Layer,
    Model,
    blocks_of,
    model,
    parameters_of,
    published,
)
from dpro_search.space.mesh import Collective, Strategy, compile_block, layout_of

HERE = Path(__file__).parent
CASES = (
    *("gpt2:", "llama:", "bert:", "resnet50:", "moe:"),
    *("gpt2:dp=8", "llama:dp=8", "bert:dp=8", "resnet50:dp=8"),
    *("gpt2:dp_shard=8", "llama:dp_shard=8", "bert:dp_shard=8", "resnet50:dp_shard=8", "moe:dp_shard=8"),
    *("gpt2:dp_replicate=2,dp_shard=4", "llama:dp_replicate=2,dp_shard=4"),
    *("llama:tp=4", "bert:tp=4", "gpt2:tp=4", "llama:dp_shard=4,tp=2"),
)
BATCH, SEQUENCE, PRECISION = 2, 128, "bf16"
VIEWS = ("aten::_unsafe_view", "aten::lift_fresh")  # ops without work, that one of both leaves out
CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("cases", nargs="*", default=CASES)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    for case in asked.cases:
        name, _, mesh = case.partition(":")
        print(row(name, parse_mesh(mesh), asked.python, asked.out), flush=True)


def row(name: str, mesh: dict[str, int], python: str, out: Path) -> str:
    """Of the table; "equal", or both values."""
    graph = _graph(name, mesh, python, out)
    step = graph.under_mesh or graph.plain
    with_peak = not mesh or "dp_shard" in mesh
    theirs = _reference(
        name, {axis: size for axis, size in mesh.items() if "dp_shard" in mesh or axis == "tp"}, python, out, with_peak
    )
    cells = [name, ", ".join(f"{axis} {size}" for axis, size in mesh.items()) or "one device"]
    cells.append(_ops(step, theirs))
    ours = sum(op.flops for op in step.ops if CPU_ATTENTION not in op.name)
    cells.append(_same(ours, theirs["flops"], "GFLOP", 1e9))
    cells.append(_same(step.local_parameter_bytes, theirs["parameters_bytes"], "MiB", 2**20))
    own = len(step.parameters)  # numbers of storages begin with those of parameters
    cells.append(_same(sum(each.size_bytes for each in step.saved if each.storage >= own), theirs["saved_bytes"], "MiB", 2**20))
    issued = Counter(each.type for each in step.collectives)
    cells.append(_collectives(issued, theirs["collectives"], mesh))
    cells.append(_compiled(graph, step, mesh))
    peak = theirs.get("peak_bytes")
    cells.append(
        f"{(step.peak_bytes / peak - 1) * 100:+.1f} %" if isinstance(peak, int) else "" if peak is None else str(peak)[:40]
    )
    cells.append(_described(name, graph) if not mesh else "")
    return "| " + " | ".join(cells) + " |"


def _graph(name: str, mesh: dict[str, int], python: str, out: Path) -> CapturedGraph:
    path = out / f"{_file(name, mesh)}.graph.json"
    if not path.exists():
        images = name == "resnet50"
        request = CaptureRequest(
            python=python,
            script=HERE / "models.py",
            build=name,
            inputs="images" if images else None,
            batch=BATCH,
            sequence=None if images else SEQUENCE,
            precision=PRECISION,
            mesh=mesh,
        )
        path.write_bytes(written_graph(capture(request)))
    return read_graph(path)


def _reference(name: str, mesh: dict[str, int], python: str, out: Path, with_peak: bool) -> dict[str, Any]:
    path = out / f"{_file(name, mesh)}.reference.json"
    if not path.exists():
        command = [python, str(HERE / "reference.py"), name, json.dumps(mesh), str(BATCH), str(SEQUENCE), PRECISION]
        done = subprocess.run([*command, *(["peak"] if with_peak else [])], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        path.write_text(done.stdout.strip().splitlines()[-1])
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _file(name: str, mesh: dict[str, int]) -> str:
    return "-".join([name, *(f"{axis}{size}" for axis, size in mesh.items())])


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
    found: Counter[str] = Counter()
    for name, count in theirs.items():
        found[names.get(name, name)] += count
    text = ", ".join(f"{count} {name.replace('_', '-')}" for name, count in sorted(issued.items())) or "none"
    if mesh.get("dp_replicate", 1) > 1 and "dp_shard" not in mesh:
        return f"{text} (buckets)"
    return f"{text}, equal" if issued == found else f"{text}; theirs {dict(found)}"


def _compiled(graph: CapturedGraph, step: CapturedStep, mesh: dict[str, int]) -> str:
    """Whether the collectives of tensor parallel ranks are those that the captured model is compiled to."""
    if mesh.keys() != {"tp"}:
        return ""
    captured, strategy = captured_model(graph), Strategy(tp=mesh["tp"])
    found: Counter[tuple[str, float]] = Counter()
    for block in blocks_of(captured):
        program = compile_block(block, layout_of(strategy, regather_inputs=False), graph.batch, graph.sequence or 1)
        for each in (*program.forward, *program.backward):
            if isinstance(each, Collective):
                found[each.type.name.lower(), each.elements] += each.repeats * block.count
    issued = Counter((each.type, float(each.elements)) for each in step.collectives)
    return "equal" if found == issued else f"{dict(found)}, issued {dict(issued)}"


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


DESCRIBED = {
    "gpt2": lambda: _layers(published("gpt2")),
    "bert": lambda: _layers(published("bert-base")),
    "resnet50": lambda: model("resnet50"),
    "llama": lambda: _llama(22, 2048, 32, FeedForward(hidden=5632, gated=True)),
    "moe": lambda: _llama(4, 1024, 16, Experts(count=8, top_k=2, hidden=3584)),
}


if __name__ == "__main__":
    main()
