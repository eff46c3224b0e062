"""The collectives of an iteration under a plan, read off a replay of a Horovod job."""

from __future__ import annotations

import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.kinds.horovod.predictor import Predictor
from dpro_search.replay.exchanges import Exchange
from dpro_search.replay.horovod import machine
from dpro_search.space.plan import Plan

_ITERATIONS = 8  # that are replayed; medians over them


def horovod_exchanges(predictor: Predictor, plan: Plan) -> tuple[Exchange, ...]:
    """The collectives under a plan with exact groups, in the order of their posts; empty if the replay tells none apart."""
    assert plan.tensor_groups is not None, "dynamic fusion has no lasting collectives"
    index = {tensor.name: number for number, tensor in enumerate(predictor.tensors)}
    named = [[index[name] for name in group] for group in plan.tensor_groups]
    known = {number for group in named for number in group}
    groups = [*named, *([number] for number in range(len(index)) if number not in known)]
    core_us = _core_time_of_posts(predictor)
    posts_core_us = np.array([core_us[group].max() for group in groups])
    order = np.argsort(posts_core_us, kind="stable").tolist()
    posted_us, ended_us = _replayed(predictor, plan, len(groups))
    if not len(posted_us):
        return ()
    # Core time passes slower while a core is shared: in between posts, evenly.
    clock_core, clock_us = np.append(0.0, posts_core_us[order]), np.append(0.0, np.maximum.accumulate(posted_us))
    exchanges = []
    for place, number in enumerate(order):
        members = sorted(groups[number], key=lambda tensor: float(core_us[tensor]))
        exchanges.append(
            Exchange(
                tensors=tuple(predictor.tensors[tensor].name for tensor in members),
                ready_us=tuple(np.interp(core_us[members], clock_core, clock_us).tolist()),
                size_bytes=float(sum(predictor.tensors[tensor].size_bytes for tensor in members)),
                posted_us=float(clock_us[place + 1]),
                ended_us=float(ended_us[place]),
            )
        )
    return tuple(exchanges)


def _core_time_of_posts(predictor: Predictor) -> Floats:
    """Core time from the start of an iteration until each tensor is posted on the rank where that is latest, [tensors]."""
    profiles = predictor.graph.profiles
    slowest_us: Floats = np.max([(profile.post_us + profile.host_us[:, None]).mean(axis=0) for profile in profiles], axis=0)
    return slowest_us


def _replayed(predictor: Predictor, plan: Plan, count: int) -> tuple[Floats, Floats]:
    """Post and end of the k-th posted unit of an iteration, medians over whole iterations, [units] each; empty without any."""
    log = predictor.timeline(plan, log=True, iterations=_ITERATIONS).log
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
