"""Judges the model of collectives on a torus of TPUs by published measurements, and fits its constants.

    python -m experiments.costmodel.torus

Two predictions stand beside each measured time: from published rates alone, and with constants fitted to the other generations.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from dpro_search.cluster import bundled, parse_cluster
from dpro_search.costmodel.collectives.torus import PUBLISHED, TorusConstants, collective_us, torus_of
from dpro_search.costmodel.collectives.torus_groups import Places, places_of, spans_of

FOLDER = Path(__file__).parent
STARTS_US = np.arange(0.0, 20.5, 0.5)


@dataclass(frozen=True)
class Measured:
    """A collective that was measured: groups of all devices that differ in their places on some axes only."""

    collective: str
    topology: str
    axes: str  # Those along which a group extends, like "xy".
    bytes: float  # Bytes of the whole array on a device.
    time_us: float
    source: str

    @property
    def generation(self) -> str:
        return self.topology.partition(":")[0]

    def predicted_us(self, constants: TorusConstants) -> float:
        cluster = parse_cluster(self.topology)
        torus = torus_of(cluster)
        places = places_of(torus)
        spans = spans_of(torus, places, groups_along(places, self.axes, torus.devices_per_chip))
        return float(collective_us(self.collective, self.bytes, cluster, spans, constants))


def main() -> None:
    rows = measured()
    fits = {name: fitted([row for row in rows if row.generation != name]) for name in sorted({row.generation for row in rows})}
    print("| topology | collective | axes | bytes | measured us | published rates us | error % | fitted to others us | error % |")
    print("|---|---|---|---:|---:|---:|---:|---:|---:|")
    errors: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
    for row in rows:
        cold_us, fitted_us = row.predicted_us(PUBLISHED), row.predicted_us(fits[row.generation])
        cold_pct, fitted_pct = (100 * (predicted / row.time_us - 1) for predicted in (cold_us, fitted_us))
        for key in (("generation", row.generation), ("collective", row.collective), ("all", "all")):
            for known, error in zip(errors.setdefault(key, ([], [])), (cold_pct, fitted_pct), strict=True):
                known.append(abs(error))
        print(
            f"| {row.topology} | {row.collective} | {row.axes} | {row.bytes:.0f} | {row.time_us:.1f} "
            f"| {cold_us:.1f} | {cold_pct:+.0f} | {fitted_us:.1f} | {fitted_pct:+.0f} |"
        )
    print("\n| | rows | published rates, median error % | fitted to other generations, median error % |\n|---|---:|---:|---:|")
    for (_, name), (cold, left_out) in sorted(errors.items()):
        print(f"| {name} | {len(cold)} | {median(cold):.1f} | {median(left_out):.1f} |")
    print("\n| fitted without | start us |\n|---|---:|")
    for name, constants in (*fits.items(), ("none", fitted(rows))):
        print(f"| {name} | {constants.start_us:.1f} |")
    print("\n| op | device | size | measured us | published peak us | share of peak % |\n|---|---|---:|---:|---:|---:|")
    for op, device, size, time_us, peak_us in ops():
        print(f"| {op} | {device} | {size} | {time_us:.1f} | {peak_us:.1f} | {100 * peak_us / time_us:.0f} |")


def measured() -> list[Measured]:
    """Rows of collectives.csv."""
    with (FOLDER / "collectives.csv").open() as file:
        return [
            Measured(row["collective"], row["topology"], row["axes"], float(row["bytes"]), float(row["time_us"]), row["source"])
            for row in csv.DictReader(file)
        ]


def groups_along(places: Places, axes: str, devices_per_chip: int) -> list[list[int]]:
    """Groups of devices with the same core and the same places on all other axes."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, (number, place) in enumerate(zip(places.slices.tolist(), places.coordinates.tolist(), strict=True)):
        others = tuple(at for axis, at in zip("xyz", place, strict=True) if axis not in axes)
        groups.setdefault((device % devices_per_chip, number, *others), []).append(device)
    return list(groups.values())


def fitted(rows: Sequence[Measured]) -> TorusConstants:
    """The published share of links, with the start that has the least error; every generation has the same weight."""
    bare_us = np.array([row.predicted_us(PUBLISHED) for row in rows])
    count = {row.generation: sum(other.generation == row.generation for other in rows) for row in rows}
    weights = np.array([1 / count[row.generation] / len(count) for row in rows])
    times_us = np.array([row.time_us for row in rows])
    errors = (np.abs(np.log((STARTS_US[:, None] + bare_us) / times_us)) * weights).sum(axis=1)
    return TorusConstants(start_us=float(STARTS_US[np.argmin(errors)]), link_share=PUBLISHED.link_share)


def ops() -> list[tuple[str, str, int, float, float]]:
    """Op, device, size, measured and least time by published peaks, of rows of ops.csv; each ran on one TensorCore."""
    rows = []
    with (FOLDER / "ops.csv").open() as file:
        for row in csv.DictReader(file):
            device, size, cores = bundled.device(row["device"]), int(row["size"]), int(row["cores"])
            rate = device.peak.bf16 if row["op"].startswith("matmul") else device.memory_bytes_per_s
            assert rate is not None, "published"
            work = 2 * size**3 if row["op"].startswith("matmul") else 2 * size
            rows.append((row["op"], row["device"], size, float(row["time_us"]), work * cores / rate * 1e6))
    return rows


if __name__ == "__main__":
    main()
