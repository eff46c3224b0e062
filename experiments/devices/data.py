"""All measured ops of a folder, by target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dpro_search.costmodel.devices.measured import Measured
from dpro_search.costmodel.devices.profile import Shares
from dpro_search.errors import InputError
from experiments.devices import aiconfigurator, deepbench, neusight, sailor
from experiments.devices.table import Table, device_of, family_of, joined_tables

USUAL = Shares()
MOST_OF_CATEGORY = {True: 800, False: 200}
"""Ops of a category that are used: of products, and of what memory bounds."""
FEWEST = 150  # ops of a target: fewer leave none to judge once 100 are samples


def tables(folder: Path, skipped: list[str], aiconfigurator_folder: Path | None = None) -> dict[str, Table]:
    """All ops that were measured by themselves, by target."""
    found: dict[str, list[Table]] = {}
    for part in (
        *neusight.read(folder),
        *sailor.read(folder, skipped),
        *deepbench.read(folder, skipped),
        *aiconfigurator.read(aiconfigurator.systems_folder(aiconfigurator_folder), skipped),
    ):
        if len(part):
            found.setdefault(str(part.target[0]), []).append(part)
    joined = {name: joined_tables(parts) for name, parts in found.items()}
    if not joined:
        raise InputError(f"{folder}: no measured ops; expected neusight/, sailor/ or deepbench/ in it")
    return joined


def thinned(table: Table, random: np.random.Generator) -> Table:
    """At most `MOST_OF_CATEGORY` ops of each category, drawn at random."""
    ops = table.ops
    keys = np.column_stack([ops.kind, ops.precision, ops.backward, ops.special, ops.batch > 1])
    of = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
    order = random.permutation(len(of))
    order = order[np.argsort(of[order], kind="stable")]
    starts = np.searchsorted(of[order], of[order])
    most = np.where(ops.flops > 0, MOST_OF_CATEGORY[True], MOST_OF_CATEGORY[False])[order]
    return table[np.sort(order[np.arange(len(of)) - starts < most])]


def measured(found: dict[str, Table], seed: int, skipped: list[str], *, probed: bool = True) -> list[Measured]:
    """By target, thinned. Probes are chosen before thinning, and kept."""
    random = np.random.default_rng(seed)
    result = []
    for name, one in sorted(found.items()):
        try:
            device = device_of(name.split(" ", 1)[1])
            if len(one) < FEWEST:
                skipped.append(f"{name}: {len(one)} ops are too few to judge")
                continue
            result.append(_measured(name, one, device, random, probed))
        except InputError as error:
            skipped.append(f"{name}: {error}")
    return result


def _measured(name: str, one: Table, device, random: np.random.Generator, probed: bool) -> Measured:  # type: ignore[no-untyped-def]
    from dpro_search.costmodel.devices.profile import probe_places

    few = thinned(one, random)
    probes = one[probe_places(one.ops, device)]
    both = joined_tables([probes, few])
    first = np.unique(np.column_stack([both.ops.matrix, both.us]), axis=0, return_index=True)[1]
    kept = both[np.sort(first)]
    return Measured.of(name, family_of(device), device, kept.ops, kept.us, USUAL, probed=probed)


def kinds(parts: Sequence[Measured]) -> list[str]:
    """Names of targets."""
    return [part.name for part in parts]
