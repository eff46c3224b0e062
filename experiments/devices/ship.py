"""Fits the predictor to all public measurements and writes the file that the package ships."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import xgboost

import dpro_search.costmodel.devices as package
from dpro_search._version import __version__
from dpro_search.costmodel.devices.correction import COORDINATES
from dpro_search.costmodel.devices.features import FEATURES, base_us
from dpro_search.costmodel.devices.model import BUDGETS, LatencyModel, Widths
from dpro_search.costmodel.devices.model_file import LATENCY_VERSION, LatencyInfo
from dpro_search.costmodel.devices.ops import Floats
from dpro_search.costmodel.devices.profile import DeviceProfile
from experiments.devices.data import USUAL, Target, tables, targets
from experiments.devices.fit import fit_domain, fit_trees, interval_width, save
from experiments.devices.protocol import by_family, fitted, judged, left_out, similarity_of

SEED = 0
PROBED_BY = ("deepbench", "sailor", "neusight", "aiconfigurator")
SOURCES = (
    "NeuSight (sitar-lab/NeuSight 6945927, MIT)",
    "Sailor (eth-easl/sailor cf2c8e3, MIT), one GPU",
    "DeepBench (baidu-research/DeepBench da81ba7, Apache-2.0), training",
    "aiconfigurator-core 0.12.0 (Apache-2.0), bf16 products and attention",
)


def ship(folder: Path, aiconfigurator: Path | None) -> str:
    """Write ``latency.npz`` into the package; says what it holds."""
    skipped: list[str] = []
    some = targets(tables(folder, skipped, aiconfigurator), SEED, skipped)
    without = left_out(some, SEED, by_family)
    found = judged(without, SEED)
    of_budget = {budget: [one for one in found if one.budget == budget] for budget in BUDGETS}
    specs = [_unprobed_errors(one.target, one.ratio) for one in without]
    forests = fit_trees([fitted(one) for one in some], SEED)
    model = LatencyModel(
        forests=forests,
        similarity=similarity_of(without, SEED),
        widths=Widths(
            specs=interval_width(specs),
            deviations=tuple(interval_width([one.score for one in of_budget[budget]]) for budget in BUDGETS),
        ),
        domain=fit_domain([one.measured.features[one.fit] for one in some]),
        usual=USUAL,
    )
    info = LatencyInfo(
        version=LATENCY_VERSION,
        sources=SOURCES,
        devices=tuple(one.name for one in some),
        rows=int(sum(one.fit.sum() for one in some)),
        fitted_at=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"dpro-search": __version__, "xgboost": xgboost.__version__},
        left_out_mape_pct={
            str(budget): round(float(np.mean([np.abs(np.expm1(one.log_error)).mean() for one in of_budget[budget]])) * 100, 2)
            for budget in BUDGETS
        },
        features=FEATURES,
        coordinates=COORDINATES,
        forest_bases=(forests[0].base, forests[1].base),
        roughness=model.similarity.roughness,
        widths=model.widths,
        usual=model.usual,
    )
    path = Path(package.__file__).parent / "latency.npz"
    save(model, info, path)
    size_kb = path.stat().st_size / 1e3
    return f"{path}: {size_kb:.0f} kB, {info.rows} ops of {len(some)} devices, {info.left_out_mape_pct}, {info.widths}"


def probes_toml(folder: Path, aiconfigurator: Path | None) -> str:
    """Write ``probes.toml`` into the package: what the sources' probes show of each device; says how many there are.

    Of several sources the later one in `PROBED_BY` counts. Copies of the first two are of ops that do more beside. The least time
    of an op is left out: it is that of a way to run ops, not of the device.
    """
    skipped: list[str] = []
    found: dict[str, dict[str, tuple[float, str]]] = {}
    for one in sorted(
        targets(tables(folder, skipped, aiconfigurator), SEED, skipped), key=lambda one: PROBED_BY.index(one.name.split()[0])
    ):
        source, profile = one.name.split()[0], one.measured.profile
        values = found.setdefault(profile.device.name, {})
        rates = {f"matrix.{name}": rate for name, rate in profile.probes.matrix_flops_per_s.items()}
        if profile.probes.stream_bytes_per_s is not None and source in ("neusight", "aiconfigurator"):
            rates["stream"] = profile.probes.stream_bytes_per_s
        values |= {key: (rate, source) for key, rate in rates.items()}
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


def _unprobed_errors(target: Target, ratio: Floats) -> Floats:
    """|log(predicted / measured)| of a device without probes, [n], by the trees of `ratio`, which were fitted with probes."""
    part = target.measured
    bare = DeviceProfile(device=part.profile.device)
    moved = np.log(base_us(part.ops, bare, USUAL) / part.base_us)
    return np.asarray(np.abs(ratio + moved - part.ratio)[target.judge])
