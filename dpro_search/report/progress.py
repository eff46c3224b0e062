"""How the search went: the best plan so far over the trials, and what memory the fast plans need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpro_search.report import units
from dpro_search.report.charts import Dot, plot
from dpro_search.report.html import Element, Section, figure, name_of, table

_TRIAL = Mapping[str, Any]
_MOST_DOTS = 4000  # more only make the page slow
_FEW_DOTS = 1000  # where the page has another chart of all plans


def best_so_far(trials: Sequence[_TRIAL]) -> list[_TRIAL]:
    """The trials that keep the memory limit and were faster than all such before them, in order."""
    best: list[_TRIAL] = []
    for trial in trials:
        if trial["infeasible"] is None and (not best or trial["iteration_us"] < best[-1]["iteration_us"]):
            best.append(trial)
    return best


def pareto_front(trials: Sequence[_TRIAL]) -> list[_TRIAL]:
    """Trials than which none is both faster and smaller, smallest first; empty where the memory of none is known."""
    known = [trial for trial in trials if trial["peak_memory_bytes"] is not None]
    known.sort(key=lambda trial: (trial["peak_memory_bytes"], trial["iteration_us"]))
    return best_so_far(known)


def search_section(trials: Sequence[_TRIAL], unchanged: str = "as recorded", *, draws_all: bool = True) -> Section | None:
    """Progress, and the front of time against memory where plans differ in memory; None without trials.

    `unchanged` is the name of the setting without a plan. `draws_all`: False where another chart of the page has every plan.
    """
    if not trials:
        return None
    front = pareto_front(trials)
    memories = {trial["peak_memory_bytes"] for trial in trials} - {None}
    fronts = _front(trials, front) if len(memories) > 1 else []
    content = [_progress(trials, unchanged, _MOST_DOTS if draws_all else _FEW_DOTS), *(fronts if draws_all else fronts[1:])]
    return Section("search", "The search", content)


def _progress(trials: Sequence[_TRIAL], unchanged: str, most_dots: int) -> Element:
    best = best_so_far(trials)
    steps = [(trial["number"], trial["iteration_us"]) for trial in best]
    if steps:
        steps.append((trials[-1]["number"], steps[-1][1]))
    shown = trials[:: len(trials) // most_dots + 1]
    dots = [_dot(trial, "number", marked) for marked, some in ((False, shown), (True, best)) for trial in some]
    unchanged_us = trials[0]["iteration_us"]
    result = f"the best is {units.duration(best[-1]['iteration_us'])}" if best else "none stays within the memory limit"
    unit, unit_us = units.time_scale([trial["iteration_us"] for trial in trials])
    chart = plot(
        f"Predicted step time of {len(trials)} trials; {result}",
        dots,
        steps,
        ("trial", f"step, {unit}"),
        (1.0, unit_us),
        (unchanged_us, unchanged),
    )
    numbers = table(
        "Trials that were the best so far",
        ("trial", "plan", "found by", "step#"),
        ((str(t["number"]), name_of(t["name"]), t["origin"], units.duration(t["iteration_us"])) for t in best),
    )
    which = "Every trial" if len(shown) == len(trials) else f"{len(shown)} of the trials, evenly spread,"
    last = (
        f"The last improvement was trial {best[-1]['number']} of {len(trials)}."
        if best
        else "No trial stays within the memory limit."
    )
    key = [("dot", "a trial"), ("best", "best so far"), ("reference", unchanged)]
    return figure(chart, f"{which} and the best so far. {last}", numbers, key + _key_of_refused(trials))


def _front(trials: Sequence[_TRIAL], front: Sequence[_TRIAL]) -> list[Element]:
    chosen = {trial["number"] for trial in front}
    every = len(trials) // _MOST_DOTS + 1
    spread = [trial for place, trial in enumerate(trials) if place % every == 0 and trial["number"] not in chosen]
    known = [trial for trial in spread if trial["peak_memory_bytes"] is not None]
    dots = [_dot(trial, "peak_memory_bytes", marked) for marked, some in ((False, known), (True, front)) for trial in some]
    steps = [(trial["peak_memory_bytes"], trial["iteration_us"]) for trial in front]
    shown = [*known, *front]
    unit, unit_us = units.time_scale([trial["iteration_us"] for trial in shown])
    size, size_bytes = units.size_scale([trial["peak_memory_bytes"] for trial in shown])
    chart = plot(
        f"Step time against peak memory; {units.count(len(front), 'plan')} on the front",
        dots,
        steps,
        (f"peak memory, {size}", f"step, {unit}"),
        (size_bytes, unit_us),
    )
    priced = all(trial.get("cost_per_million_tokens") is not None for trial in front)
    caption = "Step time against peak memory. No plan is both faster and smaller than a plan on the front."
    caption += " On one cluster the price is proportional to the time." if priced else ""
    key = [("dot", "a trial"), ("best", "Pareto front")]
    columns = ("plan", "step#", "peak memory#", *(("price of a million tokens#",) if priced else ()))
    picture = figure(chart, caption, None, key + _key_of_refused(trials))
    return [picture, table("Plans on the front", columns, _front_rows(front, priced))]


def _front_rows(front: Sequence[_TRIAL], priced: bool) -> list[tuple[Element | str, ...]]:
    """The fastest first."""
    return [
        (
            name_of(trial["name"]),
            units.duration(trial["iteration_us"]),
            units.size(trial["peak_memory_bytes"]),
            *([units.money(trial["cost_per_million_tokens"])] if priced else []),
        )
        for trial in sorted(front, key=lambda trial: float(trial["iteration_us"]))
    ]


def _dot(trial: _TRIAL, across: str, marked: bool) -> Dot:
    """A trial by its iteration time over another of its fields."""
    refused, memory = trial["infeasible"], across == "peak_memory_bytes"
    tip = f"trial {trial['number']}: {trial['name']}, {units.duration(trial['iteration_us'])}"
    tip += ("" if refused is None else f", {refused}") + (f", {units.size(trial[across])}" if memory else "")
    return Dot(
        x=trial[across],
        y=trial["iteration_us"],
        kind="dot found" if marked else "dot" if refused is None else "dot refused",
        tip=tip,
    )


def _key_of_refused(trials: Sequence[_TRIAL]) -> list[tuple[str, str]]:
    return [("dot refused", "needs too much memory")] if any(trial["infeasible"] is not None for trial in trials) else []
