"""Models left out: ops of a model, and whole steps, from ops of other models on devices that were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpro_search.costmodel.devices.features import base_us, features
from dpro_search.costmodel.devices.model import Trees
from dpro_search.costmodel.devices.ops import Floats, Ops
from dpro_search.costmodel.devices.profile import DeviceProfile
from experiments.devices.data import USUAL, Target
from experiments.devices.fit import Measured, fit_trees
from experiments.devices.table import Table

ModelOps = Mapping[tuple[str, str], Table]
"""Measured ops by target and model."""


@dataclass(frozen=True, kw_only=True)
class ModelError:
    """Errors on the ops of a model that was left out, on a device that was not."""

    model: str
    target: str
    log_error: Floats  # log(predicted / measured), [n].
    backward: Floats


def without_model(targets: Sequence[Target], ops_of: ModelOps, model: str, seed: int) -> Trees:
    """Trees fitted to all devices, from which every shape that a model has was taken out, on every device."""
    taken = {shape for (_, name), table in ops_of.items() if name == model for shape in _shapes(table.ops)}
    by_name = {one.name: one.measured for one in targets}
    parts = [one.measured[one.fit & _free(one.measured.ops, taken)] for one in targets]
    for (target, name), table in sorted(ops_of.items()):
        if name != model and target in by_name:
            part = _measured(by_name[target], table)
            parts.append(part[_free(part.ops, taken)])
    return fit_trees([part for part in parts if len(part)], seed)


def errors_of(model: str, trees: Trees, targets: Sequence[Target], ops_of: ModelOps) -> list[ModelError]:
    """Errors on the model's ops, by target."""
    by_name = {one.name: one.measured for one in targets}
    return [
        ModelError(
            model=model,
            target=target,
            log_error=np.log(predicted_us(trees, by_name[target].profile, table.ops) / table.us),
            backward=table.ops.backward,
        )
        for (target, name), table in sorted(ops_of.items())
        if name == model and target in by_name
    ]


def predicted_us(trees: Trees, profile: DeviceProfile, ops: Ops) -> Floats:
    """Latencies, us, [n]."""
    return np.asarray(base_us(ops, profile, USUAL) * np.exp(trees.log_ratio(features(ops, profile, USUAL))))


def _measured(of: Measured, table: Table) -> Measured:
    return Measured(
        name=of.name,
        family=of.family,
        profile=of.profile,
        ops=table.ops,
        us=table.us,
        features=features(table.ops, of.profile, USUAL),
        base_us=base_us(table.ops, of.profile, USUAL),
        probes=np.zeros(0, dtype=np.int64),
    )


def _shapes(ops: Ops) -> list[tuple[float, ...]]:
    return [tuple(row) for row in np.column_stack([ops.kind, ops.batch, ops.m, ops.n, ops.k, ops.backward]).tolist()]


def _free(ops: Ops, taken: set[tuple[float, ...]]) -> npt.NDArray[np.bool_]:
    return np.array([shape not in taken for shape in _shapes(ops)])
