"""Profiles of a job that trains two layers, as MXNet's profiler writes them, for tests."""

import json
from pathlib import Path
from typing import Any

EPOCH = 1_795_000_000_000_000
STEP_US = 20_000


def symbol_file(path: Path, nodes: list[tuple[str, str, list[str]]], shapes: dict[str, str] | None = None) -> Path:
    """Nodes (type, name, names of the inputs); a variable with a shape is a parameter."""
    number = {name: i for i, (_, name, _) in enumerate(nodes)}
    attrs = {name: {"__shape__": shape} for name, shape in (shapes or {}).items()}
    entries: list[dict[str, Any]] = [
        {"op": op, "name": name, "inputs": [[number[source], 0, 0] for source in inputs]}
        | ({"attrs": attrs[name]} if name in attrs else {})
        for op, name, inputs in nodes
    ]
    path.write_text(json.dumps({"nodes": entries, "heads": [[len(nodes) - 1, 0, 0]]}, indent=2))
    return path


def layered(path: Path) -> Path:
    """Two fully connected layers with a weight and a bias each."""
    nodes = [("null", "data", [])]
    for layer, source in (("a", "data"), ("b", "a_fwd")):
        nodes += [("null", f"{layer}_{part}", []) for part in ("weight", "bias")]
        nodes.append(("FullyConnected", f"{layer}_fwd", [source, f"{layer}_weight", f"{layer}_bias"]))
    shapes = {f"{layer}_{part}": shape for layer in "ab" for part, shape in (("weight", "(64, 0)"), ("bias", "(64,)"))}
    return symbol_file(path, nodes, shapes)


class Process:
    """Writes the profile of one process."""

    def __init__(self) -> None:
        self._events = [
            {"ph": "M", "args": {"name": name}, "pid": pid, "name": "process_name"}
            for pid, name in enumerate(("cpu/0", "cpu/1", "cpu pinned/", "cpu shared/"))
        ]

    def op(self, name: str, start: float, end: float, tid: int = 1) -> None:
        for first, last, pid, more in (("B", "E", 0, {}), ("b", "e", 77, {"id": tid})):
            for ph, ts in ((first, start), (last, end)):
                self._events.append({"name": name, "cat": "operator", "ph": ph, "ts": EPOCH + ts, "pid": pid, "tid": tid} | more)

    def span(self, name: str, category: str, start: float, end: float) -> None:
        for ph, ts in (("b", start), ("e", end)):
            self._events.append({"name": name, "cat": category, "ph": ph, "ts": EPOCH + ts, "pid": 88, "tid": 5, "id": 5})

    def written(self, path: Path) -> Path:
        path.write_text(json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}, indent=1))
        return path


ROUNDS = {"b_bias": 5000, "b_weight": 5400, "a_bias": 7000, "a_weight": 7500}  # when the server adds; it updates 100 us later


def worker(path: Path, *, late_us: int = 0, swapped: bool = False, marked: bool = True, steps: int = 2) -> Path:
    """Trains the two layers; `swapped`: the gradients of a layer start in the other order."""
    process = Process()
    for step in range(steps):
        t = STEP_US * step
        if marked:
            process.span(f"iter{step}", "train", t, t + STEP_US - 100)
        process.op("FullyConnected", t + 1000, t + 1100)
        process.op("FullyConnected", t + 1100, t + 1200)
        process.op("log_softmax", t + 1200, t + 1210)
        process.op("_backward_FullyConnected", t + 2000 + late_us, t + 2100 + late_us)
        process.op("_backward_FullyConnected", t + 3000 + late_us, t + 3500 + late_us)
        for k, name in enumerate(("a_bias", "a_weight", "b_bias", "b_weight")):
            process.span("MXKVStorePushPull", "MXNET_C_API", t + 1300 + 10 * k, t + 1305 + 10 * k)
            ready = 2100 if name.startswith("b") else 3500
            place = ("bias", "weight").index(name[2:])
            start = t + ready + late_us + 10 * (1 - place if swapped else place) + 1
            process.op("KVStoreDistDefaultStoragePushPull", start, t + ROUNDS[name] + 150, tid=2)
        process.span("MXNDArrayWaitAll", "MXNET_C_API", t + 4000, t + 8000)
        process.span("MXNDArrayGetShapeEx", "MXNET_C_API", t + 8001, t + 8002)
    return process.written(path)


def server(path: Path, *, steps: int = 2) -> Path:
    process = Process()
    for step in range(steps):
        t = STEP_US * step
        for name, start in ROUNDS.items():
            longer = 80 if name.endswith("weight") else 5
            process.op("CopyCPU2CPU", t + start - 500, t + start - 500 + longer, tid=9)
            process.op("BinaryOpKernel", t + start, t + start + longer, tid=9)
            process.op("multi_sgd_update", t + start + 100, t + start + 110, tid=9)
    return process.written(path)
