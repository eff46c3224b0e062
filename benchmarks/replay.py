"""How fast the replay engine is, beside a plain numba heap in the same run.

    python benchmarks/replay.py                                # the table, about two minutes
    python benchmarks/replay.py --graph ring:8:3906 --json     # one graph

`seconds` is one replay of a graph that an `Engine` has prepared (`prepare_seconds`: validation, one replay, layout in order of
execution). The baseline gets its CSR arrays prepared too, and runs on the graph in its own numbering; `baseline_laid_out_seconds`
is the baseline on the engine's layout, so that what the layout alone brings can be seen.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np
from bench_graphs import build
from measure import in_turn, machine
from plain_heap import simulate_plainly

from dpro_search.collect.sample import sample_trace_path
from dpro_search.collect.trace import CollectiveKind, Floats, Trace
from dpro_search.errors import InputError
from dpro_search.replay.engine import Engine
from dpro_search.replay.replayer import replay
from dpro_search.space.data_parallel import DataParallelJob, LinearCost, layered_step
from dpro_search.space.data_parallel_graph import fold, whole_graph
from dpro_search.space.replay_graph import Int32s, ReplayGraph, csr

SIZES = ("ring:8:39", "ring:8:391", "ring:8:3906", "coarse:8:250", "coarse:8:2500", "coarse:8:25000")
KNOWN_MAKESPAN_US = {"ring:8:39": 26_652, "ring:8:391": 262_506, "ring:8:3906": 2_617_579, "coarse:8:250": 165_914}
_ROUNDS = 9


def one_graph(name: str) -> dict[str, Any]:
    """All figures of one graph."""
    kind, workers, layers = _parse(name)
    graph = build(kind, workers, layers)
    started = time.perf_counter()
    engine = Engine(graph)
    prepare = time.perf_counter() - started
    laid_out = engine.layout.op_of
    label = engine.layout.label_of()
    source, destination = graph.edges()
    plain = _plain_arguments(graph, source, destination, np.arange(len(graph)))
    plain_laid_out = _plain_arguments(graph, label[source], label[destination], laid_out)
    seconds = in_turn(
        {
            "plain": lambda: simulate_plainly(*plain),
            "plain laid out": lambda: simulate_plainly(*plain_laid_out),
            "engine": engine.simulate,
            "retime": lambda: engine.retime(engine.layout.duration_us),
        },
        _ROUNDS,
    )
    makespan = engine.simulate().makespan_us
    assert makespan == simulate_plainly(*plain).max() == engine.retime(engine.layout.duration_us).makespan_us
    assert makespan == KNOWN_MAKESPAN_US.get(name, makespan)
    arrays = sum(value.nbytes for value in vars(graph).values() if isinstance(value, np.ndarray))
    return {
        "graph": name,
        "ops": len(graph),
        "edges": len(graph.pred_idx),
        "makespan_us": makespan,
        "seconds": seconds["engine"].median,
        "spread_pct": seconds["engine"].spread_pct,
        "ops_per_s": len(graph) / seconds["engine"].median,
        "prepare_seconds": prepare,
        "baseline_seconds": seconds["plain"].median,
        "baseline_laid_out_seconds": seconds["plain laid out"].median,
        "speedup": seconds["plain"].median / seconds["engine"].median,
        "retime_ops_per_s": len(graph) / seconds["retime"].median,
        "bytes_per_op": (arrays + engine.nbytes) / len(graph),
        "machine": machine(),
    }


def _parse(name: str) -> tuple[str, int, int]:
    try:
        kind, workers, layers = name.split(":")
        return kind, int(workers), int(layers)
    except ValueError as error:
        raise InputError(f"--graph {name}: write KIND:WORKERS:LAYERS, like ring:8:3906") from error


def _plain_arguments(graph: ReplayGraph, source: Int32s, destination: Int32s, order: Int32s) -> tuple[Any, ...]:
    succ_ptr, succ_idx = csr(source, destination, len(graph))
    needs = np.bincount(destination, minlength=len(graph)).astype(np.int32)
    return graph.duration_us[order], graph.device[order], graph.priority[order], succ_ptr, succ_idx, needs, graph.devices


def folded(ranks: int, tensors: int) -> dict[str, float]:
    """A data-parallel job on many ranks, from the description to the settled iteration time."""
    rng = np.random.default_rng(0)
    sizes = rng.lognormal(11, 2, tensors)
    step = layered_step(
        sizes, forward_us=float((40 + sizes * 1e-3).sum()), backward_us=80 + sizes * 2e-3, update_us=np.full(tensors, 15.0)
    )
    cost = LinearCost(kind=CollectiveKind.ALL_REDUCE, latency_us=60.0, us_per_byte=8e-5)

    def job(factor: Floats) -> DataParallelJob:
        step_of_rank = np.zeros(len(factor), np.int64)
        return DataParallelJob(steps=(step,), step_of_rank=step_of_rank, costs=(cost,), compute_factor=factor)

    def run(factor: Floats) -> float:
        return replay(fold(job(factor)).graph).iteration_us

    alike = np.ones(ranks)
    straggler = np.where(np.arange(ranks) == ranks // 3, 1.2, 1.0)
    seconds = in_turn({"alike": lambda: run(alike), "straggler": lambda: run(straggler)}, 5)
    small = job(np.where(np.arange(512) == 100, 1.2, 1.0))
    assert replay(whole_graph(small)).iteration_us == replay(fold(small).graph).iteration_us
    return {"ranks": ranks, "tensors": tensors, **{f"{name}_seconds": value.median for name, value in seconds.items()}}


def monte_carlo(samples: int) -> dict[str, float]:
    """Monte-Carlo replays of the bundled sample: op by op, and of Horovod's state machine."""
    from dpro_search.kinds import JobInScenario, PlanOptions
    from dpro_search.kinds.horovod.job import Horovod, horovod_schedule
    from dpro_search.space.plan import Plan

    trace = Trace.load(sample_trace_path("resnet50_2ranks_2gbit"))
    job = JobInScenario(Horovod.of(trace, PlanOptions()))
    graph = horovod_schedule(job.lowered(Plan())).single_ops()
    replay(graph, samples=2)
    job.sampled(Plan(), samples=2)
    started = time.perf_counter()
    timeline = replay(graph, samples=samples)
    op_seconds = time.perf_counter() - started
    started = time.perf_counter()
    job.sampled(Plan(), samples=samples)
    return {
        "samples": samples,
        "ops": len(graph) * timeline.iterations,
        "op_level_seconds": op_seconds,
        "horovod_seconds": time.perf_counter() - started,
    }


_FIRST_CALL = """
import sys; sys.path.insert(0, sys.argv[1])
from bench_graphs import build
from dpro_search.replay import replay
replay(build("ring", 8, 39))
"""


def first_call() -> dict[str, float]:
    """Seconds of a new process that imports the package and replays 10 k ops, compiled code being in the cache."""
    command = [sys.executable, "-c", _FIRST_CALL, sys.path[0]]
    seconds = in_turn({"process": lambda: subprocess.run(command, check=True)}, 5)["process"]
    return {"seconds": seconds.median}


def main() -> None:
    """Print the table, or one graph's figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", metavar="KIND:WORKERS:LAYERS", help="one graph only, like ring:8:3906")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    try:
        if arguments.graph:
            result = one_graph(arguments.graph)
        else:
            result = {
                "graphs": [one_graph(name) for name in SIZES],
                "folded": folded(10_240, 161),
                "monte_carlo": monte_carlo(1000),
                "first_call": first_call(),
                "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "machine": machine(),
            }
    except InputError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
    print(json.dumps(result) if arguments.json else _table(result))


def _table(result: dict[str, Any]) -> str:
    rows = result.get("graphs", [result])
    lines = [
        f"{'graph':15} {'ops':>9} {'M ops/s':>8} {'spread':>7} {'x plain':>8} {'x laid out':>10} {'retime M/s':>10} {'bytes/op':>8}"
    ]
    lines += [
        f"{row['graph']:15} {row['ops']:9} {row['ops_per_s'] / 1e6:8.1f} {row['spread_pct']:6.1f}% {row['speedup']:7.1f}x "
        f"{row['baseline_laid_out_seconds'] / row['seconds']:9.1f}x {row['retime_ops_per_s'] / 1e6:10.0f} "
        f"{row['bytes_per_op']:8.0f}"
        for row in rows
    ]
    for key in ("folded", "monte_carlo", "first_call"):
        if key in result:
            facts = ", ".join(f"{name} {value:.3g}" for name, value in result[key].items())
            lines.append(f"{key}: {facts}")
    return "\n".join([*lines, f"machine: {result['machine']}"])


if __name__ == "__main__":
    main()
