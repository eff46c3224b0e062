"""Times all-reduces as a rank of a job: what, and when, is told by files in a folder that all ranks see.

    python dpro_search_comm_worker.py BACKEND FOLDER

Waits for ``order-N.json``, N = 0, 1, ...: a list of cells [algorithm, bytes, warm calls, timed calls, pause between two calls in
seconds]. Runs them and writes ``result-N-RANK.json``: of each cell, when every timed call began and ended, and what the host sent
meanwhile. An empty list ends the job. All ranks run on one machine and read the same clock.
"""

import json
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import dpro_search_comm_groups as groups

_POLL_S, _PATIENCE_S = 0.002, 300.0
_SENT = "/sys/class/net/eth0/statistics/tx_bytes"


def main():
    backend, folder = sys.argv[1], sys.argv[2]
    group = groups.start(backend)
    _write(os.path.join(folder, "ready-%d.json" % group.rank), {"version": group.version})
    number = 0
    while True:
        order = _awaited(os.path.join(folder, "order-%d.json" % number))
        if not order:
            break
        found = [_measured(group, *cell) for cell in order]
        _write(os.path.join(folder, "result-%d-%d.json" % (number, group.rank)), found)
        number += 1
    group.stop()


def _measured(group, algorithm, size_bytes, warm, calls, pause_s):
    run = group.prepare(algorithm, size_bytes)
    for _ in range(warm):
        run()
    spans = []
    group.barrier()
    sent = _sent_bytes()
    for _ in range(calls):
        # Links that let a burst pass are as they are between the collectives of a job.
        time.sleep(pause_s)
        group.barrier()
        begin = time.monotonic_ns()
        run()
        spans.append((begin, time.monotonic_ns()))
    group.barrier()
    return {"spans_ns": spans, "sent_bytes": _sent_bytes() - sent}


def _sent_bytes():
    with open(_SENT) as file:
        return int(file.read())


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
