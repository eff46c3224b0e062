"""`TrainingReplay`: a training that was simulated to its target loss, and its graph of ops, for timelines and critical paths."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.kinds._diagnosis import RankFacts
from dpro_search.replay.iterations import IterationTimes
from dpro_search.replay.replayer import replay
from dpro_search.replay.synchronisation import AppliedCommit, Simulated, TimeToLoss
from dpro_search.replay.timeline import Timeline
from dpro_search.runtime.schemes import Pace
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.replay_graph import ReplayGraph

_MOST_COMMITS = 5_000  # that are shown: the first ones


class WorkerFacts(RankFacts, frozen=True, kw_only=True, omit_defaults=True):
    """A worker of a training: the time of a step, how many steps and commits it made, and how long it waited."""

    waited_us: float
    step_us: float
    steps: int
    commits: int


@dataclass(frozen=True, kw_only=True)
class TrainingReplay:
    """A simulated training. An iteration is the whole training.

    Attributes
    ----------
    paces
        Pace of each worker under the training's scheme.
    """

    training: TimeToLoss
    paces: tuple[Pace, ...]

    @property
    def end_s(self) -> float:
        """The time at which the target is reached, or else at which the simulation ended."""
        return self.training.simulated.end_s if self.training.time_s is None else self.training.time_s

    @cached_property
    def graph(self) -> ReplayGraph:
        """The training op by op."""
        return training_graph(self.training.simulated, self.paces, self.end_s)

    @property
    def op_count(self) -> int:
        return len(self.graph)

    def iterations(self, *, detailed: bool = False) -> IterationTimes:
        low_s, high_s = self.training.interval_s
        breakdown_us: dict[str, float] = {}
        if detailed:
            rows = [row.parts_us for row in self.workers()]
            breakdown_us = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
        return IterationTimes(
            iteration_us=1e6 * self.end_s,
            interval_us=(1e6 * min(low_s, self.end_s), 1e6 * (high_s if math.isfinite(high_s) else 2 * self.end_s)),
            breakdown_us=breakdown_us,
            settled=True,
        )

    def sampled_us(self, *, samples: int, seed: int = 0, on_sample: Callable[[], None] = lambda: None) -> Floats:
        raise InputError("steps and commits of a training have one duration each: they cannot be drawn anew")

    def timeline(self) -> Timeline:
        return replay(self.graph)

    def workers(self) -> tuple[WorkerFacts, ...]:
        """Times of each worker until the simulation ended: steps, commits and waiting in the training."""
        end_us = 1e6 * self.training.simulated.end_s
        share = 1.0 if self.training.time_s is None else self.training.time_s / self.training.simulated.end_s
        rows = []
        for worker, pace in enumerate(self.paces):
            worker_commits = [commit for commit in self.training.simulated.commits if commit.worker == worker]
            steps_us, commits_us = (
                1e6 * pace.step_s * sum(commit.steps for commit in worker_commits),
                1e6 * pace.commit_s * len(worker_commits),
            )
            waited_us = 1e6 * self.training.simulated.waiting_s[worker]
            rows.append(
                WorkerFacts(
                    rank=worker,
                    host=f"worker {worker}",
                    breakdown_us={
                        "compute": min(steps_us, end_us) * share,
                        "exposed_communication": commits_us * share,
                        "waiting_for_ranks": waited_us * share,
                    },
                    step_us=1e6 * pace.step_s,
                    steps=round(share * sum(commit.steps for commit in worker_commits)),
                    commits=round(share * len(worker_commits)),
                    last_pct=None,
                    waited_us=waited_us * share,
                )
            )
        return tuple(rows)


def training_graph(simulated: Simulated, paces: Sequence[Pace], until_s: float) -> ReplayGraph:
    """Events until a time: local steps and the receiving of the model on each worker, and updates, in the order of time.

    A worker's steps follow from its model; it receives that when the scheme lets it go on, behind the update that was applied then.
    """
    graph = GraphBuilder()
    devices = [graph.add_device(name=f"worker {worker}", rank=worker) for worker in range(len(paces))]
    server = graph.add_device(name="updates", rank=0)
    commits = [commit for commit in simulated.commits if commit.time_s <= until_s][:_MOST_COMMITS]
    following = {
        (worker, one.time_s): other for worker in range(len(paces)) for one, other in pairwise(_of(simulated.commits, worker))
    }
    received: dict[int, int] = {}
    applied: list[tuple[float, int]] = []
    waiting: dict[int, float] = {}  # by worker, when it is let go on
    for commit in commits:
        worker, half_us = commit.worker, paces[commit.worker].commit_s / 2 * 1e6
        duration_us = max((commit.time_s - commit.begun_s) * 1e6 - half_us, 0.0)
        steps = graph.add_op(
            devices[worker],
            duration_us,
            kind=OpKind.FORWARD,
            name=f"worker {worker}: {commit.steps} {'step' if commit.steps == 1 else 'steps'}",
            after=[received[worker]] if worker in received else [],
        )
        sent = graph.add_op(devices[worker], half_us, kind=OpKind.COMM, name=f"worker {worker}: send", after=[steps])
        update = graph.add_op(server, 0.0, kind=OpKind.COMM, name=f"update of worker {worker}", after=[sent])
        applied.append((commit.time_s, update))
        if (later := following.get((worker, commit.time_s))) is not None:
            waiting[worker] = later.begun_s - half_us / 1e6
        for other in [each for each, time in waiting.items() if time <= commit.time_s + 1e-9]:
            other_us = paces[other].commit_s / 2 * 1e6
            received[other] = graph.add_op(
                devices[other], other_us, kind=OpKind.COMM, name=f"worker {other}: receive", after=[update]
            )
            del waiting[other]
    return graph.build()


def _of(commits: Sequence[AppliedCommit], worker: int) -> list[AppliedCommit]:
    return [commit for commit in commits if commit.worker == worker]
