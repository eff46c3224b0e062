"""The collectives of an iteration under a plan, read off the log of a replay of a Horovod job."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dpro_search.collect.trace import Floats, Trace
from dpro_search.replay.exchanges import Exchange
from dpro_search.replay.horovod import machine
from dpro_search.replay.horovod.schedule import HorovodSchedule
from dpro_search.space.describe import describe
from dpro_search.space.plan import Plan
from dpro_search.space.tensor_groups import Group, TensorGroups, planned_groups, recorded_groups

_REPLAYED_ITERATIONS = 8


def horovod_exchanges(schedule: HorovodSchedule, plan: Plan) -> tuple[Exchange, ...]:
    """The collectives of a plan with exact groups, in the order of their posts; empty if the replay tells none apart."""
    assert plan.tensor_groups is not None, "dynamic fusion has no lasting collectives"
    tensors = schedule.graph.tensors
    index = {tensor.name: number for number, tensor in enumerate(tensors)}
    named = [[index[name] for name in group] for group in plan.tensor_groups]
    known = {number for group in named for number in group}
    groups = [*named, *([number] for number in range(len(index)) if number not in known)]
    core_us = _core_time_of_posts(schedule)
    posts_core_us = np.array([core_us[group].max() for group in groups])
    order = np.argsort(posts_core_us, kind="stable").tolist()
    posted_us, ended_us = _posts_and_ends(schedule, len(groups))
    if not len(posted_us):
        return ()
    # Core time passes slower while a core is shared: in between posts, evenly.
    clock_core, clock_us = np.append(0.0, posts_core_us[order]), np.append(0.0, np.maximum.accumulate(posted_us))
    exchanges = []
    for place, number in enumerate(order):
        members = sorted(groups[number], key=lambda tensor: float(core_us[tensor]))
        exchanges.append(
            Exchange(
                tensors=tuple(tensors[tensor].name for tensor in members),
                ready_us=tuple(np.interp(core_us[members], clock_core, clock_us).tolist()),
                size_bytes=float(sum(tensors[tensor].size_bytes for tensor in members)),
                posted_us=float(clock_us[place + 1]),
                ended_us=float(ended_us[place]),
            )
        )
    return tuple(exchanges)


def _core_time_of_posts(schedule: HorovodSchedule) -> Floats:
    """Core time from the start of an iteration until each tensor is posted on the rank where that is latest, [tensors]."""
    profiles = schedule.graph.profiles
    slowest_us: Floats = np.max([(profile.post_us + profile.host_us[:, None]).mean(axis=0) for profile in profiles], axis=0)
    return slowest_us


def _posts_and_ends(schedule: HorovodSchedule, count: int) -> tuple[Floats, Floats]:
    """Post and end of the k-th posted unit of an iteration, medians over whole iterations, [units] each; empty without any."""
    log = schedule.logged(_REPLAYED_ITERATIONS).log
    kind, iteration = log[:, machine.LOG_KIND], log[:, machine.LOG_ITERATION]
    posted, ended = [], []
    for number in np.unique(iteration[kind == machine.LOG_STEP]):
        begin = log[(kind == machine.LOG_STEP) & (iteration == number), machine.LOG_START].min()
        rows = log[(kind == machine.LOG_POST) & (iteration == number)]
        unit = rows[:, machine.LOG_UNIT].astype(np.int64)
        if len(np.unique(unit)) < count:
            continue  # the log ended within this iteration
        post, end = np.full(count, -np.inf), np.full(count, -np.inf)
        np.maximum.at(post, unit, rows[:, machine.LOG_START] - begin)
        np.maximum.at(end, unit, rows[:, machine.LOG_END] - begin)
        order = np.argsort(post, kind="stable")
        posted.append(post[order])
        ended.append(end[order])
    if not posted:
        return np.zeros(0), np.zeros(0)
    return np.median(posted, axis=0), np.median(ended, axis=0)


def tensor_groups(
    trace: Trace, schedule_of: Callable[[Plan], HorovodSchedule], step: int | None, best: Plan | None
) -> TensorGroups | None:
    """See `Job.tensor_groups`: groups are the plan's, or form while the job runs (`schedule_of` the plan)."""
    recorded = () if step is None else recorded_groups(trace, step)
    groups: dict[str, Sequence[Group]] = {"as recorded": recorded} if recorded else {}
    note = ""
    if best is not None and best.tensor_groups is not None:
        groups[describe(best)] = planned_groups(trace.tensors, best.tensor_groups)
    elif best is not None and {"fusion_threshold_bytes", "cycle_time_us"} & best.settings.keys():
        # Algorithms, of which only the search's model knows, hardly change which groups form, nor does compute.
        settings = {name: best.get(name) for name in ("fusion_threshold_bytes", "cycle_time_us")}
        planned = replayed_groups(schedule_of(Plan.of(**settings)))
        if planned:
            groups[describe(best)] = planned
            note = "The plan sets a limit; these groups formed under it in a replayed iteration, and vary from one to the next."
    return TensorGroups(groups=groups, note=note) if groups else None


def replayed_groups(schedule: HorovodSchedule) -> tuple[Group, ...]:
    """The collectives that form in an iteration of a replay, in order, their tensors counted; empty if it logged no whole one."""
    job, log = schedule.job, schedule.logged(_REPLAYED_ITERATIONS).log
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
