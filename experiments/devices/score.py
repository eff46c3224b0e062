"""What is scored, each part as rows of one seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpro_search.cluster import Device
from dpro_search.cluster.device import PRECISIONS
from dpro_search.costmodel.devices.correction import Similarity
from dpro_search.costmodel.devices.features import features
from dpro_search.costmodel.devices.model import BUDGETS
from dpro_search.costmodel.devices.model_file import default_info, default_model
from dpro_search.costmodel.devices.ops import KINDS, Floats
from dpro_search.costmodel.devices.profile import DeviceProfile, profile_of
from dpro_search.costmodel.intervals import Durations
from dpro_search.errors import InputError
from experiments.devices import ablations, baselines, models, moved, neusight, protocol, whole_models
from experiments.devices.aiconfigurator import between_engines, systems_folder
from experiments.devices.data import USUAL, Target, of_training, tables, targets
from experiments.devices.protocol import Judged, LeftOut
from experiments.devices.table import Table, device_of

Rows = list[dict[str, Any]]
WHOLE_MODEL_BUDGETS = (0, 20)


class Inputs(NamedTuple):
    """Where measurements are, and those that were read."""

    folder: Path
    aiconfigurator: Path | None
    tables: dict[str, Table]
    training: dict[str, Table]  # The ops of training among them.
    described: Mapping[str, Device]  # Devices that the folder describes.
    left: tuple[str, ...]  # What was left out, in words.


@cache
def _inputs(folder: Path, aiconfigurator: Path | None) -> Inputs:
    skipped: list[str] = []
    found = tables(folder, skipped, aiconfigurator)
    described = neusight.described(folder, [])
    return Inputs(folder, systems_folder(aiconfigurator), found, of_training(found), described, tuple(skipped))


def scored(folder: Path, aiconfigurator: Path | None, part: str, seed: int, skipped: list[str]) -> Rows:
    """The rows of a part; what was left out is told in `skipped`."""
    if part not in PARTS:
        raise InputError(f"--parts: '{part}' is none of {', '.join(PARTS)}")
    inputs = _inputs(folder, aiconfigurator)
    skipped += inputs.left
    return PARTS[part](inputs, seed, skipped)


FEWEST_GROUPS = 3
_GROUPS = {"family": protocol.by_family, "device": protocol.by_device, "source": protocol.by_source}
_LEFT_OUT: dict[tuple[int, int, str, bool], list[LeftOut]] = {}


def _left_out(inputs: Inputs, seed: int, how: str, skipped: list[str], *, others: bool = False) -> list[LeftOut]:
    """Kept, for several parts need it."""
    key = (id(inputs.tables), seed, how, others)
    if key not in _LEFT_OUT:
        _LEFT_OUT.clear()
        _LEFT_OUT[key] = protocol.left_out(_enough(inputs, seed, how, skipped, others=others), seed, _GROUPS[how])
    return _LEFT_OUT[key]


def _enough(inputs: Inputs, seed: int, how: str, skipped: list[str], *, probed: bool = True, others: bool = False) -> list[Target]:
    """The targets, none if there are too few groups to leave one out and to learn from the errors on the others.

    Ops of training are fitted and judged by themselves; `others` are judged by a fit to all ops.
    """
    measured = inputs.tables if others else inputs.training
    some = targets(measured, seed, skipped, probed=probed, described=inputs.described, others=others)
    groups = {_GROUPS[how](one) for one in some if one.judge.any()}
    if len(groups) >= FEWEST_GROUPS:
        return some
    skipped.append(f"{inputs.folder}: too few to leave a {how} out ({', '.join(sorted(groups))}); --parts shipped scores them")
    return []


def families(inputs: Inputs, seed: int, skipped: list[str]) -> Rows:
    """Architectures left out."""
    without = _left_out(inputs, seed, "family", skipped)
    rows = _rows(protocol.judged(without, seed), "predictor", "family", covered=True)
    rows += _rows(protocol.from_data_sheets(without), "predictor, data sheet only", "family")
    rows += _rows(_of_base(without), "predictor, without trees of shapes", "family")
    return rows + _rows(baselines.roofline([one.target for one in without], protocol.by_family), "roofline", "family")


def other_families(inputs: Inputs, seed: int, skipped: list[str]) -> Rows:
    """Architectures left out, ops that are not of training: 8 and 4 bits, experts, decoding steps; XGBoost beside it."""
    without = _left_out(inputs, seed, "family", skipped, others=True)
    rows = _rows(protocol.judged(without, seed), "predictor, other ops", "family", covered=True)
    rows += _rows(protocol.from_data_sheets(without), "predictor, other ops, data sheet only", "family")
    rows += _rows(baselines.roofline([one.target for one in without], protocol.by_family), "roofline, other ops", "family")
    return rows + _by_kind(without)


def _by_kind(without: Sequence[LeftOut]) -> Rows:
    """Errors of other ops by kind and precision, with the probes of the device as rates only."""
    rows: Rows = []
    for one in without:
        ops, error = one.target.measured.ops, np.abs(np.expm1(-one.errors)) * 100
        for kind, precision in np.unique(np.stack((ops.kind, ops.precision))[:, one.target.judge], axis=1).T.astype(int).tolist():
            chosen = one.target.judge & (ops.kind == kind) & (ops.precision == precision)
            name = f"other ops, {KINDS[kind]} {PRECISIONS[precision]}"
            rows.append({"predictor": name, "left_out": "family", "target": one.target.name, "budget": 0,
                         "rows": int(chosen.sum()), **_errors(error[chosen]), "covered_pct": None})  # fmt: skip
    return rows


def whole_sources(inputs: Inputs, seed: int, skipped: list[str]) -> Rows:
    """Sources left out with the way in which they run ops; XGBoost beside it, and the predictor with a data sheet only."""
    without = _left_out(inputs, seed, "source", skipped)
    rows = _rows(protocol.judged(without, seed), "predictor", "source", covered=True)
    rows += _rows(protocol.from_data_sheets(without), "predictor, data sheet only", "source")
    some = [one.target for one in without]
    rows += _rows(baselines.roofline(some, protocol.by_source), "roofline", "source")
    return rows + _rows(baselines.xgboost_alone(some, seed, protocol.by_source, (0, 20, 100)), "XGBoost", "source")


def single_devices(inputs: Inputs, seed: int, skipped: list[str]) -> Rows:
    """Devices left out, others of their architecture not."""
    return _rows(protocol.judged(_left_out(inputs, seed, "device", skipped), seed), "predictor", "device", covered=True)


def _of_base(without: Sequence[LeftOut]) -> list[Judged]:
    return [
        Judged(
            target=one.target.name,
            group=one.group,
            budget=0,
            log_error=(one.of_base - one.target.measured.ratio)[one.target.judge],
            deviation=np.ones(int(one.target.judge.sum())),
        )
        for one in without
    ]


def xgboost_alone(inputs: Inputs, seed: int, skipped: list[str]) -> Rows:
    """XGBoost on a data sheet's features, with samples of the device added to the fit."""
    some = _enough(inputs, seed, "family", skipped)
    return _rows(baselines.xgboost_alone(some, seed, protocol.by_family, (0, 20, 100)), "XGBoost", "family")


def unprobed(inputs: Inputs, seed: int, skipped: list[str]) -> Rows:
    """The predictor fitted and judged without probes: a data sheet only."""
    some = _enough(inputs, seed, "family", skipped, probed=False)
    without = protocol.left_out(some, seed, protocol.by_family)
    return _rows(protocol.judged(without, seed), "predictor, without probes", "family", covered=True)


def other_targets(inputs: Inputs, seed: int, skipped: list[str]) -> Rows:
    """Trees that are fitted to log(latency), or to its Box-Cox transform, instead of log(latency / base)."""
    some = _enough(inputs, seed, "family", skipped)
    return [
        row
        for kind in ("log", "box-cox")
        for row in _rows(
            protocol.judged(ablations.of_other_targets(some, seed, protocol.by_family, kind), seed, (0, 20, 100)),
            f"predictor, target {kind}",
            "family",
        )
    ]


def random_samples(inputs: Inputs, seed: int, skipped: list[str]) -> Rows:
    """Ops to measure drawn at random, instead of by KMeans."""
    found = ablations.judged_with_random_samples(_left_out(inputs, seed, "family", skipped), seed, (20, 100))
    return _rows(found, "predictor, random samples", "family")


def moved_ops(inputs: Inputs, seed: int, skipped: list[str]) -> Rows:
    """Ops measured on one device, moved to a device whose architecture was left out."""
    without = _left_out(inputs, seed, "family", skipped)
    return [
        {"predictor": one["way"], "left_out": "family", "budget": 0, "kind": one["kind"], "target": one["pair"],
         "rows": len(one["error_pct"]), **_errors(one["error_pct"]), "covered_pct": one.get("covered_pct")}
        for one in moved.errors(without, [other.target for other in without])
    ]  # fmt: skip


def _rows(found: Sequence[Judged], predictor: str, how: str, *, covered: bool = False) -> Rows:
    limits = protocol.widths(found) if covered else {}
    rows = []
    for one in found:
        error = np.abs(np.expm1(one.log_error)) * 100
        rows.append(
            {
                "predictor": predictor,
                "left_out": how,
                "target": one.target,
                "budget": one.budget,
                "rows": len(error),
                **_errors(error),
                "covered_pct": float((one.score <= limits[one.group, one.budget]).mean() * 100) if covered else None,
            }
        )
    return rows


def _errors(error: Floats) -> dict[str, float]:
    return {
        "mape_pct": float(error.mean()),
        "median_ape_pct": float(np.median(error)),
        "p90_ape_pct": float(np.quantile(error, 0.9)),
    }


def shipped(inputs: Inputs, seed: int, skipped: list[str]) -> Rows:
    """The predictor that the package ships, on ops of devices that the fit which predicts them has not seen."""
    of_fit = {True: set(default_info().training.devices), False: set(default_info().every.devices)}
    rows: Rows = []
    for one in targets(inputs.tables, seed, skipped, described=inputs.described):
        part = one.measured
        judge = one.judge & np.array([one.name not in of_fit[bool(of_training)] for of_training in part.ops.of_training])
        if judge.sum() <= max(BUDGETS):
            continue
        for budget in BUDGETS:
            chosen = protocol.samples(part, budget, seed, np.flatnonzero(judge))
            rest = judge.copy()
            rest[chosen] = False
            measured_ops = (part.ops[chosen], part.us[chosen]) if budget else (None, None)
            found = default_model().on(part.profile, *measured_ops).predict(part.ops[rest])
            row = _shipped_row(found, part.us[rest])
            if row:
                rows.append({"left_out": "all", "target": one.name, "budget": budget, **row})
    return rows


def shipped_models(inputs: Inputs, seed: int, skipped: list[str]) -> Rows:
    """Ops of models and NeuSight's whole steps by the predictor that the package ships, fitted to all public measurements.

    Only models that are in none of them are left out of it.
    """
    profiles = {one.name: one.measured.profile for one in targets(inputs.tables, seed, skipped, described=inputs.described)}
    rows: Rows = []
    own = {"predictor": "shipped", "left_out": "shipped"}
    for (target, model), table in sorted(_model_ops(inputs).items()):
        profile = _profile(target, profiles, inputs, skipped)
        for passes, mask in (("forward", table.ops.backward == 0), ("backward", table.ops.backward > 0)):
            if profile is None or not mask.any():
                continue
            row = _shipped_row(default_model().on(profile).predict(table.ops[mask]), table.us[mask])
            if row:
                rows.append({**row, **own, "model": model, "passes": passes, "target": target})
    for case in whole_models.cases(inputs.folder):
        profile = _profile(f"neusight {case['device']}", profiles, inputs, skipped)
        if profile is not None:

            def predict(device: str, name: str, ops: Any, profile: DeviceProfile = profile) -> Floats:
                return default_model().on(profile).predict(ops).us

            us = whole_models.predicted_us(case, predict)
            if us is not None and np.isfinite(us):
                rows.append(_step_row(case, us, "shipped", 0))
    return rows


def _profile(target: str, profiles: dict[str, DeviceProfile], inputs: Inputs, skipped: list[str]) -> DeviceProfile | None:
    """Of a device with the probes among its ops, else with known ones; None: it has no specs."""
    if target not in profiles:
        try:
            profiles[target] = profile_of(device_of(target.split(" ", 1)[1], inputs.described))
        except InputError as error:
            skipped.append(f"{target}: {error}")
    return profiles.get(target)


def _shipped_row(found: Durations, us: Floats) -> dict[str, Any]:
    """Of predictions beside measured times; empty if all are refused."""
    answered = np.isfinite(found.us)
    if not answered.any():
        return {}
    inside = (found.low_us <= us) & (us <= found.high_us)
    error = np.abs(found.us / us - 1)[answered] * 100
    covered_pct = float(inside[answered].mean() * 100)
    return {"predictor": "shipped", "rows": int(answered.sum()), **_errors(error), "covered_pct": covered_pct}


def noise(inputs: Inputs, seed: int, skipped: list[str]) -> Rows:
    """Half the distance between repeated measurements of an op, or between libraries that compute it, by target."""
    del seed, skipped
    logs = {name: table.spread[np.isfinite(table.spread)] for name, table in inputs.tables.items()}
    if inputs.aiconfigurator is not None:
        logs.update(between_engines(inputs.aiconfigurator))
    return [
        {"predictor": "noise floor", "left_out": "-", "target": name, "budget": 0, "rows": len(log), **_errors(half)}
        for name, log in sorted(logs.items())
        if len(log) >= 20 and name in inputs.tables
        for half in (np.expm1(log / 2) * 100,)
    ]


def _model_ops(inputs: Inputs) -> dict[tuple[str, str], Table]:
    ops_of: dict[tuple[str, str], Table] = {}
    for table in neusight.gemm_tables(neusight.model_ops(inputs.folder)):
        ops_of[str(table.target[0]), str(table.model[0])] = table
    for name, table in inputs.tables.items():
        for model in sorted(set(table.model) - {""}):
            ops_of[name, str(model)] = table[table.model == model]
    return ops_of


def cross_model(inputs: Inputs, seed: int, skipped: list[str]) -> Rows:
    """Models left out on devices that were measured: their ops, and NeuSight's whole steps."""
    some = targets(inputs.training, seed, skipped, described=inputs.described)
    ops_of = _model_ops(inputs)
    cases = whole_models.cases(inputs.folder)
    by_name = {one.name: one.measured for one in some}
    rows: Rows = []
    for model in sorted({model for _, model in ops_of}):
        trees = models.without_model(some, ops_of, model, seed)
        for one in models.errors_of(model, trees, some, ops_of):
            for passes, mask in (("forward", one.backward == 0), ("backward", one.backward > 0)):
                if mask.any():
                    error = np.abs(np.expm1(one.log_error[mask])) * 100
                    rows.append({"predictor": "predictor", "left_out": "model", "model": model, "passes": passes,
                                 "target": one.target, "rows": int(mask.sum()), **_errors(error)})  # fmt: skip
        for case in cases:
            target = f"neusight {case['device']}"
            if f"neusight {case['model']}" == model and target in by_name:
                profile = by_name[target].profile

                def predict(device: str, name: str, ops: Any, trees: Any = trees, profile: Any = profile) -> Floats:
                    return models.predicted_us(trees, profile, ops)

                rows.append(_step_row(case, whole_models.predicted_us(case, predict), "model", 0))
    return rows


def whole_steps(inputs: Inputs, seed: int, skipped: list[str]) -> Rows:
    """NeuSight's whole inference and training steps on devices whose architecture was left out."""
    cases = whole_models.cases(inputs.folder)
    wanted = {f"neusight {case['device']}" for case in cases}
    rows: Rows = [_step_row(case, whole_models.measured_sum_us(case), "sum of measured ops", 0) for case in cases]
    without = _left_out(inputs, seed, "family", skipped)
    for one in without:
        target = one.target
        if target.name not in wanted:
            continue
        similarity = protocol.similarity_of([other for other in without if other.group != one.group], seed)
        for budget in WHOLE_MODEL_BUDGETS:
            predict = _on_device(one, similarity, budget, seed)
            for case in cases:
                if f"neusight {case['device']}" == target.name:
                    rows.append(_step_row(case, whole_models.predicted_us(case, predict), "device", budget))
    return rows


def _on_device(one: LeftOut, similarity: Similarity, budget: int, seed: int) -> whole_models.Predict:
    part = one.target.measured
    measured = None
    if budget:
        chosen = protocol.samples(part, budget, seed, np.flatnonzero(one.target.judge))
        measured = similarity.residual(one.points[chosen], one.errors[chosen])

    def predict(device: str, model: str, ops: Any) -> Floats:
        us = models.predicted_us(one.trees, part.profile, ops)
        if measured is not None:
            shift, _ = similarity.correction(measured, one.points_of(ops, features(ops, part.profile, USUAL)))
            us = us * np.exp(shift)
        return us

    return predict


def _step_row(case: dict[str, Any], us: float | None, how: str, budget: int) -> dict[str, Any]:
    error = None if us is None else abs(us / case["measured_us"] - 1) * 100
    return {"predictor": "predictor", "left_out": how, "step": case["mode"], "target": case["device"], "model": case["model"],
            "budget": budget, "rows": 1, "mape_pct": error}  # fmt: skip


PARTS: dict[str, Callable[[Inputs, int, list[str]], Rows]] = {
    "shipped": shipped,
    "shipped-models": shipped_models,
    "families": families,
    "other-families": other_families,
    "whole-steps": whole_steps,
    "cross-model": cross_model,
    "xgboost": xgboost_alone,
    "unprobed": unprobed,
    "devices": single_devices,
    "sources": whole_sources,
    "targets": other_targets,
    "random-samples": random_samples,
    "moved": moved_ops,
    "noise": noise,
}
ONCE = ("shipped", "shipped-models", "sources", "xgboost", "noise")
ON_REQUEST = ("unprobed", "targets", "random-samples", "moved")
