"""Tables and summaries of published runs beside their predictions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import kendalltau

from experiments.xla.predict import Predicted, predicted
from experiments.xla.published import Row, cannot_rebuild, request_of

SEED = 0
FITTED_SHARE = 5  # One of so many rows of a generation gives its clock efficiency.


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Errors of predictions: their sizes, and the order of a source's configurations on one generation (mean Kendall tau)."""

    rows: int
    median_error: float
    mean_error: float
    tau: float | None  # None: no group has two rows.


def predictions(rows: Sequence[Row]) -> list[Predicted]:
    return [one for row in rows if not cannot_rebuild(row) if (one := predicted(row)) is not None]


def summary(pairs: Sequence[tuple[Predicted, float]]) -> Summary:
    """The errors of predictions in seconds, each beside its row. Configurations are ordered by MFU."""
    errors = np.array([abs(seconds / one.measured_s - 1) for one, seconds in pairs])
    groups: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for one, seconds in pairs:
        groups[one.row.group].append((one.measured_mfu, one.measured_mfu * one.measured_s / seconds))
    taus = [kendalltau(*zip(*group, strict=True)).statistic for group in groups.values() if len(group) > 1]
    return Summary(
        rows=len(pairs),
        median_error=float(np.median(errors)),
        mean_error=float(errors.mean()),
        tau=float(np.mean(taus)) if taus else None,
    )


def with_clock_efficiency(results: Sequence[Predicted], seed: int = SEED) -> tuple[dict[str, float], list[tuple[Predicted, float]]]:
    """One factor on the time of each generation, fitted on a fifth of its rows, and the predictions of its other rows, in seconds.

    The factor is the median of measured over predicted time.
    """
    generator = np.random.default_rng(seed)
    factors, scored = {}, []
    by_generation: dict[str, list[Predicted]] = defaultdict(list)
    for one in results:
        by_generation[one.row.generation].append(one)
    for generation, group in sorted(by_generation.items()):
        chosen = set(generator.choice(len(group), max(len(group) // FITTED_SHARE, 1), replace=False).tolist())
        factors[generation] = float(np.median([group[place].measured_s / group[place].predicted_s for place in chosen]))
        scored += [(one, one.predicted_s * factors[generation]) for place, one in enumerate(group) if place not in chosen]
    return factors, scored


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """The tables, as Markdown."""
    results = predictions(rows)
    yield "| row | run | chips | measured s | predicted s | error | measured MFU | predicted MFU | memory, GiB |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for one in results:
        memory = f"{one.slice.needed_bytes / 2**30:.1f} of {one.slice.available_bytes / 2**30:.0f}"
        mfu = f"{one.measured_mfu:.1f} % | {one.predicted_mfu:.1f} %"
        yield (
            f"| {one.row.number} | {one.row['model']}, {one.row['mesh']} | {one.row['n_gpus']} {one.row.generation} | "
            f"{one.measured_s:.2f} | {one.predicted_s:.2f} | {one.error:+.0%} | {mfu} | "
            f"{memory} |"
        )
    yield ""
    yield from summaries(rows, results)
    yield ""
    yield from weak_scaling(results)
    yield ""
    yield from parts(results)
    yield ""
    yield from left_out(rows, {one.row.number for one in results})


def summaries(rows: Sequence[Row], results: Sequence[Predicted]) -> Iterator[str]:
    if not results:
        yield "No program was compiled yet: python -m experiments.xla compile"
        return
    factors, scored = with_clock_efficiency(results)
    yield "| | rows | median error | mean error | Kendall tau |"
    yield "|---|---|---|---|---|"
    for name, pairs in (("cold", [(one, one.predicted_s) for one in results]), ("a clock efficiency for each generation", scored)):
        if pairs:
            figures = summary(pairs)
            tau = "-" if figures.tau is None else f"{figures.tau:.2f}"
            yield f"| {name} | {figures.rows} | {figures.median_error:.1%} | {figures.mean_error:.1%} | {tau} |"
    yield ""
    rebuilt = [row for row in rows if not cannot_rebuild(row)]
    yield "Factors on time: " + ", ".join(f"{name} {factor:.2f}" for name, factor in factors.items()) + "."
    tried = [row for row in rebuilt if request_of(row).folder.exists() or refused_for_memory(row)]
    yield f"{len(results)} of {len(tried)} runs fit by the compiler's word, which refuses a program that does not; all of them ran."
    yield f"{len(rebuilt)} of {len(rows)} rows can be rebuilt from their recipe, and {len(results)} of these are compiled."


def refused_for_memory(row: Row) -> bool:
    error = request_of(row).error_file
    return error.exists() and "RESOURCE_EXHAUSTED" in error.read_text()


def weak_scaling(results: Sequence[Predicted]) -> Iterator[str]:
    """How MFU changes from one slice to several."""
    yield "| run | slices | measured change of MFU | predicted | off by |"
    yield "|---|---|---|---|---|"
    single = {request_of(one.row).key: one for one in results if one.row.slices == 1}
    for one in results:
        base = single.get(request_of(one.row).key)
        if one.row.slices > 1 and base is not None:
            measured, expected = one.measured_mfu - base.measured_mfu, one.predicted_mfu - base.predicted_mfu
            run = f"{one.row['model']}, {one.row.chips_per_slice} {one.row.generation}"
            yield f"| {run} | {one.row.slices} | {measured:+.1f} | {expected:+.1f} | {expected - measured:+.1f} |"


def parts(results: Sequence[Predicted]) -> Iterator[str]:
    """The parts of the step of each program, in shares of the measured time of its first row."""
    yield "| row | products | attention kernels | other instructions | exposed collectives | exposed copies | between slices |"
    yield "|---|---|---|---|---|---|---|"
    for one in results:
        shares = [us / 1e6 / one.measured_s for us in one.slice.parts_us.values()] + [one.between_slices_s / one.measured_s]
        yield f"| {one.row.number} | " + " | ".join(f"{share:.0%}" for share in shares) + " |"


def left_out(rows: Sequence[Row], compiled: set[int]) -> Iterator[str]:
    yield "Rows that are not in the table:"
    yield ""
    for row in rows:
        if row.number not in compiled:
            reason = cannot_rebuild(row)
            if not reason:
                error = request_of(row).error_file
                reason = f"not compiled: {error.read_text()[:200]}" if error.exists() else "not compiled yet"
            yield f"* row {row.number}, {row['model']} on {row['n_gpus']} {row.generation}: {reason}"
