"""Runs of a job under several plans, in turn: A B A B."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dpro_search.deploy.jobs import RecordedJob, Run
from dpro_search.deploy.losses import compare, tolerance_of
from dpro_search.space.plan import Plan


def in_turn(job: RecordedJob, settings: Mapping[str, Plan], rounds: int, warmup: int) -> Iterator[tuple[str, Run, str]]:
    """Name of a setting, its run, and how its losses compare with those of the round's first run."""
    for _ in range(rounds):
        base = None
        for name, plan in settings.items():
            run = job.run(plan, warmup=warmup)
            base = base or run
            yield name, run, compare([base.losses], [run.losses], tolerance_of(plan)).reason
