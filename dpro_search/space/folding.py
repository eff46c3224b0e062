"""Folding: ranks that behave alike are built once, with a multiplicity, so that 10,000 ranks replay as fast as a few.

Two ranks are alike if they compute alike and each exchanges data with ranks that are alike. What comes from another rank then comes
from the one that stands for that rank's class, and in the folded graph every class has exactly the times that each of its ranks has
in the whole graph. (The classes are a stable colouring, the folded graph is its quotient: Paige & Tarjan, "Three partition
refinement algorithms", 1987. Partners lie along the axes of a ring or a hypercube, so one pass over the axes is enough.)

==================  ==============================================================================================
rendezvous          everybody waits for the last rank: a class is what computes alike
ring                a class is what the ring looks like from a rank on: one straggler distinguishes all ranks
halving-doubling    likewise for the hypercube
flows over links    only where two flows can never meet on a link, or the shares would depend on the multiplicity:
                    a ring with a host for each rank, halving-doubling if all ranks are alike; else all stay apart
parameter server    the servers' queues hold the pushes of all ranks: all ranks stay apart (KVStore: `kvstore_job.folded`)
==================  ==============================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Ints
from dpro_search.errors import GraphError
from dpro_search.space.collectives import halving_doubling_partners
from dpro_search.space.data_parallel import DataParallelJob
from dpro_search.space.job_graph import build_rows
from dpro_search.space.network import ParameterServer, Rendezvous, Ring
from dpro_search.space.replay_graph import Int32s, ReplayGraph

_MOST_OPS = 20_000_000


@dataclass(frozen=True, kw_only=True, eq=False)
class FoldedJob:
    """A job's graph in which one rank of each class stands for all."""

    graph: ReplayGraph  # Its ranks are the classes (after them come servers).
    rank_class: Ints  # Class of each rank, [ranks]; classes are numbered by their first rank.
    representative: Ints  # First rank of each class, [classes].

    @property
    def multiplicity(self) -> Ints:
        """Ranks in each class, [classes]."""
        return np.bincount(self.rank_class)

    def ops_of_rank(self, rank: int) -> Int32s:
        """Ops of the graph that stand for a rank's ops, in the order of its ops in the whole graph."""
        return np.flatnonzero(self.graph.rank_of_op == self.rank_class[rank]).astype(np.int32)

    def unfold(self, values: npt.NDArray[Any], rank: int) -> npt.NDArray[Any]:
        """A rank's part of what a replay found for the graph's ops, such as ``timeline.times.end_us``.

        Parameters
        ----------
        values
            [iterations * ops of the graph].

        Returns
        -------
        ndarray
            [iterations, ops of the rank].
        """
        return values.reshape(-1, len(self.graph))[:, self.ops_of_rank(rank)]


def fold(job: DataParallelJob, *, most_ops: int = _MOST_OPS) -> FoldedJob:
    """Fold a job; the whole graph is never made.

    Raises
    ------
    GraphError
        So few ranks are alike that the graph would have more than `most_ops` ops.
    """
    rank_class = classes(job)
    _, representative = np.unique(rank_class, return_index=True)
    ops = job.most_ops(len(representative))
    if ops > most_ops:
        summary = f"{job.ranks} ranks under {type(job.scheme).__name__} fold into {len(representative)} classes, up to {ops:,} ops"
        advice = "fuse tensors into larger groups" if isinstance(job.scheme, Rendezvous) else "use Rendezvous, which folds better,"
        raise GraphError(f"{summary} (most_ops is {most_ops:,}): {advice} or raise most_ops")
    return FoldedJob(graph=build_rows(job, representative, rank_class), rank_class=rank_class, representative=representative)


def classes(job: DataParallelJob) -> Ints:
    """Class of each rank, [ranks], numbered by their first ranks; every rank its own class where folding would not be exact."""
    colour = _refined(_distinct(job.step_of_rank), job.compute_factor)
    if isinstance(job.scheme, Rendezvous):
        return _by_first_rank(colour)
    apart = np.arange(job.ranks)
    if isinstance(job.scheme, ParameterServer):
        return apart
    assert job.network is not None  # the job was checked
    flows = job.network.flows
    if flows and len(np.unique(job.network.host)) < job.ranks:
        return apart
    if isinstance(job.scheme, Ring):
        return _by_first_rank(_ring_colours(job, colour))
    class_of_rank = _by_first_rank(_hypercube_colours(job, colour))
    return apart if flows and class_of_rank.any() else class_of_rank


def _ring_colours(job: DataParallelJob, colour: Ints) -> Ints:
    """What the ring looks like from each rank on: colours of 1, 2, 4, ... ranks, until all are seen."""
    rank = np.arange(job.ranks)
    colour = _with_rates(job, colour, (rank + 1) % job.ranks)
    seen = 1
    while seen < job.ranks:
        colour = _refined(colour, np.roll(colour, -seen))
        seen *= 2
    return colour


def _hypercube_colours(job: DataParallelJob, colour: Ints) -> Ints:
    """What the hypercube looks like from each rank: one dimension after the other; a surplus rank is what its keeper is."""
    cube = halving_doubling_partners(job.ranks)
    colour = _refined(_with_rates(job, colour, cube.mate), cube.surplus)
    for partner in cube.partner:
        colour = _with_rates(job, colour, partner)
    colour = _refined(colour, np.where(cube.mate >= 0, colour[cube.mate], -1))
    for partner in cube.partner:
        colour = _refined(colour, np.where(partner >= 0, colour[partner], -1))
    return _refined(colour, np.where(cube.surplus, colour[cube.mate], -1))


def _with_rates(job: DataParallelJob, colour: Ints, partner: Ints) -> Ints:
    """Colours refined by the rates at which ranks send to a partner (-1: none); for flows, by the rates of their own links."""
    network = job.network
    assert network is not None
    host = network.host
    if network.flows:
        return _refined(_refined(colour, network.transmit_bytes_per_us[host]), network.receive_bytes_per_us[host])
    return _refined(colour, np.where(partner >= 0, network.idle_rate(host, host[partner]), -1.0))


def _refined(colour: Ints, other: npt.NDArray[Any]) -> Ints:
    """Colours that differ where either does."""
    second = _distinct(other)
    return _distinct(colour * (second.max() + 1) + second)


def _distinct(values: npt.NDArray[Any]) -> Ints:
    """Number of each entry's value among the distinct ones."""
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


def _by_first_rank(colour: Ints) -> Ints:
    _, first, inverse = np.unique(colour, return_index=True, return_inverse=True)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return number[inverse]
