"""Start the processes of a JAX step, one on each shaped host, and read what each of them timed: `run_xla_ranks`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from dpro_search.collect._files import scratch_folder
from dpro_search.collect.launch.netns import ShapedHosts
from dpro_search.collect.launch.ranks import JobSpec, default_cores, run_ranks
from dpro_search.errors import TraceFormatError
from dpro_search.runtime import CAPTURE

_WORKER = CAPTURE / "dpro_search_xla_rank.py"
_PORT = 29501  # hosts have their ports for themselves
Span = tuple[int, int]  # begin and end, ns, by the clock that all processes of this machine share


class TimedExchange(msgspec.Struct, frozen=True, array_like=True):
    """A collective to be timed, alone, among groups of devices that follow each other."""

    kind: str  # An HLO opcode: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"; or "nothing".
    elements: int  # Numbers of 4 bytes that each device gives.
    group: int  # Devices of a group.


class StepRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The work of each process.

    Attributes
    ----------
    script, function, mesh
        The step: a function of a `jax.sharding.Mesh` with these axes.
    chosen
        Values of the script's ``CHOICES`` by name, as texts; those that are left out are the first.
    warmup, steps, profiled
        Steps that are not timed, that are timed, and that are profiled behind them.
    exchanges
        Collectives to time behind the steps.
    """

    script: str
    function: str
    mesh: dict[str, int]
    chosen: dict[str, str] = msgspec.field(default_factory=dict)
    warmup: int = 3
    steps: int = 20
    profiled: int = 0
    exchanges: tuple[TimedExchange, ...] = ()


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The times that one process wrote."""

    steps_ns: tuple[Span, ...]
    losses: tuple[float, ...] = ()  # The first number that each step returned, those before the timed ones included.
    profiled_ns: tuple[Span, ...] = ()
    events: tuple[tuple[str, int, int], ...] = ()  # Instructions of the profiled steps: name, begin and end in ns.
    exchanges_ns: tuple[tuple[Span, ...], ...] = ()  # For each exchange its calls.


def run_xla_ranks(
    request: StepRequest,
    *,
    python: str,
    ranks: int,
    rate_bps: float | None,
    timeout_s: float,
    on_poll: Callable[[], None] = lambda: None,
) -> list[RankTimes]:
    """Run a step in several processes, each on a host of its own and pinned to a core, which processes share in turn; needs root.

    Parameters
    ----------
    python
        An interpreter with JAX.
    rate_bps
        Limit of each host's link, bits a second; None: not limited.
    on_poll
        Called several times a second while they run.

    Raises
    ------
    JobError
        A process failed or took too long.
    MissingCapabilityError
        A tool or a permission is missing.
    """
    with scratch_folder("xla") as folder, ShapedHosts(ranks, rate_bps) as hosts:
        asked = folder / "request.json"
        asked.write_bytes(msgspec.json.encode(request))
        spec = JobSpec(
            command=(python, str(_WORKER), str(asked), str(folder)), ranks=ranks, cores=default_cores(ranks), timeout_s=timeout_s
        )
        meeting = f"{hosts.address(0)}:{_PORT}"
        env = [
            {"DPRO_SEARCH_RANK": str(rank), "DPRO_SEARCH_RANKS": str(ranks), "DPRO_SEARCH_MEETING": meeting}
            for rank in range(ranks)
        ]
        run_ranks(spec, folder, env, hosts=hosts, on_poll=on_poll)
        return [_times(folder / f"rank{rank}.json") for rank in range(ranks)]


def _times(path: Path) -> RankTimes:
    try:
        return msgspec.json.decode(path.read_bytes(), type=RankTimes)
    except (OSError, msgspec.DecodeError) as error:
        raise TraceFormatError(f"{path.name}: the process ended well, but did not write its times: {error}") from error
