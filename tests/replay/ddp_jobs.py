"""Programs of DistributedDataParallel jobs whose times can be worked out by hand."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from dpro_search.costmodel.collectives.horovod import CommCosts
from dpro_search.space.programs.ddp_job import Action, DdpJob

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


@st.composite
def programs(draw):
    """A job of random segments, costs, cores and threads; every collective is enqueued, and some are waited for later."""
    ranks, collectives = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    work = st.sampled_from([0.0, 0.0, 1.0, 10.0, 37.0, 100.0])
    actions = [(POST, number) for number in range(collectives)]
    for number in draw(st.lists(st.integers(0, collectives - 1), unique=True)):
        actions.insert(draw(st.integers(actions.index((POST, number)) + 1, len(actions))), (WAIT, number))
    end = draw(st.sampled_from([[], [(NONE, -1)]]))
    program = [(draw(work), *action) for action in (*actions, *end)]
    number = st.sampled_from([0.0, 0.3, 2.0, 17.0])
    costs = replace(
        FREE,
        **{name: draw(number) for name in ("alpha_busy_us", "alpha_more_us", "alpha_tail_us", "collective_cpu_us")},
        **{name: draw(st.sampled_from([0.05, 0.5, 1.0])) for name in ("beta_busy_us", "beta_tail_us")},
        cpu_us=draw(st.sampled_from([0.0, 0.1, 0.7])),
    )
    opened_job = job(
        program,
        draw(st.lists(st.sampled_from([0.0, 5.0, 80.0]), min_size=collectives, max_size=collectives)),
        ranks=ranks,
        broadcast={c for c in range(collectives) if draw(st.booleans())},
        threads=draw(st.integers(1, 3)),
        costs=costs,
        core=draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks)),
        scale=draw(st.lists(st.sampled_from([1.0, 1.0, 1.3]), min_size=ranks, max_size=ranks)),
        finish=draw(st.lists(st.sampled_from([0.0, 6.0]), min_size=collectives, max_size=collectives)),
    )
    return replace(opened_job, work_us=np.concatenate((opened_job.work_us, opened_job.work_us * 1.1)))
