"""``dpro-search diagnose`` of a trace whose ops all differ: seconds, CPU time and peak memory, as JSON.

    python -m benchmarks.distinct_ops [--ops 1000000] [--steps 2] [--keep FOLDER]

Each kernel has a name of its own and a call that launches it: a third of the ops are kernels, a third launches, a third stretches
of the host's thread. ``--ops`` counts them over all steps. With ``--keep`` the trace stays.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.measure import machine, process_usage
from dpro_search.collect.trace import ClockReport, Dependencies, DependencyKind, EventKind, Events, Steps, Trace, TraceMeta

_OPS_A_KERNEL = 3
_CALL_US, _KERNEL_US = 4.0, 5.0
_THREAD, _STREAM = -1, 7


def main() -> None:
    """Write the trace, diagnose it in a process of its own, print what that took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.keep or Path(folder) / "trace"
        kernels = args.ops // _OPS_A_KERNEL // args.steps
        trace = distinct_trace(kernels, args.steps)
        trace.save(path)
        used = process_usage([sys.executable, "-m", "dpro_search.cli", "diagnose", str(path), "--json"])
    print(json.dumps({"machine": machine(), "ops": kernels * args.steps * _OPS_A_KERNEL, "names": len(trace.names)} | used))


def distinct_trace(kernels: int, steps: int) -> Trace:
    """One rank whose every step runs `kernels` kernels of different names, each launched by a call; durations differ by step."""
    rng = np.random.default_rng(0)
    count = kernels * steps
    step = np.repeat(np.arange(steps), kernels)
    call_us = np.cumsum(_CALL_US * rng.uniform(0.5, 1.5, count))
    length_us = _KERNEL_US * rng.uniform(0.1, 1.0, count)
    earliest_us = call_us + _CALL_US
    # A kernel starts when it has been launched and the one before it has ended.
    waits_us = earliest_us - np.concatenate(([0.0], np.cumsum(length_us)[:-1]))
    start_us = earliest_us + np.maximum.accumulate(waits_us) - waits_us
    end_us = start_us + length_us
    none = np.full(2 * count, -1, np.int64)
    events = Events(
        name=np.concatenate((np.zeros(count, np.int64), 1 + np.tile(np.arange(kernels), steps))),
        kind=np.repeat([int(EventKind.RUNTIME), int(EventKind.KERNEL)], count),
        rank=np.zeros(2 * count, np.int64),
        stream=np.repeat([_THREAD, _STREAM], count),
        start_us=np.concatenate((call_us, start_us)),
        end_us=np.concatenate((call_us + 1.0, end_us)),
        step=np.tile(step, 2),
        tensor=none,
        collective=none,
        size_bytes=np.zeros(2 * count, np.int64),
    )
    calls = np.arange(count, dtype=np.int64)
    bounds = np.concatenate(([0.0], end_us[kernels - 1 :: kernels]))
    zero = np.zeros(steps)
    return Trace(
        meta=TraceMeta(
            framework="pytorch",
            comm="none",
            ranks=1,
            hosts=("",),
            cores=(-1,),
            format="kineto",
            clock=ClockReport(offset_us=(0.0,), residual_us=(0.0,), method="one rank"),
        ),
        names=("cudaLaunchKernel", *(f"kernel_{i}" for i in range(kernels))),
        events=events,
        steps=Steps(
            rank=np.zeros(steps, np.int64),
            index=np.arange(steps),
            start_us=bounds[:-1],
            end_us=bounds[1:],
            traced=np.ones(steps, np.bool_),
            compute_cpu_us=zero,
            comm_cpu_us=zero,
        ),
        tensors=(),
        graphs=(),
        graph_of_rank=(),
        dependencies=Dependencies(source=calls, target=calls + count, kind=np.full(count, int(DependencyKind.LAUNCH))),
    )


if __name__ == "__main__":
    main()
