"""`ProgramReplay`: the replay of a job whose ranks' main threads run one program, as DDP and FSDP on processors do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dpro_search.collect.trace import Floats
from dpro_search.replay.ddp.ops import iteration_ops
from dpro_search.replay.ddp.timeline import DdpTimeline, replay_ddp
from dpro_search.replay.monte_carlo import iterations_of_draws_us
from dpro_search.replay.timeline import Timeline
from dpro_search.space.programs.ddp_job import DdpJob


@dataclass(frozen=True, kw_only=True)
class ProgramReplay:
    """A program in a scenario."""

    job: DdpJob
    op_count: int

    def iterations(self, *, detailed: bool = False) -> DdpTimeline:
        return replay_ddp(self.job)

    def sampled_us(self, *, samples: int, seed: int = 0, on_sample: Callable[[], None] = lambda: None) -> Floats:
        return iterations_of_draws_us(
            lambda draw: replay_ddp(self.job, seed=draw).iteration_us, samples=samples, seed=seed, on_sample=on_sample
        )

    def timeline(self) -> Timeline:
        return iteration_ops(self.job, self.iterations())
