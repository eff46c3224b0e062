"""Scores predictors of tuned GPU kernels on devices that were left out.

    python -m experiments.tensor_programs.kernels FOLDER [--kernels NAME,...] [--devices NAME,...] [--seeds 0,1,2,3,4]
        [--budgets 0,20,50,100] [--no-compare] [--cache FILE] [--json]

FOLDER has tables (CSV) of configurations and their times on devices (`tables`). Each device is left out in turn. With --cache FILE
devices and seeds that are in the file are not computed again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dpro_search.errors import DproSearchError
from experiments.tensor_programs.kernels.score import BUDGETS, Scores, score
from experiments.tensor_programs.kernels.tables import KernelTable, read


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.tensor_programs.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kernels", help="with commas between them (default: all)")
    parser.add_argument("--devices", help="devices to leave out (default: each in turn)")
    parser.add_argument("--seeds", default="0,1,2,3,4", help="with commas between them")
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)), help="numbers of measured programs; 0: only their order")
    parser.add_argument("--no-compare", action="store_true", help="only the predictor, no others beside it")
    parser.add_argument("--cache", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    skipped: list[str] = []
    try:
        tables = read(options.folder, skipped)
    except DproSearchError as error:
        print(f"experiments.tensor_programs.kernels: {error}", file=sys.stderr)
        return 2
    results = _results(tables, options)
    if options.json:
        print(json.dumps({"results": results, "mean": means(results), "remarks": _remarks(tables), "left_out": skipped}, indent=2))
        return 0
    for kernel, lines in _remarks(tables).items():
        for line in lines:
            print(f"{kernel}: {line}")
    for name_of_mean, rows in means(results).items():
        print(f"\n{name_of_mean}")
        for name, values in rows.items():
            print(f"  {name:60} " + "  ".join(f"{key} {value:.3g}" for key, value in values.items()))
    for reason in skipped:
        print(f"left out: {reason}", file=sys.stderr)
    return 0


def _results(tables: list[KernelTable], options: argparse.Namespace) -> dict[str, dict[str, Scores]]:
    known: dict[str, Any] = json.loads(options.cache.read_text()) if options.cache and options.cache.is_file() else {}
    wished: dict[str, dict[str, Scores]] = {}
    budgets = [int(one) for one in options.budgets.split(",")]
    for table in tables:
        for device in table.devices if len(table.devices) > 1 else ():
            if (options.kernels and table.kernel not in options.kernels.split(",")) or (
                options.devices and device not in options.devices.split(",")
            ):
                continue
            for seed in options.seeds.split(","):
                key = f"{table.kernel}/{device}/{seed}"
                if key not in known:
                    known[key] = score(table, device, int(seed), budgets=budgets, compare=not options.no_compare)
                    if options.cache:
                        options.cache.write_text(json.dumps(known))
                wished[key] = known[key]
    return wished


def means(results: dict[str, dict[str, Scores]]) -> dict[str, dict[str, Scores]]:
    """Mean over seeds by kernel and device, over devices by kernel, and over kernels: "all kernels"."""
    devices: dict[str, list[dict[str, Scores]]] = {}
    for key, rows in results.items():
        devices.setdefault(key.rsplit("/", 1)[0], []).append(rows)
    by_device = {name: _mean(rows) for name, rows in devices.items()}
    kernels: dict[str, list[dict[str, Scores]]] = {}
    for name, averaged in by_device.items():
        kernels.setdefault(name.split("/")[0], []).append(averaged)
    by_kernel = {name: _mean(rows) for name, rows in kernels.items()}
    return {**by_device, **by_kernel, **({"all kernels": _mean(list(by_kernel.values()))} if by_kernel else {})}


def _mean(parts: list[dict[str, Scores]]) -> dict[str, Scores]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: {
            key: float(np.mean([part[name][key] for part in parts if name in part]))
            for key in next(part[name] for part in parts if name in part)
        }
        for name in names
    }


def _remarks(tables: list[KernelTable]) -> dict[str, list[str]]:
    return {
        table.kernel: [
            *table.remarks,
            *([] if table.noise_pct is None else [f"repeats differ by {table.noise_pct:.2g} % (median)"]),
        ]
        for table in tables
    }


if __name__ == "__main__":
    sys.exit(main())
