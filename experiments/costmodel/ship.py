"""Joins tables of measured clusters of one machine into a compressed one, as the package bundles it.

python -m experiments.costmodel.ship TABLE... OUT.jsonl.gz
"""

from __future__ import annotations

import sys
from pathlib import Path

from dpro_search.collect.clusters.table import ClusterTable, MeasuredCluster, compact, read_table
from dpro_search.errors import InputError


def joined(tables: list[ClusterTable]) -> ClusterTable:
    """All measured rows, equal clusters once; of the first table's provenance."""
    if len({(table.header.machine, *sorted(table.header.versions.items())) for table in tables}) > 1:
        raise InputError("the tables are of different machines or versions")
    distinct: dict[str, MeasuredCluster] = {}
    for table in tables:
        for row in table.measured:
            distinct.setdefault(row.cluster.fingerprint, row)
    return ClusterTable(header=tables[0].header, rows=tuple(distinct.values()), dropped={})


def main() -> None:
    *sources, out = map(Path, sys.argv[1:])
    table = joined([read_table(source) for source in sources])
    compact(table, out)
    print(f"{out}: {len(table.rows)} clusters, {out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
