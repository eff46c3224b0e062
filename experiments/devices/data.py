"""All measured ops of a folder, by target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from dpro_search.cluster import Device
from dpro_search.costmodel.devices.ops import KINDS, Floats, LibraryOpKind, Ops
from dpro_search.costmodel.devices.profile import UsualShares, probe_places
from dpro_search.errors import InputError
from experiments.devices import aiconfigurator, aiter, deepbench, neusight, sailor, vidur
from experiments.devices.fit import Measured
from experiments.devices.sailor import OUT_OF_MEMORY_US
from experiments.devices.table import Table, device_of, family_of, joined_tables

USUAL = UsualShares()
MOST_OF_CATEGORY = {True: 800, False: 200}
"""Ops of a category that are used: of products, and of what memory bounds."""
MOST_JUDGED = 1500
FEWEST = 150  # ops of a target: fewer leave none to judge once 100 are samples


def tables(folder: Path, skipped: list[str], aiconfigurator_folder: Path | None = None) -> dict[str, Table]:
    """All ops that were measured by themselves, by target."""
    found: dict[str, list[Table]] = {}
    specs = neusight.described(folder, skipped)
    for part in (
        *neusight.read(folder, skipped),
        *sailor.read(folder, skipped, specs),
        *deepbench.read(folder, skipped, specs),
        *aiter.read(folder, skipped),
        *vidur.read(folder, skipped, specs),
        *aiconfigurator.read(aiconfigurator.systems_folder(aiconfigurator_folder), skipped),
    ):
        absurd = part.us >= OUT_OF_MEMORY_US
        if absurd.any():
            skipped.append(f"{part.target[0]}: {int(absurd.sum())} ops of {OUT_OF_MEMORY_US:g} us or more: taken for out of memory")
            part = part[~absurd]
        if len(part):
            found.setdefault(str(part.target[0]), []).append(part)
    joined = {name: joined_tables(parts) for name, parts in found.items()}
    if not joined and not (folder / "neusight" / "model_ops.parquet").is_file():
        why = "; ".join(reason for reason in skipped if "aiconfigurator" not in reason)
        expected = "neusight/, sailor/, deepbench/, vidur/ or tuned/"
        raise InputError(f"{folder}: no measured ops; expected {expected} in it{why and f' ({why})'}")
    return joined


def of_training(found: Mapping[str, Table]) -> dict[str, Table]:
    """The ops that training runs, by target: what the fit for them is made of, and judged by.

    They are `Ops.of_training` but for some rows, which made whole steps and moved profiles worse. AITER has the best of hundreds of
    kernels, not the library's choice. Of aiconfigurator: products of latent attention, of another layout; and attention on A100,
    whose table is of an older engine than all others and does not say whether a window was used.
    """
    kept = {}
    for name, one in found.items():
        source, device = name.split(" ", 1)
        ops = one.ops
        chosen = ops.of_training & (source != "aiter")
        if source == "aiconfigurator":
            chosen &= (ops.kind != KINDS.index(LibraryOpKind.GEMM)) | (ops.batch == 1) & (ops.transposes > 0)
            chosen &= (ops.kind != KINDS.index(LibraryOpKind.ATTENTION)) | (not device.startswith("a100"))
        if chosen.any():
            kept[name] = one[chosen]
    return kept


@dataclass(frozen=True, kw_only=True)
class Target:
    """A device under one way to run and time ops: what a fit takes of it, and what is judged."""

    measured: Measured
    fit: npt.NDArray[np.bool_]  # Categories alike, [n].
    judge: npt.NDArray[np.bool_]  # As often as the source has them; of these samples are chosen, too, [n].

    @property
    def name(self) -> str:
        return self.measured.name

    @property
    def family(self) -> str:
        return self.measured.family


Described = Mapping[str, Device]


def targets(
    found: dict[str, Table],
    seed: int,
    skipped: list[str],
    *,
    probed: bool = True,
    described: Mapping[str, Device] = MappingProxyType({}),
    others: bool = False,
) -> list[Target]:
    """All that have specs, bundled or `described` ones, and enough ops. Probes are chosen from all ops of a target.

    `others`: only ops that are not of training are judged; targets that have few of them are for the fit alone.
    """
    result = []
    for name, one in sorted(found.items()):
        try:
            device = device_of(name.split(" ", 1)[1], described)
            if len(one) < FEWEST:
                skipped.append(f"{name}: {len(one)} ops are too few to judge")
                continue
            result.append(_target(name, one, device, seed, probed, others))
        except InputError as error:
            skipped.append(f"{name}: {error}")
    return result


def _target(name: str, one: Table, device: Device, seed: int, probed: bool, others: bool) -> Target:
    number = drawn(one.ops, seed)
    fit = _thinned(one, number)
    judge = np.zeros(len(one), dtype=bool)
    judged = np.flatnonzero(~one.ops.of_training) if others else np.arange(len(one))
    if len(judged) >= FEWEST:
        judge[judged[np.argsort(drawn(one.ops, seed + 1000)[judged], kind="stable")[:MOST_JUDGED]]] = True
    probes = np.zeros(len(one), dtype=bool)
    probes[probe_places(one.ops, device)] = True
    kept = fit | judge | probes
    part = one[kept]
    measured = Measured.of(name, family_of(device), device, part.ops, part.us, USUAL, probed=probed)
    return Target(measured=measured, fit=(fit | probes)[kept], judge=judge[kept])


def _thinned(table: Table, number: Floats) -> npt.NDArray[np.bool_]:
    """A mask of at most `MOST_OF_CATEGORY` ops of each category, those with the least numbers."""
    ops = table.ops
    keys = np.column_stack([ops.kind, ops.precision, ops.backward, ops.distinction, ops.batch > 1])
    of = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
    order = np.argsort(number, kind="stable")
    order = order[np.argsort(of[order], kind="stable")]
    starts = np.searchsorted(of[order], of[order])
    most = np.where(ops.flops > 0, MOST_OF_CATEGORY[True], MOST_OF_CATEGORY[False])[order]
    found = np.zeros(len(of), dtype=bool)
    found[order[np.arange(len(of)) - starts < most]] = True
    return found


def drawn(ops: Ops, seed: int) -> Floats:
    """A number between 0 and 1 for each op, which depends on its sizes and the seed: the same op is drawn on every device, [n]."""
    digits = np.zeros(len(ops), dtype=np.uint64)
    sizes = (ops.kind, ops.batch, ops.m, ops.n, ops.k, ops.backward, ops.special, np.full(len(ops), seed + 1))
    for size in sizes:
        digits = (digits ^ np.round(size * 16).astype(np.int64).astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        digits ^= digits >> np.uint64(29)
    return np.asarray((digits >> np.uint64(11)).astype(np.float64) / 2**53)
