"""Measured all-reduces chosen by size: against the MPI library's default, its best fixed algorithm, and the best of all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dpro_search.collect.tables.all_reduces import LIBRARIES, AllReduceRow, CommTable, read_comm_table
from dpro_search.costmodel.collectives.all_reduce_table import OF_LIBRARIES, choices, predicted_choice
from dpro_search.costmodel.collectives.model_file import CommunicationModel
from dpro_search.costmodel.collectives.series import table_series
from dpro_search.quantities import size_text
from dpro_search.runtime.all_reduce.dpro_search_all_reduce import Choice
from dpro_search.runtime.all_reduce.dpro_search_all_reduce.choice import joined, of_size

Place = tuple[str, int, int, float | None]  # backend, ranks, ranks on a host, rate of the links
Cell = Mapping[str, AllReduceRow]  # by algorithm

_TITLES = {"mpi4py": "Open MPI", "mpi4py-mpich": "MPICH"}


def lines(paths: Sequence[Path]) -> list[str]:
    """Markdown: one table of all places, one of each place by size."""
    summary = [
        "| MPI library | ranks | on a host | link | sizes | against its default: median | worst | best"
        " | against its best fixed algorithm: median | worst"
        " | chosen by the cost model, against the best of ours: median | mean | worst"
        " | by that of other numbers of ranks: median | mean | worst |",
        f"|---|---:|---:|---|{'---:|' * 12}",
    ]
    detail: list[str] = []
    by_rounds = [
        "",
        "Chosen by all sizes in every second round, judged in the rounds between; and the other way round, the mean of both:",
        "",
        "| MPI library | ranks | on a host | link | sizes | against its default: median | worst | best"
        " | against its best fixed algorithm, chosen likewise: median | worst | more than 5 % slower |",
        f"|---|---:|---:|---|{'---:|' * 7}",
    ]
    for path in paths:
        table = read_comm_table(path)
        by_rounds += _by_rounds(table)
        models = _models(table, path.name)
        for place, cells in _places(table).items():
            some = models[None], models[place[1]]
            found = [_row(table, some, place, size, cells[size]) for size in sorted(cells) if _default(place) in cells[size]]
            if found:
                summary.append(_summary(place, found))
                detail += _detail(place, found)
    return [*summary, *by_rounds, *detail]


def _models(table: CommTable, name: str) -> dict[int | None, CommunicationModel | None]:
    """The cost model of all rows (None), and of those of other numbers of ranks than each; None: there are too few others."""
    own = tuple(row for row in table.rows if row.backend in LIBRARIES and not row.algorithm.startswith(OF_LIBRARIES))
    table = CommTable(header=table.header, rows=own, dropped={})
    found: dict[int | None, CommunicationModel | None] = {None: CommunicationModel.train(table_series(table), [name])}
    counts = sorted({row.ranks for row in own})
    for ranks in counts:
        rows = tuple(row for row in own if row.ranks != ranks)
        others = CommTable(header=table.header, rows=rows, dropped={})
        found[ranks] = CommunicationModel.train(table_series(others), [name]) if len(counts) > 2 else None
    return found


class Row:
    """One size: what each way takes, us."""

    def __init__(self, place: Place, size_bytes: int, chosen: str, cell: Cell, by_model: Sequence[str | None]) -> None:
        taken = {name: row.duration_us for name, row in cell.items()}
        prefix, default = LIBRARIES[place[0]], _default(place)
        library = {name: us for name, us in taken.items() if name.startswith(prefix) and name != default}
        own = {name: us for name, us in taken.items() if not name.startswith(prefix)}
        self.size_bytes, self.chosen, self.chosen_us = size_bytes, chosen, taken[chosen]
        self.default_us, self.spread_pct = taken[default], cell[default].spread_pct
        self.fixed = min(library, key=library.__getitem__)
        self.fixed_us = library[self.fixed]
        self.by_model = by_model[0] or ""
        best_us = min(own.values())
        self.regrets_pct = [np.nan if name is None else (own[name] / best_us - 1) * 100 for name in by_model]


def _by_rounds(table: CommTable) -> list[str]:
    """Each size as a user has it whose table holds that size: choices and the best fixed algorithm come from other calls."""
    found: dict[Place, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    repeated = [row for row in table.rows if row.backend in LIBRARIES and len(row.rounds_us) > 2]
    halves = [CommTable(header=table.header, rows=tuple(_half(row, first) for row in repeated), dropped={}) for first in (0, 1)]
    for seen, judged in (halves, reversed(halves)):
        known, made = _places(seen), choices([seen])
        for place, cells in _places(judged).items():
            for size, cell in cells.items():
                library = [name for name in cell if name.startswith(LIBRARIES[place[0]]) and name != _default(place)]
                chosen = _name(made[place[3]], place, size, cell)
                if library and {_default(place), chosen} <= cell.keys():
                    fixed = min(library, key=lambda name: known[place][size][name].duration_us)
                    us, default_us, fixed_us = (cell[name].duration_us for name in (chosen, _default(place), fixed))
                    found[place][size].append((us / default_us - 1, us / fixed_us - 1))
    lines = []
    for (backend, ranks, ranks_per_host, rate_bps), by_size in found.items():
        default, fixed = np.array([np.mean(values, axis=0) * 100 for values in by_size.values()]).T
        numbers = (np.median(default), default.max(), default.min(), np.median(fixed), fixed.max())
        cells = " | ".join(f"{value:+.1f} %" for value in numbers)
        where = f"{_TITLES[backend]} | {ranks} | {ranks_per_host} | {_link(rate_bps)} | {len(by_size)}"
        lines.append(f"| {where} | {cells} | {int((fixed > 5).sum())} |")
    return lines


def _half(row: AllReduceRow, first: int) -> AllReduceRow:
    return msgspec.structs.replace(row, rounds_us=row.rounds_us[first::2])


def _places(table: CommTable) -> dict[Place, dict[int, dict[str, AllReduceRow]]]:
    found: dict[Place, dict[int, dict[str, AllReduceRow]]] = defaultdict(lambda: defaultdict(dict))
    for row in table.rows:
        if row.backend in LIBRARIES:
            found[row.backend, row.ranks, row.ranks_per_host, row.rate_bps][row.size_bytes][row.algorithm] = row
    return found


def _row(table: CommTable, models: Sequence[CommunicationModel | None], place: Place, size_bytes: int, cell: Cell) -> Row:
    """The measured choice is made from the other sizes; the first cost model has seen all, the second no such number of ranks."""
    backend, ranks, ranks_per_host, rate_bps = place
    rows = tuple(row for row in table.rows if row.backend == backend and row.size_bytes != size_bytes)
    others = CommTable(header=table.header, rows=rows, dropped={})
    chosen = _name(choices([others])[rate_bps], place, size_bytes, cell)
    sizes = np.array(sorted({row.size_bytes for row in table.rows}), dtype=np.float64)
    by_model: list[str | None] = []
    for model in models:
        if model is None:
            by_model.append(None)
            continue
        predicted = predicted_choice(model, [(ranks, ranks_per_host)], rate_bps, table.header.cores, sizes, backend)
        by_model.append(_name(predicted, place, size_bytes, cell))
    return Row(place, size_bytes, chosen, cell, by_model)


def _name(table: Mapping[str, Any], place: Place, size_bytes: int, cell: Cell) -> str:
    name = joined(*of_size(Choice(table).ranges(*place[1:3]), size_bytes))
    return name if name in cell else "native"


def _summary(place: Place, rows: Sequence[Row]) -> str:
    default = np.array([(row.chosen_us / row.default_us - 1) * 100 for row in rows])
    fixed = np.array([(row.chosen_us / row.fixed_us - 1) * 100 for row in rows])
    regrets = np.array([row.regrets_pct for row in rows]).T
    of_models = [value for regret in regrets for value in (np.median(regret), regret.mean(), regret.max())]
    numbers = (np.median(default), default.max(), default.min(), np.median(fixed), fixed.max(), *of_models)
    cells = " | ".join("-" if np.isnan(value) else f"{value:+.1f} %" for value in numbers)
    backend, ranks, ranks_per_host, rate_bps = place
    return f"| {_TITLES[backend]} | {ranks} | {ranks_per_host} | {_link(rate_bps)} | {len(rows)} | {cells} |"


def _detail(place: Place, rows: Sequence[Row]) -> list[str]:
    found = [
        "",
        f"{_TITLES[place[0]]}, {place[1]} ranks, {place[2]} on a host, {_link(place[3])}:",
        "",
        "| bytes | chosen | us | default, us | spread of rounds | best fixed algorithm | us | chosen by the cost model |",
        "|---:|---|---:|---:|---:|---|---:|---|",
    ]
    for row in rows:
        fixed = row.fixed.removeprefix(LIBRARIES[place[0]])
        found.append(
            f"| {size_text(row.size_bytes)} | {row.chosen} | {row.chosen_us:.0f} | {row.default_us:.0f} | {row.spread_pct:.0f} %"
            f" | {fixed} | {row.fixed_us:.0f} | {row.by_model} |"
        )
    return found


def _default(place: Place) -> str:
    return f"{LIBRARIES[place[0]]}default"


def _link(rate_bps: float | None) -> str:
    return "unlimited" if rate_bps is None else f"{rate_bps / 1e6:g} Mbit/s"
