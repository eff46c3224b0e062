"""Joins tables of measured clusters of one machine into what the package bundles: one compressed table, and a model trained on it.

python -m experiments.costmodel.ship TABLE... --out dpro_search/samples
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from dpro_search.collect.tables.clusters import MODEL_NAME, TABLE_NAME, ClusterTable, compact, read_table
from dpro_search.costmodel.fused.model_file import FusionModel, distinct
from dpro_search.errors import InputError


def joined(tables: list[ClusterTable]) -> ClusterTable:
    """All measured rows, equal clusters once; of the first table's provenance."""
    headers = [table.header for table in tables]
    if len({(header.version, header.machine, *sorted(header.versions.items())) for header in headers}) > 1:
        raise InputError("the tables are of different machines or versions")
    return ClusterTable(header=headers[0], rows=distinct(tables), dropped={})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", metavar="TABLE", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="folder to write both into")
    options = parser.parse_args()
    table = joined([read_table(source) for source in options.tables])
    model = FusionModel.train([table])
    shutil.rmtree(options.out / MODEL_NAME, ignore_errors=True)
    model.save(options.out / MODEL_NAME)
    compact(table, options.out / TABLE_NAME)
    model_bytes = sum(path.stat().st_size for path in (options.out / MODEL_NAME).iterdir())
    table_bytes = (options.out / TABLE_NAME).stat().st_size
    print(f"{len(table.rows)} clusters: table {table_bytes / 1e6:.2f} MB, model {model_bytes / 1e6:.2f} MB")
    print(f"error on left-out models {model.info.overall.mape_pct:.1f} %")


if __name__ == "__main__":
    main()
