"""The headline: the gain of the best plan, its uncertainty, and the iteration time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpro_search.report import units
from dpro_search.report.charts import Mark, whiskers
from dpro_search.report.facts import Facts
from dpro_search.report.html import Element, Section, figure, name_of, table

NOT_CERTAIN, NOT_MEASURED = "Not a certain gain", "Predicted, not yet measured"
_VALIDATE = "Run 'dpro-search validate' to measure"
_NONE = "\N{EN DASH}"


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


def verdict(facts: Facts) -> Verdict:
    """The result; a gain is stated only as far as it is certain."""
    if facts.search is None:
        return _of_trace(facts)
    if facts.validation is not None and facts.validation["plans"]:
        return _measured(facts.validation)
    if facts.validation is not None and facts.validation["refused"]:
        return _refused(facts.validation)
    if facts.validation is not None and facts.validation["failed"]:
        return _failed(facts.validation)
    elsewhere = None if facts.cluster is None else str(facts.cluster["name"])
    return _predicted(facts.search, facts.replay["measured_iteration_us"], elsewhere, facts.origin)


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """What is predicted of a setting, and what its real runs gave; `gain` and `measured_gain` are speed-ups, in words."""

    name: str
    predicted_us: float
    interval_us: Sequence[float]
    gain: str
    certain: str = ""
    memory: str = ""
    measured_us: float | None = None
    measured_gain: str = ""

    @property
    def mark(self) -> Mark:
        """Its line of the chart."""
        ran = "" if self.measured_us is None else f", measured {units.duration(self.measured_us)}"
        return Mark(
            label=self.name,
            low=self.interval_us[0],
            middle=self.predicted_us,
            high=self.interval_us[1],
            measured=self.measured_us,
            tip=f"predicted {units.duration(self.predicted_us)} ({units.interval(self.interval_us)}){ran}",
            value=f"{units.duration(self.predicted_us)} · {self.gain}",
        )

    @property
    def row(self) -> tuple[Element | str, ...]:
        """Its row of the table."""
        measured = _NONE if self.measured_us is None else units.duration(self.measured_us)
        predicted = (units.duration(self.predicted_us), units.interval(self.interval_us))
        gain = f"{self.gain} ({self.certain})" if self.certain else self.gain
        return (name_of(self.name), *predicted, gain, self.memory or _NONE, measured, self.measured_gain or _NONE)


def plans_section(facts: Facts) -> Section | None:
    """The best plans with their intervals, and what real runs gave; None where nothing was searched."""
    search, validation = facts.search, facts.validation
    if search is None:
        return None
    measured: Sequence[Mapping[str, Any]] = () if validation is None else _that_ran(validation)
    recorded_us = facts.replay["measured_iteration_us"]
    settings = [
        _unchanged(search, validation, recorded_us, facts.origin),
        *(_planned(plan, measured) for plan in search["plans"] if plan["plan"]),
    ]
    columns = ("plan", "predicted#", "interval#", "predicted speed-up#", "peak memory#", "measured#", "measured speed-up#")
    key = [("predicted", "predicted, with its interval")]
    if any(setting.measured_us is not None for setting in settings):
        key.append(("measured", "measured" if validation is not None else "measured in the recording"))
    caption = f"Iteration time. If the interval of a plan overlaps that of the {facts.origin} setting, its gain is not certain."
    chart = whiskers("Iteration time of the best plans", [setting.mark for setting in settings], "iteration")
    rows = table("Best plans", columns, [setting.row for setting in settings])
    return Section("plans", "Best plans", [figure(chart, caption, rows, key)])


def _that_ran(validation: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return [*validation["plans"], *validation["refused"], *validation["failed"]]


def _unchanged(search: Mapping[str, Any], validation: Mapping[str, Any] | None, recorded_us: float | None, origin: str) -> _Setting:
    """The setting without a plan; before a validation, what was measured is its iteration in the recording."""
    same = units.ratio(1.0)
    measured_us = recorded_us if validation is None else validation["baseline_us"]
    return _Setting(
        name=f"as {origin}",
        predicted_us=search["baseline_us"],
        interval_us=search["baseline_interval_us"],
        gain=same,
        measured_us=measured_us,
        measured_gain="" if measured_us is None else same,
    )


def _planned(plan: Mapping[str, Any], measured: Sequence[Mapping[str, Any]]) -> _Setting:
    ran = next((row for row in measured if row["plan"] == plan["plan"]), None)
    return _Setting(
        name=plan["name"],
        predicted_us=plan["predicted_iteration_us"],
        interval_us=plan["interval_us"],
        gain=units.ratio(plan["speedup"]),
        certain="certain" if plan["gain_certain"] else "not certain",
        memory="" if plan["peak_memory_bytes"] is None else units.size(plan["peak_memory_bytes"]),
        measured_us=None if ran is None else ran["measured_us"],
        measured_gain="" if ran is None else _measured_gain(ran),
    )


def _measured_gain(ran: Mapping[str, Any]) -> str:
    """Of a plan that ran; one that was refused or failed has no speed-up."""
    if "reason" in ran:
        return "none: a run failed"
    if "speedup_measured" not in ran:
        return "none: trains something else"
    return units.ratio(ran["speedup_measured"]) + ("" if ran["beyond_noise"] else " (within noise)")


def _of_trace(facts: Facts) -> Verdict:
    replay = facts.replay
    measured = replay["measured_iteration_us"]
    predicted = units.duration(replay["predicted_iteration_us"])
    tiles = [("Replayed", predicted, units.interval(replay["interval_us"]))]
    if facts.described:
        sentence = "The job was described, not recorded: nothing was measured of it."
    elif measured is None:
        sentence = "No two steps in a row were recorded, so there is no measured iteration time to compare with."
    else:
        error = units.signed_percent(replay["error_pct"])
        tiles += [
            ("Measured", units.duration(measured), "median of the recording"),
            ("Error", error, "of the replayed iteration time"),
        ]
        sentence = f"The replay predicts the recorded setting with an error of {error}."
    best = max(facts.diagnosis.get("gains", ()), key=lambda gain: gain["gain_us"], default=None)
    if best is not None and best["gain_us"] > 0:
        gain_pct = best["gain_us"] / replay["predicted_iteration_us"] * 100
        tiles.append(("Largest gain", units.percent(gain_pct), f"what if: {best['what_if']}"))
    title = f"An iteration takes {predicted if measured is None else units.duration(measured)}"
    badge = f"{'Description' if facts.described else 'Recording'}, without a search"
    return Verdict("plain", badge, title, sentence, tuple(tiles))


def _measured(validation: Mapping[str, Any]) -> Verdict:
    ran: Sequence[Mapping[str, Any]] = validation["plans"]
    confirmed = [row for row in ran if row["beyond_noise"] and row["speedup_measured"] > 1]
    best = max(confirmed or ran, key=lambda row: row["speedup_measured"])
    name, gain, (low, high) = best["name"], units.ratio(best["speedup_measured"]), best["speedup_interval"]
    runs = (
        f"{units.count(len(ran), 'plan')} and the recorded setting ran interleaved, in {units.count(validation['rounds'], 'round')}"
    )
    noise = units.percent(validation["noise_pct"])
    inside = best["interval_us"][0] <= best["measured_us"] <= best["interval_us"][1]
    more = _notes(best, validation)
    predicted = f"{units.interval(best['interval_us'])}, {units.ratio(best['speedup_predicted'])}"
    error = f"prediction error {units.signed_percent(best['error_pct'])}, {'inside' if inside else 'outside'} the interval"
    tiles = (
        ("Recorded setting", units.duration(validation["baseline_us"]), "measured"),
        ("Predicted", units.duration(best["predicted_us"]), predicted),
        ("Measured", units.duration(best["measured_us"]), error),
        ("Speed-up", gain, f"95 % interval {low:.2f} to {high:.2f}"),
        ("Noise floor", noise, "half the range of the recorded setting's runs"),
    )
    if confirmed:
        sentence = f"{runs}; the fastest is '{name}'. Its gain is larger than the noise.{more}"
        return Verdict("good", "Confirmed by real runs", f"{gain} faster than recorded", sentence, tiles)
    sentence = f"{runs}; the fastest, '{name}', differs by less than the noise of {noise}, or its interval includes 1.00.{more}"
    return Verdict("open", NOT_CERTAIN, "No plan is faster by more than the noise", sentence, tiles)


def _refused(validation: Mapping[str, Any]) -> Verdict:
    """All plans that ran compute something else, or failed."""
    first = validation["refused"][0]
    return _no_speedup(
        validation,
        "The measured plans train something else",
        f"'{first['name']}': {first['losses']['reason']}. Such a run is no evidence of a speed-up.",
        ("Predicted", units.duration(first["predicted_us"]), "for unchanged training"),
        ("Measured", units.duration(first["measured_us"]), "of a different training"),
        ("Plans refused", str(len(validation["refused"])), "of those measured"),
    )


def _failed(validation: Mapping[str, Any]) -> Verdict:
    """All plans failed in one of their runs."""
    first = validation["failed"][0]
    measured = _NONE if first["measured_us"] is None else units.duration(first["measured_us"])
    return _no_speedup(
        validation,
        "The plans' runs failed",
        f"'{first['name']}': {first['reason']}.",
        ("Predicted", units.duration(first["predicted_us"]), "for a complete run"),
        ("Measured", measured, f"in {units.count(first['runs'], 'run')} before the failure"),
        ("Plans that failed", str(len(validation["failed"])), "of those measured"),
    )


def _no_speedup(validation: Mapping[str, Any], title: str, sentence: str, *tiles: tuple[str, str, str]) -> Verdict:
    """Of real runs without a speed-up."""
    recorded = ("Recorded setting", units.duration(validation["baseline_us"]), "measured")
    return Verdict("open", "No speed-up measured", title, sentence, (recorded, *tiles))


def _notes(row: Mapping[str, Any], validation: Mapping[str, Any]) -> str:
    """Sentences on the losses of the best plan, and on the plans that have no speed-up."""
    found = [] if row["losses"] is None else [f"Losses: {row['losses']['reason']}."]
    for others, fate in ((validation["refused"], "trained something else"), (validation["failed"], "failed in a run")):
        if others:
            found.append(f"{units.count(len(others), 'other plan')} {fate} (no speed-up).")
    return "".join(f" {sentence}" for sentence in found)


def _predicted(search: Mapping[str, Any], recorded_us: float | None, elsewhere: str | None, origin: str) -> Verdict:
    """Of predictions alone; `elsewhere`: the cluster that they are for, if not the recorded one."""
    unchanged = f"{origin} setting"
    to_measure = _VALIDATE if elsewhere is None else f"Run both on {elsewhere} to measure"
    plans = [plan for plan in search["plans"] if plan["plan"]]
    certain = [plan for plan in plans if plan["gain_certain"]]
    best = (certain or plans or list(search["plans"]))[0]
    name, speedup = best["name"], units.ratio(best["speedup"])
    (base_low, base_high), (low, high) = search["baseline_interval_us"], best["interval_us"]
    known = "" if recorded_us is None else f"; measured {units.duration(recorded_us)}"
    tiles = (
        (
            unchanged.capitalize(),
            units.duration(search["baseline_us"]),
            f"predicted, {units.interval((base_low, base_high))}{known}",
        ),
        ("Best plan", units.duration(best["predicted_iteration_us"]), f"predicted, {units.interval((low, high))}"),
        ("Speed-up", speedup, f"predicted, {_over(base_low, high):.2f} to {_over(base_high, low):.2f}"),
        ("Best plan, measured", "not yet", "dpro-search validate RUN" if elsewhere is None else f"only possible on {elsewhere}"),
        ("Plans tried", f"{search['trials']:,}".replace(",", " "), f"in {search['seconds']:.1f} s"),
    )
    if not search["feasible"]:
        sentence = f"The closest, '{name}', {best['infeasible']} MiB."
        return Verdict("open", "Nothing fits", "No plan stays within the memory limit", sentence, tiles)
    if search["baseline_infeasible"] is not None:
        title = f"A plan that fits, at {speedup} the {origin} speed"
        sentence = f"The {unchanged} {search['baseline_infeasible']} MiB. The best plan that fits is '{name}'."
        return Verdict("likely", NOT_MEASURED, title, sentence, tiles)
    if certain:
        title = f"{speedup} faster than {origin}, if the prediction holds"
        return Verdict("likely", NOT_MEASURED, title, f"The best plan is '{name}'. {to_measure} it.", tiles)
    if search["worth_measuring"]:
        title = f"{speedup} is predicted, which only real runs can confirm"
        sentence = f"The intervals of '{name}' and of the {unchanged} overlap. {to_measure} the difference."
        return Verdict("open", NOT_CERTAIN, title, sentence, tiles)
    sentence = f"No plan is faster than the {unchanged} by more than the prediction intervals."
    return Verdict("open", NOT_CERTAIN, "No certain gain was found", sentence, tiles)


def _over(one: float, other: float) -> float:
    return one / other if other else float("inf")
