"""A step of a fully sharded job whose times can be worked out by hand."""

import numpy as np

from dpro_search.graph.fsdp import GATHER_SHARE, CollectiveMark, FsdpGraph, Purpose


def two_units(work=100.0, copy=5.0, size=40.0, after=30.0, samples=1, ranks=2) -> FsdpGraph:
    """Two units of a size that compute `work` forward and as much backward; each of a gather's two copies takes `copy`."""
    gather = [
        (CollectiveMark.COPY_IN, None),
        (CollectiveMark.POST, copy),
        (CollectiveMark.WAIT, 0.0),
        (CollectiveMark.COPY_OUT, 0.0),
        (CollectiveMark.READY, copy),
    ]
    scatter = [(CollectiveMark.POST, work), (CollectiveMark.WAIT, 0.0)]
    collectives = [
        ("all-gather of 0", Purpose.FORWARD, 0.0),
        ("all-gather of 1", Purpose.FORWARD, work),
        ("all-gather of 1 for backward", Purpose.BACKWARD, work),
        ("reduce-scatter of 1", Purpose.SCATTER, None),
        ("all-gather of 0 for backward", Purpose.BACKWARD, 0.0),
        ("reduce-scatter of 0", Purpose.SCATTER, None),
    ]
    program = [
        (mark, number, before if took is None else took)
        for number, (_, purpose, before) in enumerate(collectives)
        for mark, took in (scatter if purpose == Purpose.SCATTER else gather)
    ]
    mark, collective, took = zip(*program, strict=True)
    labels, purposes, _ = zip(*collectives, strict=True)
    share = np.array([1.0 if purpose == Purpose.SCATTER else GATHER_SHARE for purpose in purposes])
    return FsdpGraph(
        tensors=(),
        labels=labels,
        purpose=np.array(purposes, dtype=np.int64),
        size_bytes=np.full(len(labels), size),
        moved_bytes=size * share,
        lag=1.0,
        mark=np.array(mark, dtype=np.int64),
        collective=np.array(collective, dtype=np.int64),
        work_us=np.broadcast_to(np.array(took, dtype=np.float64), (samples, ranks, len(took))).copy(),
        after_us=np.full((samples, ranks), after),
        steps=np.arange(samples),
        ops=len(program),
    )
