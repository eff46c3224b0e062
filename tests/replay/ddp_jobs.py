"""Programs of DistributedDataParallel jobs whose times can be worked out by hand."""

import numpy as np

from dpro_search.costmodel.horovod import CommCosts
from dpro_search.space.ddp_job import Action, DdpJob

NONE, POST, WAIT = Action.NONE, Action.POST, Action.WAIT

# No latency beside the least of 1 us, 1 us a byte, and no core time of the communication.
FREE = CommCosts(
    alpha_busy_us=0.0, alpha_more_us=0.0, alpha_tail_us=0.0, dispatch_us=0.0, beta_busy_us=1.0, beta_tail_us=1.0,
    negotiate_busy_us=np.zeros(1), negotiate_idle_us=np.zeros(1), copy_in_us=0.0, copy_out_us=0.0, cpu_us=0.0, cycle_cpu_us=0.0,
    collective_cpu_us=0.0, residual_pct=0.0,
)  # fmt: skip


def job(program, sizes, *, ranks=2, broadcast=(), threads=2, costs=FREE, core=None, scale=None, finish=()) -> DdpJob:
    """A job of (work, action, collective) segments, equal on all ranks but for a factor of each."""
    work, action, collective = zip(*program, strict=True)
    factor = np.ones(ranks) if scale is None else np.array(scale, dtype=float)
    return DdpJob(
        core=np.arange(ranks) if core is None else np.array(core),
        work_us=factor[None, :, None] * np.array(work, dtype=float)[None, None, :],
        action=np.array([int(a) for a in action]),
        collective=np.array(collective),
        size_bytes=np.array(sizes, dtype=float),
        is_broadcast=np.array([i in broadcast for i in range(len(sizes))], dtype=np.bool_),
        threads=threads,
        comm=costs,
        finish_us=np.array(finish, dtype=float),
    )
