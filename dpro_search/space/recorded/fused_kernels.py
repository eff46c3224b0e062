"""``fused_us(...)``: a recorded step whose element-wise kernels a compiler had fused, as ``--what-if compile=1`` asks.

torch.compile makes one kernel of element-wise ops, reductions, norms and softmax that follow each other, and leaves products,
attention and convolutions to libraries. A run of such kernels, on one stream and launched by one thread (the forward and the
backward pass have a graph each), becomes one kernel, which reads and writes what the run's longest kernel does: it takes as long.
The other kernels are gone, and what the host did to launch them. What the host does for the remaining launches stays: ``launch=0``
takes that away as well, as CUDA graphs (``mode="reduce-overhead"``) do. What hooks of gradients, DDP, FSDP and the optimizer launch
is not of the compiled model, and stays.

This is what a compiler gains at best: whether it can trace the model, and how good its kernels are, no profile tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import numpy as np

from dpro_search.collect.trace import EventKind, Floats, Ints, Trace
from dpro_search.errors import InputError
from dpro_search.graph.event_names import kernel_class
from dpro_search.space.recorded.events import LAUNCHES, launched_within
from dpro_search.space.recorded.ops import RecordedOps
from dpro_search.space.scenario import Scale

FUSED = ("elementwise", "reduction", "normalization", "softmax")
_COMPILED = "triton_"  # kernels of torch.compile, which has fused what it can
# Spans of host threads that launch what is not of the model: hooks of gradients, DDP, FSDP, the optimizer.
OUTSIDE_THE_MODEL = (
    "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",
    "torch.distributed.ddp.reducer::",
    "FSDP::",
    "Optimizer.",
)


def fused_us(trace: Trace, ops: RecordedOps, in_step: Ints, duration_us: Floats, scale: Scale) -> Floats:
    """Durations of a step's ops with each run of kernels that can be fused as one.

    Parameters
    ----------
    mine
        The step's ops, in their order, [n].
    duration_us
        Of these, [n].
    scale
        ``compile=F``: each run takes F times as long as its longest kernel; of one rank only, if it names one.

    Raises
    ------
    InputError
        No two kernels that follow each other can be fused.
    """
    after_us = duration_us.copy()
    launching = ops.role[in_step] == LAUNCHES
    launches: dict[int, list[int]] = {}
    for place in np.flatnonzero(launching).tolist():
        launches.setdefault(int(ops.about[in_step[place]]), []).append(place)
    fused_any = False
    for run in _runs(trace, ops, in_step, launches, scale):
        fused_any = True
        longest_us = max(float(duration_us[place]) for place in run)
        for place in run[1:]:
            after_us[place] = 0.0
            for launch in launches.get(int(ops.event[in_step[place]]), ()):
                after_us[launch] = min(float(ops.loading_us[in_step[launch]]), float(duration_us[launch]))
        after_us[run[0]] = longest_us * scale.factor
    if not fused_any:
        raise InputError(f"'{scale.text}': the trace shows no kernels that follow each other and that a compiler would fuse")
    return after_us


def _runs(trace: Trace, ops: RecordedOps, in_step: Ints, launches: dict[int, list[int]], scale: Scale) -> Iterator[list[int]]:
    """Places of kernels that become one, two or more each."""
    events = trace.events
    can = np.array([kernel_class(name) in FUSED and not name.startswith(_COMPILED) for name in trace.names] or [False])
    of_others = launched_within(trace, lambda name: name.startswith(OUTSIDE_THE_MODEL))
    device = ops.device[in_step]
    on_stream = np.flatnonzero(ops.on_device[in_step] & (ops.event[in_step] >= 0))
    on_stream = on_stream[np.argsort(device[on_stream], kind="stable")]

    def sort_of(place: int) -> tuple[int, int, bool]:
        """Stream and launching thread of a kernel, and whether it can be fused."""
        event = int(ops.event[in_step[place]])
        threads = [int(device[launch]) for launch in launches.get(event, ())]
        fusable = bool(can[events.name[event]] and events.kind[event] == EventKind.KERNEL and threads and event not in of_others)
        of_rank = scale.rank is None or int(ops.rank_of_device[device[place]]) == scale.rank
        return int(device[place]), min(threads, default=-1), fusable and of_rank

    for (_, _, fusable), places in groupby(on_stream.tolist(), key=sort_of):
        run = list(places)
        if fusable and len(run) > 1:
            yield run
