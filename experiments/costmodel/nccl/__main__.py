"""Fits NCCL's cost model and judges it on systems left out.

    python -m experiments.costmodel.nccl FOLDER [--aiconfigurator FOLDER] [--write]

FOLDER has ``collectives.csv.gz`` and ``fits.csv`` (public logs of nccl-tests and OSU). That of --aiconfigurator holds the unpacked
package ``aiconfigurator-core`` (Apache-2.0; needs pyarrow). ``--write`` writes the constants that the package ships.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import dpro_search.costmodel.collectives.nccl.constants as shipped
from experiments.costmodel.nccl import crossover
from experiments.costmodel.nccl.data import Measured, measured
from experiments.costmodel.nccl.fit import REGIMES, SMALL_BYTES, Calls, constants, fitted, for_fit, table, thinned

SOURCE = (
    "fitted to public nccl-tests, OSU and AIConfigurator measurements (python -m experiments.costmodel.nccl), starting from the "
    "constants of NCCL's src/graph/tuning.cc; to several systems each, but pair_ratio (one cluster of H100)"
)
LEVEL, LEAST_FACTOR = 0.9, 1.05
FEW_SYSTEMS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--aiconfigurator", type=Path)
    parser.add_argument("--write", action="store_true", help="the constants, into the package")
    options = parser.parse_args()
    rows = thinned(measured(options.folder, options.aiconfigurator))
    errors = left_out(rows)
    show(rows, errors)
    crossover.show(rows, errors)
    values = fitted(Calls(for_fit(rows)))
    print("\n| constant | value |\n|---|---:|\n" + "\n".join(f"| {name} | {value:.3g} |" for name, value in values.items()))
    if options.write:
        path = Path(shipped.__file__).parent / "constants.toml"
        path.write_text(toml(table({name: float(f"{value:.4g}") for name, value in values.items()}, widths(rows, errors), SOURCE)))


def left_out(rows: Sequence[Measured]) -> Any:
    """log(predicted / measured) of each call, by constants fitted without its system, [rows]."""
    everyone, found = Calls(rows), np.zeros(len(rows))
    for system in sorted({row.system for row in rows}):
        of = constants(fitted(Calls(for_fit([row for row in rows if row.system != system]))))
        mine = np.array([row.system == system for row in rows])
        found[mine] = everyone.log_errors(of)[mine]
    return found


def regime(row: Measured) -> str:
    """The interval that a call has."""
    place = "in" if row.nodes == 1 else "far" if row.nodes > shipped.MANY_DOMAINS else "out"
    return f"{place}.{'small' if row.bytes < SMALL_BYTES else 'large'}"


def widths(rows: Sequence[Measured], errors: Any, without: str = "") -> dict[str, float]:
    """Factor that holds 90 % of the calls of systems that were left out, by regime.

    Each system has the same weight. Where fewer than `FEW_SYSTEMS` were measured a tenth of them cannot be told from the worst
    one, so that the factor holds 90 % of the calls of each.
    """
    factors = {}
    for name in REGIMES:
        chosen = [number for number, row in enumerate(rows) if regime(row) == name and row.system != without]
        of_systems: dict[str, list[float]] = defaultdict(list)
        for number in chosen:
            of_systems[rows[number].system].append(abs(errors[number]))
        if len(of_systems) < FEW_SYSTEMS:
            error = max(float(np.quantile(values, LEVEL, method="higher")) for values in of_systems.values())
        else:
            pairs = sorted((error, 1 / len(values) / len(of_systems)) for values in of_systems.values() for error in values)
            share = np.cumsum([weight for _, weight in pairs])
            error = pairs[min(int(np.searchsorted(share, LEVEL)), len(pairs) - 1)][0]
        factors[name] = max(float(np.exp(error)), LEAST_FACTOR)
    return factors


def show(rows: Sequence[Measured], errors: Any) -> None:
    """Tables of errors of left-out systems: by system, collective, number of nodes, and how often intervals hold."""
    pct = np.abs(np.expm1(errors)) * 100
    print("| left out | nodes | calls | < 1 MiB, median % | >= 1 MiB, median % | signed % | in 90 % interval, % |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    inside = np.zeros(len(rows))
    for system in sorted({row.system for row in rows}):
        limits = widths(rows, errors, without=system)  # from the errors of the others
        for number, row in enumerate(rows):
            if row.system == system:
                inside[number] = abs(errors[number]) <= np.log(limits[regime(row)])
        for nodes in sorted({row.nodes for row in rows if row.system == system}):
            mine = [number for number, row in enumerate(rows) if row.system == system and row.nodes == nodes]
            small = [pct[number] for number in mine if rows[number].bytes < SMALL_BYTES]
            large = [pct[number] for number in mine if rows[number].bytes >= SMALL_BYTES]
            signed = float(np.expm1(np.median(errors[mine]))) * 100
            held = float(inside[mine].mean()) * 100
            print(f"| {system} | {nodes} | {len(mine)} | {_median(small)} | {_median(large)} | {signed:+.0f} | {held:.0f} |")
    print("\n| median over systems | systems | < 1 MiB, % | systems | >= 1 MiB, % |\n|---|---:|---:|---:|---:|")
    parts: list[tuple[str, Callable[[Measured], bool]]] = [("all", lambda row: True)]
    parts += [("one node", lambda row: row.nodes == 1), ("2 to 10 nodes", lambda row: 1 < row.nodes <= 10)]
    parts += [("more nodes", lambda row: row.nodes > 10)]
    parts += [(one, lambda row, one=one: row.collective == one) for one in sorted({row.collective for row in rows})]  # type: ignore[misc]
    for title, has in parts:
        cells = []
        for small_ones in (True, False):
            by_system: dict[str, list[float]] = defaultdict(list)
            for number, row in enumerate(rows):
                if has(row) and (row.bytes < SMALL_BYTES) == small_ones:
                    by_system[row.system].append(pct[number])
            cells += [str(len(by_system)), _median([median(values) for values in by_system.values()])]
        print(f"| {title} | {' | '.join(cells)} |")
    systems = {row.system for row in rows}
    held = [float(np.mean([inside[number] for number, row in enumerate(rows) if row.system == one])) for one in systems]
    print(f"\n90 % intervals hold {np.mean(held) * 100:.0f} % of the calls of a left-out system, mean over systems")


def _median(values: Sequence[float]) -> str:
    return f"{median(values):.1f}" if values else "-"


def toml(values: dict[str, Any]) -> str:
    """A table of numbers, lists, tables and one list of tables as TOML."""
    plain = [
        f"{name} = {_value(value)}" for name, value in values.items() if not isinstance(value, dict) and name != "architectures"
    ]
    parts = [
        f"[{name}]\n" + "\n".join(f"{key} = {_value(one)}" for key, one in value.items())
        for name, value in values.items()
        if isinstance(value, dict)
    ]
    kinds = [
        "\n".join(["[[architectures]]", *(f"{key} = {_value(one)}" for key, one in kind.items())])
        for kind in values["architectures"]
    ]
    return "\n\n".join(["\n".join(plain), *parts, *kinds]) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"' if "\\" not in value else f"'{value}'"
    if isinstance(value, list):
        return f"[{', '.join(_value(one) for one in value)}]"
    return f"{value:.0f}" if value >= 1e4 else f"{value:.4g}"


if __name__ == "__main__":
    main()
