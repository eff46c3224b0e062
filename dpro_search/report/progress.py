"""How the search went: the best plan so far over the trials, and what memory the fast plans need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpro_search.report import units
from dpro_search.report.charts import Dot, legend, plot
from dpro_search.report.html import Element, figure, name_of, section, table

_TRIAL = Mapping[str, Any]
_MOST_DOTS = 4000  # more only make the page slow


def best_so_far(trials: Sequence[_TRIAL]) -> list[_TRIAL]:
    """The trials that were faster than all before them, in order."""
    found: list[_TRIAL] = []
    for trial in trials:
        if not found or trial["iteration_us"] < found[-1]["iteration_us"]:
            found.append(trial)
    return found


def pareto_front(trials: Sequence[_TRIAL]) -> list[_TRIAL]:
    """Trials than which none is both faster and smaller, smallest first; empty where the memory of none is known."""
    known = [trial for trial in trials if trial["peak_memory_bytes"] is not None]
    known.sort(key=lambda trial: (trial["peak_memory_bytes"], trial["iteration_us"]))
    return best_so_far(known)


def search_section(trials: Sequence[_TRIAL]) -> Element | None:
    """Progress, and the front of time against memory where plans differ in memory; None without trials."""
    if not trials:
        return None
    front = pareto_front(trials)
    memories = {trial["peak_memory_bytes"] for trial in trials} - {None}
    return section("search", "The search", _progress(trials), _front(trials, front) if len(memories) > 1 else None)


def _progress(trials: Sequence[_TRIAL]) -> Element:
    best = best_so_far(trials)
    steps = [(trial["number"], trial["iteration_us"]) for trial in best]
    steps.append((trials[-1]["number"], steps[-1][1]))
    shown = trials[:: len(trials) // _MOST_DOTS + 1]
    dots = [Dot(x=trial["number"], y=trial["iteration_us"], kind="dot", tip=_tip(trial)) for trial in shown]
    dots += [Dot(x=trial["number"], y=trial["iteration_us"], kind="dot found", tip=_tip(trial)) for trial in best]
    recorded_us = trials[0]["iteration_us"]
    chart = plot(
        f"Predicted iteration time of {len(trials)} trials; the best is {units.duration(best[-1]['iteration_us'])}",
        dots,
        steps,
        ("trial", "iteration, ms"),
        (1.0, 1e3),
        (recorded_us, "as recorded"),
    )
    numbers = table(
        "Trials that were the best so far",
        ("trial", "plan", "found by", "iteration#"),
        ((str(t["number"]), name_of(t["name"]), t["origin"], units.duration(t["iteration_us"])) for t in best),
    )
    which = "Every trial" if len(shown) == len(trials) else f"{len(shown)} of the trials, evenly spread"
    caption = f"{which}, and the best so far. The last improvement came with trial {best[-1]['number']} of {len(trials)}."
    return figure(chart, caption, numbers, legend([("dot", "a trial"), ("best", "best so far"), ("reference", "as recorded")]))


def _front(trials: Sequence[_TRIAL], front: Sequence[_TRIAL]) -> Element:
    chosen = {trial["number"] for trial in front}
    spread = [
        trial for place, trial in enumerate(trials) if place % (len(trials) // _MOST_DOTS + 1) == 0 or trial["number"] in chosen
    ]
    dots = [
        Dot(
            x=trial["peak_memory_bytes"],
            y=trial["iteration_us"],
            kind="dot found" if trial["number"] in chosen else "dot",
            tip=f"{_tip(trial)}, {units.size(trial['peak_memory_bytes'])}",
        )
        for trial in sorted(spread, key=lambda trial: trial["number"] in chosen)
        if trial["peak_memory_bytes"] is not None
    ]
    steps = [(trial["peak_memory_bytes"], trial["iteration_us"]) for trial in front]
    chart = plot(
        f"Iteration time against peak memory; {units.count(len(front), 'plan')} on the front",
        dots,
        steps,
        ("peak memory, MiB", "iteration, ms"),
        (2.0**20, 1e3),
    )
    numbers = table(
        "Plans on the front",
        ("plan", "peak memory#", "iteration#"),
        ((name_of(t["name"]), units.size(t["peak_memory_bytes"]), units.duration(t["iteration_us"])) for t in front),
    )
    caption = "Time against peak memory. No plan is both faster and smaller than those on the front."
    return figure(chart, caption, numbers, legend([("dot", "a trial"), ("best", "Pareto front")]))


def _tip(trial: _TRIAL) -> str:
    return f"trial {trial['number']}: {trial['name']}, {units.duration(trial['iteration_us'])}"
