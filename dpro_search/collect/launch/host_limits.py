"""Limits of a job's hosts on this machine in addition to their links, and changes while the job runs: `HostLimits`.

    HostLimits.parse("1,1,0.5,0.25", ["30s:h2.cpus=0.25", "60s:h0.rate=50mbit"])

Hosts are ``h0 .. hN-1``. A quota is in cores: a host of 0.25 gets a quarter of a core's time, on whichever cores it runs.
A link's rate is limited by a token bucket, which fills while the link is idle: `burst_bytes`, `burst_us`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dpro_search.errors import InputError
from dpro_search.quantities import parse_number, parse_rate_bps, parse_us

LEAST_CPUS = 0.01  # the kernel gives a group at least a millisecond, in at most a second
_CHANGE = re.compile(r"(?P<after>[^:]+):h(?P<host>\d+)\.(?P<what>cpus|rate)=(?P<value>.+)", re.ASCII)
_LEAST_BURST_BYTES = 128 * 1024
_BURST_US = 500.0  # at high rates, what the kernel's timers need


@dataclass(frozen=True, kw_only=True)
class CpusChange:
    """A host's quota from `after_s` on, which is since the job's processes began to start."""

    after_s: float
    host: int
    cpus: float


@dataclass(frozen=True, kw_only=True)
class RateChange:
    """The rate of a host's link from `after_s` on, in each direction; None: not limited."""

    after_s: float
    host: int
    rate_bps: float | None


HostChange = CpusChange | RateChange


@dataclass(frozen=True, kw_only=True)
class HostLimits:
    """Quotas of hosts, and changes.

    Attributes
    ----------
    cpus
        Of each host, in cores; empty: no host has one. Hosts behind these, of parameter servers, have none.
    changes_text
        As given: ``30s:h2.cpus=0.25``.
    """

    cpus: tuple[float, ...] = ()
    changes_text: tuple[str, ...] = ()

    @staticmethod
    def parse(cpus: str | None, changes: Sequence[str] = ()) -> HostLimits:
        """Limits from the command line; raises `InputError` for what is not one."""
        numbers = () if cpus is None else tuple(parse_number(text.strip()) for text in cpus.split(","))
        return HostLimits(cpus=numbers, changes_text=tuple(changes))

    def __post_init__(self) -> None:
        for cpus in self.cpus:
            _require_cpus(cpus, "--host-cpus")
        for text in self.changes_text:
            parsed_change(text)

    def __bool__(self) -> bool:
        return bool(self.cpus or self.changes_text)

    @property
    def changes(self) -> tuple[HostChange, ...]:
        """In the order of time."""
        return tuple(sorted((parsed_change(text) for text in self.changes_text), key=lambda change: change.after_s))

    @property
    def has_quotas(self) -> bool:
        """Whether a host has a quota, now or later."""
        return bool(self.cpus) or any(isinstance(change, CpusChange) for change in self.changes)

    def check_hosts(self, count: int) -> None:
        """Raise `InputError` unless these are limits of so many hosts."""
        if self.cpus and len(self.cpus) != count:
            raise InputError(f"--host-cpus: {len(self.cpus)} quotas, and {count} hosts; give one for each host, like 1,0.5")
        for text, change in zip(self.changes_text, map(parsed_change, self.changes_text), strict=True):
            if change.host >= count:
                raise InputError(f"--host-change {text}: there are {count} hosts, h0 to h{count - 1}")


NO_LIMITS = HostLimits()


def parsed_change(text: str) -> HostChange:
    """The change that "30s:h2.cpus=0.25" or "30s:h2.rate=50mbit" asks for; raises `InputError` for anything else."""
    match = _CHANGE.fullmatch(text.strip())
    if match is None:
        raise InputError(f"--host-change {text}: write it like 30s:h2.cpus=0.25 or 30s:h2.rate=50mbit")
    after_s, host = parse_us(match["after"]) / 1e6, int(match["host"])
    if match["what"] == "rate":
        return RateChange(after_s=after_s, host=host, rate_bps=parse_rate_bps(match["value"]))
    cpus = parse_number(match["value"])
    _require_cpus(cpus, f"--host-change {text}")
    return CpusChange(after_s=after_s, host=host, cpus=cpus)


def _require_cpus(cpus: float, where: str) -> None:
    if not LEAST_CPUS <= cpus < float("inf"):
        raise InputError(f"{where}: a host's quota is a number of cores, at least {LEAST_CPUS}, not {cpus:g}")


def burst_bytes(rate_bps: float) -> int:
    """Bytes that a link lets pass at once when it has rested long enough."""
    return max(_LEAST_BURST_BYTES, int(rate_bps / 8e6 * _BURST_US))


def burst_us(rate_bps: float | None) -> float:
    """Time that a link has to rest to save that up, which is what it is ahead by then; 0 without a limit."""
    return 0.0 if rate_bps is None else burst_bytes(rate_bps) * 8e6 / rate_bps
