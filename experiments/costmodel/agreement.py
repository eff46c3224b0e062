"""How well two collections of the same clusters agree: the noise that no model can do better than.

    dpro-search fit --collect xla --models bert,resnet50 --limit 60 --out a.jsonl      # and b.jsonl, in the same way
    python -m experiments.costmodel.agreement a.jsonl b.jsonl

To see whether two cores can collect at once, let another collection run on the other core meanwhile (`taskset -c 0 ...`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from dpro_search.collect.tables.clusters import MeasuredCluster, read_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", metavar="TABLE", type=Path, nargs=2)
    first, second = (_by_cluster(path) for path in parser.parse_args().tables)
    pairs = [(first[key], second[key]) for key in first if key in second]
    if not pairs:
        raise SystemExit("the tables have no cluster in common")
    print(f"{len(pairs)} clusters in both")
    ratios = {
        "fused": [b.fused_us / a.fused_us for a, b in pairs],
        "unfused": [b.unfused_us / a.unfused_us for a, b in pairs],
        "fused over unfused": [b.fused_us / b.unfused_us / (a.fused_us / a.unfused_us) for a, b in pairs],
    }
    for name, values in ratios.items():
        off = np.abs(np.log(values)) * 100
        bias = (np.exp(np.median(np.log(values))) - 1) * 100
        print(f"{name}: differs by {np.median(off):.1f} % (median), {np.quantile(off, 0.9):.1f} % (p90); bias {bias:+.1f} %")
    clear = [(a, b) for a, b in pairs if a.pays is not None]
    same = [a.pays == (b.fused_us < b.unfused_us) for a, b in clear]
    print(f"whether fusing pays: the same in {np.mean(same) * 100:.1f} % of {len(clear)} that differ by more than the noise")


def _by_cluster(path: Path) -> dict[str, MeasuredCluster]:
    return {row.cluster.fingerprint: row for row in read_table(path).measured}


if __name__ == "__main__":
    main()
