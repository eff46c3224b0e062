"""`WhichScheme`: the transformation that changes the synchronisation scheme, with the settings that are worth a look."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import Any

from dpro_search.runtime.schemes import (
    Accumulation,
    Adacomm,
    Adsp,
    Asp,
    Bsp,
    Diloco,
    FixedAdacomm,
    LocalSgd,
    Scheme,
    Ssp,
    parse_scheme,
)
from dpro_search.space.plan import Plan
from dpro_search.space.transformations import JobFacts
from dpro_search.space.transformations._base import RECORDED, Choice, Knob, grid

_STALENESS = (1, 2, 3, 4, 8, 16)
_STEPS = (2, 4, 8, 16, 32, 64)
_ADAPTATIONS = 8  # of ADACOMM's steps in a training as long as the longest recorded one
_MICRO_BATCHES = (2, 4, 8)  # of each worker, mean


class WhichScheme(Knob):
    """All schemes; those with an outer momentum as they were recorded."""

    name = "synchronisation"
    fields = ("synchronisation",)

    def __init__(
        self, job: JobFacts, *, workers: int, longest_s: float, momentum: Collection[str], collectives: bool = True
    ) -> None:
        """The schemes of a job.

        Parameters
        ----------
        momentum
            Texts of those with an outer momentum of which a run is there.
        collectives
            Whether there is an engine for those without a parameter server.
        """
        super().__init__(job)
        self._collectives = collectives
        self._workers, self._longest_s, self._momentum = workers, longest_s, momentum

    def legal(self, plan: Plan) -> str | None:
        scheme = parse_scheme(plan.synchronisation or str(self.job.values["synchronisation"]))
        if scheme.collective and not self._collectives:
            return f"synchronisation: {scheme.name} uses all-reduces, which MXNet's KVStore has not"
        if isinstance(scheme, Diloco) and str(scheme) not in self._momentum:
            return f"synchronisation: what the outer momentum of {scheme} does to the job is not known: record a short run of it"
        return None

    @cached_property
    def choice(self) -> Choice:
        families: dict[str, list[str]] = {}
        for scheme in self.schemes():
            families.setdefault(scheme.name, []).append(str(scheme))
        recorded: Mapping[str, tuple[Mapping[str, Any], ...]] = {RECORDED: ({},)}
        grids = {**recorded, **{name: grid("synchronisation", texts) for name, texts in families.items()}}
        return Choice(name=self.name, fields=self.fields, grids=grids)

    def schemes(self) -> Iterator[Scheme]:
        """All that a search tries, family by family."""
        yield from (Bsp(), Asp(), Adsp(), *(Adsp(commits=n) for n in (1, 2, 4, 8, 16)))
        yield from (Ssp(staleness=n) for n in _STALENESS)
        yield from (FixedAdacomm(steps=n) for n in _STEPS)
        adapt_s = float(f"{self._longest_s / _ADAPTATIONS:.2g}")
        yield from (Adacomm(steps=n, adapt_s=adapt_s) for n in _STEPS)
        if not self._collectives:
            return
        yield from (LocalSgd(steps=n) for n in _STEPS)
        yield from (Accumulation(batches=n * self._workers) for n in _MICRO_BATCHES)
        yield from (parse_scheme(text) for text in sorted(self._momentum))
