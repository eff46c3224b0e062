"""`HorovodSchedule`: a Horovod job under a plan, for the runtime's state machine, which decides as it runs what is fused.

People see the recorded setting op by op: its fusions are those of a recorded step (`space/tensorflow/op_level.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dpro_search.collect.trace import Floats, Trace
from dpro_search.costmodel.collectives.horovod import CommCosts
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import DataflowGraph
from dpro_search.replay.horovod.timeline import HorovodReplay, replay_horovod
from dpro_search.replay.monte_carlo import iterations_of_draws_us
from dpro_search.replay.replayer import replay
from dpro_search.replay.timeline import Timeline
from dpro_search.space.replay_graph import ReplayGraph
from dpro_search.space.tensorflow.horovod_job import HorovodJob
from dpro_search.space.tensorflow.op_level import op_level, typical_step


@dataclass(frozen=True, kw_only=True)
class HorovodSchedule:
    """A Horovod job in a scenario.

    Attributes
    ----------
    graph, costs
        The step and the costs of communication in the scenario.
    trace
        The recording; None: the job was not recorded, and has no ops to show.
    as_recorded
        Whether the scenario is the recorded setting.
    """

    job: HorovodJob
    graph: DataflowGraph
    costs: CommCosts
    trace: Trace | None
    as_recorded: bool

    @property
    def op_count(self) -> int:
        return len(self.graph)

    def iterations(self, *, detailed: bool = False) -> HorovodReplay:
        return replay_horovod(self.job)

    def logged(self, iterations: int = 32) -> HorovodReplay:
        """A replay with a log of what the runtime did."""
        return replay_horovod(self.job, iterations=iterations, log=True)

    def sampled_us(self, *, samples: int, seed: int = 0, on_sample: Callable[[], None] = lambda: None) -> Floats:
        seeds = np.random.SeedSequence(seed).spawn(samples)
        return iterations_of_draws_us(lambda one: replay_horovod(self.job, seed=one).iteration_us, seeds, on_sample=on_sample)

    def timeline(self) -> Timeline:
        """The recorded step, op by op; raises `InputError` in other scenarios, of which no step was recorded."""
        if not self.as_recorded:
            raise InputError("--timeline has the ops of the recorded setting: leave out --plan, --set and --what-if")
        return replay(self.single_ops(self.typical_step))

    def single_ops(self, step: int | None = None) -> ReplayGraph:
        """The step as a graph of single ops, with the fusions of a recorded step (None: of the typical one)."""
        assert self.trace is not None, "only a recorded step has ops"
        return op_level(self.trace, self.graph, self.costs, step=step)

    @property
    def typical_step(self) -> int:
        """The recorded step whose iteration is the median."""
        assert self.trace is not None, "only a recorded step has ops"
        return typical_step(self.trace, self.graph)
