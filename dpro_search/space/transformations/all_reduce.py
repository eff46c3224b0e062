"""Which algorithm adds up an all-reduce of Horovod on Open MPI, by its size."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from dpro_search.space.plan import Plan
from dpro_search.space.schemes import HorovodSettings
from dpro_search.space.transformations._base import RECORDED, Choice, JobFacts, Knob, grid

if TYPE_CHECKING:
    from dpro_search.costmodel.collectives.all_reduce_choice import AllReduceChoice

_LOG2_BOUNDARIES = range(12, 25)  # 4 KiB to 16 MiB


class AllReduceAlgorithms(Knob):
    """One algorithm for all sizes, two with a boundary between them, or whichever is the fastest by itself.

    Parameters
    ----------
    known
        What they take.
    """

    name = "all-reduce"
    fields = ("allreduce_algorithms",)

    def __init__(self, job: JobFacts, known: AllReduceChoice) -> None:
        self.known = known
        super().__init__(job)

    def legal(self, plan: Plan) -> str | None:
        return self.known.refusal([algorithm for _, algorithm in HorovodSettings.of(plan).allreduce_algorithms or ()])

    @cached_property
    def choice(self) -> Choice:
        algorithms = self.known.algorithms
        alone = [((0, algorithm),) for algorithm in algorithms]
        grids: dict[str, tuple[Mapping[str, object], ...]] = {RECORDED: ({},), "one": grid("allreduce_algorithms", alone)}
        for small in algorithms:
            for large in algorithms:
                if small != large:
                    cuts = [((0, small), (2**power, large)) for power in _LOG2_BOUNDARIES]
                    grids[f"{small}, then {large}"] = grid("allreduce_algorithms", cuts)
        fastest = self.known.fastest()
        if all({"allreduce_algorithms": fastest} not in points for points in grids.values()):
            grids["fastest"] = grid("allreduce_algorithms", [fastest])
        return Choice(name=self.name, fields=self.fields, grids=grids)
