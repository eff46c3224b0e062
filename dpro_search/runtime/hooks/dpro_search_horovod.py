"""Horovod's threads, for the recorders of all frameworks: find them, calm one of them, measure the others at rest.

Standard library only; Python 3.8 and later.
"""

import atexit
import contextlib
import os
import time

from dpro_search_process import rank, replaces, threads

_START_S = 0.05  # a thread that Horovod starts takes up its work within this time
_WATCHED_S = 0.3  # to distinguish the threads by what they do
_IDLE_S = 0.5
_QUIET_S = 0.3  # a timeline that has not grown while its writer ran for so long is whole
_MOST_S = 20.0  # how long that is waited for at most


def patch_init(basics, started):
    """Call `started` with the ids of the threads that Horovod's init starts; `basics` is the module horovod.common.basics."""

    @replaces(basics.HorovodBasics, "init")
    def init(original, self, *args, **kwargs):
        before = threads()
        result = original(self, *args, **kwargs)
        time.sleep(_START_S)
        started(threads() - before)
        return result


def watch_threads(clock, tids):
    """Count the threads as the communication's on a `ThreadClock`, and measure what idle cycles cost.

    Rank 0's timeline writer spins; on a busy core it would take time from the job that is not taken without it.

    Returns
    -------
    dict
        wall_ns: [begin, end] of the measurement; comm_cpu_ns: CPU time of the threads meanwhile.
    """
    writes = bool(os.environ.get("HOROVOD_TIMELINE")) and rank() == 0
    spinning = clock.spinning(tids, over_s=_WATCHED_S) if writes else set()
    clock.communication |= tids - spinning
    clock.ignored |= spinning
    for tid in spinning:
        os.sched_setscheduler(int(tid), os.SCHED_IDLE, os.sched_param(0))
    if writes:
        atexit.register(let_write, os.environ["HOROVOD_TIMELINE"], clock, spinning)  # after Horovod's own, and so called before it
    start = time.time_ns(), clock.read()[1]
    time.sleep(_IDLE_S)
    end = time.time_ns(), clock.read()[1]
    return {"wall_ns": [start[0], end[0]], "comm_cpu_ns": end[1] - start[1]}


def let_write(path, clock, writers):
    """Let the calmed writer catch up with the job: Horovod ends without writing what is left.

    How long it was quiet is counted in its own time on a core: on a busy machine it may not run for longer than that.
    """
    for tid in writers:
        with contextlib.suppress(OSError):  # it has ended, or may not be raised again without rights
            os.sched_setscheduler(int(tid), os.SCHED_OTHER, os.sched_param(0))

    def now_s():
        return sum(clock.of(tid) or 0 for tid in writers) / 1e9 if writers else time.monotonic()

    end = time.monotonic() + _MOST_S
    size, since = -1, now_s()
    while time.monotonic() < end and now_s() < since + _QUIET_S and not _ended(clock, writers):
        now = os.path.getsize(path) if os.path.exists(path) else 0
        if now != size:
            size, since = now, now_s()
        time.sleep(0.02)


def _ended(clock, tids):
    return bool(tids) and all(clock.of(tid) is None for tid in tids)
