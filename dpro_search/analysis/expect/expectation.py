"""`expect`: what a described job should show, where measured numbers lie, and the probable causes of a difference.

job --signals--> expected values, slopes --accuracy--> errors in common
causes --replays--> hypotheses --measured numbers--> probabilities --> answer, next measurement
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dpro_search.analysis.expect.answer import Cause, Expectation, ExpectedValue
from dpro_search.analysis.expect.causes import CAUSES, Situation, cause_texts
from dpro_search.analysis.expect.hypotheses import MOST_CAUSES, NONE, beliefs_of, by_cause, prior_shares
from dpro_search.analysis.expect.measured import Facts, Reading, one_host_work, read_measured
from dpro_search.analysis.expect.next_measurement import measurements
from dpro_search.analysis.expect.posterior import Beliefs, Hypothesis
from dpro_search.analysis.expect.published import comparable_runs
from dpro_search.analysis.expect.quantities import ABOUT, Quantity
from dpro_search.analysis.expect.signals import signals
from dpro_search.analysis.expect.unstated import PossibleJobs, possible_jobs
from dpro_search.errors import InputError
from dpro_search.kinds import JobInScenario
from dpro_search.kinds._work import efficiency
from dpro_search.parallel.answers.accuracy import accuracy
from dpro_search.parallel.job import ParallelJob
from dpro_search.parallel.prepared import PreparedJob
from dpro_search.parallel.steps.step_prices import StepPrices
from dpro_search.parallel.workload import Workload
from dpro_search.space.plan import Plan

_SEEN = 0.1  # of a logarithm, from which on a cause is said to change a quantity
_LIKELY = 0.05  # probability of causes that are compared with each other
_APART = 3.0  # Ratio of likelihoods, from which on one cause is told from another.
_TELLS = 0.1  # of a logarithm: a quantity that two causes move apart by so much tells them apart
_OUTSIDE = (5.0, 95.0)
ON_CORES = (0.92, 1.22)
"""Measured over predicted steps of jobs on cores whose blocks were timed: quantiles of 5 and 95 %, rounded outwards
(experiments/parallel: 72 cases, median error 4 %, worst 25 %, bias -4 %; rounds an hour apart differ by 8 % in the median, one in
ten by 28 %)."""


def expect(
    job: JobInScenario,
    measured: Iterable[str] = (),
    files: Iterable[Path] = (),
    *,
    plan: Plan | None = None,
    with_next: bool = False,
    seed: int = 0,
) -> Expectation:
    """Compares a job with what is expected of it.

    Parameters
    ----------
    job
        A described parallel job.
    measured
        Numbers that were seen, ``name=value`` (`KEYS`).
    files
        Files with such numbers.
    plan
        Changes of its strategy; None: as it is described.
    with_next
        Whether to say which measurement to make next.
    seed
        Of the draws by which the worth of a further measurement is estimated.

    Raises
    ------
    InputError
        Another kind of job, or numbers that cannot be (`read_measured`).
    """
    if not isinstance(job.job, ParallelJob):
        raise InputError(f"{job.title} is not compared with what is expected: write it down as a job.toml (dpro-search describe)")
    prepared = job.job.prepared(job.scenario)
    strategy = prepared.space.strategy(Plan() if plan is None else plan)
    described = replace(prepared.prices.workload, strategy=strategy)
    possible = possible_jobs(prepared.description, described, frozenset((plan or Plan()).settings))
    workload = possible.likely
    readings = read_measured(measured, files, _facts(prepared, workload))
    expected = signals(workload, list(Quantity))
    for reading in readings:
        if reading.key.quantity not in expected:
            raise InputError(f"--measured {reading.name}: it is not known what to expect of such a job; leave it out")
    situation = Situation(
        workload=workload,
        framework=prepared.description.framework,
        step_ratio=_step_ratio(prepared, possible, expected[Quantity.STEP]),
    )
    beliefs = beliefs_of(situation, readings, expected)
    causes = _causes(beliefs, expected, {reading.key.quantity for reading in readings})
    device = prepared.description.device
    limits = {Quantity.UTILISATION: 1.0, Quantity.MEMORY: device.memory_bytes, Quantity.POWER: device.power_w}
    values = {
        quantity.value: _value(quantity, expected[quantity], limits.get(quantity), beliefs)
        for quantity in Quantity
        if quantity in expected and (quantity is not Quantity.MEDIAN_STEP or quantity in beliefs.measured)
    }
    first = readings[0] if readings else None
    name, scalars = _as_given(first, values)
    devices, per_host = workload.strategy.devices, workload.cluster.ranks_per_host or workload.strategy.devices
    return Expectation(
        quantity=name,
        mfu_pct=efficiency(prepared.work, values[Quantity.STEP].measured or values[Quantity.STEP].expected).mfu_pct,
        expected=scalars.expected,
        interval=scalars.interval,
        measured=scalars.measured,
        percentile=scalars.percentile,
        verdict=_verdict(beliefs, causes),
        values=values,
        causes=causes,
        not_told_apart=_not_told_apart(causes, readings),
        comparable=comparable_runs(workload),
        next=tuple(
            measurements(
                beliefs, devices, per_host, workload.precision, np.random.default_rng(seed), on_gpus=situation.device.kind == "gpu"
            )
        )
        if with_next
        else (),
        assumptions=(*prepared.assumptions, *possible.assumptions),
    )


def _step_ratio(prepared: PreparedJob, possible: PossibleJobs, step_us: float) -> tuple[float, float]:
    """Quantiles of 5 and 95 % of measured over expected step time, with those of the other jobs that the description may mean."""
    workload = possible.likely
    if workload.times is not None and prepared.description.device.kind != "gpu":
        return ON_CORES
    domain = StepPrices(workload).domain(workload.strategy)
    low_us, high_us = prepared.interval_us(step_us, workload.strategy, domain)
    for other in possible.others:
        other_low_us, other_high_us = accuracy().interval_us(
            StepPrices(other).step_us(other.strategy), domain, prepared.description.gpu_vendor
        )
        low_us, high_us = min(low_us, other_low_us), max(high_us, other_high_us)
    return low_us / step_us, high_us / step_us


def _facts(prepared: PreparedJob, workload: Workload) -> Facts:
    description, strategy = prepared.description, workload.strategy
    hosts = max(description.cluster.hosts, 1)
    return Facts(
        work=prepared.work,
        one_host=one_host_work(prepared.work, hosts),
        samples=float(strategy.global_batch),
        sequence=description.fixed.sequence,
        micro_batches=strategy.micro_batches,
        memory_bytes=prepared.device_bytes,
        power_w=description.device.power_w,
        hosts=hosts,
        peak_is_measured=description.times is not None and description.device.kind != "gpu",
    )


# The answer.


def _value(quantity: Quantity, expected: float, limit: float | None, beliefs: Beliefs) -> ExpectedValue:
    """A quantity with its interval, which ends at what a device has; `limit`: None where that is not known."""
    spread = beliefs.spread
    low, high = (math.exp(sign * spread.half_width(quantity, above=sign > 0)) for sign in (-1, 1))
    most = math.inf if limit is None else max(limit, expected)
    log = beliefs.measured.get(quantity)
    return ExpectedValue(
        words=ABOUT[quantity].words,
        expected=expected,
        interval=(low * expected, min(high * expected, most)),
        measured=None if log is None else expected * math.exp(log),
        percentile=None if log is None else beliefs.percentile(quantity),
    )


def _as_given(reading: Reading | None, values: Mapping[str, ExpectedValue]) -> tuple[str, ExpectedValue]:
    """The quantity of the first number that was given, in the unit of that number; without one the step time."""
    if reading is None:
        return "step_time", values[Quantity.STEP]
    value = values[reading.key.quantity]
    if not reading.key.derived:
        return reading.name, value
    product = reading.number * reading.value  # a rate times the duration that it stands for
    low, high = value.interval
    assert value.percentile is not None, "it was measured"
    return reading.name, ExpectedValue(
        words=reading.name.replace("_", " "),
        expected=product / value.expected,
        interval=(product / high, product / low),
        measured=reading.number,
        percentile=100 - value.percentile,
    )


def _causes(beliefs: Beliefs, expected: Mapping[Quantity, float], measured: set[Quantity]) -> tuple[Cause, ...]:
    texts, sums = cause_texts(), by_cause(beliefs)
    if not measured:
        return ()
    answers = []
    for names in sorted(sums, key=lambda names: -sums[names])[:MOST_CAUSES]:
        likeliest = max(
            (place for place, one in enumerate(beliefs.hypotheses) if one.causes == names),
            key=lambda place: beliefs.probabilities[place],
        )
        one = beliefs.hypotheses[likeliest]
        about = [texts[name] for name in names] or [texts[NONE]]
        answers.append(
            Cause(
                name="+".join(names) or NONE,
                title=" and ".join(text.title for text in about),
                probability=round(sums[names], 4),
                severity=", ".join(filter(None, one.words)),
                would_be={quantity.value: expected[quantity] * math.exp(one.logs.get(quantity, 0.0)) for quantity in expected},
                would_also_see=_would_see(one, expected, measured)
                + tuple(sentence for text in about for sentence in (text.also_seen, text.tells_apart) if sentence and names),
                links=tuple(link for text in about for link in text.links),
            )
        )
    return tuple(answers)


def _would_see(one: Hypothesis, expected: Mapping[Quantity, float], measured: set[Quantity]) -> tuple[str, ...]:
    """Sentences on quantities that were not measured."""
    sentences = []
    for quantity, value in expected.items():
        if quantity in measured or not one.causes:
            continue
        about, log = ABOUT[quantity], one.logs.get(quantity, 0.0)
        if quantity is Quantity.MEDIAN_STEP and abs(one.logs.get(Quantity.STEP, 0.0) - log) <= _SEEN:
            continue  # all steps are longer alike
        if abs(log) > _SEEN:
            sentences.append(f"{about.words}: {about.text(value * math.exp(log))} in place of {about.text(value)}")
        elif quantity in (Quantity.MEDIAN_STEP, Quantity.ONE_HOST, Quantity.ALL_REDUCE, Quantity.GEMM):
            sentences.append(f"{about.words}: as expected, {about.text(value)}")
    return tuple(sentences)


def _verdict(beliefs: Beliefs, causes: Sequence[Cause]) -> str:
    if not causes:
        return "not measured"
    outside = {name: beliefs.percentile(name) for name in beliefs.measured}
    far = max(outside, key=lambda name: abs(outside[name] - 50))
    is_outside = not _OUTSIDE[0] <= outside[far] <= _OUTSIDE[1]
    if not is_outside:
        return "as expected"
    return _more(far) if outside[far] > 50 else _less(far)


def _more(quantity: Quantity) -> str:
    return {Quantity.STEP: "slower than expected", Quantity.ONE_HOST: "slower on one host than expected"}.get(
        quantity, f"more {ABOUT[quantity].words} than expected"
    )


def _less(quantity: Quantity) -> str:
    return {Quantity.STEP: "faster than expected", Quantity.ONE_HOST: "faster on one host than expected"}.get(
        quantity, f"less {ABOUT[quantity].words} than expected"
    )


def _not_told_apart(causes: Sequence[Cause], readings: Sequence[Reading]) -> tuple[str, ...]:
    """Sentences on likely causes that the given numbers do not tell apart, with a number or a look that would."""
    texts, shares, sentences = cause_texts(), prior_shares(), []
    given = {reading.key.quantity.value for reading in readings}
    likely = [cause for cause in causes if cause.probability >= _LIKELY and cause.name in CAUSES]
    for place, one in enumerate(likely):
        for other in likely[place + 1 :]:
            evidence = (one.probability / shares[one.name]) / (other.probability / shares[other.name])
            if abs(math.log(evidence)) > math.log(_APART):
                continue
            apart = {name: abs(math.log(one.would_be[name] / other.would_be[name])) for name in one.would_be.keys() - given}
            best = max(sorted(apart), key=lambda name: apart[name], default="")
            if best and apart[best] > _TELLS:
                helps = f"the {ABOUT[Quantity(best)].words} would"
            else:
                helps = f"no number does. {texts[one.name].tells_apart}"
            sentences.append(f"the given numbers do not tell {one.name} from {other.name}; {helps}")
    return tuple(sentences)
