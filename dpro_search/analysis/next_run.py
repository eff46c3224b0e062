"""`next_run`: which plan of a search to run next, what that run is worth, and when to stop.

Everything that was measured (`deploy.measured_plans`) conditions the predictions of all listed plans (`PlanBeliefs`).
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from dpro_search.analysis.plan_beliefs import PlanBeliefs
from dpro_search.deploy.measured_plans import LEAST_NOISE, measured_plans
from dpro_search.kinds._measured_runs import SearchedRun
from dpro_search.quantities import time_text
from dpro_search.space.plan import Plan

_START_US = 5 * 60e6  # Start of a job until its steps are warm (estimated).
_STEPS = 20  # Steps of a run that is only measured.
_LITTLE = 0.001  # Expected gain of a run below which none is proposed, where the length of the training is not known.
_SIGMAS = 1.645  # Half the width of a normal distribution's 90 % interval, in standard deviations.


class BelievedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan after everything that was measured; times in us.

    Attributes
    ----------
    number, name
        Its number in the run folder (0: without a plan), and its settings in words.
    predicted_us
        Prediction of the search.
    expected_us, interval_us
        Expected time given all measurements, and its 90 % interval.
    measured_us
        Median of its measurements; None: it was not measured.
    """

    number: int
    name: str
    predicted_us: float
    expected_us: float
    interval_us: tuple[float, float]
    measured_us: float | None


class NextRun(msgspec.Struct, frozen=True, kw_only=True):
    """The run to make next.

    Attributes
    ----------
    plans
        All plans that fit in memory, the fastest one first, as far as is known.
    number
        Plan to run next; None: stop.
    worth_pct
        Expected gain of the plan that is chosen in the end, if that run is made, % of the step time.
    device_minutes
        Cost of the run: minutes times devices.
    pays_off_after_us
        Length of a training from which on the run gains more than it costs; None: no run gains anything.
    reason
        Why, in a sentence.
    """

    plans: tuple[BelievedPlan, ...]
    number: int | None
    worth_pct: float
    device_minutes: float
    pays_off_after_us: float | None
    reason: str

    def lines(self) -> list[str]:
        """The answer in sentences."""
        best = self.plans[0]
        low_us, high_us = best.interval_us
        known = f"{time_text(best.expected_us)} ({time_text(low_us)} to {time_text(high_us)})"
        return [f"Fastest as far as is known: {_title(best)}, {known}.", self.reason]


def next_run(searched: SearchedRun, training_us: float | None = None) -> NextRun:
    """The plan to run next.

    Parameters
    ----------
    training_us
        How long the job will train with the plan that is chosen; None: not known.

    Raises
    ------
    InputError
        A file of the run folder is damaged.
    """
    result, measured = searched.result, measured_plans(searched.folder)
    numbers = {Plan(): 0} | {ranked.plan: number for number, ranked in enumerate(result.plans, 1)}
    predictions = {Plan(): result.baseline} | {ranked.plan: ranked.prediction for ranked in result.plans}
    predictions = {plan: one for plan, one in predictions.items() if one.infeasible is None or plan in measured}
    plans = list(predictions)
    ran = {place: measured[plan] for place, plan in enumerate(plans) if plan in measured}
    beliefs = PlanBeliefs(
        logs=np.log([one.iteration_us for one in predictions.values()]),
        covariance=searched.job.job.plan_errors(searched.job, predictions),
        noise=max((times.noise for times in ran.values()), default=LEAST_NOISE),
    ).after({place: math.log(times.step_us) for place, times in ran.items()})
    widths = _SIGMAS * np.sqrt(np.maximum(np.diag(beliefs.covariance), 0.0))
    believed = [
        BelievedPlan(
            number=numbers[plan],
            name=searched.plan(numbers[plan])[2],
            predicted_us=predictions[plan].iteration_us,
            expected_us=math.exp(log),
            interval_us=(math.exp(log - width), math.exp(log + width)),
            measured_us=ran[place].step_us if place in ran else None,
        )
        for place, (plan, log, width) in enumerate(zip(plans, beliefs.logs.tolist(), widths.tolist(), strict=True))
    ]
    return _answer(searched, believed, beliefs, set(ran), training_us)


def _answer(
    searched: SearchedRun, believed: list[BelievedPlan], beliefs: PlanBeliefs, ran: set[int], training_us: float | None
) -> NextRun:
    ranking = tuple(sorted(believed, key=lambda one: one.expected_us))
    if len(ran) == len(believed):
        reason = "Stop: every listed plan was measured."
        return NextRun(plans=ranking, number=None, worth_pct=0.0, device_minutes=0.0, pays_off_after_us=None, reason=reason)
    place = beliefs.next_plan(but=ran)
    plan, worth = believed[place], float(beliefs.worth()[place])
    run_us = _START_US + _STEPS * plan.expected_us
    device_minutes = run_us / 60e6 * searched.job.cluster.ranks
    pays_off_us = run_us / worth if worth > 0 else None
    cost = f"{device_minutes:,.0f} device-minutes"
    if training_us is None:
        stop = worth < _LITTLE
        why = f"Stop: a further run, of {_title(plan)}, is expected to gain less than {_LITTLE:.1%} and costs {cost}."
    else:
        stop = pays_off_us is None or pays_off_us > training_us
        why = (
            f"Stop: a further run, of {_title(plan)}, is worth less than it costs in {time_text(training_us)} of training ({cost})."
        )
    if not stop and pays_off_us is not None:
        why = (
            f"Run next: {_title(plan)}. It is expected to gain {worth:.1%} of the step time and costs {cost}, which pays off in a "
            f"training of more than {time_text(pays_off_us)}."
        )
    return NextRun(
        plans=ranking,
        number=None if stop else plan.number,
        worth_pct=worth * 100,
        device_minutes=device_minutes,
        pays_off_after_us=pays_off_us,
        reason=why,
    )


def _title(plan: BelievedPlan) -> str:
    return f"plan {plan.number} ({plan.name})" if plan.number else plan.name
