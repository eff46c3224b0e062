"""Times all-reduces as a rank of a job: what and when is given by files in a folder that all ranks see.

    python dpro_search_comm_worker.py BACKEND FOLDER

Waits for ``order-N.json``, N = 0, 1, ...: a list of cells [algorithm, bytes, bytes of a call before the timed ones, such calls,
timed calls, whether ranks meet before each of these]. Runs the calls of a cell one after the other, and writes
``result-N-RANK.json``: of each cell, when the timed calls began and ended (one by one if ranks meet, else all together), what
the host sent in them, how long the cores that this process may use rested meanwhile, and which these are. An empty list ends the
job. All ranks run on one machine and read the same clock.
"""

import json
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import dpro_search_comm_groups as groups

_POLL_S, _PATIENCE_S = 0.002, 300.0
_SENT = "/sys/class/net/eth0/statistics/tx_bytes"
_TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")
# Columns of /proc/stat: user, nice, system, both interrupts; idle, idle while a disk is read, taken by other machines.
_WORKS, _RESTS = (0, 1, 2, 5, 6), (3, 4, 7)


def main():
    backend, folder = sys.argv[1], sys.argv[2]
    group = groups.start(backend)
    _write(os.path.join(folder, "ready-%d.json" % group.rank), {"version": group.version})
    number = 0
    while True:
        order = _awaited(os.path.join(folder, "order-%d.json" % number))
        if not order:
            break
        times = [_measured(group, *cell) for cell in order]
        _write(os.path.join(folder, "result-%d-%d.json" % (number, group.rank)), times)
        number += 1
    group.stop()


def _measured(group, algorithm, size_bytes, before_bytes, before, calls, meet):
    run = group.prepare(algorithm, size_bytes)
    run_before = run if before_bytes == size_bytes else group.prepare(algorithm, before_bytes)
    cores = sorted(os.sched_getaffinity(0))
    for _ in range(before):
        run_before()
    if meet:  # a rank may have all that it gets while another of its host still sends
        group.meet()
    sent, (work, rest) = _sent_bytes(), _cores_ns(cores)
    spans = [_span(run, 1, group.meet) for _ in range(calls)] if meet else [_span(run, calls)]
    if meet:
        group.meet()
    sent, (work_after, rest_after) = _sent_bytes() - sent, _cores_ns(cores)
    return {
        "spans_ns": spans,
        "sent_bytes": sent,
        "work_ns": work_after - work,
        "rest_ns": rest_after - rest,
        "cores": cores,
    }


def _span(run, calls, meet=lambda: None):
    meet()
    begin = time.monotonic_ns()
    for _ in range(calls):
        run()
    return begin, time.monotonic_ns()


def _sent_bytes():
    with open(_SENT) as file:
        return int(file.read())


def _cores_ns(cores):
    """Time in ns in which cores ran anything of this machine, and nothing of it, since it started."""
    with open("/proc/stat") as file:
        rows = {row[0]: row for row in map(str.split, file)}
    counts_of_cores = [[int(count) for count in rows["cpu%d" % core][1:]] for core in cores]
    return [sum(counts[column] for counts in counts_of_cores for column in columns) * _TICK_NS for columns in (_WORKS, _RESTS)]


def _awaited(path):
    deadline = time.monotonic() + _PATIENCE_S
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            raise RuntimeError("no order came for %d s" % _PATIENCE_S)
        time.sleep(_POLL_S)
    with open(path) as file:
        return json.load(file)


def _write(path, value):
    with open(path + ".tmp", "w") as file:
        json.dump(value, file)
    os.rename(path + ".tmp", path)


if __name__ == "__main__":
    main()
