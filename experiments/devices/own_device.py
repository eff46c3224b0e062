"""How far predictions are off on a device that was measured: python -m experiments.devices.own_device DEVICE.toml [--seeds 0,1,2]

DEVICE.toml is written by `dpro-search fit --collect device --budget 300` on the machine that has it. Its ops are predicted by the
shipped predictor without any of them, and corrected by 20, 50 or 100, which are chosen as `fit` chooses them; the rest are judged.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from dpro_search.cluster import Device, bundled
from dpro_search.cluster.files import load_device
from dpro_search.costmodel.devices.choice import nearest_to_centres
from dpro_search.costmodel.devices.correction import OpPoints
from dpro_search.costmodel.devices.features import features
from dpro_search.costmodel.devices.ops import Floats
from dpro_search.costmodel.devices.profile import DeviceProfile, UsualShares, probe_places
from dpro_search.costmodel.devices.sampled import SampledOps, latency_on, measured_on

BUDGETS = 0, 20, 50, 100
LONG_US = 20.0  # from which on launches matter little


def main() -> None:
    """Print markdown: errors by number of samples, and by kind of op without any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    options = parser.parse_args()
    device = load_device(options.file, bundled.find)
    measured = measured_on(device)
    if measured is None:
        raise SystemExit(f"{options.file}: has no samples; dpro-search fit --collect device writes them")
    spread = float(np.median([sample.spread_pct for sample in device.samples]))
    print(f"{device.name}: {len(device.samples)} ops, noise {spread:.1f} % (median); {device.provenance.of('samples')}")
    print("\n| samples | judged | mean | median | p90 | bias | in the 90 % interval |\n|---:|---:|---:|---:|---:|---:|---:|")
    for budget in BUDGETS:
        rows = [_judged(device, measured, budget, seed) for seed in map(int, options.seeds.split(",")) if budget or not seed]
        predicted, true, inside = (np.concatenate(each) for each in zip(*rows, strict=True))
        print(f"| {budget} | {_row(predicted, true, inside)} |")
        long = true >= LONG_US
        print(f"| {budget}; ops of {LONG_US:.0f} us and more | {_row(predicted[long], true[long], inside[long])} |")
    predicted, true, inside = _judged(device, measured, 0, 0)
    kinds = np.array([sample.op.split()[0] + (" backward" if "backward" in sample.op else "") for sample in device.samples])
    print("\n| without samples | judged | mean | median | p90 | bias | in the 90 % interval |\n|---|---:|---:|---:|---:|---:|---:|")
    for kind in sorted(set(kinds)):
        own = kinds == kind
        print(f"| {kind} | {_row(predicted[own], true[own], inside[own])} |")


def _judged(device: Device, measured: SampledOps, budget: int, seed: int) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
    """Predicted and measured us, and whether the interval held it, of the ops that were no samples."""
    used = _samples(device, measured, budget, seed)
    part = msgspec.structs.replace(device, samples=tuple(device.samples[place] for place in used))
    judged = np.setdiff1d(np.arange(len(measured.us)), used)
    found = latency_on(part).predict(measured.ops[judged])
    us = measured.us[judged]
    return found.us, us, (found.low_us <= us) & (us <= found.high_us)


def _samples(device: Device, measured: SampledOps, budget: int, seed: int) -> list[int]:
    """Probes first, then what is nearest to the centres of clusters of ops."""
    if not budget:
        return []
    probes = probe_places(measured.ops, device)[:budget]
    left = np.setdiff1d(np.arange(len(measured.us)), probes)
    points = OpPoints.of(measured.ops[left], features(measured.ops[left], DeviceProfile(device=device), UsualShares()))
    return [*probes.tolist(), *left[nearest_to_centres(points, budget - len(probes), seed)].tolist()]


def _row(predicted: Floats, true: Floats, inside: Sequence[bool] | npt.NDArray[np.bool_]) -> str:
    known = np.isfinite(predicted)
    error = predicted[known] / true[known] - 1
    off = np.abs(error) * 100
    figures = f"{off.mean():.1f} % | {np.median(off):.1f} % | {np.quantile(off, 0.9):.0f} % | {np.median(error) * 100:+.1f} %"
    return f"{known.sum()} | {figures} | {np.asarray(inside)[known].mean() * 100:.0f} %"


if __name__ == "__main__":
    main()
