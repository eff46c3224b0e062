"""Output of `dpro-search run` about the result of a search."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from dpro_search.quantities import count_text, money_text

if TYPE_CHECKING:
    from msgspec import UnsetType
    from rich.console import Console
    from rich.table import Table

    from dpro_search.analysis.clusters import ClusterChoice
    from dpro_search.analysis.search import Deployment
    from dpro_search.deploy.targets import Change
    from dpro_search.kinds._answers import ComparedSetting
    from dpro_search.machine import Calibration
    from dpro_search.search import SearchResult
    from dpro_search.search.objective import StrategyFacts
    from dpro_search.space.plan import Prediction

_CHANGES: Mapping[str | None, str] = {"environment": "env", "script": "script", None: "-"}
_NOTES = {
    "finished": "",
    "timeout": " (stopped by --timeout)",
    "interrupted": " (interrupted)",
    "exhausted": " (the sampler found no new plan)",
    "settled": " (expected further gain below the prediction error)",
    "complete": " (no other way to cut the job can be faster by more than 0.5 %)",
}


def print_result(
    console: Console,
    result: SearchResult,
    deployment: Deployment,
    calibration: Calibration | None = None,
    origin: str = "recorded",
    baseline: ComparedSetting | UnsetType = UNSET,
) -> None:
    """The best plans as a table, their gain, what they need, and the run folder.

    Parameters
    ----------
    deployment
        What the plans need.
    calibration
        What the intervals were calibrated on; None: not known.
    origin
        Where the setting without a plan comes from, in a word.
    baseline
        Of a parallel job: the whole strategy without a plan, with what it gives and costs (`Job.search_facts`); UNSET: other jobs.
    """
    from dpro_search.analysis.search import servers_note
    from dpro_search.cli.printing import microseconds
    from dpro_search.search.result import PLAN_FILE

    servers = deployment.servers
    if isinstance(baseline, UnsetType):
        console.print(result_table(result, deployment.changes, origin))
    else:
        console.print(strategy_table(result, baseline, origin))
    best = result.plans[0]
    if not result.feasible:
        console.print(
            f"No plan keeps the memory limit. The plan with the least memory {best.prediction.infeasible}.", style="yellow"
        )
    elif result.baseline.infeasible is not None:
        console.print(
            f"The {origin} setting {result.baseline.infeasible}. Best plan that fits:"
            f" {microseconds(best.prediction.iteration_us)}, {best.speedup:.2f}x the {origin} speed."
        )
    elif result.worth_measuring:
        console.print(
            f"No gain is certain: the intervals overlap. The best plan is predicted to be {best.speedup:.2f}x as fast;"
            + (" measure it with `dpro-search validate`." if origin == "recorded" else " only real runs can tell."),
            style="yellow",
        )
    elif not result.gain_certain:
        console.print(
            f"No gain found: no plan is faster than the {origin} setting by more than the prediction intervals.",
            style="yellow",
        )
    else:
        console.print(
            f"Best plan: {microseconds(best.prediction.iteration_us)} instead of"
            f" {microseconds(result.baseline.iteration_us)}, predicted speed-up {best.speedup:.2f}x."
        )
    if best.plan.is_lossy:
        console.print(_lossless_sentence(result, origin))
    if best.beats_recorded is not None and best.quantile_us is not None:
        console.print(
            f"Re-ranked by a quantile over resampled durations: {microseconds(best.quantile_us)};"
            f" the best plan is faster than the {origin} setting in {best.beats_recorded:.0%} of the draws."
        )
    if calibration is not None and not calibration.calibrated:
        console.print(f"Intervals: {calibration.text}.", style="yellow", soft_wrap=True)
    if servers is not None and (note := servers_note([ranked.plan for ranked in result.plans], servers)):
        console.print(note, style="yellow")
    if result.front:
        console.print(f"{len(result.front)} plans are on the Pareto front of time and memory: pareto.csv.")
    if result.workers_lost:
        console.print(f"{result.workers_lost} workers ended too early; others took over their plans.", style="yellow")
    note = _NOTES[result.stopped]
    console.print(f"{result.trials} trials in {result.seconds:.1f} s{note}. Run folder:", result.run, soft_wrap=True)
    console.print("File of the best plan:", f"{result.run}/{PLAN_FILE.format(1)}", soft_wrap=True)
    console.print(f"All plans, to open in a browser: dpro-search report {result.run} --out report.html", soft_wrap=True)


def _lossless_sentence(result: SearchResult, origin: str) -> str:
    """The best plan that changes no numbers, where the best of all does."""
    from dpro_search.cli.printing import microseconds
    from dpro_search.space.plan import Plan

    lossless = [
        (number, ranked) for number, ranked in enumerate(result.plans, 1) if not ranked.plan.is_lossy and ranked.plan != Plan()
    ]
    begin = "The best plan is lossy: it rounds further than the job does now, so that losses differ."
    if not lossless or lossless[0][1].speedup <= 1:
        return f"{begin} No lossless plan is faster than the {origin} setting."
    number, ranked = lossless[0]
    return (
        f"{begin} The best lossless plan is plan {number}: {microseconds(ranked.prediction.iteration_us)}, {ranked.speedup:.2f}x."
    )


def result_table(result: SearchResult, changes: Sequence[Change | None] = (), origin: str = "recorded") -> Table:
    """Plans by predicted iteration time, the setting without a plan in its place or last; "?" where intervals overlap."""
    from rich import box
    from rich.table import Table

    from dpro_search.space.plan import Plan

    notes = []
    if changes:
        notes.append("change: env = environment only; script = the script needs a change")
    if any(not ranked.gain_certain and ranked.plan != Plan() for ranked in result.plans):
        notes.append(f"? = not certain: overlaps the interval of the {origin} setting")
    table = Table(box=box.SIMPLE, caption="\n".join(notes) or None, caption_justify="left")
    table.add_column("#", justify="right")
    table.add_column("plan", ratio=1)
    for title in ("iteration", "interval", "speed-up", *(["change"] if changes else [])):
        table.add_column(title, justify="right", no_wrap=True)
    for number, (named, ranked) in enumerate(zip(result.names, result.plans, strict=True), 1):
        name = f"as {origin}" if ranked.plan == Plan() else named + " (lossy)" * ranked.plan.is_lossy
        uncertain = ranked.plan != Plan() and not ranked.gain_certain
        words = [_CHANGES[changes[number - 1]]] if changes else []
        if ranked.plan == Plan():
            words = [""] * len(words)
        table.add_row(
            str(number),
            name,
            *_times(ranked.prediction),
            f"{ranked.speedup:.2f}x" + (" ?" if uncertain else "  "),
            *words,
            style="green" if ranked.gain_certain else "",
        )
    if all(ranked.plan != Plan() for ranked in result.plans):
        table.add_row("", f"as {origin}", *_times(result.baseline), "1.00x  ", *([""] if changes else []))
    return table


def strategy_table(result: SearchResult, baseline: ComparedSetting, origin: str) -> Table:
    """Whole strategies of a parallel job with speed, memory and price; the setting without a plan in its place or last."""
    from rich import box
    from rich.table import Table

    from dpro_search.space.plan import Plan

    caption = None
    if any(not ranked.gain_certain and ranked.plan != Plan() for ranked in result.plans):
        caption = f"? = not certain: overlaps the interval of the {origin} setting"
    table = Table(box=box.SIMPLE, caption=caption, caption_justify="left", padding=(0, 1, 1, 0))
    table.add_column("#", justify="right")
    table.add_column("plan", ratio=1)
    for title in ("step\ninterval\nspeed-up", "tokens/s\na device\nMFU", "memory\nfree", "a million\ntokens"):
        table.add_column(title, justify="right", no_wrap=True)
    named = f"usual plan of its framework: {baseline.name}" if baseline.usual_plan else f"as {origin}: {baseline.name}"
    for number, (name, ranked) in enumerate(zip(result.names, result.plans, strict=True), 1):
        mark = "" if ranked.plan == Plan() or ranked.gain_certain else " ?"
        cells = _strategy_cells(ranked.prediction, ranked.facts, f"{ranked.speedup:.2f}x{mark}")
        text = named if ranked.plan == Plan() else name
        table.add_row(str(number), text, *cells, style="green" if ranked.gain_certain else "")
    if all(ranked.plan != Plan() for ranked in result.plans):
        table.add_row("", named, *_strategy_cells(result.baseline, baseline, "1.00x"))
    return table


def _strategy_cells(prediction: Prediction, facts: StrategyFacts, speedup: str) -> list[str]:
    """Times, speed, memory and price of a strategy; "-" where one is not known."""
    from dpro_search.quantities import count_text, money_text, percent_text, size_text

    def text(write: Callable[[float], str], value: float | UnsetType | None) -> str:
        return "-" if value is None or isinstance(value, UnsetType) else write(value)

    return [
        "\n".join((*_times(prediction), speedup)),
        "\n".join(
            (
                text(count_text, facts.tokens_per_second),
                text(count_text, facts.tokens_per_second_per_device),
                text(percent_text, facts.mfu_pct),
            )
        ),
        f"{text(size_text, prediction.peak_memory_bytes)}\n{text(size_text, facts.memory_margin_bytes)}",
        text(money_text, facts.cost_per_million_tokens),
    ]


def _times(prediction: Prediction) -> tuple[str, str]:
    from dpro_search.quantities import interval_text, time_text

    return time_text(prediction.iteration_us), interval_text(*prediction.interval_us)


def print_choice(answer: ClusterChoice, tokens_per_second: float | None, origin: str) -> None:
    """For people."""
    from msgspec import UNSET

    from dpro_search.analysis.clusters import ALMOST, ImpossibleSearch
    from dpro_search.cli.printing import microseconds, print_table, say, stdout_console

    console = stdout_console()
    rows = []
    for row in answer.clusters:
        batch = () if row.global_batch is UNSET else (f"{row.global_batch:,}",)
        if isinstance(row, ImpossibleSearch):
            rows.append((row.cluster, *batch, "-", row.error, "-", "-", "-"))
            continue
        name = row.name if row.plan else f"as {origin}"
        rows.append(
            (
                row.cluster,
                *batch,
                str(row.devices),
                name if row.feasible else f"nothing fits in memory; least: {name}",
                microseconds(row.predicted_iteration_us),
                "-" if row.tokens_per_second is None else count_text(row.tokens_per_second),
                "-" if row.cost_per_million_tokens is None else money_text(row.cost_per_million_tokens),
            )
        )
    batches = ("batch",) if answer.of_batches else ()
    columns = ("cluster", *batches, "devices", "best plan", "iteration", "tokens/s", "a million tokens")
    print_table(console, f"best plan {'of each batch' if answer.of_batches else 'on each cluster'}", columns, rows)
    if answer.fastest is not None:
        say(console, f"Fastest: {_named(answer.fastest, answer.fastest_batch)}.")
        smallest, batch_of_fastest = answer.smallest_batch, answer.fastest_batch
        if isinstance(smallest, int) and isinstance(batch_of_fastest, int) and smallest < batch_of_fastest:
            say(console, f"At most {ALMOST:.0%} slower: a batch of {smallest:,}.")
    if answer.cheapest is not None:
        say(console, f"Cheapest for a token: {_named(answer.cheapest, answer.cheapest_batch)}.")
    else:
        say(console, "The cheapest is not known: no cluster has a price (price_per_device_hour_usd in its file).")
    if tokens_per_second is not None:
        speed = f"{count_text(tokens_per_second)} tokens a second"
        if answer.fewest_devices:
            say(console, f"Fewest devices with {speed}: {_named(answer.fewest_devices, answer.fewest_devices_batch)}.")
        else:
            say(console, f"None of the clusters gives {speed}.")


def _named(cluster: str, batch: int | UnsetType | None) -> str:
    """A cluster, with the batch where several are compared."""
    return f"{cluster} with a batch of {batch:,}" if isinstance(batch, int) else cluster
