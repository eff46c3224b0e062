"""`pooled`: parameters of each kind of rows, drawn towards 0 by how few independent groups of rows say something else.

A mixed model. The error of a row is a sum: what the parameters of its kind make of it, what its group shares, and the rest. Each is
drawn from a distribution whose width is learned from all rows (empirical Bayes: the widths that make the errors most likely). So a
kind of which few groups are known stays near 0, and a group with many rows is one vote on what its rows share. A kind is a GPU and
a framework: a part of its parameters is that of all kinds with its framework, a part that of all kinds with its GPU, and as much is
its own. Groups and rows far out count for less (t distributions): a handful of impossible rows moves nothing.

Where the mixed model is wrong its parameters can be worse than none. So they are shrunk once more, by how well they predict groups
of rows that they were not learned from: those of the kind, one left out at a time; of a kind that no row is of, all kinds, one left
out at a time, or, if it shares its publisher with none, all publishers, one left out at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

Floats = npt.NDArray[np.float64]
Kind = tuple[str, str, str]  # GPU, framework, publisher
Name = TypeVar("Name", bound=Hashable)

FREEDOM = 4.0
"""Degrees of freedom of the t distribution: heavy tails (Lange, Little and Taylor 1989, "Robust statistical modeling")."""
ROUNDS = 4  # of weights and widths in turn
USUAL_WIDTH = 0.15
"""Of parameters, groups and rows before anything is seen; what is learned may be another by about `WIDTH_DOUBT` in logarithms."""
WIDTH_DOUBT = 0.5
FAR = 2.0
SHARES = np.linspace(0.0, 1.0, 11)
"""Of parameters, that may be used."""
PRIOR_GROUPS = 5.0
"""Groups of a kind that all groups count for together, where it is asked which share of its parameters to use (assumed)."""
LEAST_WIDTH, MOST_WIDTH = 0.01, 3.0


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Errors of rows, as straight lines of the parameters of their kinds.

    Attributes
    ----------
    errors
        Logarithm of measured over predicted where all parameters are 0, [rows].
    slopes
        By how much the logarithm of the prediction grows with each parameter, [rows, parameters].
    kinds, groups
        Of each row.
    """

    errors: Floats
    slopes: Floats
    kinds: Sequence[Kind]
    groups: Sequence[str]


class Widths(NamedTuple):
    """Standard deviations."""

    parameters: Floats
    groups: float
    rows: float


class Pooled(NamedTuple):
    """What is learned from rows.

    Attributes
    ----------
    parameters
        Of any kind, also of one that no row is of.
    share
        Of a kind's parameters, what is to be used: 0 to 1.
    """

    parameters: Callable[[Kind], Floats]
    share: Callable[[Kind], float]
    widths: Widths


def pooled(rows: Errors) -> Pooled:
    """Parameters and the widths that were learned; without rows all parameters are 0."""
    count = rows.slopes.shape[1]
    if not len(rows.errors):
        return Pooled(lambda kind: np.zeros(count), lambda kind: 0.0, Widths(np.full(count, USUAL_WIDTH), USUAL_WIDTH, USUAL_WIDTH))
    names = sorted(set(rows.groups))
    members = np.array([[float(group == name) for name in names] for group in rows.groups])
    alike = np.array([_alike(kind, rows.kinds) for kind in rows.kinds])
    products = [np.outer(slope, slope) * alike for slope in rows.slopes.T]
    medians, middles = _medians(rows, names)
    of_groups = _robust((medians - middles) / USUAL_WIDTH)
    of_rows = _robust((rows.errors - members @ medians) / USUAL_WIDTH)
    logs = np.full(count + 2, np.log(USUAL_WIDTH))
    for _ in range(ROUNDS):
        parts = [*products, (members / of_groups) @ members.T, np.diag(1 / of_rows)]
        logs = _learned(rows.errors, parts, logs)
        squares = np.exp(2 * logs)
        inverse = np.linalg.inv(np.tensordot(squares, parts, axes=1))
        solved = inverse @ rows.errors
        of_groups = _seen_again(squares[-2] / of_groups, members.T @ solved, members.T @ inverse @ members, squares[-2])
        of_rows = _seen_again(squares[-1] / of_rows, solved, inverse, squares[-1])

    def parameters(kind: Kind) -> Floats:
        return np.asarray(squares[:-2] * (rows.slopes.T @ (_alike(kind, rows.kinds) * solved)))

    widths = np.exp(logs)
    return Pooled(parameters, _shares(rows, inverse, solved), Widths(widths[:-2], float(widths[-2]), float(widths[-1])))


def _shares(rows: Errors, inverse: Floats, solved: Floats) -> Callable[[Kind], float]:
    """Of each kind, the share of its parameters with which rows that were left out are predicted best."""

    def losses(names: Sequence[Name]) -> dict[Name, Floats]:
        """Of each name, the mean absolute error of its rows for each of `SHARES`, by parameters from all other rows.

        What a Gaussian process predicts of rows that are left out follows from the inverse of the covariance of all (Rasmussen and
        Williams 2006, section 5.4.2).
        """
        found: dict[Name, Floats] = {}
        for name in dict.fromkeys(names):
            own = np.array([each == name for each in names])
            predicted = rows.errors[own] - np.linalg.solve(inverse[np.ix_(own, own)], solved[own])
            found[name] = np.array([np.mean(np.abs(rows.errors[own] - share * predicted)) for share in SHARES])
        return found

    publishers = [kind[-1] for kind in rows.kinds]
    of_groups, of_kinds, of_publishers = losses(rows.groups), losses(rows.kinds), losses(publishers)
    kind_of = dict(zip(rows.groups, rows.kinds, strict=True))
    usual = np.mean(list(of_groups.values()), axis=0)

    def share(kind: Kind) -> float:
        alone = [loss for group, loss in of_groups.items() if kind_of[group] == kind]
        if alone:
            return float(SHARES[np.argmin(np.sum(alone, axis=0) + PRIOR_GROUPS * usual)])
        others = of_kinds if kind[-1] in publishers else of_publishers
        return float(SHARES[np.argmin(np.mean(list(others.values()), axis=0))])

    return share


def _alike(kind: Kind, kinds: Sequence[Kind]) -> Floats:
    """How much of their parameters a kind has in common with others: a fifth by each of five things that they may share."""

    def alike(gpu: str, framework: str, publisher: str) -> float:
        same_gpu, same_framework, same_publisher = gpu == kind[0], framework == kind[1], publisher == kind[2]
        shared = (
            same_gpu,
            same_framework,
            same_gpu and same_framework,
            same_framework and same_publisher,
            kind == (gpu, framework, publisher),
        )
        return sum(shared) / len(shared)

    return np.array([alike(*each) for each in kinds])


def _medians(rows: Errors, names: Sequence[str]) -> tuple[Floats, Floats]:
    """Of each group, the median error, and that of its kind's groups, as far as parameters are likely to explain it."""
    groups, kinds = np.array(rows.groups), np.array([" ".join(kind) for kind in rows.kinds])
    medians = np.array([np.median(rows.errors[groups == name]) for name in names])
    of = np.array([kinds[groups == name][0] for name in names])
    middles = np.array([np.median(medians[of == kind]) for kind in of])
    return medians, np.clip(middles, -FAR * USUAL_WIDTH, FAR * USUAL_WIDTH)


def _robust(standardised: Floats) -> Floats:
    return (FREEDOM + 1) / (FREEDOM + standardised**2)


def _seen_again(variances: Floats, solved: Floats, inverse: Floats, square: float) -> Floats:
    """What effects count whose variances are given: by the expected squares of what they were, beside what is usual."""
    expected = (variances * solved) ** 2 + variances - variances**2 * np.diag(inverse)
    return _robust(np.sqrt(np.maximum(expected, 0.0) / square))


def _learned(errors: Floats, parts: Sequence[Floats], start: Floats) -> Floats:
    """Logarithms of the widths that make the errors most likely, where their covariance is a sum of parts by the squared widths."""

    def unlikely(logs: Floats) -> tuple[float, Floats]:
        squares, away = np.exp(2 * logs), (logs - np.log(USUAL_WIDTH)) / WIDTH_DOUBT
        covariance = np.tensordot(squares, parts, axes=1)
        inverse = np.linalg.inv(covariance)
        solved = inverse @ errors
        value = np.linalg.slogdet(covariance)[1] / 2 + errors @ solved / 2 + away @ away / 2
        slopes = [np.sum(inverse * part) - solved @ part @ solved for part in parts]
        return float(value), squares * slopes + away / WIDTH_DOUBT

    bounds = [(np.log(LEAST_WIDTH), np.log(MOST_WIDTH))] * len(start)
    return np.asarray(minimize(unlikely, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 30}).x)
