"""Steps of a trace whose events carry streams and dependencies (see `recorded_ops`) as a `ReplayGraph`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from dpro_search.collect.trace import Floats, Ints, Trace
from dpro_search.errors import InputError
from dpro_search.quantities import time_text
from dpro_search.space.recorded.events import steps_in_order
from dpro_search.space.recorded.ops import RecordedOps
from dpro_search.space.replay_graph import Int32s, OrderPolicy, ReplayGraph, csr

_SHOWN_STEPS = 8  # in a sentence


def graph_of_step(ops: RecordedOps, step: int, without: Sequence[int] = (), *, samples: bool = True) -> ReplayGraph:
    """The graph of one of the recorded steps, with carried dependencies.

    Parameters
    ----------
    without
        Steps that must not count, neither as structure nor as durations.
    samples
        Whether to keep the durations that the same ops had in each step but those left out.

    Raises
    ------
    InputError
        There is no such step.
    """
    if step not in ops.steps or step in without:
        raise InputError(f"step {step} is not among the recorded steps {', '.join(map(str, ops.steps))}, or was left out")
    in_step = np.flatnonzero(ops.step == step)
    number = np.full(len(ops), -1, np.int64)
    number[in_step] = np.arange(len(in_step))
    inside = (number[ops.source] >= 0) & (number[ops.target] >= 0)
    pred_ptr, pred_idx = csr(number[ops.target[inside]], number[ops.source[inside]], len(in_step))
    duration_us, known = ops.duration_us[in_step], ops.known[in_step]
    samples_us = np.zeros((0, 0))
    if samples or not known.all():
        samples_us = _samples(ops, in_step, [s for s in ops.steps if s not in without])
        duration_us = np.where(known, duration_us, np.median(samples_us, axis=0))
    carry_src, carry_dst = _carried(ops, in_step, number, step)
    return ReplayGraph(
        duration_us=duration_us,
        device=ops.device[in_step],
        pred_ptr=pred_ptr,
        pred_idx=pred_idx,
        policy=ops.policy,
        rank_of_device=ops.rank_of_device,
        kind=ops.kind[in_step],
        collective=_whole_collectives(ops.collective[in_step]),
        carry_src=carry_src,
        carry_dst=carry_dst,
        samples_us=samples_us.astype(np.float32),
        names=tuple(map(ops.name.__getitem__, in_step.tolist())),
        device_names=ops.device_names,
    )


def graph_of_all(ops: RecordedOps) -> ReplayGraph:
    """All steps as one iteration, with the durations that each had, from the first event of the recording on."""
    pred_ptr, pred_idx = csr(ops.target, ops.source, len(ops))
    return ReplayGraph(
        duration_us=ops.duration_us + ops.lead_us,
        device=ops.device,
        pred_ptr=pred_ptr,
        pred_idx=pred_idx,
        policy=ops.policy,
        rank_of_device=ops.rank_of_device,
        kind=ops.kind,
        collective=_whole_collectives(ops.collective),
        names=ops.name,
        device_names=ops.device_names,
    )


def iterations_us(trace: Trace) -> dict[int, float]:
    """Measured iteration of each step but the first: distance of the last device ends (of all ranks) from the step before.

    Steps of `unmeasured_steps` have none.
    """
    without = unmeasured_steps(trace)
    return {step: us for step, us in _distances_us(trace).items() if step not in without}


def unmeasured_steps(trace: Trace) -> dict[int, str]:
    """Steps behind the first whose distance from the step before is no iteration, with the reason, by number."""
    reasons: dict[int, str] = {}
    distances_us, order = _distances_us(trace), steps_in_order(trace)
    consecutive = any(step - before == 1 for before, step in pairwise(order))
    for before, step in pairwise(order):
        if distances_us[step] <= 0:
            reasons[step] = f"takes {time_text(distances_us[step])}"
            if before in distances_us:
                reasons.setdefault(before, "ends after the next step")
        elif consecutive and step - before > 1:
            reasons[step] = f"follows step {before}, and what lies between them ran nothing"
    return dict(sorted(reasons.items()))


def unmeasured_text(trace: Trace) -> str:
    """A sentence that counts and names the steps of `unmeasured_steps`; empty if none exist."""
    unmeasured = unmeasured_steps(trace)
    if not unmeasured:
        return ""
    shown = [f"step {step} {why}" for step, why in list(unmeasured.items())[:_SHOWN_STEPS]]
    more = ["..."] if len(unmeasured) > len(shown) else []
    is_ = "step is" if len(unmeasured) == 1 else "steps are"
    return f"{len(unmeasured)} {is_} left out of the measured iterations: {', '.join([*shown, *more])}"


def _distances_us(trace: Trace) -> dict[int, float]:
    """Distance of each step's last device end from that of the step before it, of all steps but the first."""
    steps, order = trace.steps, steps_in_order(trace)
    end_us = {step: float(steps.end_us[steps.index == step].max()) for step in order}
    return {step: end_us[step] - end_us[before] for before, step in pairwise(order)}


def _carried(ops: RecordedOps, in_step: Ints, number: Ints, step: int) -> tuple[Int32s, Int32s]:
    """Each device's last op before its first; and what depended on the step before."""
    first = np.full(len(ops.policy), -1, np.int64)
    last = first.copy()
    device = ops.device[in_step]
    first[device[::-1]] = np.arange(len(in_step))[::-1]
    last[device] = np.arange(len(in_step))
    ordered = (first >= 0) & (ops.policy == OrderPolicy.PROGRAM)
    at = ops.steps.index(step)
    if at == 0:
        return last[ordered].astype(np.int32), first[ordered].astype(np.int32)
    before = ops.steps[at - 1]
    crossing = (number[ops.target] >= 0) & (ops.step[ops.source] == before)
    of_key = dict(zip(ops.key[in_step].tolist(), range(len(in_step)), strict=True))
    pairs = [
        (of_key[key], int(number[target]))
        for key, target in zip(ops.key[ops.source[crossing]].tolist(), ops.target[crossing].tolist(), strict=True)
        if key in of_key
    ]
    extra = np.array(pairs, np.int64).reshape(-1, 2)
    source = np.concatenate((last[ordered], extra[:, 0]))
    return source.astype(np.int32), np.concatenate((first[ordered], extra[:, 1])).astype(np.int32)


def _samples(ops: RecordedOps, in_step: Ints, steps: Sequence[int]) -> Floats:
    """Duration of each op in each step, [steps, ops]; the median of the others where a step has no such op."""
    order = np.argsort(ops.key[in_step], kind="stable")
    keys = ops.key[in_step][order]
    table = np.full((len(steps), len(in_step)), np.nan)
    for row, step in enumerate(steps):
        theirs = np.flatnonzero((ops.step == step) & ops.known)
        at = np.minimum(np.searchsorted(keys, ops.key[theirs]), len(keys) - 1)
        same = keys[at] == ops.key[theirs]
        table[row, order[at[same]]] = ops.duration_us[theirs[same]]
    nobody = np.isnan(table).all(axis=0)
    table[:, nobody] = ops.duration_us[in_step[nobody]]
    usual = np.nanmedian(table, axis=0)
    return np.where(np.isnan(table), usual, table)


def _whole_collectives(collective: Int32s) -> Int32s:
    """Renumbered from 0; empty where none exist."""
    if not (collective >= 0).any():
        return np.zeros(0, np.int32)
    numbers, index = np.unique(collective, return_inverse=True)
    return (index - int(numbers[0] < 0)).astype(np.int32)
