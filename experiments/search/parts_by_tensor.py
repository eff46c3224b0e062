"""What a size of parts for each tensor would gain over one size for all, in the replay of jobs with parameter servers.

    python -m experiments.search.parts_by_tensor TRACE ... [--seconds 60] [--seed 0] [--rate 500mbit]

No framework can be told a size for each tensor: KVStore's bound and slices and BytePS's partitions are one number for all of them.
So this asks whether more is missed. Sizes on a fine grid are tried for all tensors at once; from the best of them on, a search
gives tensors sizes of their own and keeps what is faster, for so many seconds of processor time. KVStore with a bound, where a
tensor is cut over all servers or is not, and with priority slices; BytePS's partitions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from dpro_search.collect.trace import Ints, Trace
from dpro_search.errors import InputError
from dpro_search.kinds import job_of
from dpro_search.kinds.byteps.job import Byteps
from dpro_search.kinds.kvstore.job import Kvstore
from dpro_search.quantities import parse_rate_bps
from dpro_search.replay.replayer import settled_us
from dpro_search.space.plan import Plan
from dpro_search.space.replay_graph import ReplayGraph
from dpro_search.space.scenario import ClusterChange, Scenario
from dpro_search.space.servers.byteps_job import PAGE_BYTES, BytepsJob, Part, byteps_graph
from dpro_search.space.servers.kvstore_job import KvstoreJob, kvstore_graph

_OCTAVES, _STEPS = 9, 4  # sizes from the largest tensor down, and steps in an octave
_DRAWN = 3  # tensors whose size changes in a step: 1 to so many


@dataclass(frozen=True, kw_only=True)
class KvstoreByTensor(KvstoreJob):
    """`size`: the bound of each tensor, or the elements of its slices, [tensors]."""

    size: tuple[int, ...]

    @cached_property
    def slices(self) -> list[list[tuple[int, float]]]:
        elements = np.round(self.tensor_bytes / self.element_bytes).astype(np.int64).tolist()
        turn, found = 0, [[(0, 0.0)]] * len(elements)
        for tensor in np.argsort(self.key).tolist():
            slicing = replace(self.slicing, bound=self.size[tensor], slice_threshold=self.size[tensor])
            # Key 0 and server 0 first; slices of a tensor go on where those of the last one ended.
            key = 0 if slicing.priority else int(self.key[tensor])
            parts = slicing.parts([key], [elements[tensor]])[0]
            begin = turn if slicing.priority else 0
            found[tensor] = [
                ((begin + server) % slicing.servers, count * float(self.element_bytes[tensor])) for server, count in parts
            ]
            turn += len(parts)
        return found


@dataclass(frozen=True, kw_only=True)
class BytepsByTensor(BytepsJob):
    """`size`: bytes of each tensor's partitions, [tensors]."""

    size: tuple[int, ...]

    def parts(self, tensor: int) -> list[Part]:
        return BytepsJob.parts(replace(self, partition_bytes=self.size[tensor]), tensor)


_Job = TypeVar("_Job", KvstoreByTensor, BytepsByTensor)


class Case(NamedTuple):
    """A way to cut a job's tensors: its graph for sizes [tensors], and the sizes that leave every tensor whole, [tensors]."""

    name: str
    graph: Callable[[tuple[int, ...]], ReplayGraph]
    whole: Ints


def cases(trace: Trace, rate_bps: float | None) -> list[Case]:
    """The ways in which a recording's tensors can be cut, on links of another rate if one is given."""
    scenario = Scenario(cluster=ClusterChange(rate_bps=rate_bps))
    recorded = job_of(trace)
    if isinstance(recorded, Byteps):
        byteps = recorded.replay_of(scenario).job
        pages = -(-byteps.tensor_bytes.astype(np.int64) // PAGE_BYTES) * PAGE_BYTES
        return [Case("BytePS's partitions", lambda size: byteps_graph(with_sizes(BytepsByTensor, byteps, size)), pages)]
    if not isinstance(recorded, Kvstore):
        raise InputError("not a recording of MXNet's KVStore or BytePS")
    found = []
    for name, priority in (("KVStore's bound", False), ("KVStore's priority slices", True)):
        job = recorded.replay_of(replace(scenario, plan=Plan.of(p3=priority))).job
        elements = np.round(job.tensor_bytes / job.element_bytes).astype(np.int64)
        found.append(Case(name, _kvstore(job), elements if priority else elements + 1))
    return found


def _kvstore(job: KvstoreJob) -> Callable[[tuple[int, ...]], ReplayGraph]:
    return lambda size: kvstore_graph(with_sizes(KvstoreByTensor, job, size))


def with_sizes(kind: type[_Job], job: KvstoreJob | BytepsJob, size: tuple[int, ...]) -> _Job:
    """A job whose tensors have these sizes of parts."""
    return kind(**{field.name: getattr(job, field.name) for field in fields(job)}, size=size)


class Found(NamedTuple):
    """Iterations, us: of the best size for all tensors, and of the best found with sizes of their own; and replays tried."""

    alike_us: float
    own_us: float
    tried: int


def searched(case: Case, seconds: float, seed: int) -> Found:
    """Sizes of their own from the best common one on, for so many seconds of processor time."""
    largest = int(case.whole.max())
    grid = [max(round(largest * 2 ** (-step / _STEPS)), 1) for step in range(_OCTAVES * _STEPS + 1)]

    def iteration_us(size: Ints) -> float:
        return settled_us(case.graph(tuple(size.tolist())))[0]

    alike = [np.minimum(size, case.whole) for size in grid]
    prices = [iteration_us(size) for size in alike]
    best, best_us = alike[int(np.argmin(prices))], min(prices)
    alike_us, tried = best_us, len(grid)
    rng = np.random.default_rng(seed)
    until = time.process_time() + seconds
    share = case.whole / case.whole.sum()
    while time.process_time() < until:
        chosen = rng.choice(len(best), size=rng.integers(1, _DRAWN + 1), p=share)
        changed = best.copy()
        changed[chosen] = np.minimum(case.whole[chosen], rng.choice(grid, size=len(chosen)))
        tried += 1
        if (us := iteration_us(changed)) < best_us:
            best, best_us = changed, us
    return Found(alike_us, best_us, tried)


def main() -> None:
    """A table, one row for each recording and way to cut."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", help="of the links, where not as recorded")
    options = parser.parse_args()
    print("| recording | cut by | tensors | one size, ms | sizes of their own, ms | gain | replays |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for path in options.traces:
        for case in cases(Trace.load(path), None if options.rate is None else parse_rate_bps(options.rate)):
            found = searched(case, options.seconds, options.seed)
            print(
                f"| {path.parent.name} | {case.name} | {len(case.whole)} | {found.alike_us / 1e3:.1f} | {found.own_us / 1e3:.1f}"
                f" | {(1 - found.own_us / found.alike_us) * 100:.2f} % | {found.tried} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
