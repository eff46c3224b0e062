"""Aligning the ranks' clocks from what all of them saw: the collectives.

Method: dPRO (MLSys 2022, section 4.2), for all-reduce. Ranks on one host share a clock; host h's clock is ahead of host 0's by
theta_h. Two facts fix it:

* Causality. A collective completes nowhere before its last rank has enqueued, so theta_h - theta_k <= end_h - post_k for every
  collective and every two ranks. These bounds are hard but wide: a whole transfer lies between them.
* Regularity. A collective completes on all ranks at almost the same moment, and collectives of one size class take about
  equally long, counted from the last enqueue (dPRO's clipped duration). Theta is fitted to both by a robust (Huber) regression.
  Both are the sharper the shorter the collective: completions cannot lie further apart than the clipped duration. So each
  equation is scaled by it. dPRO's term for ranks of one machine is met exactly by sharing theta.

What stays unknown: regularity cannot distinguish an offset from a delay that one host's completions always have. Such a delay is
taken to be no larger than completions usually scatter: the residual that is reported is the sampling error (bootstrap over
collectives) plus half the range that holds 80 % of the completions' differences (short collectives counting for more), which does
not shrink with the number of collectives. It is never wider than what causality leaves.

Fewer than 8 collectives are too few for a regression. The offset is then the median difference of their completions, and the
residual is the 95 % prediction interval (Student's t) of another such difference: a few collectives that complete within a
microsecond of each other fix the clocks, and a few that do not leave them open. A single collective shows no spread: its residual
is what causality leaves.

More than 64 hosts are fitted one by one, in time and memory linear in the ranks (`_fit_many`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from dpro_search.collect.trace import ClockReport, Floats, Ints
from dpro_search.errors import InputError

_MIN_COLLECTIVES = 8  # fewer: no regression
_MOST_COLLECTIVES = 2000  # the regression takes at most so many, evenly spread: more add cost, not accuracy
_VIOLATIONS = 0.005  # share of collectives that may contradict causality (mismatched or torn records)
_HUBER = 1.345  # 95 % efficiency on normal noise (Huber 1964)
_MOST_HOSTS = 64  # more are fitted one by one
_MOST_ENTRIES = 1 << 22  # collectives x ranks x hosts, likewise
_ROUNDS = 10
_FEW = "completions of {count} collectives within causal bounds"
_RESAMPLES = 200


@dataclass(frozen=True, kw_only=True)
class CommSpans:
    """m collectives on R ranks, each on its rank's own clock. A fused collective is one row, not one per tensor.

    Attributes
    ----------
    enqueue_us
        When each rank enqueued the collective, [m, R].
    end_us
        When it completed on each rank, [m, R].
    family
        Size class: collectives of one number should take about equally long, [m].
    """

    enqueue_us: Floats
    end_us: Floats
    family: Ints

    @staticmethod
    def of(rows: Sequence[Sequence[tuple[float, float]]], family: Iterable[int], ranks: int, base_us: float = 0.0) -> CommSpans:
        """From the start and the end of each collective on each of so many ranks, counted from `base_us` on."""
        return CommSpans(
            enqueue_us=np.array([[start - base_us for start, _ in row] for row in rows], np.float64).reshape(-1, ranks),
            end_us=np.array([[end - base_us for _, end in row] for row in rows], np.float64).reshape(-1, ranks),
            family=np.array(list(family), np.int64),
        )


ONE_MACHINE = "all processes ran on one machine and share its clock"


def one_clock(ranks: int, method: str) -> ClockReport:
    """The report of ranks whose clocks need no offset; `method` says why."""
    return ClockReport(offset_us=(0.0,) * ranks, residual_us=(0.0,) * ranks, method=method)


def align_clocks(spans: CommSpans, hosts: tuple[str, ...]) -> ClockReport:
    """Offset of each rank's clock from rank 0's; aligned time = raw time - offset.

    Clocks are taken to run equally fast while recorded: a drift widens the residual.

    Parameters
    ----------
    spans
        Collectives that all ranks completed.
    hosts
        Host of each rank, [R]; ranks of one host share a clock.

    Returns
    -------
    ClockReport
        `residual_us` is the half-width of a 95 % interval of the offset; with one collective only, what causality leaves.

    Raises
    ------
    InputError
        Several hosts but no collective, or collectives that contradict each other (not of one run, or wrongly matched).
    """
    ranks = len(hosts)
    names = list(dict.fromkeys(hosts))
    if len(names) == 1:
        return one_clock(ranks, "one host, one clock")
    if len(spans.enqueue_us) == 0:
        raise InputError(
            "clocks of several hosts cannot be aligned without a collective that all ranks completed; record more steps"
        )
    number = {name: i for i, name in enumerate(names)}
    host = np.array([number[name] for name in hosts], dtype=np.int64)
    # Epoch microseconds have no digits to spare: work relative to the first enqueue of each host's first rank.
    first_rank = np.unique(host, return_index=True)[1]
    origin = spans.enqueue_us[0, first_rank[host]]
    enqueue, end = spans.enqueue_us - origin, spans.end_us - origin
    if len(names) > _MOST_HOSTS or spans.enqueue_us.size * len(names) > _MOST_ENTRIES:
        theta, residual, method = _fit_many(enqueue, end, host, names)
    else:
        highest = _causal_limits(enqueue, end, host, names)
        theta, residual, method = _fit(enqueue, end, spans.family, host, highest)
    offset = theta[host] + origin - origin[0]
    return ClockReport(
        offset_us=tuple(float(value) for value in offset),
        residual_us=tuple(float(value) for value in residual[host]),
        method=method,
    )


def _causal_limits(enqueue: Floats, end: Floats, host: Ints, names: list[str]) -> Floats:
    """Largest theta_h - theta_k that causality allows, [H, H]."""
    count = len(names)
    allowed = int(_VIOLATIONS * len(enqueue))
    limits = np.zeros((count, count))
    for h in range(count):
        first_end = end[:, host == h].min(axis=1)
        for k in range(count):
            if h != k:
                limits[h, k] = np.partition(first_end - enqueue[:, host == k].max(axis=1), allowed)[allowed]
    # Going through a third host can be tighter (shortest paths, Floyd and Warshall); a negative way back is a contradiction.
    for via in range(count):
        limits = np.minimum(limits, limits[:, [via]] + limits[[via], :])
    loops = limits.diagonal()
    if loops.min() < 0:
        raise _contradiction(name for name, loop in zip(names, loops, strict=True) if loop < 0)
    return limits


def _contradiction(names: Iterable[str]) -> InputError:
    shown = list(names)
    return InputError(
        f"clocks of hosts {', '.join(shown[:8])}{', ...' if len(shown) > 8 else ''}: "
        "collectives complete before they are enqueued, whatever the offset; are all recordings of the same run?"
    )


def _fit(enqueue: Floats, end: Floats, family: Ints, host: Ints, highest: Floats) -> tuple[Floats, Floats, str]:
    """Offset and residual of each host, [H], and the method's name."""
    low, high = -highest[0, :], highest[:, 0]
    if len(enqueue) < _MIN_COLLECTIVES:
        completion = np.stack([end[:, host == h].mean(axis=1) for h in range(len(highest))], axis=1)
        theta, residual = _few(completion - completion[:, :1])
        theta = _made_causal(theta, highest)
        return theta, np.minimum(residual, np.maximum(high - theta, theta - low)), _FEW.format(count=len(enqueue))
    some = np.linspace(0, len(enqueue) - 1, min(len(enqueue), _MOST_COLLECTIVES)).astype(np.int64)
    theta, sampling, blur = _regression(enqueue[some], end[some], family[some], host)
    theta = _made_causal(theta, highest)
    on_host = np.stack([end[some][:, host == h].mean(axis=1) for h in range(len(theta))], axis=1)
    spread = np.array([_half_range(on_host[:, h] - on_host[:, 0], blur**-2) for h in range(len(theta))])
    residual = np.minimum(1.96 * sampling + spread, np.maximum(high - theta, theta - low))
    return theta, residual, "completion and clipped duration, Huber regression within causal bounds"


def _few(distance: Floats) -> tuple[Floats, Floats]:
    """Offset and residual of each host, [H] each, from differences of completions to those on host 0, [m, H]."""
    count = len(distance)
    if count == 1:
        return distance[0], np.where(np.arange(distance.shape[1]) > 0, np.inf, 0.0)
    width = float(stdtrit(count - 1, 0.975)) * np.sqrt(1 + 1 / count)
    return np.median(distance, axis=0), width * distance.std(axis=0, ddof=1)


def _fit_many(enqueue: Floats, end: Floats, host: Ints, names: list[str]) -> tuple[Floats, Floats, str]:
    """As `_fit`, in time and memory linear in the ranks: each host is fitted to host 0 alone, by completions.

    The equations from durations are left out: one a collective, they add little to as many completions as there are ranks.
    Causality is met in rounds, against each collective's latest enqueue and first completion under the offsets of the round before.
    """
    some = np.linspace(0, len(end) - 1, min(len(end), _MOST_COLLECTIVES)).astype(np.int64)
    allowed = int(_VIOLATIONS * len(end))
    order = np.argsort(host, kind="stable")
    starts = np.searchsorted(host[order], np.arange(len(names)))
    first_end = np.minimum.reduceat(end[:, order], starts, axis=1)  # [m, H], as what follows
    last_enqueue = np.maximum.reduceat(enqueue[:, order], starts, axis=1)
    completion = np.add.reduceat(end[:, order], starts, axis=1) / np.bincount(host)
    high = np.partition(first_end - last_enqueue[:, :1], allowed, axis=0)[allowed]
    low = -np.partition(first_end[:, :1] - last_enqueue, allowed, axis=0)[allowed]
    if (low > high).any():
        raise _contradiction(names[h] for h in np.flatnonzero(low > high))
    distance = (completion - completion[:, :1])[some]
    theta = np.clip(np.median(distance, axis=0), low, high)
    theta[0] = 0.0
    blur = np.maximum((first_end - theta)[some].min(axis=1) - (last_enqueue - theta)[some].max(axis=1), 1.0)
    if len(end) >= _MIN_COLLECTIVES:
        for _ in range(_ROUNDS):
            size = np.abs(distance - theta) / blur[:, None]
            scale = np.maximum(1.4826 * np.median(size, axis=0), 1e-3)
            weight = np.minimum(1.0, _HUBER * scale / np.maximum(size, 1e-9)) / (scale * blur[:, None]) ** 2
            theta = (weight * distance).sum(axis=0) / weight.sum(axis=0)
        times = np.random.default_rng(0).multinomial(len(some), np.full(len(some), 1.0 / len(some)), size=_RESAMPLES)
        sampling = ((times @ (weight * distance)) / (times @ weight)).std(axis=0)
        spread = np.array([_half_range(column, blur**-2) for column in distance.T])
        half = np.minimum(1.96 * sampling + spread, np.maximum(high - theta, theta - low))
    else:
        half = np.minimum(_few(distance)[1], np.maximum(high - theta, theta - low))
    for _ in range(_ROUNDS):
        latest, first = (last_enqueue - theta).max(axis=1), (first_end - theta).min(axis=1)
        upper = np.partition(first_end - latest[:, None], allowed, axis=0)[allowed]
        lower = -np.partition(first[:, None] - last_enqueue, allowed, axis=0)[allowed]
        theta = np.where(lower <= upper, np.clip(theta, lower, upper), theta)
        theta[0] = 0.0
    half[0] = 0.0
    return theta, half, "completion, Huber regression of each host, causal in rounds"


def _half_range(values: Floats, weight: Floats) -> float:
    """Half the distance of the weighted 10 % and 90 % quantiles."""
    order = np.argsort(values)
    below = np.cumsum(weight[order])
    first, last = np.searchsorted(below, np.array([0.1, 0.9]) * below[-1])
    return float(values[order[last]] - values[order[first]]) / 2


def _made_causal(theta: Floats, highest: Floats) -> Floats:
    """Theta moved as little as needed, host by host, into theta_h - theta_k <= highest[h, k]; host 0 stays."""
    theta = theta.copy()
    for h in range(1, len(theta)):
        known = np.arange(h)
        theta[h] = np.clip(theta[h], (theta[known] - highest[known, h]).max(), (theta[known] + highest[h, known]).min())
    return theta


def _regression(enqueue: Floats, end: Floats, family: Ints, host: Ints) -> tuple[Floats, Floats, Floats]:
    """Robust estimate of theta and its standard error, [H] each, and the scale of each collective's equations, [m].

    Each collective gives R - 1 equations from its completions, end_r - end_0 = theta_h(r), and one from its duration,
    mean(end) - post_last = mean(theta) - theta_h(last) + (its family's duration). Which rank enqueued last depends on theta, so
    it is found anew in each round; the families' durations are taken out by centring the equations within each family.
    """
    m, ranks = end.shape
    group = np.unique(family, return_inverse=True)[1]
    one_hot = np.eye(int(host.max()) + 1)[host]  # [R, H]
    unknowns = slice(1, None)  # theta_0 = 0 is known
    rows = np.empty((m, ranks, one_hot.shape[1] - 1))  # the last of a collective's equations is its duration's
    rows[:, :-1] = one_hot[1:, unknowns]  # rank 0 is on host 0
    right = np.empty((m, ranks))
    right[:, :-1] = end[:, 1:] - end[:, :1]
    theta = np.array([np.median((end[:, host == h] - end[:, :1]).mean(axis=1)) for h in range(one_hot.shape[1])])
    theta[0] = 0.0
    share = np.ones(m)
    for _ in range(_ROUNDS):
        last = (enqueue - theta[host]).argmax(axis=1)
        rows[:, -1] = _centred((one_hot.mean(axis=0) - one_hot[last])[:, unknowns], group, share)
        right[:, -1] = _centred((end.mean(axis=1) - enqueue[np.arange(m), last])[:, None], group, share)[:, 0]
        clipped = (end - theta[host]).max(axis=1) - (enqueue - theta[host]).max(axis=1)
        sharpest = max(_MIN_COLLECTIVES, m // 10) - 1  # so many set the scale, lest one collective decides
        blur = np.maximum(clipped, max(float(np.partition(clipped, sharpest)[sharpest]), 1.0))
        weight = _weights(right - rows @ theta[unknowns], blur)
        share = weight[:, -1]
        normal = np.einsum("irp,ir,irq->ipq", rows, weight, rows)
        moment = np.einsum("irp,ir,ir->ip", rows, weight, right)
        theta[unknowns] = np.linalg.solve(normal.sum(axis=0), moment.sum(axis=0))
    return theta, np.concatenate([[0.0], _standard_error(normal, moment)]), blur


def _centred(values: Floats, group: Ints, weight: Floats) -> Floats:
    """Values [m, n] less the weighted mean of their group."""
    total = np.bincount(group, weights=weight)
    means = np.stack([np.bincount(group, weights=weight * column) / total for column in values.T], axis=1)
    centred: Floats = values - means[group]
    return centred


def _weights(left_over: Floats, blur: Floats) -> Floats:
    """Weight of each equation, [m, R]: Huber's, over the variance of its kind (completion, duration) and collective."""
    relative = np.abs(left_over) / blur[:, None]
    weight = np.empty_like(left_over)
    for kind in (slice(None, -1), slice(-1, None)):
        size = relative[:, kind]
        scale = max(1.4826 * float(np.median(size)), 1e-3)
        weight[:, kind] = np.minimum(1.0, _HUBER * scale / np.maximum(size, 1e-9)) / (scale * blur[:, None]) ** 2
    return weight


def _standard_error(normal: Floats, moment: Floats) -> Floats:
    """Bootstrap over collectives of the solution of their normal equations; the weights are kept."""
    rng = np.random.default_rng(0)
    m = len(normal)
    times = rng.multinomial(m, np.full(m, 1.0 / m), size=_RESAMPLES).astype(np.float64)
    matrices, vectors = np.tensordot(times, normal, axes=1), times @ moment
    error: Floats = np.linalg.solve(matrices, vectors[:, :, None])[:, :, 0].std(axis=0)
    return error
