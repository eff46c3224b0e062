"""`Scenario`: one question about a job: a plan, another cluster, parts that are faster or slower; and how it is written as text.

Whatever changes a job has a name and a unit, and the same text everywhere: ``--set``, ``--what-if``, the Python API, the rows of
`diagnose`:

    fusion_threshold_bytes=16MiB  cycle_time_us=5ms  servers=4  p3=on           settings of a `Plan`
    ranks=64  cores=2  rate=200gbit                                             the cluster
    compute=0.9  rank1.compute=0.9  bandwidth=2  communication=0                scales of what was recorded
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dpro_search.cluster import Cluster, parse_cluster
from dpro_search.errors import InputError
from dpro_search.quantities import parse_bytes, parse_count, parse_rate_bps, parse_switch, parse_us
from dpro_search.space.cluster import ClusterSpec, spec_on
from dpro_search.space.plan import Plan, setting_types

ScaledPart = Literal["compute", "bandwidth", "communication"]
CLUSTER_SETTINGS = ("ranks", "cores", "rate")
SCALES = ("compute", "bandwidth", "communication")
_SCALE = re.compile(r"(?:rank(?P<rank>\d+)\.)?(?P<what>compute|bandwidth|communication)=(?P<factor>[0-9.]+)x?")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A part of the job that takes another time.

    Attributes
    ----------
    text
        As it was written.
    what, factor
        "compute" and "communication" take that many times as long, "bandwidth" is that many times as high.
    rank
        The only rank whose compute or communication changes; None: all.
    """

    text: str
    what: ScaledPart
    factor: float
    rank: int | None = None

    def check_rank(self, ranks: int) -> None:
        """Raise `InputError` if a job of so many ranks has none of this number."""
        if self.rank is not None and self.rank >= ranks:
            raise InputError(f"'{self.text}': the trace has ranks 0 to {ranks - 1}")

    @staticmethod
    def parse(text: str) -> Scale:
        """Read ``compute=0.9``, ``rank1.compute=0.9``, ``bandwidth=2`` or ``communication=0``; else raise `InputError`."""
        match = _SCALE.fullmatch(text.strip())
        if not match or (match["rank"] and match["what"] == "bandwidth"):
            raise InputError(f"'{text}': write compute=0.9, rank1.compute=0.9, bandwidth=2 or communication=0")
        factor = _number(text, match["factor"])
        if match["what"] == "bandwidth" and factor <= 0:
            raise InputError(f"'{text}': the factor must be above 0")
        what: ScaledPart = match["what"]  # type: ignore[assignment]
        return Scale(text=text, what=what, factor=factor, rank=int(match["rank"]) if match["rank"] else None)


@dataclass(frozen=True, kw_only=True)
class ClusterChange:
    """What is different about the cluster; None leaves it as recorded.

    Attributes
    ----------
    machines
        A cluster in place of the recorded one; what follows changes it further.
    ranks, cores
        Number of ranks (None with `machines`: one on each of their devices), and of the cores that they share.
    rate_bps
        Link rate per host and direction in bits a second; `math.inf`: no limit.
    """

    machines: Cluster | None = None
    ranks: int | None = None
    cores: int | None = None
    rate_bps: float | None = None

    def applied(self, recorded: ClusterSpec) -> ClusterSpec:
        """What the change makes of a cluster; raises `InputError` if the machines have fewer devices than ranks are asked for."""
        if self.machines is None:
            return recorded.changed(ranks=self.ranks, cores=self.cores, rate_bps=self.rate_bps)
        return spec_on(self.machines, self.ranks).spec.changed(cores=self.cores, rate_bps=self.rate_bps)

    @property
    def left_out(self) -> tuple[str, ...]:
        """What of the machines predictions do not know, a sentence each."""
        return () if self.machines is None else spec_on(self.machines, self.ranks).left_out


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A job under a plan, on another cluster, with other speeds. The empty scenario is the job as recorded.

    Attributes
    ----------
    plan
        Changes of strategy.
    groups
        So many contiguous tensor groups in place of the plan's; None: the plan's.
    cluster
        Changes of the cluster.
    scales
        Changes of speed, in the order in which they apply.
    """

    plan: Plan = field(default_factory=Plan)
    groups: int | None = None
    cluster: ClusterChange = field(default_factory=ClusterChange)
    scales: tuple[Scale, ...] = ()

    @property
    def is_recorded(self) -> bool:
        """Whether nothing changes."""
        return self == Scenario()

    def on(self, cluster: str | None) -> Scenario:
        """The scenario on a named cluster, like "16xhgx-h100" or a TOML file (`cluster.parse_cluster`); None: as it is."""
        return self if cluster is None else replace(self, cluster=replace(self.cluster, machines=parse_cluster(cluster)))

    def changed(self, texts: Iterable[str], *, known: Collection[str], job: str) -> Scenario:
        """The scenario with changes written as ``name=value``, in order.

        Parameters
        ----------
        known
            What can be changed about the job: names of settings of a plan, "groups", `CLUSTER_SETTINGS`, `SCALES`.
        job
            What the kind of job is called in errors: "a Horovod job".

        Raises
        ------
        InputError
            A name that the job does not have (with the nearest one that it has), or a value that cannot be read.
        """
        found = self
        for text in texts:
            for part in re.split(r"\s*,\s*(?=[a-z])", text.strip()):
                found = found._with(part, known, job)
        return found

    def _with(self, text: str, known: Collection[str], job: str) -> Scenario:
        name, equals, value = (piece.strip() for piece in text.partition("="))
        setting = name.rpartition(".")[2] if re.match(r"rank\d+\.", name) else name
        if not equals or setting not in known:
            near = difflib.get_close_matches(setting, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InputError(f"'{text}': {job} has no knob '{setting}'{hint} (known: {', '.join(known)})")
        if setting in SCALES:
            return replace(self, scales=(*self.scales, Scale.parse(f"{name}={value}")))
        try:
            if setting == "groups":
                return replace(self, groups=parse_count(value))
            if setting == "rate":
                rate_bps = parse_rate_bps(value)
                return replace(self, cluster=replace(self.cluster, rate_bps=float("inf") if rate_bps is None else rate_bps))
            if setting == "ranks":
                return replace(self, cluster=replace(self.cluster, ranks=parse_count(value)))
            if setting == "cores":
                return replace(self, cluster=replace(self.cluster, cores=parse_count(value)))
            return replace(self, plan=self.plan.changed(**{setting: readers()[setting](value)}))
        except InputError as error:
            raise InputError(f"{name}={value}: {error}") from error


def readers() -> dict[str, Callable[[str], Any]]:
    """How the value of each setting is read from text, by its name and type; settings that are lists cannot be written so."""
    found: dict[str, Callable[[str], Any]] = {}
    for name, hint in setting_types().items():
        kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType] or [hint]
        if name.endswith("_bytes"):
            found[name] = parse_bytes
        elif name.endswith("_us"):
            found[name] = parse_us
        elif bool in kinds:
            found[name] = parse_switch
        elif int in kinds:
            found[name] = parse_count
        elif typing.get_origin(kinds[0]) is Literal:
            found[name] = _one_of(typing.get_args(kinds[0]))
    return found


def _one_of(values: Sequence[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in values:
            raise InputError(f"'{text}' is none of {', '.join(values)}")
        return text

    return read


def _number(text: str, factor: str) -> float:
    try:
        return float(factor)
    except ValueError as error:
        raise InputError(f"'{text}': '{factor}' is not a number") from error
