"""`Scheme`: one synchronisation scheme with its parameters, and its text, ``ssp(staleness=3)``.

A scheme says by what rule workers commit their updates. Most keep a global model at a parameter server; `LocalSgd`, `Diloco` and
`Accumulation` use collectives among the workers.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from dpro_search.errors import InputError

_TEXT = re.compile(r"\s*([a-z-]+)\s*(?:\(([^()]*)\))?\s*")


@dataclass(frozen=True)
class Scheme:
    """One scheme. All parameters are positive numbers, or None where a default is found while the job runs.

    Attributes
    ----------
    name
        What its text begins with.
    collective
        Whether workers exchange updates among themselves; else through a parameter server.
    needs_loss
        Whether its decisions depend on the training loss.
    """

    name: ClassVar[str]
    collective: ClassVar[bool] = False
    may_be_zero: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if field.name in self.may_be_zero and value == 0:
                continue
            if not 0 < value <= 1e9:
                raise InputError(f"{self.name}: {field.name} must be > 0 and at most 1e9, not {value}")

    @property
    def needs_loss(self) -> bool:
        return False

    @property
    def parameters(self) -> dict[str, int | float]:
        """Those that are set, by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        words = ", ".join(f"{name}={value:g}" for name, value in self.parameters.items())
        return f"{self.name}({words})" if words else self.name


@dataclass(frozen=True)
class Bsp(Scheme):
    """Bulk synchronous parallel: every worker commits after each step and waits for all others."""

    name = "bsp"


@dataclass(frozen=True)
class Ssp(Scheme):
    """Stale synchronous parallel: a worker may be at most `staleness` commits ahead of the slowest (Ho et al., 2013)."""

    staleness: int = 3

    name = "ssp"
    may_be_zero = ("staleness",)


@dataclass(frozen=True)
class Asp(Scheme):
    """Asynchronous parallel: every worker commits after each step, none waits."""

    name = "asp"


@dataclass(frozen=True)
class Adsp(Scheme):
    """ADSP: nobody waits, all workers commit equally often, and the rate is searched online (AAAI 2020, arXiv 1911.06949).

    Attributes
    ----------
    commits
        Commits of each worker in a check period; None: searched.
    period_s
        The check period, seconds; None: ten steps and commits of the slowest worker.
    epoch_periods
        Check periods from one search to the next.
    """

    commits: int | None = None
    period_s: float | None = None
    epoch_periods: int = 40

    name = "adsp"

    @property
    def needs_loss(self) -> bool:
        return self.commits is None


@dataclass(frozen=True)
class Adacomm(Scheme):
    """ADACOMM: all workers commit and wait after some local steps, fewer as the loss falls (Wang and Joshi, 2019).

    Attributes
    ----------
    steps
        Local steps at the start.
    adapt_s
        Seconds between changes.
    """

    steps: int = 8
    adapt_s: float = 10.0

    name = "adacomm"

    @property
    def needs_loss(self) -> bool:
        return True


@dataclass(frozen=True)
class FixedAdacomm(Scheme):
    """All workers commit and wait after the same number of local steps."""

    steps: int = 8

    name = "fixed-adacomm"


@dataclass(frozen=True)
class LocalSgd(Scheme):
    """Models are averaged with an all-reduce after every `steps` local steps."""

    steps: int = 8

    name = "local-sgd"
    collective = True


@dataclass(frozen=True)
class Diloco(Scheme):
    """Local steps, then an outer SGD step with Nesterov momentum on the averaged change (Douillard et al., 2023)."""

    steps: int = 8
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    name = "diloco"
    collective = True
    may_be_zero = ("outer_momentum",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.outer_momentum >= 1:
            raise InputError(f"diloco: outer_momentum must be below 1, not {self.outer_momentum}")


@dataclass(frozen=True)
class Accumulation(Scheme):
    """Synchronous steps in which a worker's share of the batches is proportional to its speed.

    Attributes
    ----------
    batches
        Micro-batches of all workers in a step; None: twice the number of workers.
    """

    batches: int | None = None

    name = "accumulation"
    collective = True


SCHEMES: dict[str, type[Scheme]] = {
    each.name: each for each in (Bsp, Ssp, Asp, Adsp, Adacomm, FixedAdacomm, LocalSgd, Diloco, Accumulation)
}


def parse_scheme(text: str | Scheme) -> Scheme:
    """The scheme of a text such as ``adsp(commits=2, period_s=1.5)``.

    Raises
    ------
    InputError
        An unknown scheme or parameter, a value of the wrong type or out of range.
    """
    if isinstance(text, Scheme):
        return text
    match = _TEXT.fullmatch(text)
    if match is None or match[1] not in SCHEMES:
        raise InputError(f"synchronisation: {text!r} is none of {', '.join(SCHEMES)}; write one like 'ssp(staleness=3)'")
    kind = SCHEMES[match[1]]
    types = {field.name: field.type for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for part in filter(None, map(str.strip, (match[2] or "").split(","))):
        name, _, value = map(str.strip, part.partition("="))
        if name not in types:
            raise InputError(f"synchronisation: {kind.name} has no parameter {name!r} (it has: {', '.join(types) or 'none'})")
        if name in values:
            raise InputError(f"synchronisation: {kind.name}: {name} is given twice")
        values[name] = _number(kind.name, name, value, whole="int" in str(types[name]))
    return kind(**values)


def _number(scheme: str, name: str, value: str, *, whole: bool) -> int | float:
    try:
        return int(value) if whole else float(value)
    except ValueError:
        kind = "a whole number" if whole else "a number"
        raise InputError(f"synchronisation: {scheme}: {name} must be {kind}, not {value!r}") from None
