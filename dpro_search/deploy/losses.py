"""Comparison of the losses of two runs, within the tolerance of a plan's changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from dpro_search.space.plan import Plan

COMPARED_STEPS = 20
_FEWEST = 3
_OWN_FACTOR = 3.0  # times the difference among runs of the recorded setting
_OWN_LIMIT = 0.05  # runs of one setting that differ by more are not comparable


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The allowed difference of losses."""

    relative: float  # Largest relative difference.
    # Compare the means of the last third of the losses instead of each loss: for changes of precision.
    by_convergence: bool = False
    because: str = ""  # Why losses may differ by so much, for people.

    @property
    def promise(self) -> str:
        """A clause for people."""
        what = f"the means of the last third of the first {COMPARED_STEPS} losses" if self.by_convergence else "the first losses"
        because = f" ({self.because})" if self.because else ""
        return f"{what} should differ by at most {self.relative:.3g} of their value{because}"


class Equivalence(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a comparison of losses."""

    verdict: Literal["same", "different", "unknown"]  # "unknown": the script prints no losses, or its own runs differ too much.
    compared: int  # Losses of each run.
    # difference, tolerance: Largest relative difference found, and allowed; None where nothing was compared.
    difference: float | None
    tolerance: float | None
    reason: str  # A sentence.


@dataclass(frozen=True)
class Loss:
    """A printed loss; `resolution` is half a unit of its last digit."""

    value: float
    resolution: float = 0.0

    @staticmethod
    def parse(text: str) -> Loss:
        """The value of a number as a script prints it, decimal or hexadecimal; raises `ValueError` for anything else."""
        if "0x" in text.lower():
            return Loss(float.fromhex(text))
        mantissa, _, exponent = text.lower().partition("e")
        decimals = len(mantissa.partition(".")[2])
        return Loss(float(text), 0.5 * 10.0 ** (int(exponent or 0) - decimals))


Losses = tuple[Loss, ...]


# Relative differences of losses among layouts of one job (tensor parallel degrees, micro-batches), by the precision of its matrix
# products. A layout splits sums in other places, and each part is rounded to the precision: to 2^-9 in bf16, 2^-12 in fp16 and 2^-4
# in FP8 (E4M3). Estimates: losses of the first steps stay within a few roundings; that for FP8 is the one of changes of precision.
_ROUNDING = {"bf16": 2e-2, "fp16": 2e-2, "fp8": 5e-2}


def tolerance_of(plan: Plan, precision: str | None = None) -> Tolerance:
    """The allowed difference of losses for a plan's changes.

    Parameters
    ----------
    precision
        Precision of the matrix products of a parallel job, whose plans split sums in other places; None for jobs whose plans leave
        each rank's arithmetic as it is.

    Another order of summation changes the last bits of a float32 sum (on two ranks: none). Fused, recomputed or split ops change
    the last bits of every value. Half precision and other synchronisation change every step, so the convergence is compared.
    """
    if any(field is not None for field in (plan.bfloat16_ops, plan.bfloat16_modules, plan.compression, plan.synchronisation)):
        return Tolerance(relative=0.05, by_convergence=True)
    if precision in _ROUNDING and plan != Plan():
        because = f"the plan splits sums in other places, and {precision} rounds each part"
        return Tolerance(relative=_ROUNDING[precision], by_convergence=precision == "fp8", because=because)
    if plan.micro_batches is not None:
        return Tolerance(relative=1e-2)
    if any(field is not None for field in (plan.op_clusters, plan.recomputed_ops, plan.recomputed_modules)):
        return Tolerance(relative=1e-3)
    return Tolerance(relative=1e-4)


def read_losses(folder: Path) -> Losses:
    """The first losses that the lowest rank printed (see `runtime/timed/sitecustomize.py`); empty if none did."""
    paths = sorted(folder.glob("loss-*"))
    if not paths:
        return ()
    losses = []
    for line in paths[0].read_text().split()[:COMPARED_STEPS]:
        try:
            losses.append(Loss.parse(line))
        except ValueError:  # incomplete, because its process ended
            break
    return tuple(losses)


def compare(recorded: Sequence[Losses], planned: Sequence[Losses], tolerance: Tolerance) -> Equivalence:
    """Losses of runs of the recorded setting (two or more) and of a plan's."""
    count = min((len(losses) for losses in (*recorded, *planned)), default=0)
    if count < _FEWEST:
        return _unknown(count, f"not compared: the script prints fewer than {_FEWEST} losses (lines with 'loss' and a number)")
    base = recorded[0]
    spread = max((_difference(base, other, count, tolerance) for other in recorded[1:]), default=0.0)
    if not spread <= _OWN_LIMIT:
        return _unknown(
            count, f"not compared: losses of the recorded setting's own runs differ by {spread:.2g}; fix the job's seeds"
        )
    allowed = max(tolerance.relative, _OWN_FACTOR * spread)
    difference = max(_difference(base, losses, count, tolerance) for losses in planned)
    same = difference <= allowed
    how = "means of the last losses" if tolerance.by_convergence else f"first {count} losses"
    relation = "agree within" if same else "differ, by more than"
    return Equivalence(
        verdict="same" if same else "different",
        compared=count,
        difference=difference if math.isfinite(difference) else None,
        tolerance=allowed,
        reason=f"{how} {relation} {allowed:.2g} (largest relative difference {difference:.2g})",
    )


def trained_to(target: float) -> Equivalence:
    """The comparison of runs that were trained until their loss was a target."""
    reason = f"all runs were trained to a loss of {target:g}"
    return Equivalence(verdict="same", compared=0, difference=None, tolerance=None, reason=reason)


def _unknown(count: int, reason: str) -> Equivalence:
    return Equivalence(verdict="unknown", compared=count, difference=None, tolerance=None, reason=reason)


def _difference(a: Losses, b: Losses, count: int, tolerance: Tolerance) -> float:
    """Largest relative difference beyond the rounding of printed numbers; infinite if a loss is not finite."""
    if tolerance.by_convergence:
        tail = max(count // 3, 1)
        return _apart(_mean(a[count - tail : count]), _mean(b[count - tail : count]))
    return max(_apart(a[i], b[i]) for i in range(count))


def _apart(a: Loss, b: Loss) -> float:
    if not (math.isfinite(a.value) and math.isfinite(b.value)):
        return math.inf
    beyond = abs(a.value - b.value) - a.resolution - b.resolution
    scale = max(abs(a.value), abs(b.value))
    return max(beyond, 0.0) / scale if scale else 0.0


def _mean(losses: Losses) -> Loss:
    return Loss(sum(loss.value for loss in losses) / len(losses), max(loss.resolution for loss in losses))
