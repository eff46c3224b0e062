"""`ServerReplay`: the op-level replay of a job with parameter servers, with its costs as recorded or drawn anew.

If servers share the workers' hosts, the critical path may change with a few per cent of a cost, and a search finds plans that are
fast by chance (the winner's curse). Costs are therefore drawn with their spread between recordings of one job and between
iterations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.graph.dataflow import OpKind
from dpro_search.replay.iterations import IterationTimes
from dpro_search.replay.monte_carlo import iterations_of_draws_us
from dpro_search.replay.path.critical_path import path_shares
from dpro_search.replay.replayer import replay, settled_us, varied_us
from dpro_search.replay.sensitivity import Change
from dpro_search.replay.timeline import Timeline
from dpro_search.space.replay_graph import ReplayGraph
from dpro_search.space.servers.byteps_job import BytepsJob
from dpro_search.space.servers.cost_spread import CostFactors, CostSpread
from dpro_search.space.servers.kvstore_job import KvstoreJob

ServerJob = TypeVar("ServerJob", KvstoreJob, BytepsJob)
_ITERATIONS = 10  # of a replay with costs drawn anew
_OPERATORS = (OpKind.FORWARD, OpKind.BACKWARD, OpKind.UPDATE)
_PART_OF_KIND = {"FORWARD": "compute", "BACKWARD": "compute", "UPDATE": "compute", "COMM": "exposed_communication"}


@dataclass(frozen=True, kw_only=True)
class ServerReplay(Generic[ServerJob]):
    """Workers and servers, and the changes of their speeds."""

    job: ServerJob  # Under a plan, with workers that behave alike folded.
    workers: int  # Number of workers before they were folded.
    build: Callable[[ServerJob], ReplayGraph]
    changes: tuple[Change, ...]
    cost_spread: CostSpread

    @cached_property
    def graph(self) -> ReplayGraph:
        """The graph of one iteration."""
        return self._changed_graph(self.job)

    @property
    def op_count(self) -> int:
        return len(self.graph)

    @property
    def folded_ranks(self) -> frozenset[int]:
        """Ranks of the graph that stand for several workers: questions about one of them cannot be answered."""
        classes = self.job.classes
        if classes is None:
            return frozenset()
        return frozenset(rank for rank, members in zip(classes.rank, classes.members, strict=False) if members > 1)

    def iterations(self, *, detailed: bool = False) -> IterationTimes:
        if not detailed:
            iteration_us, settled = settled_us(self.graph)
            return IterationTimes(iteration_us=iteration_us, settled=settled)
        timeline = self.timeline()
        return IterationTimes(iteration_us=timeline.iteration_us, settled=timeline.settled, breakdown_us=breakdown_us(timeline))

    def timeline(self) -> Timeline:
        return replay(self.graph)

    def sampled_us(self, *, samples: int, seed: int = 0, on_sample: Callable[[], None] = lambda: None) -> Floats:
        draws = self.cost_spread.drawn(self.workers, _ITERATIONS, samples, seed)
        return iterations_of_draws_us(self._iteration_us, draws, on_sample=on_sample)

    def _iteration_us(self, factors: CostFactors) -> float:
        """Mean iteration time at some costs."""
        if self.job.classes is not None:
            slowest = self.job.classes.slowest
            factors = replace(factors, compute=slowest(factors.compute), step=slowest(factors.step))
        graph = self._changed_graph(self.job.at_costs(factors))
        return varied_us(graph, step_factors(graph, self.job, factors.step))

    def _changed_graph(self, job: ServerJob) -> ReplayGraph:
        graph = self.build(job)
        for change in self.changes:
            graph = change.apply(graph)
        return graph


def step_factors(graph: ReplayGraph, job: KvstoreJob | BytepsJob, step: Floats) -> Floats:
    """Factors on the duration of each op in each iteration, [iterations, ops]: `CostFactors.step` for workers' operators.

    Cores are the first devices of these graphs, in the order in which workers, then servers name them.
    """
    cores = list(dict.fromkeys((*job.worker_core, *job.server_core)))
    factors = np.ones((len(step), len(graph)))
    for worker, core in enumerate(job.worker_core):
        factors[:, (graph.device == cores.index(core)) & np.isin(graph.kind, _OPERATORS)] = step[:, worker, None]
    return factors


def breakdown_us(timeline: Timeline) -> dict[str, float]:
    """An iteration by what its critical path does: compute of workers, communication that nothing hides, the servers' work."""
    parts = {"compute": 0.0, "exposed_communication": 0.0, "server": 0.0}
    for (_, kind), us in path_shares(timeline).by_rank_and_kind.items():
        parts[_PART_OF_KIND.get(kind, "server")] += us
    total = sum(parts.values()) or 1.0
    return {part: us / total * timeline.iteration_us for part, us in parts.items()}
