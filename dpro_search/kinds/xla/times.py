"""`ProgramTimes`: how long a program's steps, instructions and collectives take where it really ran; the file ``times.json``."""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from dpro_search.cluster import Cluster
from dpro_search.collect.launch.ranks import this_machines_cores
from dpro_search.collect.launch.xla_ranks import RankTimes, Span, StepRequest, TimedExchange, run_xla_ranks
from dpro_search.collect.this_machine import LoadMeter, load_warning, machine
from dpro_search.collect.trace import Floats
from dpro_search.errors import InputError

TIMES_FILE = "times.json"
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
MOST_ON_A_CORE = 4
"""Processes that share a core. More were not tried."""

_SIZES_BYTES = (1 << 12, 1 << 16, 1 << 19, 1 << 22)
_LONGEST_US = 200_000.0  # that an exchange takes on the link alone
_LEAST_US = 1.0  # of an exchange; a busy machine may start a program with nothing to exchange more slowly
_STEPS, _PROFILED = 20, 5
_TIME_LIMIT_S = 600.0


class ExchangeTime(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a collective alone. `bytes` are those of the whole array: what a device gives, of an all-gather what it gets."""

    kind: str
    group: int
    bytes: int
    us: float


class ProgramTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``times.json``.

    Attributes
    ----------
    steps_us
        Each step that was timed, without the profiler: from the end of the one before on the last process to its own.
    instructions_us
        One execution of each instruction that took time, by name: the mean over processes and executions in profiled steps, times
        `unprofiled` (what steps take without the profiler over what they take with it). A collective's contains what a process
        waits for the others.
    exchanges
        Collectives alone, from when the last process began to when the last one ended.
    rate_bps, ranks, cores
        Limit of each process's link (None: not limited), processes, and the cores that they shared.
    """

    format: Literal["dpro-search/xla-times/1"] = "dpro-search/xla-times/1"
    steps_us: tuple[float, ...]
    instructions_us: dict[str, float]
    unprofiled: float
    exchanges: tuple[ExchangeTime, ...]
    rate_bps: float | None
    ranks: int
    cores: int
    machine: str = ""
    recorded_at: str = ""
    warning: str | None = None  # Why the times may be too long.

    @property
    def iteration_us(self) -> float:
        """The mean step."""
        return float(np.mean(self.steps_us))


def read_times(path: Path) -> ProgramTimes | None:
    """The times in a file; None: it is not there; raises `InputError` if it is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ProgramTimes)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise InputError(f"{path}: {error}; capture the program again") from error


def timed(
    script: Path,
    function: str,
    mesh: dict[str, int],
    chosen: dict[str, str],
    cluster: Cluster,
    python: str,
    *,
    with_exchanges: bool = True,
    on_poll: Callable[[], None] = lambda: None,
) -> ProgramTimes:
    """Run a step on this machine, on hosts with links like those of a cluster of CPU cores, and time it and its collectives.

    Parameters
    ----------
    with_exchanges
        Whether collectives are timed alone as well, from which those of other meshes follow.
    on_poll
        Called several times a second while it runs.

    Raises
    ------
    InputError
        The cluster has other devices than this machine, or too many.
    JobError, MissingCapabilityError
        Those of `run_xla_ranks`.
    """
    require_startable(cluster)
    exchanges = tuple(_exchanges(cluster)) if with_exchanges else ()
    request = StepRequest(
        script=str(script),
        function=function,
        mesh=mesh,
        chosen=chosen,
        steps=_STEPS,
        profiled=_PROFILED,
        exchanges=exchanges,
    )
    meter = LoadMeter()
    ranks = run_xla_ranks(
        request, python=python, ranks=cluster.ranks, rate_bps=cluster.rate_bps, timeout_s=_TIME_LIMIT_S, on_poll=on_poll
    )
    load = meter.read()
    steps_us = step_times_us([rank.steps_ns for rank in ranks])
    unprofiled = float(steps_us.mean() / step_times_us([rank.profiled_ns for rank in ranks]).mean())
    calls = list(zip(*(rank.exchanges_ns for rank in ranks), strict=True))  # for each exchange those of each process
    dispatch_us = float(np.diff(np.array(calls[0], dtype=np.float64)).mean()) / 1e3 if calls else 0.0
    return ProgramTimes(
        steps_us=tuple(np.round(steps_us, 1).tolist()),
        instructions_us={name: round(us * unprofiled, 2) for name, us in _instructions_us(ranks).items()},
        unprofiled=unprofiled,
        exchanges=tuple(
            ExchangeTime(
                kind=each.kind,
                group=each.group,
                bytes=_whole_bytes(each),
                us=round(max(_call_us(spans) - dispatch_us, _LEAST_US), 1),
            )
            for each, spans in zip(exchanges[1:], calls[1:], strict=True)
        ),
        rate_bps=cluster.rate_bps,
        ranks=cluster.ranks,
        cores=min(len(this_machines_cores()), cluster.ranks),
        machine=machine(),
        recorded_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        warning=None if load is None else load_warning(load),
    )


def require_startable(cluster: Cluster) -> None:
    """Raise `InputError` unless processes on this machine can stand for the devices of a cluster."""
    device = cluster.groups[0].host.device
    if device.kind != "cpu" or cluster.ranks_per_host != 1:
        raise InputError(
            f"{cluster.name}: a program runs here on processes with hosts of their own, like --on 4xtestbed@1gbit; "
            f"{device.name} is not here"
        )
    cores = len(this_machines_cores())
    if cluster.ranks > MOST_ON_A_CORE * cores:
        raise InputError(f"{cluster.name}: {cluster.ranks} processes share {cores} cores here; at most {MOST_ON_A_CORE * cores}")


def step_times_us(ranks: Sequence[Sequence[Span]]) -> Floats:
    """Each step but the first, [n - 1], in us: from the end of the one before on the last process to its own end there."""
    ends = np.max([[end for _, end in spans] for spans in ranks], axis=0)
    return np.asarray(np.diff(ends) / 1e3, dtype=np.float64)


def wire_bytes(kind: str, group: int, whole_bytes: float) -> float:
    """Bytes that each of `group` devices sends in a collective: the least that is possible, which Gloo's rings reach."""
    if kind == "collective-permute":
        return whole_bytes
    return (2 if kind == "all-reduce" else 1) * (group - 1) / group * whole_bytes


def _exchanges(cluster: Cluster) -> Iterator[TimedExchange]:
    """Nothing, and collectives of each kind: among as many devices as axes of a mesh can have, of sizes that the link carries."""
    ranks, rate_bps = cluster.ranks, cluster.rate_bps
    yield TimedExchange(kind="nothing", elements=1024, group=1)  # the start of a program, which each of the others contains
    for group in (size for size in range(2, ranks + 1) if ranks % size == 0):
        for kind in KINDS:
            for size_bytes in _SIZES_BYTES:
                wire_us = 0.0 if rate_bps is None else wire_bytes(kind, group, size_bytes) / (rate_bps / 8e6)
                if wire_us <= _LONGEST_US:
                    elements = size_bytes // 4 // (group if kind == "all-gather" else 1)
                    yield TimedExchange(kind=kind, elements=elements, group=group)


def _whole_bytes(exchange: TimedExchange) -> int:
    return 4 * exchange.elements * (exchange.group if exchange.kind == "all-gather" else 1)


def _call_us(calls: Sequence[Sequence[Span]]) -> float:
    """The mean of an exchange's calls, us; `calls` has those of each process."""
    spans = np.array(calls, dtype=np.float64)  # [processes, calls, 2]
    return float(np.mean(spans[:, :, 1].max(axis=0) - spans[:, :, 0].max(axis=0))) / 1e3


def _instructions_us(ranks: Sequence[RankTimes]) -> dict[str, float]:
    """The mean duration of each instruction's executions on all processes."""
    durations: dict[str, list[float]] = defaultdict(list)
    for rank in ranks:
        for name, begin, end in rank.events:
            durations[name].append((end - begin) / 1e3)
    return {name: float(np.mean(each)) for name, each in durations.items()}
