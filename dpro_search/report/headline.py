"""The first thing to read: what a plan gains, how sure that is, and what an iteration takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpro_search.report import units
from dpro_search.report.charts import Mark, whiskers
from dpro_search.report.facts import Facts
from dpro_search.report.html import Element, Section, figure, name_of, table

NOT_CERTAIN = "Not a certain gain"
_NONE = "\N{EN DASH}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the page says first.

    Attributes
    ----------
    tone
        "good" (proved on real runs), "likely" (predicted only), "open" (not a certain gain), or "plain" (nothing was searched).
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
    """What was found, never more than what is certain."""
    if facts.search is None:
        return _of_trace(facts)
    if facts.validation is not None and facts.validation["plans"]:
        return _measured(facts.validation)
    if facts.validation is not None and facts.validation["refused"]:
        return _refused(facts.validation)
    if facts.validation is not None and facts.validation["failed"]:
        return _failed(facts.validation)
    return _predicted(facts.search)


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
            tip=f"predicted {units.duration(self.predicted_us)} ({_interval(self.interval_us)}){ran}",
            value=f"{units.duration(self.predicted_us)} · {self.gain}",
        )

    @property
    def row(self) -> tuple[Element | str, ...]:
        """Its row of the table."""
        measured = _NONE if self.measured_us is None else units.duration(self.measured_us)
        predicted = (units.duration(self.predicted_us), _interval(self.interval_us))
        gain = f"{self.gain} ({self.certain})" if self.certain else self.gain
        return (name_of(self.name), *predicted, gain, self.memory or _NONE, measured, self.measured_gain or _NONE)


def plans_section(facts: Facts) -> Section | None:
    """The best plans with their intervals, and what real runs gave; None where nothing was searched."""
    search, validation = facts.search, facts.validation
    if search is None:
        return None
    measured: Sequence[Mapping[str, Any]] = () if validation is None else _that_ran(validation)
    settings = [_recorded(search, validation), *(_planned(plan, measured) for plan in search["plans"] if plan["plan"])]
    columns = ("plan", "predicted#", "interval#", "predicted speed-up#", "peak memory#", "measured#", "measured speed-up#")
    key = [("predicted", "predicted, with its interval")] + ([("measured", "measured")] if measured else [])
    caption = "Iteration time: where the interval of a plan overlaps that of the recorded setting, its gain is not certain."
    chart = whiskers("Iteration time of the best plans", [setting.mark for setting in settings], "iteration, ms", 1e3)
    rows = table("Best plans", columns, [setting.row for setting in settings])
    return Section("plans", "Best plans", [figure(chart, caption, rows, key)])


def _that_ran(validation: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return [*validation["plans"], *validation["refused"], *validation["failed"]]


def _recorded(search: Mapping[str, Any], validation: Mapping[str, Any] | None) -> _Setting:
    same = units.ratio(1.0)
    return _Setting(
        name="as recorded",
        predicted_us=search["baseline_us"],
        interval_us=search["baseline_interval_us"],
        gain=same,
        measured_us=None if validation is None else validation["baseline_us"],
        measured_gain="" if validation is None else same,
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
    tiles = [("Replayed", predicted, _interval(replay["interval_us"]))]
    if measured is None:
        sentence = "The recording holds no iteration that could be compared with."
    else:
        error = units.signed_percent(replay["error_pct"])
        tiles += [("Measured", units.duration(measured), "median of the recording"), ("Error", error, "replayed over measured")]
        sentence = f"The replay of the recorded setting is {error} off the measured iteration."
    best = max(facts.diagnosis.get("gains", ()), key=lambda gain: gain["gain_us"], default=None)
    if best is not None and best["gain_us"] > 0:
        gain_pct = best["gain_us"] / replay["predicted_iteration_us"] * 100
        tiles.append(("Largest gain", units.percent(gain_pct), f"what if: {best['what_if']}"))
    return Verdict(
        tone="plain",
        badge="A recording; nothing was searched",
        title=f"An iteration takes {predicted if measured is None else units.duration(measured)}",
        sentence=sentence,
        tiles=tuple(tiles),
    )


def _measured(validation: Mapping[str, Any]) -> Verdict:
    ran: Sequence[Mapping[str, Any]] = validation["plans"]
    proved = [row for row in ran if row["beyond_noise"] and row["speedup_measured"] > 1]
    best = max(proved or ran, key=lambda row: row["speedup_measured"])
    name, gain, (low, high) = best["name"], units.ratio(best["speedup_measured"]), best["speedup_interval"]
    runs = f"{units.count(len(ran), 'plan')} and the recorded setting ran in turn, in {units.count(validation['rounds'], 'round')}"
    noise = units.percent(validation["noise_pct"])
    inside = best["interval_us"][0] <= best["measured_us"] <= best["interval_us"][1]
    more = _said_of_losses(best) + _said_of_others(validation)
    tiles = (
        ("Recorded setting", units.duration(validation["baseline_us"]), "measured"),
        (
            "Predicted",
            units.duration(best["predicted_us"]),
            f"{_interval(best['interval_us'])}, {units.ratio(best['speedup_predicted'])}",
        ),
        (
            "Measured",
            units.duration(best["measured_us"]),
            f"prediction {units.signed_percent(best['error_pct'])} off, {'inside' if inside else 'outside'} its interval",
        ),
        ("Speed-up", gain, f"95 % interval {low:.2f} to {high:.2f}"),
        ("Noise floor", noise, "the recorded setting against itself"),
    )
    if proved:
        return Verdict(
            tone="good",
            badge="Proved on real runs",
            title=f"{gain} faster than recorded",
            sentence=f"{runs}; the fastest is '{name}'. Its gain is larger than the noise.{more}",
            tiles=tiles,
        )
    return Verdict(
        tone="open",
        badge=NOT_CERTAIN,
        title="No plan is faster by more than the noise",
        sentence=f"{runs}; the fastest, '{name}', differs by less than the noise of {noise} or its interval holds 1.00.{more}",
        tiles=tiles,
    )


def _refused(validation: Mapping[str, Any]) -> Verdict:
    """All plans that ran compute something else, or failed."""
    first = validation["refused"][0]
    return _untold(
        validation,
        "What ran trains something else",
        f"'{first['name']}': {first['losses']['reason']}. A run that computes something else proves no gain.",
        ("Predicted", units.duration(first["predicted_us"]), "for the same training"),
        ("Measured", units.duration(first["measured_us"]), "of another training"),
        ("Plans refused", str(len(validation["refused"])), "of those that ran"),
    )


def _failed(validation: Mapping[str, Any]) -> Verdict:
    """All plans failed in one of their runs."""
    first = validation["failed"][0]
    measured = _NONE if first["measured_us"] is None else units.duration(first["measured_us"])
    return _untold(
        validation,
        "The plans' runs failed",
        f"'{first['name']}': {first['reason']}.",
        ("Predicted", units.duration(first["predicted_us"]), "if it ran"),
        ("Measured", measured, f"in {units.count(first['runs'], 'run')} before"),
        ("Plans that failed", str(len(validation["failed"])), "of those that ran"),
    )


def _untold(validation: Mapping[str, Any], title: str, sentence: str, *tiles: tuple[str, str, str]) -> Verdict:
    """Of real runs that tell no speed-up."""
    recorded = ("Recorded setting", units.duration(validation["baseline_us"]), "measured")
    return Verdict(tone="open", badge="No speed-up is told", title=title, sentence=sentence, tiles=(recorded, *tiles))


def _said_of_losses(row: Mapping[str, Any]) -> str:
    return "" if row["losses"] is None else f" Losses: {row['losses']['reason']}."


def _said_of_others(validation: Mapping[str, Any]) -> str:
    refused, failed = len(validation["refused"]), len(validation["failed"])
    said = f" {units.count(refused, 'other plan')} trained something else and got no speed-up." if refused else ""
    return said + (f" {units.count(failed, 'other plan')} failed in a run and got none." if failed else "")


def _predicted(search: Mapping[str, Any]) -> Verdict:
    plans = [plan for plan in search["plans"] if plan["plan"]]
    certain = [plan for plan in plans if plan["gain_certain"]]
    best = (certain or plans or list(search["plans"]))[0]
    name = best["name"]
    (base_low, base_high), (low, high) = search["baseline_interval_us"], best["interval_us"]
    tiles = (
        ("Recorded setting", units.duration(search["baseline_us"]), f"predicted, {_interval((base_low, base_high))}"),
        ("Best plan", units.duration(best["predicted_iteration_us"]), f"predicted, {_interval((low, high))}"),
        ("Speed-up", units.ratio(best["speedup"]), f"predicted, {_over(base_low, high):.2f} to {_over(base_high, low):.2f}"),
        ("Measured", "not yet", "dpro-search validate RUN"),
        ("Plans tried", f"{search['trials']:,}".replace(",", " "), f"in {search['seconds']:.1f} s"),
    )
    if not search["feasible"]:
        return Verdict(
            tone="open",
            badge="Nothing fits",
            title="No plan keeps the memory limit",
            sentence=f"The nearest, '{name}', {best['infeasible']} MiB.",
            tiles=tiles,
        )
    if search["baseline_infeasible"] is not None:
        return Verdict(
            tone="likely",
            badge="Predicted, not yet measured",
            title=f"A plan that fits, at {units.ratio(best['speedup'])} the recorded speed",
            sentence=f"The recorded setting {search['baseline_infeasible']} MiB. The best plan that fits is '{name}'.",
            tiles=tiles,
        )
    if certain:
        return Verdict(
            tone="likely",
            badge="Predicted, not yet measured",
            title=f"{units.ratio(best['speedup'])} faster than recorded, if the prediction holds",
            sentence=f"The best plan is '{name}'. Run 'dpro-search validate' before relying on it.",
            tiles=tiles,
        )
    if search["worth_measuring"]:
        return Verdict(
            tone="open",
            badge=NOT_CERTAIN,
            title=f"{units.ratio(best['speedup'])} is predicted, which only real runs can confirm",
            sentence=f"The intervals of '{name}' and of the recorded setting overlap; 'dpro-search validate' tells.",
            tiles=tiles,
        )
    return Verdict(
        tone="open",
        badge=NOT_CERTAIN,
        title="Nothing to gain that is certain",
        sentence="No plan is faster than the recorded setting by more than the intervals of both predictions allow for.",
        tiles=tiles,
    )


def _over(one: float, other: float) -> float:
    return one / other if other else float("inf")


def _interval(interval_us: Sequence[float]) -> str:
    low, high = (units.duration(value) for value in interval_us)
    if low == high:
        return f"no spread seen around {low}"
    return f"{low.removesuffix(high[high.index(' ') :])} to {high}"
