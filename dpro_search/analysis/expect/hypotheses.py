"""`beliefs_of`: hypotheses on a job, one or two causes at one severity each, and how probable measured numbers make them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from dpro_search.analysis.expect.causes import CAUSES, Effect, Situation, cause_texts, effects_of
from dpro_search.analysis.expect.measured import Reading
from dpro_search.analysis.expect.posterior import Beliefs, ErrorSpread, Hypothesis
from dpro_search.analysis.expect.quantities import ABOUT, Quantity
from dpro_search.analysis.expect.signals import signals, slopes
from dpro_search.errors import InputError
from dpro_search.parallel.answers.accuracy import accuracy
from dpro_search.parallel.costs.scales import MEASURED
from dpro_search.parallel.memory.peak import peak_memory
from dpro_search.parallel.workload import Workload

NONE = "none"
PRIOR_NONE = 0.5  # That nothing is wrong with a job, before anything was measured (assumed).
MOST_CAUSES = 6
_PAIRED = 5  # causes of which pairs are considered
_PAIRED_GRADES = 6  # severities of each of them
_GRADE = 0.1  # of a logarithm, from one severity to the next
_MOST_GRADES = 20
_OVER_MEMORY = 1.1  # Predicted memory over that of the device, from which on the job would not have run.
_RECORDED = 0.5  # How far off what was timed there is, over what a data sheet says of it (estimated).
_CORES = 0.15  # Standard deviation of the logarithm of a core's speed: it shares its host with others (experiments/parallel).
_ONE_PLACE = (
    # Causes of which a job has one at most: the slowest of them decides.
    {"half-the-nics", "wrong-nic-binding", "tcp-instead-of-rdma", "no-gpudirect", "network-contention"},
    {"input-stalls", "checkpoint-in-window"},
    {"power-or-thermal-cap", "slow-device-or-host", "shared-devices"},
)


def beliefs_of(situation: Situation, readings: Sequence[Reading], expected: Mapping[Quantity, float]) -> Beliefs:
    """How probable each cause is, given some measured numbers.

    All causes are replayed for the quantities that were measured, the likely ones for all, and those in pairs.

    Parameters
    ----------
    expected
        All quantities of the job (`signals`).
    """
    measured = {reading.key.quantity: math.log(reading.value / expected[reading.key.quantity]) for reading in readings}
    spread = _spread(situation, expected)
    derived = {reading.key.quantity: reading.counts for reading in readings if reading.key.derived}
    needed = [quantity for quantity in expected if quantity in measured or quantity in (Quantity.STEP, Quantity.MEMORY)]
    replays = CauseReplays(situation=situation, expected=expected, derived=derived)
    none = Hypothesis(causes=(), words=(), prior=PRIOR_NONE, logs={})
    single = [none, *(one for name in CAUSES for one in replays.hypotheses(name, needed))]
    likely = _likely(Beliefs(hypotheses=single, spread=spread, measured=measured))
    whole = [one for name in likely for one in replays.hypotheses(name, list(expected))]
    alone = [*(one for one in single if not one.causes or one.causes[0] not in likely), *whole]
    return Beliefs(hypotheses=[*alone, *_pairs(alone, likely)], spread=spread, measured=measured)


def _spread(situation: Situation, expected: Mapping[Quantity, float]) -> ErrorSpread:
    known = accuracy()
    rows = slopes(situation.workload, list(expected), expected)
    widths = np.array([known.spread[name] for name in MEASURED]) * (_RECORDED if situation.recorded else 1.0)
    matrix = np.array([rows[quantity] * widths for quantity in expected])
    covariance = matrix @ matrix.T
    steps = np.array([float(quantity in (Quantity.STEP, Quantity.ONE_HOST)) for quantity in expected])
    covariance += known.spread["group"] ** 2 * np.outer(steps, steps) + np.diag(known.spread["row"] ** 2 * steps)
    covariance += np.diag([ABOUT[quantity].spread ** 2 for quantity in expected])
    if Quantity.GEMM in expected and not situation.on_gpus:
        place = list(expected).index(Quantity.GEMM)
        covariance[place, place] += _CORES**2
    for place, quantity in enumerate(expected):
        covariance[place, place] += 1e-4 * (quantity is Quantity.MEMORY)
    if Quantity.MEDIAN_STEP in expected:  # an error of the prediction is one of the mean and of the median alike
        mean, median = (list(expected).index(quantity) for quantity in (Quantity.STEP, Quantity.MEDIAN_STEP))
        covariance[median] = covariance[mean]
        covariance[:, median] = covariance[:, mean]
    memory = peak_memory(situation.workload)
    least, most = known.memory_ratio
    ratios = {
        Quantity.STEP: situation.step_ratio,
        Quantity.MEDIAN_STEP: situation.step_ratio,
        Quantity.ONE_HOST: situation.step_ratio,
        Quantity.MEMORY: (least * memory.allocated_bytes / memory.total_bytes, most),  # tensors alone, or all that is reserved
    }
    return ErrorSpread(quantities=tuple(expected), covariance=covariance, ratios=ratios)


@dataclass(frozen=True, kw_only=True)
class CauseReplays:
    """A job with one cause after the other.

    Attributes
    ----------
    expected
        All quantities of the job without a cause.
    derived
        Measured quantities that follow from a count, and the things that are counted ("tokens", "flops").
    """

    situation: Situation
    expected: Mapping[Quantity, float]
    derived: Mapping[Quantity, str]
    _shown: dict[tuple[str, int], dict[Quantity, float] | None] = field(default_factory=dict)  # by cause and number of the effect

    def hypotheses(self, name: str, quantities: Sequence[Quantity]) -> list[Hypothesis]:
        """A cause at each severity, with what it moves of some quantities; none where the job cannot have it."""
        if name == "counted-otherwise" and not self.derived:
            return []
        severities: list[tuple[str, dict[Quantity, float]]] = []
        before, said = dict.fromkeys(quantities, 0.0), ""
        for number, effect in enumerate(effects_of(name, self.situation)):
            logs = self._logs((name, number), effect, quantities)
            if logs is None:
                continue
            if effect.graded:
                words = f"between: {said}, and {effect.words}" if said else f"less than: {effect.words}"
                severities += [(words, between) for between in _between(before, logs)]
            severities.append((effect.words, logs))
            before, said = logs, effect.words
        prior = (1 - PRIOR_NONE) * prior_shares()[name] / max(len(severities), 1)
        return [Hypothesis(causes=(name,), words=(words,), prior=prior, logs=logs) for words, logs in severities]

    def _logs(self, key: tuple[str, int], effect: Effect, quantities: Sequence[Quantity]) -> dict[Quantity, float] | None:
        """Logarithm of each quantity under an effect over the expected one; None: the job could not run like that."""
        logs = dict.fromkeys(quantities, 0.0)
        if effect.replay is not None:
            replayed = [quantity for quantity in quantities if effect.on_one_host or quantity is not Quantity.ONE_HOST]
            shown = self._replayed(key, effect.replay, replayed)
            if shown is None:
                return None
            logs |= {name: math.log(shown[name] / self.expected[name]) for name in replayed if name in shown}
        for quantity, factor in effect.factors.items():
            if quantity in logs:
                logs[quantity] += math.log(factor)
        if effect.counted != 1.0:
            rates = [quantity for quantity, counts in self.derived.items() if counts == effect.counts and quantity in logs]
            if not rates:
                return None
            logs |= {quantity: logs[quantity] - math.log(effect.counted) for quantity in rates}
        return logs

    def _replayed(self, key: tuple[str, int], workload: Workload, quantities: Sequence[Quantity]) -> dict[Quantity, float] | None:
        """The quantities that a changed job shows; None: it is impossible, or does not fit in memory."""
        shown = self._shown.setdefault(key, {})
        missing = [quantity for quantity in quantities if shown is not None and quantity not in shown]
        if shown is None or not missing:
            return shown
        try:
            shown |= signals(workload, missing)
        except InputError:
            self._shown[key] = None
            return None
        limit_bytes = self.situation.device.memory_bytes
        if limit_bytes and shown.get(Quantity.MEMORY, 0.0) > limit_bytes * _OVER_MEMORY:
            self._shown[key] = None
        return self._shown[key]


@lru_cache(maxsize=1)
def prior_shares() -> Mapping[str, float]:
    """The share of jobs with a cause that have each: by the public threads that had it, and half a thread more for each."""
    threads = {name: text.threads + 0.5 for name, text in cause_texts().items() if name != NONE}
    return {name: count / sum(threads.values()) for name, count in threads.items()}


def _between(before: Mapping[Quantity, float], after: Mapping[Quantity, float]) -> list[dict[Quantity, float]]:
    """Severities between two, so near to each other that no quantity moves by more than `_GRADE` from one to the next."""
    apart = max(abs(after[name] - before.get(name, 0.0)) for name in after)
    steps = min(math.ceil(apart / _GRADE), _MOST_GRADES)
    return [
        {name: before.get(name, 0.0) + (after[name] - before.get(name, 0.0)) * place / steps for name in after}
        for place in range(1, steps)
    ]


def _likely(beliefs: Beliefs) -> list[str]:
    """The most probable causes."""
    sums = by_cause(beliefs)
    names = sorted((cause[0] for cause in sums if cause), key=lambda name: -sums[name,])
    return names[:MOST_CAUSES]


def by_cause(beliefs: Beliefs) -> dict[tuple[str, ...], float]:
    """Probability of each cause, or pair of causes, at any severity."""
    sums: dict[tuple[str, ...], float] = {}
    for one, probability in zip(beliefs.hypotheses, beliefs.probabilities, strict=True):
        sums[one.causes] = sums.get(one.causes, 0.0) + float(probability)
    return sums


def _pairs(alone: Sequence[Hypothesis], likely: Sequence[str]) -> list[Hypothesis]:
    """Hypotheses of two of the likely causes: what they move adds up, and their prior odds are multiplied."""
    none = next(one.prior for one in alone if not one.causes)
    first = [one for name in likely[:_PAIRED] for one in _thinned([each for each in alone if each.causes == (name,)])]
    pairs = []
    for place, one in enumerate(first):
        for other in first[place + 1 :]:
            names = {one.causes[0], other.causes[0]}
            if len(names) == 2 and not any(names <= group for group in _ONE_PLACE):
                logs = {name: one.logs.get(name, 0.0) + other.logs.get(name, 0.0) for name in {**one.logs, **other.logs}}
                prior = one.prior * other.prior / none
                pairs.append(Hypothesis(
                    causes=one.causes + other.causes, words=one.words + other.words, prior=prior, logs=logs
                ))  # fmt: skip
    return pairs


def _thinned(severities: Sequence[Hypothesis]) -> list[Hypothesis]:
    """A few severities of a cause, which stand for all."""
    step = max(math.ceil(len(severities) / _PAIRED_GRADES), 1)
    kept = severities[step - 1 :: step]
    return [replace(one, prior=sum(each.prior for each in severities) / len(kept)) for one in kept]
