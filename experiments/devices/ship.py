"""Fits the predictor to all public measurements and writes the file that the package ships."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import xgboost

import dpro_search.costmodel.devices as package
from dpro_search._version import __version__
from dpro_search.costmodel.devices.correction import COORDINATES
from dpro_search.costmodel.devices.domain import Domain
from dpro_search.costmodel.devices.features import FEATURES, base_us
from dpro_search.costmodel.devices.model import BUDGETS, LatencyModel, Widths, fit_trees, interval_width
from dpro_search.costmodel.devices.model_file import LATENCY_VERSION, LatencyInfo, save
from dpro_search.costmodel.devices.ops import Floats
from dpro_search.costmodel.devices.profile import DeviceProfile
from experiments.devices.data import USUAL, Target, tables, targets
from experiments.devices.protocol import by_family, fitted, judged, left_out, similarity_of

SEED = 0
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
    trees = fit_trees([fitted(one) for one in some], SEED)
    model = LatencyModel(
        trees=trees,
        similarity=similarity_of(without, SEED),
        widths=Widths(
            specs=interval_width(specs),
            deviations=tuple(interval_width([one.score for one in of_budget[budget]]) for budget in BUDGETS),
        ),
        domain=Domain.fit([one.measured.features[one.fit] for one in some]),
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
        forest_bases=(trees.base.base, trees.shapes.base),
        roughness=model.similarity.roughness,
        widths=model.widths,
        usual=model.usual,
    )
    path = Path(package.__file__).parent / "latency.npz"
    save(model, info, path)
    size_kb = path.stat().st_size / 1e3
    return f"{path}: {size_kb:.0f} kB, {info.rows} ops of {len(some)} devices, {info.left_out_mape_pct}, {info.widths}"


def _unprobed_errors(target: Target, ratio: Floats) -> Floats:
    """|log(predicted / measured)| of a device without probes, [n], by the trees of `ratio`, which were fitted with probes."""
    part = target.measured
    bare = DeviceProfile(device=part.profile.device)
    moved = np.log(base_us(part.ops, bare, USUAL) / part.base_us)
    return np.asarray(np.abs(ratio + moved - part.ratio)[target.judge])
