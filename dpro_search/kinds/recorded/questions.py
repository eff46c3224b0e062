"""What-ifs of an imported trace that mean something to its owner, each answered by the replay, the largest gain first.

Each is a text that ``replay --what-if`` takes and answers with the same iteration time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dpro_search.cluster import Device
from dpro_search.collect.trace import Floats
from dpro_search.errors import InputError
from dpro_search.graph.recorded_collectives import GroupSpeed, slow_groups
from dpro_search.kinds._diagnosis import PredictedGain
from dpro_search.kinds.recorded.replay import RecordedReplay
from dpro_search.replay.iterations import IterationTimes
from dpro_search.replay.sensitivity import compute_us_of_ranks
from dpro_search.space.recorded.precision_change import lower_precision, precision_change
from dpro_search.space.recorded.scales import Bools
from dpro_search.space.scenario import Scale

_MOST_RANKS = 16  # with more, only those with the most work are asked about
_MOST_CLASSES = 6
_MOST_MODULES = 8
_NEARLY_ALL = 0.9
_UNEVEN = 0.05  # of the mean; stages that differ by less are asked about no further (`WORTH_PCT` of an iteration is 3)
_LEAST_SHARE = 0.01  # of the time of all kernels
_MOST_REPLAYED_OPS = 4_000_000  # of all questions together; with more, each is answered for the median step alone


class Answer(PredictedGain, frozen=True, kw_only=True, omit_defaults=True):
    """The gain of a change of a profile."""

    topic: str
    ranks: tuple[int, ...]
    meaning: str
    predicted_mean_us: float
    gain_pct: float
    certain: bool


class _Question(NamedTuple):
    what_if: str
    topic: str
    meaning: str
    ranks: tuple[int, ...] = ()


def answers(replay: RecordedReplay, speeds: Sequence[GroupSpeed], *, error: float, device: Device | None = None) -> list[Answer]:
    """The gain of each question that the trace can answer, largest first.

    Parameters
    ----------
    replay
        The job without the changes that are asked about.
    speeds
        Speeds of its groups of ranks: each slow one is asked about.
    error
        Relative error of the replay of the recorded setting, where it is too large to be part of intervals.
    device
        The GPU that runs the job, which decides about lower precisions; None: these are not asked about.
    """
    questions = list(_questions(replay, speeds))
    on_steps = replay.fewer_steps(len(questions), _MOST_REPLAYED_OPS)
    base, before = replay.iterations(), on_steps.iterations()
    base_mean_us, before_mean_us = base.mean_us or base.iteration_us, before.mean_us or before.iteration_us
    whole_us = base_mean_us if replay.stalls else base.iteration_us
    error_us = error * base.iteration_us
    given_answers = []
    answerable = [(question, after) for question in questions if (after := _scaled(on_steps, question.what_if)) is not None]
    surely_us: dict[str, float] = {}  # gains at the far end of the interval, of changes that have one
    for question, middle, slowest in _in_lower_precision(on_steps, device):
        answerable.append((question, middle))
        surely_us[question.what_if] = base.iteration_us * (1 - _ratio(slowest.iteration_us, before.iteration_us))
    for question, after in answerable:
        iteration_us = base.iteration_us * _ratio(after.iteration_us, before.iteration_us)
        mean_us = base_mean_us * _ratio(after.mean_us or after.iteration_us, before_mean_us)
        gain_us = base_mean_us - mean_us if replay.stalls else base.iteration_us - iteration_us
        given_answers.append(
            Answer(
                **question._asdict(),
                predicted_iteration_us=iteration_us,
                predicted_mean_us=mean_us,
                gain_us=gain_us,
                gain_pct=100 * gain_us / whole_us if whole_us > 0 else 0.0,
                certain=min(gain_us, surely_us.get(question.what_if, gain_us)) > error_us,
            )
        )
    return sorted(given_answers, key=lambda answer: -answer.gain_us)


def _scaled(replay: RecordedReplay, what_if: str) -> IterationTimes | None:
    """The steps with a change of speed; None: nothing in the trace is of its category, or a rank is unlike the others."""
    try:
        return replace(replay, scales=(*replay.scales, Scale.parse(what_if))).iterations()
    except InputError:
        return None


def _in_lower_precision(
    replay: RecordedReplay, device: Device | None
) -> Iterator[tuple[_Question, IterationTimes, IterationTimes]]:
    """The question about products in 16 bits, with the steps at the middle and at the slow end of the interval.

    Nothing where products may have been in 16 bits already.
    """
    steps = replay.steps
    precision = None if device is None or not steps.has_launches else lower_precision(steps.trace, steps.ops, device)
    if device is None or precision is None:
        return
    with suppress(InputError):  # a rate is missing in the device's file
        change = precision_change(steps.trace, steps.ops, device, precision)
        middle, _, slow = change.applied([steps.ops] * 3)
        question = _Question(f"precision={precision}", "precision", f"products in {precision} (autocast)")
        replays = [replace(replay, steps=steps.with_ops(ops), model_ends=None) for ops in (middle, slow)]
        yield question, replays[0].iterations(), replays[1].iterations()


def _ratio(after_us: float, before_us: float) -> float:
    return after_us / before_us if before_us > 0 else 1.0


def _questions(replay: RecordedReplay, speeds: Sequence[GroupSpeed]) -> Iterator[_Question]:
    steps, trace = replay.steps, replay.steps.trace
    yield _Question("compute=0.5", "compute", "all kernels twice as fast")
    yield _Question("communication=0", "communication", "communication free")
    yield _Question("bandwidth=2", "bandwidth", "links twice as fast")
    if slow := slow_stages(replay):
        numbers = tuple(trace.meta.numbers[rank] for rank in slow)
        yield _Question("stages=even", "stages", "stages that compute equally long", numbers)
    if trace.meta.ranks > 1:
        for rank in _busiest(replay)[:_MOST_RANKS]:
            number = trace.meta.numbers[rank]
            yield _Question(f"rank{number}=usual", "rank", f"rank {number} as fast as the others", (number,))
    if (trace.events.module >= 0).any():
        for path in _worth_asking(steps.categories.modules, steps.ops.duration_us):
            yield _Question(f"module.{path}=0.5", "module", f"module {path} 2x faster")
    if not steps.has_launches:
        return
    yield _Question("launch=0", "launch", "no launch overhead")
    yield _Question("host=0.5", "host", "host threads twice as fast")
    yield _Question("loading=0", "loading", "input loading free")
    yield _Question("compile=1", "compile", "element-wise kernels, reductions and norms that follow each other fused")
    kernels, collectives, duration_us = steps.categories.kernels, steps.categories.collectives, steps.ops.duration_us
    total_us = sum(duration_us[chosen].sum() for chosen in kernels.values())
    for name, chosen in list(kernels.items())[:_MOST_CLASSES]:
        if duration_us[chosen].sum() >= _LEAST_SHARE * total_us:
            yield _Question(f"kernels.{name}=0.5", "kernels", f"{name if name == 'copies' else f'{name} kernels'} twice as fast")
    if len(collectives) > 1:
        for name in collectives:
            yield _Question(f"collectives.{name}=0", "collectives", f"{name.replace('_', '-')} free")
    for speed, usual_bps in slow_groups(speeds):
        what_if = f"ranks{'+'.join(map(str, speed.ranks))}.communication={speed.bus_bps / usual_bps:.3g}"
        yield _Question(what_if, "link", "these links as fast as the others", speed.ranks)


def slow_stages(replay: RecordedReplay) -> list[int]:
    """Places of the ranks that compute longer than the mean of their pipeline by more than `_UNEVEN`."""
    compute_us = compute_us_of_ranks(replay.typical_graph)
    return [
        rank
        for ranks in replay.steps.pipelines
        for rank in ranks
        if compute_us[rank] > (1 + _UNEVEN) * float(np.mean(compute_us[list(ranks)]))
    ]


def _worth_asking(modules: Mapping[str, Bools], duration_us: Floats) -> list[str]:
    """Modules that take longest, but for those that only hold others which take nearly all of their time."""
    us = {path: float(duration_us[chosen].sum()) for path, chosen in modules.items()}
    total_us = max(us.values(), default=0.0)
    kept = [
        path
        for path in modules
        if us[path] >= _LEAST_SHARE * total_us
        and not any(us[path] * _NEARLY_ALL <= us[other] for other in modules if other.startswith(f"{path}."))
        and (us[path] < _NEARLY_ALL * total_us or "." in path or len(modules) == 1)
    ]
    return kept[:_MOST_MODULES]


def _busiest(replay: RecordedReplay) -> list[int]:
    """Ranks by the time of their ops in a step, the longest first."""
    graph = replay.typical_graph
    work_us = {rank: float(graph.duration_us[graph.rank_of_op == rank].sum()) for rank in range(replay.steps.trace.meta.ranks)}
    return sorted((rank for rank, us in work_us.items() if us > 0), key=lambda rank: (-work_us[rank], rank))
