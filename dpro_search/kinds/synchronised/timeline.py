"""``training_graph(training, paces)``: a simulated training as a graph of ops, for timelines and critical paths."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from dpro_search.graph.dataflow import OpKind
from dpro_search.replay.synchronisation import Commit, Simulated
from dpro_search.runtime.schemes import Pace
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.replay_graph import ReplayGraph

_MOST_COMMITS = 5_000  # that are shown: the first ones


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


def _of(commits: Sequence[Commit], worker: int) -> list[Commit]:
    return [commit for commit in commits if commit.worker == worker]
