"""Ratio of the duration of all-reduces by a chosen algorithm to that by the algorithm which the library chooses.

Both are predicted for all-reduces by themselves, from a table that was measured on the library ('dpro-search fit --collect comm');
their ratio, size by size, is what a recorded job's all-reduces are changed by.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.costmodel.collectives.counts import HIERARCHY, MpiAlgorithm, Points
from dpro_search.costmodel.collectives.series import series_name
from dpro_search.errors import InputError

if TYPE_CHECKING:
    from dpro_search.costmodel.collectives.model_file import CommunicationModel

_BACKEND, _OWN = "mpi", "default"
_OCTAVES, _STEPS = (10, 28), 4  # 1 KiB to 256 MiB, and sizes in an octave


@dataclass(frozen=True, kw_only=True)
class AllReduceChoice:
    """Algorithms that a library can be set to, on one cluster."""

    from_bytes: Floats  # Sizes at which ratios change, ascending from 0, [sizes].
    # Duration of an all-reduce over one by the library's own choice, by algorithm, [sizes] each.
    ratio: Mapping[MpiAlgorithm, Floats]
    ranks_per_host: int = 1  # On each host of the cluster.

    @staticmethod
    def of(
        model: CommunicationModel, ranks: int, rate_bps: float | None, cores: int, ranks_per_host: int | None = 1
    ) -> AllReduceChoice:
        """Ratios that a model of Open MPI's algorithms predicts for a cluster.

        Parameters
        ----------
        cores
            That all ranks share.
        ranks_per_host
            On each host; None: they differ.

        Raises
        ------
        InputError
            The model has no series of Open MPI's own choice, or of no other algorithm, or predicts nothing for such a cluster.
        """
        if ranks_per_host is None:
            raise InputError("to choose an algorithm, hosts must have one number of ranks: others are not measured in isolation")
        names = {algorithm: series_name(_BACKEND, algorithm, ranks_per_host) for algorithm in (_OWN, *get_args(MpiAlgorithm))}
        others = [algorithm for algorithm in get_args(MpiAlgorithm) if names[algorithm] in model.costs]
        if names[_OWN] not in model.costs or not others:
            hosts = "" if ranks_per_host == 1 else f" --ranks-per-host {ranks_per_host}"
            raise InputError(
                f"the model has {'; '.join(model.costs)}: to choose an algorithm, it must have what Open MPI takes by its"
                f" own choice and by others; measure both with 'dpro-search fit --collect comm --backends mpi{hosts}'"
            )
        low, high = _OCTAVES
        sizes = np.exp2(np.arange(low, high + 1 / _STEPS, 1 / _STEPS))
        points = Points.on(rate_bps, cores, size_bytes=sizes, ranks=ranks)
        library_us = model.predict(names[_OWN], points).us
        ratio = {algorithm: model.predict(names[algorithm], points).us / library_us for algorithm in others}
        if not all(np.isfinite(values).all() for values in ratio.values()):
            raise InputError(f"the model predicts nothing for {ranks} ranks at this rate: measure all-reduces there")
        edges = sizes * 2 ** (-0.5 / _STEPS)  # each size stands for those around it
        return AllReduceChoice(from_bytes=np.concatenate(([0.0], edges[1:])), ratio=ratio, ranks_per_host=ranks_per_host)

    @property
    def algorithms(self) -> tuple[MpiAlgorithm, ...]:
        """Algorithms whose ratios are known."""
        return tuple(self.ratio)

    def refusal(self, algorithms: Sequence[MpiAlgorithm]) -> str | None:
        """Why not all of these can be chosen; None: they can."""
        unknown = next((algorithm for algorithm in algorithms if algorithm not in self.ratio), None)
        if unknown == HIERARCHY and self.ranks_per_host == 1:
            return "allreduce_algorithms: every host has one rank, so that a hierarchy is nothing but its all-reduce among hosts"
        if unknown is not None:
            return f"allreduce_algorithms: nothing is known of {unknown}, only of {', '.join(self.ratio)}"
        return None

    def ratios(self, ranges: Sequence[tuple[int, MpiAlgorithm]]) -> tuple[Floats, Floats]:
        """(bytes, ratio) from 0 bytes on, where all-reduces of at least so many bytes are by the algorithms of `ranges`.

        Raises `InputError` for an algorithm that is not known.
        """
        reason = self.refusal([algorithm for _, algorithm in ranges])
        if reason is not None:
            raise InputError(f"plan: {reason}")
        starts = np.array([start for start, _ in ranges], dtype=np.float64)
        edges = np.union1d(self.from_bytes, starts)
        size = np.searchsorted(self.from_bytes, edges, side="right") - 1
        chosen = np.searchsorted(starts, edges, side="right") - 1
        by_range = np.stack([self.ratio[algorithm] for _, algorithm in ranges])
        ratio: Floats = by_range[chosen, size]
        return edges, ratio

    def fastest(self) -> tuple[tuple[int, MpiAlgorithm], ...]:
        """The ranges of sizes in which each algorithm is the fastest."""
        winner = np.stack(list(self.ratio.values())).argmin(axis=0)
        first = [0, *(i for i, (one, other) in enumerate(itertools.pairwise(winner.tolist()), start=1) if one != other)]
        return tuple((round(float(self.from_bytes[i])), self.algorithms[winner[i]]) for i in first)
