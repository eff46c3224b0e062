"""Tables of a journal, in Markdown: times to the target by scheme, with intervals over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from scipy.stats import t as student

from dpro_search.runtime.schemes import parse_scheme
from experiments.adsp.journal import Journal
from experiments.adsp.predicted import comparison

_SWEEPS = ("heterogeneity", "picked", "workers", "delay", "batch", "changing speed", "search", "quotas")


def tables(journal: Journal) -> Iterator[str]:
    """Lines of all tables that the journal has runs for."""
    if records := journal.records("convergence"):
        yield from _times("Seconds to the target loss, mean and 90 % interval over seeds", records, "workload")
        yield from _fastest(records)
        yield from _means("Waiting, % of worker time", records, "waiting_share", 100.0)
        yield from _means("Commits until the target", records, "commits", 1.0)
        yield from _means("Steps until the target", records, "steps", 1.0)
    for experiment in _SWEEPS:
        if records := journal.records(experiment):
            yield from _times(f"{experiment}: seconds to the target loss", records, "varied")
    late = [record["late_share"] for experiment in ("convergence", *_SWEEPS) for record in journal.records(experiment)]
    if late and max(late) > 0:
        yield f"Steps that took longer than paced: mean {100 * np.mean(late):.1f} %, at most {100 * max(late):.1f} % of a run."
    if journal.records("calibration"):
        yield from _predicted(journal)


def _groups(records: Iterable[dict[str, Any]], by: str) -> dict[str, dict[str, list[dict[str, Any]]]]:
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for record in records:
        found.setdefault(record["case"][by], {}).setdefault(record["case"]["scheme"], []).append(record)
    return found


def _times(title: str, records: list[dict[str, Any]], by: str) -> Iterator[str]:
    yield from _table(title, records, by, _time_cell)


def _means(title: str, records: list[dict[str, Any]], fact: str, factor: float) -> Iterator[str]:
    yield from _table(title, records, "workload", lambda cell: f"{factor * np.mean([record[fact] for record in cell]):.1f}")


def _table(title: str, records: list[dict[str, Any]], by: str, cell: Any) -> Iterator[str]:
    groups = _groups(records, by)
    schemes = list(dict.fromkeys(record["case"]["scheme"] for record in records))
    yield f"\n**{title}** ({records[0]['how']})\n"
    yield f"| {by} | {' | '.join(schemes)} |"
    yield "|---" * (len(schemes) + 1) + "|"
    for name, by_scheme in groups.items():
        yield f"| {name} | {' | '.join(cell(by_scheme[scheme]) if scheme in by_scheme else '' for scheme in schemes)} |"


def _time_cell(records: list[dict[str, Any]]) -> str:
    times = [record["time_s"] for record in records if record["time_s"] is not None]
    if not times:
        return "not reached"
    missed = f", {len(records) - len(times)} not reached" if len(times) < len(records) else ""
    return f"{_mean(times, 1)}{missed}"


def _mean(values: list[float], digits: int) -> str:
    """The mean and its 90 % interval (Student's t)."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    half = float(student.ppf(0.95, len(values) - 1)) * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{np.mean(values):.{digits}f} ± {half:.{digits}f}"


def _fastest(records: list[dict[str, Any]]) -> Iterator[str]:
    """ADSP beside the fastest other scheme with a parameter server, seed by seed."""
    yield ""
    for workload, by_scheme in _groups(records, "workload").items():
        times = {
            scheme: {record["case"]["seed"]: record["time_s"] for record in cell}
            for scheme, cell in by_scheme.items()
            if not parse_scheme(scheme).collective and all(record["time_s"] for record in cell)
        }
        others = {scheme: float(np.mean(list(by_seed.values()))) for scheme, by_seed in times.items() if scheme != "adsp"}
        if "adsp" not in times or not others:
            continue
        other = min(others, key=lambda scheme: others[scheme])
        ratios = [time / times[other][seed] for seed, time in times["adsp"].items() if seed in times[other]]
        yield f"{workload}: ADSP takes {_mean(ratios, 2)} of the time of {other}, the fastest other scheme with a server."


def _predicted(journal: Journal) -> Iterator[str]:
    for experiment in ("convergence", *_SWEEPS):
        if experiment in ("batch", "quotas"):
            continue  # calibration runs have one batch size
        found = comparison(journal, experiment)
        if not found["rows"]:
            continue
        line = f"\nPredicted from calibration runs (equal speeds, 3 schemes), {experiment}: median error "
        line += f"{found['median_error_pct']:.1f} % of {len(found['rows'])} times, {100 * found['coverage']:.0f} % in the interval"
        if found["kendall_tau"] is not None:
            losses = found["picked_loses_pct"]
            line += f"; order of schemes: tau {found['kendall_tau']:.2f}; the predicted best loses at most {max(losses):.1f} %"
        yield line
