"""A rank of `checked`: times the MPI library's all-reduces and the checked choice, size by size, in one job.

    mpirun -np N python checked_rank.py REQUEST RESULT

REQUEST is JSON: choice (a table of all-reduces), sizes_bytes, rounds, longest_s, seed; or, for the cost of the check in training
steps, choice, buckets_bytes, compute_s, steps, repeats. Rank 0 writes RESULT. All ranks run on one machine and read the same clock.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from dpro_search_all_reduce import AllReduce, CheckedAllReduce, Choice
from dpro_search_all_reduce.choice import joined, parted
from mpi4py import MPI

_CELL_S, _MOST_CALLS = 0.08, 200
_MOST_FIRST_CALLS = 100
_WORLD = MPI.COMM_WORLD


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    all_reduce = AllReduce(choice=Choice(request["choice"]))
    result = _training(all_reduce, request) if "buckets_bytes" in request else _sizes(all_reduce, request)
    if all_reduce.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(result))
    all_reduce.close()


def _sizes(all_reduce: AllReduce, request: dict) -> list:
    """Rows: the rounds of every algorithm at a size, us, what the check kept, its calls and its cost."""
    names = ["native", *("native " + name for name in all_reduce._library.names if name != "default")]
    lines: list = []
    checked = CheckedAllReduce(all_reduce, say=lines.append)
    generator = random.Random(request["seed"])
    rows = []
    for size_bytes in request["sizes_bytes"]:
        buffer = np.zeros(size_bytes // 4, "float32")
        all_reduce.sum(buffer, algorithm="native", segment_bytes=0)
        if _typical_s(all_reduce, buffer, "native", 1) > request["longest_s"]:
            break
        spent_s, calls = checked.cost_s, 0
        while not checked.settled(size_bytes) and calls < _MOST_FIRST_CALLS:
            _WORLD.Barrier()
            checked.sum(buffer)
            calls += 1
        check = {"calls": calls, "cost_us": (checked.cost_s - spent_s) * 1e6}
        rounds_us: dict = {name: [] for name in [*names, "checked"]}
        expected_s = {name: _typical_s(all_reduce, buffer, name, 1) for name in names}
        expected_s["checked"] = min(expected_s.values())
        for _ in range(request["rounds"]):
            order = sorted(rounds_us)
            generator.shuffle(order)
            for name in order:
                timed = int(min(max(_CELL_S / expected_s[name], 1), _MOST_CALLS))
                summing = checked if name == "checked" else all_reduce
                rounds_us[name].append(_typical_s(summing, buffer, None if name == "checked" else name, timed) * 1e6)
        kept, chosen = joined(*checked.kept(size_bytes)), joined(*all_reduce.algorithm(size_bytes))
        rows.append(
            {
                "size_bytes": size_bytes,
                "rounds_us": rounds_us,
                "kept": kept,
                "table": chosen,
                **check,
            }
        )
    return rows


def _typical_s(summing: AllReduce | CheckedAllReduce, buffer: np.ndarray, name: str | None, calls: int) -> float:
    """Mean time of a call, from when the last rank began to when the last one ended; the first call is not counted."""
    arguments = () if name is None else (False, *parted(name))
    summing.sum(buffer, *arguments)
    spans = []
    for _ in range(calls):
        _WORLD.Barrier()
        began = time.monotonic_ns()
        summing.sum(buffer, *arguments)
        spans.append((began, time.monotonic_ns()))
    last = np.array(spans, np.int64)
    _WORLD.Allreduce(MPI.IN_PLACE, last, MPI.MAX)
    return float((last[:, 1] - last[:, 0]).mean()) / 1e9


def _training(all_reduce: AllReduce, request: dict) -> dict:
    """Seconds of the steps with the check, and with what it kept from the start, in turn."""
    buffers = [np.zeros(size // 4, "float32") for size in request["buckets_bytes"]]
    seconds: dict = {"checked": [], "kept": []}
    lines: list = []
    for _ in range(request["repeats"]):
        checked = CheckedAllReduce(all_reduce, say=lines.append)
        seconds["checked"].append(_steps_s(checked.sum, buffers, request))
        kept = {buffer.nbytes: checked.kept(buffer.nbytes) for buffer in buffers}
        seconds["kept"].append(_steps_s(_by_kept(all_reduce, kept), buffers, request))
    return {"seconds": seconds, "lines": lines}


def _by_kept(all_reduce: AllReduce, kept: dict) -> Callable[[np.ndarray], object]:
    return lambda buffer: all_reduce.sum(buffer, False, *kept[buffer.nbytes])


def _steps_s(run: Callable[[np.ndarray], object], buffers: list, request: dict) -> float:
    _WORLD.Barrier()
    began = time.monotonic()
    for _ in range(request["steps"]):
        time.sleep(request["compute_s"])
        for buffer in buffers:
            run(buffer)
    _WORLD.Barrier()
    return time.monotonic() - began


if __name__ == "__main__":
    main()
