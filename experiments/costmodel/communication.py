"""How well all-reduces are predicted that a fit had not seen: other sizes, more ranks, another bandwidth, the best algorithm.

    python -m experiments.costmodel.communication TABLE... [--nccl FOLDER] [--aiconfigurator FOLDER] [--out RESULT.json]

TABLE is made by ``dpro-search fit --collect comm``. FOLDER of --nccl holds vTrain's tables (AR_GPU<n>_..._LUT), that of
--aiconfigurator the unpacked package ``aiconfigurator-core`` (needs pyarrow). Every figure is of points left out of the fit.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dpro_search.collect._files import write_file
from dpro_search.collect.tables.all_reduces import read_comm_table
from dpro_search.collect.trace import Floats
from dpro_search.costmodel.collectives.cost import CollectiveCost, fit_collective_cost
from dpro_search.costmodel.collectives.counts import Points
from dpro_search.costmodel.collectives.series import Series, algorithms_of, nccl_series, table_series

ASKED_PCT = {"sizes": 5.0, "ranks": 15.0, "rates": 8.0, "regret": 5.0}
FOLDS = 4  # every fourth size between the smallest and the largest
FEW_RANKS, MANY_RANKS = 4, 8
_ITEM_BYTES = {"half": 2, "float16": 2, "bfloat16": 2, "int8": 1, "float": 4, "float32": 4}
Mask = np.ndarray[Any, np.dtype[np.bool_]]
Splits = Iterator[tuple[Mask, Mask]]  # points to fit, points to predict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="*")
    parser.add_argument("--nccl", type=Path)
    parser.add_argument("--aiconfigurator", type=Path)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="series with one of these in their name")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    measured = Series.joined([one for path in options.tables for one in table_series(read_comm_table(path))])
    series = list(measured)
    if options.nccl:
        series += [replace(one, name="nccl a100 (vTrain)") for one in nccl_series(options.nccl)]
    if options.aiconfigurator:
        series += aiconfigurator_series(options.aiconfigurator)
    series, measured = ([one for one in some if any(text in one.name for text in options.only)] for some in (series, measured))
    result = {"asked_pct": ASKED_PCT, "series": [judged(one) for one in series], "choice": choices(measured)}
    show(result)
    if options.out:
        write_file(options.out, msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def judged(series: Series) -> dict[str, Any]:
    """Errors of a series on left-out sizes, ranks and rates: of the corrected formula, and of the formula alone."""
    known = series.spread_pct[np.isfinite(series.spread_pct)]
    return {
        "name": series.name,
        "rows": len(series.duration_us),
        "repeats_pct": float(known.mean()) if len(known) else None,
        "sizes": _errors(series, _size_folds(series.points)),
        "ranks": _errors(series, _rank_split(series.points), intervals=True),
        "rates": _errors(series, _rate_splits(series.points), intervals=True),
    }


def choices(series: Sequence[Series]) -> list[dict[str, Any]]:
    """What choosing an algorithm by prediction loses against the fastest measured one, by backend with several algorithms."""
    found = []
    for backend in dict.fromkeys(one.name.split()[0] for one in series):
        mine = [one for one in series if one.name.split()[0] == backend]
        forced = [one for one in mine if not one.name.endswith(" default")]
        if len(forced) < 2:
            continue
        common = sorted(set.intersection(*(set(_keys(one.points)) for one in mine)))
        times = {one.name: dict(zip(_keys(one.points), one.duration_us.tolist(), strict=True)) for one in mine}
        best = np.array([min(times[one.name][key] for one in forced) for key in common])
        entry: dict[str, Any] = {"backend": backend, "algorithms": len(forced), "points": len(common)}
        for what, splits in (("sizes", _size_folds), ("ranks", _rank_split), ("rates", _rate_splits)):
            predicted = {one.name: _left_out(one, splits(one.points)) for one in forced}
            regret = [
                times[min(forced, key=lambda one, key=key: predicted[one.name][key]).name][key] / least - 1
                for key, least in zip(common, best.tolist(), strict=True)
                if all(key in predicted[one.name] for one in forced)
            ]
            entry[what] = _lost(regret) if regret else None
        own = next((one for one in mine if one.name.endswith(" default")), None)
        if own is not None:
            entry["library"] = _lost(np.array([times[own.name][key] for key in common]) / best - 1)
        for one in forced:
            lost = np.array([times[one.name][key] for key in common]) / best - 1
            entry.setdefault("always", {})[one.name] = float(lost.mean()) * 100
        found.append(entry)
    return found


def _lost(regret: Sequence[float] | Floats) -> dict[str, Any]:
    return {"points": len(regret), "mean_pct": float(np.mean(regret)) * 100, "worst_pct": float(np.max(regret)) * 100}


def aiconfigurator_series(folder: Path) -> list[Series]:
    """NCCL's all-reduce as measured for AIConfigurator, a series for each system and type of number."""
    from pyarrow import parquet

    found = []
    for path in sorted(folder.rglob("nccl_perf.parquet")):
        rows = parquet.read_table(path).to_pylist()
        system = path.relative_to(folder).parts[path.relative_to(folder).parts.index("data") + 1]
        for dtype in sorted({row["nccl_dtype"] for row in rows}):
            mine = [row for row in rows if row["nccl_dtype"] == dtype and _is_measured(row)]
            if mine:
                size = np.array([row["message_size"] for row in mine], dtype=np.float64) * _ITEM_BYTES[dtype]
                found.append(
                    Series(
                        name=f"nccl {system} {dtype} {path.parent.name}",
                        algorithms=algorithms_of("nccl", "default"),
                        points=Points(size_bytes=size, ranks=np.array([row["num_gpus"] for row in mine])),
                        duration_us=np.array([row["latency"] for row in mine]) * 1e3,
                        spread_pct=np.full(len(mine), np.nan),
                    )
                )
    return found


def _is_measured(row: dict[str, Any]) -> bool:
    return row["op_name"] == "all_reduce" and row["num_gpus"] > 1 and row["latency"] > 0


def show(result: dict[str, Any]) -> None:
    """The figures as tables for a page of documentation."""
    print("| measured | rows | repeats % | left-out sizes % | 2-4 ranks -> 8 % | left-out rate % |")
    print("|---|---:|---:|---:|---:|---:|")
    for one in result["series"]:
        cells = [_pair(one[what]) for what in ("sizes", "ranks", "rates")]
        repeats = "-" if one["repeats_pct"] is None else f"{one['repeats_pct']:.1f}"
        print(f"| {one['name']} | {one['rows']} | {repeats} | {' | '.join(cells)} |")
    for entry in result["choice"]:
        found = [(what, entry[what]) for what in ("sizes", "ranks", "rates") if entry[what]]
        parts = [f"{what}: {lost['mean_pct']:.1f} % (worst {lost['worst_pct']:.0f} %)" for what, lost in found]
        print(f"{entry['backend']}, the best of {entry['algorithms']} by prediction loses, left-out {'; '.join(parts)}")
        if library := entry.get("library"):
            print(f"  the library's own choice loses {library['mean_pct']:.1f} % (worst {library['worst_pct']:.0f} %)")
        print("  always one: " + ", ".join(f"{name} {lost:.0f} %" for name, lost in entry["always"].items()))


def _pair(errors: dict[str, Any] | None) -> str:
    if errors is None:
        return "-"
    inside = "" if errors["inside_pct"] is None else f"; {errors['inside_pct']:.0f} in 90 % int."
    return f"{errors['mape_pct']:.1f} (formula {errors['formula_mape_pct']:.1f}{inside})"


def _errors(series: Series, splits: Splits, *, intervals: bool = False) -> dict[str, Any] | None:
    """Mean errors over the points that the splits leave out, and how many are in their intervals; None: nothing to leave out."""
    both: list[tuple[Floats, Floats, Mask]] = []
    for kept, out in splits:
        truth, held = series.duration_us[out], series.points.select(out)
        fit = _fit(series, kept, intervals=intervals)
        inside = np.zeros(0, dtype=bool)
        if intervals:
            found = fit.predict_interval(held)
            inside = (found.low_us <= truth) & (truth <= found.high_us)
        both.append((np.abs(fit.predict(held) / truth - 1), np.abs(fit.formula.predict(held) / truth - 1), inside))
    if not both:
        return None
    errors, alone, within = (np.concatenate(column) * 100 for column in zip(*both, strict=True))
    return {
        "points": len(errors),
        "mape_pct": float(errors.mean()),
        "median_pct": float(np.median(errors)),
        "worst_pct": float(errors.max()),
        "formula_mape_pct": float(alone.mean()),
        "inside_pct": float(within.mean()) if intervals else None,
    }


def _left_out(series: Series, splits: Splits) -> dict[tuple[float, ...], float]:
    """Time of each left-out point as predicted without it."""
    found: dict[tuple[float, ...], float] = {}
    for kept, out in splits:
        held = series.points.select(out)
        found |= dict(zip(_keys(held), _fit(series, kept).predict(held).tolist(), strict=True))
    return found


def _fit(series: Series, kept: Mask, *, intervals: bool = False) -> CollectiveCost:
    return fit_collective_cost(
        series.points.select(kept),
        series.duration_us[kept],
        algorithms=series.algorithms,
        busy_us=series.busy_us[kept],
        groups=None if intervals else np.zeros(int(kept.sum())),
        meets=series.meets,
    )


def _size_folds(points: Points) -> Splits:
    """Every fourth size between the smallest and the largest, four times."""
    sizes = np.unique(points.size_bytes)[1:-1]
    for number in range(min(FOLDS, len(sizes))):
        out = np.isin(points.size_bytes, sizes[number::FOLDS])
        yield ~out, out


def _rank_split(points: Points) -> Splits:
    """Eight ranks, from up to four."""
    many, few = points.ranks == MANY_RANKS, points.ranks <= FEW_RANKS
    if many.any() and len(np.unique(points.ranks[few])) > 1:
        yield few, many


def _rate_splits(points: Points) -> Splits:
    """Each limited rate, from the others."""
    rates = np.unique(points.link_bytes_per_us[np.isfinite(points.link_bytes_per_us)])
    if len(rates) > 2:
        for rate in rates:
            out = points.link_bytes_per_us == rate
            yield ~out, out


def _keys(points: Points) -> list[tuple[float, ...]]:
    return list(zip(points.size_bytes.tolist(), points.ranks.tolist(), points.link_bytes_per_us.tolist(), strict=True))


if __name__ == "__main__":
    main()
