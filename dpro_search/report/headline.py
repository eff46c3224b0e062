"""The headline: the gain of the best plan, its uncertainty, and the iteration time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET

from dpro_search.analysis.search import PlanRow, SearchAnswer
from dpro_search.deploy.validate import FailedPlan, MeasuredPlan, RefusedPlan, Validation
from dpro_search.report import units
from dpro_search.report.charts import IntervalMark, whiskers
from dpro_search.report.facts import PageFacts
from dpro_search.report.html import Element, Section, bullets, figure, name_of, table
from dpro_search.report.parallel import EFFICIENCY, setting_tiles
from dpro_search.search.objective import StrategyFacts

NOT_CERTAIN, NOT_MEASURED = "Not a certain gain", "Predicted, not yet measured"
_VALIDATE = "Run 'dpro-search validate' to measure"
_NONE = "\N{EN DASH}"
_CLAUSE_END = re.compile(r"; |\. |, |: | because | so that ")
_SHORTEST_TITLE = 15  # characters, so that "Host-bound: " is no clause of its own


@dataclass(frozen=True)
class Verdict:
    """The headline of the page.

    Attributes
    ----------
    tone
        "good" (confirmed by real runs), "likely" (predicted only), "open" (not a certain gain), or "plain" (nothing was searched).
    badge, title, sentence
        In words.
    tiles
        Titles, values, and what stands below them.
    """

    tone: str
    badge: str
    title: str
    sentence: str
    tiles: tuple[tuple[str, str, str], ...]


def verdict(facts: PageFacts) -> Verdict:
    """The result; a gain is stated only as far as it is certain."""
    if facts.search is None:
        return _of_description(facts) if facts.described else _of_recording(facts)
    validation = facts.validation
    if validation is not None and validation.plans:
        return _measured(facts, validation)
    if validation is not None and validation.refused:
        return _refused(facts, validation, validation.refused[0])
    if validation is not None and validation.failed:
        return _failed(facts, validation, validation.failed[0])
    return _predicted(facts, facts.search)


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """Predictions of a setting, and what its real runs gave.

    `gain` and `measured_gain` are speed-ups in words.
    """

    name: str
    predicted_us: float
    interval_us: Sequence[float]
    gain: str
    certain: str = ""
    memory: str = ""
    facts: StrategyFacts = field(default_factory=StrategyFacts)
    measured_us: float | None = None
    measured_gain: str = ""

    def known(self, key: str) -> float | None:
        """One of `EFFICIENCY`; None: not known."""
        value = getattr(self.facts, key)
        return None if value is UNSET else value

    def mark(self, *, short: bool) -> IntervalMark:
        """Its line of the chart; `short`: without the strategy, which a table below the chart has."""
        ran = "" if self.measured_us is None else f", measured {units.duration(self.measured_us)}"
        return IntervalMark(
            label=self.name.partition(":")[0] if short else self.name,
            low=self.interval_us[0],
            middle=self.predicted_us,
            high=self.interval_us[1],
            measured=self.measured_us,
            tip=f"predicted {units.duration(self.predicted_us)} ({units.interval(self.interval_us)}){ran}",
            value=f"{units.duration(self.predicted_us)} · {self.gain}",
        )

    def row(self, more: Sequence[str], *, ran: bool) -> tuple[Element | str, ...]:
        """Its row of the table: with `more` facts by their keys, and, where any setting `ran`, with what was measured."""
        gain = f"{self.gain} ({self.certain})" if self.certain else self.gain
        facts = [_NONE if (value := self.known(key)) is None else EFFICIENCY[key][1](value) for key in more]
        measured = (_NONE if self.measured_us is None else units.duration(self.measured_us), self.measured_gain or _NONE)
        predicted = (units.duration(self.predicted_us), units.interval(self.interval_us))
        return (name_of(self.name), *predicted, gain, *facts, self.memory or _NONE, *(measured if ran else ()))


def plans_section(facts: PageFacts) -> Section | None:
    """The best plans with their intervals, and what real runs gave; None where nothing was searched."""
    search, validation = facts.search, facts.validation
    if search is None:
        return None
    measured: Sequence[MeasuredPlan | RefusedPlan | FailedPlan] = (
        () if validation is None else (*validation.plans, *validation.refused, *validation.failed)
    )
    recorded_us = facts.replay.measured_us
    settings = [
        _unchanged(facts, search, recorded_us),
        *(_planned(plan, measured) for plan in search.plans if plan.plan),
    ]
    ran = any(setting.measured_us is not None for setting in settings)
    more = [key for key in EFFICIENCY if any(setting.known(key) is not None for setting in settings)]
    columns = (
        ("plan", "predicted#", "interval#", "predicted speed-up#")
        + (*(f"{EFFICIENCY[key][0]}#" for key in more), "peak memory#")
        + (("measured#", "measured speed-up#") if ran else ())
    )
    key = [("predicted", "predicted, with its interval")]
    if ran:
        key.append(("measured", "measured" if validation is not None else "measured in the recording"))
    caption = f"Step time. The gain of a plan is not certain if its interval overlaps that of {_compared_with(facts)}."
    chart = whiskers("Step time of the best plans", [setting.mark(short=bool(more)) for setting in settings], "step")
    rows = table("Best plans", columns, [setting.row(more, ran=ran) for setting in settings])
    reasons = bullets(search.reasons) if search.reasons else None
    if more:  # what a plan yields, needs and costs decides as much as its time
        return Section("plans", "Best plans", [figure(chart, caption, None, key), rows, reasons])
    return Section("plans", "Best plans", [figure(chart, caption, rows, key), reasons])


def _unchanged(facts: PageFacts, search: SearchAnswer, recorded_us: float | None) -> _Setting:
    """The setting without a plan; before a validation, what was measured is its iteration in the recording."""
    same, compared = units.ratio(1.0), search.baseline
    setting = StrategyFacts() if compared is UNSET else compared
    measured_us = recorded_us if facts.validation is None else facts.validation.baseline_us
    return _Setting(
        name=facts.unchanged + ("" if compared is UNSET else f": {compared.name}"),
        predicted_us=search.baseline_us,
        interval_us=search.baseline_interval_us,
        gain=same,
        memory="" if facts.baseline is None else _memory(facts.baseline.peak_memory_bytes, setting),
        facts=setting,
        measured_us=measured_us,
        measured_gain="" if measured_us is None else same,
    )


def _planned(plan: PlanRow, measured: Sequence[MeasuredPlan | RefusedPlan | FailedPlan]) -> _Setting:
    ran = next((row for row in measured if msgspec.to_builtins(row.plan.settings) == plan.plan), None)
    return _Setting(
        name=plan.title,
        predicted_us=plan.predicted_iteration_us,
        interval_us=plan.interval_us,
        gain=units.ratio(plan.speedup),
        certain="certain" if plan.gain_certain else "not certain",
        memory=_memory(plan.peak_memory_bytes, plan),
        facts=plan,
        measured_us=None if ran is None else ran.measured_us,
        measured_gain="" if ran is None else _measured_gain(ran),
    )


def _memory(peak_bytes: int | None, facts: StrategyFacts) -> str:
    """Peak memory, and what is left of the device's; empty: not known."""
    if peak_bytes is None:
        return ""
    margin = facts.memory_margin_bytes
    if margin is None or margin is UNSET:
        return units.size(peak_bytes)
    return f"{units.size(peak_bytes)}, {units.size(abs(margin))} {'free' if margin >= 0 else 'too much'}"


def _measured_gain(ran: MeasuredPlan | RefusedPlan | FailedPlan) -> str:
    """The measured speed-up of a plan that ran, as text. A plan that was refused or failed has none."""
    if isinstance(ran, FailedPlan):
        return "none: a run failed"
    if isinstance(ran, RefusedPlan):
        return "none: trains something else"
    return units.ratio(ran.speedup_measured) + ("" if ran.beyond_noise else " (within noise)")


def _of_recording(facts: PageFacts) -> Verdict:
    """The most important finding, and what it would gain."""
    replay, measured_us = facts.replay, facts.replay.measured_us
    taken_us = replay.iteration_us if measured_us is None else measured_us
    findings = facts.diagnosis.findings
    best = max(facts.diagnosis.gains, key=lambda gain: gain.gain_us, default=None)
    title, sentence = f"A step takes {units.duration(taken_us)}; nothing that stands out slows it", ""
    if findings:
        title, sentence = _first_clause(findings[0]), findings[0]
        if best is not None and best.gain_us > 0 and best.what_if in findings[0]:
            faster = _over(facts.diagnosis.iteration_us, best.predicted_iteration_us)
            title += f"; up to {faster:.2g}\N{MULTIPLICATION SIGN} faster"
    if measured_us is None:
        tiles = [("Step", units.duration(taken_us), "replayed; no two steps in a row were recorded")]
    else:
        replayed = (
            f"{units.signed_percent((replay.iteration_us / measured_us - 1) * 100)}; interval {units.interval(replay.interval_us)}"
        )
        tiles = [
            ("Step", units.duration(taken_us), "median of the recording"),
            ("Replayed step", units.duration(replay.iteration_us), replayed),
        ]
    if best is not None and best.gain_us > 0:
        tiles.append(("Largest gain", units.percent(best.gain_us / facts.diagnosis.iteration_us * 100), best.what_if))
    if facts.sample_runs is not None and facts.sample_runs.plans:
        fastest = max(facts.sample_runs.plans, key=lambda row: row.speedup_measured)
        name = facts.name_of_plan(fastest.plan)
        tiles.append(("Best plan on real runs", units.ratio(fastest.speedup_measured), f"with the sample: {name}"))
    return Verdict("plain", "Recording", title, sentence, tuple(tiles))


def _of_description(facts: PageFacts) -> Verdict:
    """The predicted step, with what it yields and costs."""
    predicted_us = facts.replay.iteration_us
    title = f"A step is predicted to take {units.duration(predicted_us)}"
    tiles = [("Step", units.duration(predicted_us), f"predicted, {units.interval(facts.replay.interval_us)}")]
    sentence = "Nothing was measured: the job was described, not recorded."
    if facts.settings:
        setting = facts.settings[0]
        tiles += setting_tiles(setting)
        if (setting.limit_bytes or setting.peak_bytes) < setting.peak_bytes:
            title = f"The job needs {units.size(setting.peak_bytes)} of memory, more than a device has"
    return Verdict("plain", "Description", title, sentence, tuple(tiles))


def _first_clause(finding: str) -> str:
    """The beginning of a finding, short enough for a title."""
    end = _CLAUSE_END.search(finding, _SHORTEST_TITLE)
    return finding.rstrip(".") if end is None else finding[: end.start()]


def _measured(facts: PageFacts, validation: Validation) -> Verdict:
    ran = validation.plans
    confirmed = [row for row in ran if row.beyond_noise and row.speedup_measured > 1]
    best = max(confirmed or ran, key=lambda row: row.speedup_measured)
    name, gain, (low, high) = facts.name_of_plan(best.plan), units.ratio(best.speedup_measured), best.speedup_interval
    runs = f"{units.count(len(ran), 'plan')} and the recorded setting ran interleaved, in {units.count(validation.rounds, 'round')}"
    noise = units.percent(validation.noise_pct)
    inside = best.interval_us[0] <= best.measured_us <= best.interval_us[1]
    more = _notes(best, validation)
    predicted = f"{units.interval(best.interval_us)}, {units.ratio(best.speedup_predicted)}"
    error = f"prediction error {units.signed_percent(best.error_pct)}, {'inside' if inside else 'outside'} the interval"
    tiles = (
        ("Recorded setting", units.duration(validation.baseline_us), "measured"),
        ("Predicted", units.duration(best.predicted_us), predicted),
        ("Measured", units.duration(best.measured_us), error),
        ("Speed-up", gain, f"95 % interval {low:.2f} to {high:.2f}"),
        ("Noise floor", noise, "half the range of the recorded setting's runs"),
    )
    if confirmed:
        sentence = f"{runs}; the fastest is '{name}'. Its gain is larger than the noise.{more}"
        return Verdict("good", "Confirmed by real runs", f"{gain} faster than recorded", sentence, tiles)
    sentence = f"{runs}; the fastest, '{name}', differs by less than the noise of {noise}, or its interval includes 1.00.{more}"
    return Verdict("open", NOT_CERTAIN, "No plan is faster by more than the noise", sentence, tiles)


def _refused(facts: PageFacts, validation: Validation, first: RefusedPlan) -> Verdict:
    """All plans that ran compute something else, or failed."""
    return _no_speedup(
        validation,
        "The measured plans train something else",
        f"'{facts.name_of_plan(first.plan)}': {first.losses.reason}. Such a run is no evidence of a speed-up.",
        ("Predicted", units.duration(first.predicted_us), "for unchanged training"),
        ("Measured", units.duration(first.measured_us), "of a different training"),
        ("Plans refused", str(len(validation.refused)), "of those measured"),
    )


def _failed(facts: PageFacts, validation: Validation, first: FailedPlan) -> Verdict:
    """All plans failed in one of their runs."""
    measured = _NONE if first.measured_us is None else units.duration(first.measured_us)
    return _no_speedup(
        validation,
        "The plans' runs failed",
        f"'{facts.name_of_plan(first.plan)}': {first.reason}.",
        ("Predicted", units.duration(first.predicted_us), "for a complete run"),
        ("Measured", measured, f"in {units.count(first.runs, 'run')} before the failure"),
        ("Plans that failed", str(len(validation.failed)), "of those measured"),
    )


def _no_speedup(validation: Validation, title: str, sentence: str, *tiles: tuple[str, str, str]) -> Verdict:
    """The verdict on real runs without a speed-up."""
    recorded = ("Recorded setting", units.duration(validation.baseline_us), "measured")
    return Verdict("open", "No speed-up measured", title, sentence, (recorded, *tiles))


def _notes(row: MeasuredPlan, validation: Validation) -> str:
    """Sentences on the losses of the best plan, and on the plans that have no speed-up."""
    sentences = [] if row.losses is None else [f"Losses: {row.losses.reason}."]
    for others, fate in ((validation.refused, "trained something else"), (validation.failed, "failed in a run")):
        if others:
            sentences.append(f"{units.count(len(others), 'other plan')} {fate} (no speed-up).")
    return "".join(f" {sentence}" for sentence in sentences)


def _predicted(facts: PageFacts, search: SearchAnswer) -> Verdict:
    """The best plan by predictions alone, and how sure it is."""
    elsewhere = None if facts.cluster is None else facts.cluster.name
    to_measure = _VALIDATE if elsewhere is None else f"Run both on {elsewhere} to measure"
    plans = [plan for plan in search.plans if plan.plan]
    certain = [plan for plan in plans if plan.gain_certain]
    best = (certain or plans or list(search.plans))[0]
    name, speedup, unchanged = best.title, units.ratio(best.speedup), f"{facts.origin} setting"
    than = _compared_with(facts)
    tiles = _predicted_tiles(facts, search, best)
    if not search.feasible:
        return Verdict("open", "Nothing fits", "No plan stays within the memory limit", f"{name} {best.infeasible}.", tiles)
    infeasible = None if facts.baseline is None else facts.baseline.infeasible
    if infeasible is not None:
        title = f"A plan that fits: {units.duration(best.predicted_iteration_us)} a step"
        sentence = f"The {unchanged} {infeasible}. The best plan that fits is {name}."
        return Verdict("likely", NOT_MEASURED, title, sentence, tiles)
    if certain:
        sentence = f"The best plan is {name}. Its prediction interval and that of {than} do not overlap. {to_measure} the gain."
        return Verdict("likely", NOT_MEASURED, f"{speedup} faster than {than} is predicted", sentence, tiles)
    if search.worth_measuring:
        sentence = (
            f"The best plan is {name}. Its prediction interval and that of {than} overlap: {_lower_first(to_measure)} the gain."
        )
        return Verdict("open", NOT_CERTAIN, f"{speedup} faster than {than} is predicted, but not certain", sentence, tiles)
    sentence = f"No plan is faster than {than} by more than the prediction intervals. The best is {name}."
    return Verdict("open", NOT_CERTAIN, "No certain gain was found", sentence, tiles)


def _compared_with(facts: PageFacts) -> str:
    """The setting that speed-ups refer to."""
    return "the usual plan" if facts.unchanged == "usual plan" else f"the {facts.origin} setting"


def _predicted_tiles(facts: PageFacts, search: SearchAnswer, best: PlanRow) -> tuple[tuple[str, str, str], ...]:
    (base_low, base_high), (low, high) = search.baseline_interval_us, best.interval_us
    recorded_us = facts.replay.measured_us
    known = "" if recorded_us is None else f"; measured {units.duration(recorded_us)}"
    base = f"predicted, {units.interval((base_low, base_high))}{known}"
    compared = _compared_with(facts).removeprefix("the ").capitalize()
    tiles = [
        ("Best plan", units.duration(best.predicted_iteration_us), f"predicted, {units.interval((low, high))}"),
        (compared, units.duration(search.baseline_us), base),
        ("Speed-up", units.ratio(best.speedup), f"predicted, {_over(base_low, high):.2f} to {_over(base_high, low):.2f}"),
    ]
    if len(facts.settings) > 1:
        return (*tiles, *setting_tiles(facts.settings[1]))
    if facts.cluster is None:
        tiles.append(("Best plan, measured", "not yet", "dpro-search validate RUN"))
    return (*tiles, ("Plans tried", f"{search.trials:,}", f"in {search.seconds:.1f} s"))


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _over(one: float, other: float) -> float:
    return one / other if other else float("inf")
