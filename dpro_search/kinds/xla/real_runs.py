"""`RunnableProgram`: real runs of a captured step on processes of this machine, with its mesh and with those of plans."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpro_search.collect.launch.ranks import JobSpec, default_cores
from dpro_search.collect.launch.step_times import StepTimes
from dpro_search.collect.launch.xla_ranks import StepRequest, run_xla_ranks
from dpro_search.deploy.jobs import JobRun, RecordedJob
from dpro_search.deploy.losses import Loss
from dpro_search.deploy.parts.part import JobFacts, Target
from dpro_search.errors import InputError
from dpro_search.kinds.xla.plans import Point
from dpro_search.kinds.xla.program import XlaProgram
from dpro_search.kinds.xla.times import require_startable, step_times_us
from dpro_search.space.plan import Plan

_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class RunnableProgram(RecordedJob):
    """A step that runs on hosts with links like those that it was captured for; its script needs no change for a plan."""

    launcher: None = None  # type: ignore[assignment]  # it is started here
    program: XlaProgram

    def run(self, plan: Plan, *, warmup: int, timeout_s: float | None = None) -> JobRun:
        script, _, function = self.spec.command[1].rpartition(":")
        point = Point.captured(self.program.facts).under(plan)
        ranks = run_xla_ranks(
            StepRequest(
                script=script,
                function=function,
                mesh=dict(point.mesh),
                chosen=dict(point.chosen),
                warmup=warmup,
                steps=_STEPS,
            ),
            python=self.spec.command[0],
            ranks=self.spec.ranks,
            rate_bps=self.rate_bps,
            timeout_s=self.spec.timeout_s if timeout_s is None else timeout_s,
        )
        steps_us = step_times_us([rank.steps_ns for rank in ranks])
        unknown = np.full(len(steps_us), np.nan)
        times = StepTimes(iteration_us=steps_us, compute_cpu_us=unknown, comm_cpu_us=unknown)
        return JobRun(times=times, losses=tuple(map(Loss, ranks[0].losses)))

    def helpers(self, plan: Plan) -> frozenset[str]:
        return frozenset()


def runnable(program: XlaProgram, facts: JobFacts, targets: tuple[Target, ...], command: tuple[str, ...]) -> RunnableProgram:
    """The step of a captured program, as it runs here.

    Parameters
    ----------
    command
        Script and function, "train.py:step", in place of the captured ones; empty: those.

    Raises
    ------
    InputError
        The program was captured for devices that are not here, or its script is not known.
    """
    known = program.facts
    if program.cluster is None or not known.script_path:
        raise InputError(f"{program.path}: a text alone cannot run here: capture its script with --jax --on 4xtestbed@1gbit")
    require_startable(program.cluster)
    if len(command) > 1:
        raise InputError("a captured step is run by its script and function, like '-- train.py:step'")
    step = command[0] if command else f"{known.script_path}:{known.script.rpartition(':')[2]}"
    script, _, function = step.rpartition(":")
    if not Path(script).is_file():
        raise InputError(f"{script or step}: no such script; name it and its function behind '--', like '-- train.py:step'")
    ranks = program.cluster.ranks
    return RunnableProgram(
        targets=targets,
        spec=JobSpec(command=(known.python, f"{Path(script).resolve()}:{function}"), ranks=ranks, cores=default_cores(ranks)),
        facts=facts,
        rate_bps=program.cluster.rate_bps,
        shaped=True,
        command_from_trace=not command,
        program=program,
    )
