"""Fits the predictor to all public measurements and writes the file that the package ships."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import xgboost

import dpro_search.costmodel.devices as package
from dpro_search._version import __version__
from dpro_search.cluster import Provenance, bundled, device_toml
from dpro_search.collect._files import write_file
from dpro_search.costmodel.devices.choice import nearest_to_centres, stack_of
from dpro_search.costmodel.devices.correction import COORDINATES, OpPoints
from dpro_search.costmodel.devices.features import FEATURES, features
from dpro_search.costmodel.devices.model import BUDGETS, LatencyModel, OpsFit, Widths
from dpro_search.costmodel.devices.model_file import LATENCY_VERSION, FitInfo, LatencyInfo
from dpro_search.costmodel.devices.profile import DeviceProfile, peak_flops_per_s, probe_places
from dpro_search.costmodel.devices.profile_tables import read_profile_table
from dpro_search.costmodel.devices.sampled import latency_on
from dpro_search.costmodel.devices.written import OpSpec, ops_of
from dpro_search.errors import InputError
from experiments.devices.data import USUAL, Target, of_training, tables, targets
from experiments.devices.fit import fit_domain, fit_families, fit_trees, interval_width, save
from experiments.devices.protocol import by_family, by_family_and_source, fitted, from_data_sheets, judged, left_out, similarity_of

SEED = 0
PROBED_BY = ("deepbench", "sailor", "neusight", "aiter", "aiconfigurator")
SOURCES = (
    "NeuSight (sitar-lab/NeuSight 6945927, MIT)",
    "Sailor (eth-easl/sailor cf2c8e3, MIT), one GPU",
    "DeepBench (baidu-research/DeepBench da81ba7, Apache-2.0), training",
    "AITER (ROCm/aiter, MIT), tuned kernels",
    "aiconfigurator-core 0.12.0 (Apache-2.0): products, attention, experts, quantization",
)


def ship(folder: Path, aiconfigurator: Path | None) -> str:
    """Write ``latency.npz`` into the package; says what it holds."""
    skipped: list[str] = []
    measured = tables(folder, skipped, aiconfigurator)
    training = _fit(targets(of_training(measured), SEED, skipped))
    every = _fit(targets(measured, SEED, skipped, others=True))
    info = LatencyInfo(
        version=LATENCY_VERSION,
        sources=SOURCES,
        fitted_at=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"dpro-search": __version__, "xgboost": xgboost.__version__},
        features=FEATURES,
        coordinates=COORDINATES,
        training=training.info,
        every=every.info,
        usual=USUAL,
    )
    path = Path(package.__file__).parent / "latency.npz"
    save(LatencyModel(training=training.fit, every=every.fit, usual=USUAL), info, path)
    parts = [
        f"{part.rows} ops of {len(part.devices)} devices, {part.left_out_mape_pct}, {part.widths}"
        for part in (info.training, info.every)
    ]
    return "\n".join([f"{path}: {path.stat().st_size / 1e3:.0f} kB", *parts])


class _Fitted(NamedTuple):
    fit: OpsFit
    info: FitInfo


def _fit(some: Sequence[Target]) -> _Fitted:
    without = left_out(some, SEED, by_family)
    errors = judged(without, SEED)
    of_budget = {budget: [one for one in errors if one.budget == budget] for budget in BUDGETS}
    trees = fit_trees([fitted(one) for one in some], SEED)
    families, names = fit_families(by_family_and_source(some), SEED)
    fit = OpsFit(
        trees=trees,
        families=families,
        similarity=similarity_of(without, SEED),
        widths=Widths(
            specs=interval_width([np.abs(one.log_error) for one in from_data_sheets(without)]),
            deviations=tuple(interval_width([one.score for one in of_budget[budget]]) for budget in BUDGETS),
        ),
        domain=fit_domain([one.measured.features[one.fit] for one in some]),
    )
    info = FitInfo(
        devices=tuple(one.name for one in some),
        rows=int(sum(one.fit.sum() for one in some)),
        left_out_mape_pct={
            str(budget): round(float(np.mean([np.abs(np.expm1(one.log_error)).mean() for one in of_budget[budget]])) * 100, 2)
            for budget in BUDGETS
        },
        forest_bases=(trees.base.base, trees.shapes.base),
        families=names,
        roughness=fit.similarity.roughness,
        widths=fit.widths,
    )
    return _Fitted(fit, info)


def device_of_table(path: Path, name: str | None, out: Path | None, budget: int) -> str:
    """Write a device file with ops of a table of layers as its samples; says what was used, and what was not.

    Raises
    ------
    InputError
        The device or the file is not named, the table cannot be read, or its times contradict the data sheet.
    """
    if name is None or out is None or budget < 1:
        raise InputError("name the device by --specs and the file to write by --out; --budget is at least 1")
    device, measured = bundled.device(name), read_profile_table(path)
    samples = [one for one in measured.samples if peak_flops_per_s(device, one.op.split()[1]) is not None]
    if not samples:
        raise InputError(f"{path}: no op in it is of a precision that {device.name} has")
    ops = ops_of([OpSpec.parse(one.op) for one in samples], stack_of(device))
    places = probe_places(ops, device)
    others = np.setdiff1d(np.arange(len(samples)), places)
    points = OpPoints.of(ops[others], features(ops[others], DeviceProfile(device=device), USUAL))
    more = min(max(budget - len(places), 0), len(others))
    chosen = [*places.tolist(), *(others[nearest_to_centres(points, more, SEED)].tolist() if more else [])][:budget]
    known = device.provenance
    exceptions = {**dict(known.exceptions), "samples": f"measured: {path.name}"}
    device = msgspec.structs.replace(
        device,
        samples=tuple(samples[place] for place in chosen),
        provenance=Provenance(source=known.source, exceptions=tuple(sorted(exceptions.items()))),
    )
    latency_on(device)  # says so if the times contradict the specs
    write_file(out, device_toml(device).encode())
    return "\n".join([f"{out}: {len(chosen)} of {len(samples)} ops as samples of {device.name}", *measured.left_out])


def probes_toml(folder: Path, aiconfigurator: Path | None) -> str:
    """Write ``probes.toml`` into the package: what the sources' probes show of each device; says how many there are.

    Of several sources the later one in `PROBED_BY` counts, and ops of training before others, so that a device's rates in 16 bits
    do not depend on what else was measured. Copies count of NeuSight and aiconfigurator alone: those of the others are of ops that
    do more beside. The least time of an op is left out: it is that of a way to run ops, not of the device.
    """
    skipped: list[str] = []
    measured = tables(folder, skipped, aiconfigurator)
    found: dict[str, dict[str, tuple[float, str]]] = {}
    for some in (of_training(measured), measured):
        rates = _probed(targets(some, SEED, skipped))
        found = {device: {**rates.get(device, {}), **found.get(device, {})} for device in {**found, **rates}}
    lines = [
        "# Rates that probes show of devices in public measurements (README.md): FLOP/s by precision, B/s of a copy.",
        "# Written by `python -m experiments.devices probes FOLDER`; [sources] has where they come from.",
        "",
        "[sources]",
        *(f'{name.split(" ")[0].split("-")[0].lower()} = "{name}"' for name in SOURCES),
    ]
    for device, values in sorted(found.items()):
        lines += ["", f'["{device}"]', *(f'{key} = [{rate:.4g}, "{source}"]' for key, (rate, source) in sorted(values.items()))]
    path = Path(package.__file__).parent / "probes.toml"
    path.write_text("\n".join(lines) + "\n")
    return f"{path}: {len(found)} devices"


def _probed(some: Sequence[Target]) -> dict[str, dict[str, tuple[float, str]]]:
    """Rates and their sources by name of the rate, by device."""
    found: dict[str, dict[str, tuple[float, str]]] = {}
    for one in sorted(some, key=lambda one: PROBED_BY.index(one.name.split()[0])):
        source, profile = one.name.split()[0], one.measured.profile
        rates = {f"matrix.{name}": rate for name, rate in profile.probes.matrix_flops_per_s.items()}
        if profile.probes.stream_bytes_per_s is not None and source in ("neusight", "aiconfigurator"):
            rates["stream"] = profile.probes.stream_bytes_per_s
        values = {key: (rate, source) for key, rate in rates.items()}
        found[profile.device.name] = {**found.get(profile.device.name, {}), **values}
    return found
