"""Which tensors travel together in a Horovod job, as recorded and under a plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpro_search.collect.trace import Trace
from dpro_search.kinds.horovod.predictor import Predictor
from dpro_search.replay.horovod import machine
from dpro_search.space.describe import describe
from dpro_search.space.plan import Plan
from dpro_search.space.tensor_groups import Group, TensorGroups, planned_groups, recorded_groups

_REPLAYED_ITERATIONS = 8


def tensor_groups(trace: Trace, predictor: Predictor, step: int | None, best: Plan | None) -> TensorGroups | None:
    """See `Job.tensor_groups`: groups are the plan's, or form while the job runs."""
    recorded = () if step is None else recorded_groups(trace, step)
    groups: dict[str, Sequence[Group]] = {"as recorded": recorded} if recorded else {}
    note = ""
    if best is not None and best.tensor_groups is not None:
        groups[describe(best)] = planned_groups(trace.tensors, best.tensor_groups)
    elif best is not None and {"fusion_threshold_bytes", "cycle_time_us"} & best.settings.keys():
        # Algorithms, of which only the search's model knows, hardly change which groups form.
        planned = replayed_groups(predictor, best.changed(allreduce_algorithms=None))
        if planned:
            groups[describe(best)] = planned
            note = "The plan sets a limit; these groups formed under it in a replayed iteration, and vary from one to the next."
    return TensorGroups(groups=groups, note=note) if groups else None


def replayed_groups(predictor: Predictor, plan: Plan) -> tuple[Group, ...]:
    """The collectives that form in an iteration of a replay, in order, their tensors counted; empty if it logged no whole one."""
    job, log = predictor.job(plan), predictor.timeline(plan, log=True, iterations=_REPLAYED_ITERATIONS).log
    posts = log[log[:, machine.LOG_KIND] == machine.LOG_POST]
    posts = posts[posts[:, machine.LOG_RANK] == 0]
    iterations = [posts[posts[:, machine.LOG_ITERATION] == number] for number in np.unique(posts[:, machine.LOG_ITERATION])]
    whole = [rows for rows in iterations if len(rows) == job.units]
    if not whole:
        return ()
    chosen = whole[len(whole) // 2]
    units_of_collective: dict[float, list[int]] = {}
    for row in chosen[np.argsort(chosen[:, machine.LOG_END], kind="stable")]:
        units_of_collective.setdefault(float(row[machine.LOG_COLLECTIVE]), []).append(int(row[machine.LOG_UNIT]))
    return tuple(
        Group(tensors=(), size_bytes=round(float(job.unit_bytes[units].sum())), unnamed=int(job.unit_tensors[units].sum()))
        for units in units_of_collective.values()
    )
