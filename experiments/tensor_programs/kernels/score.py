"""Devices left out in turn: how far predicted times of tuned kernels are off, and how well programs are ordered.

A predictor sees the programs, their times on the other devices, and 0, 20, 50 or 100 programs that were measured on the device. The
measured ones are not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import kendalltau
from sklearn.ensemble import ExtraTreesRegressor
from xgboost import XGBRegressor

from dpro_search.costmodel.programs.choice import CHOICES, chosen
from dpro_search.costmodel.programs.latency import ProgramLatency, logs, order_of, to_try
from dpro_search.costmodel.programs.limits import likeness, limits_of
from experiments.tensor_programs.kernels.tables import KernelTable

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]
Scores = dict[str, float]
BUDGETS = (0, 20, 50, 100)
USUAL_BUDGET = 50
BEST_OF = 10  # predicted programs that a tuner would try


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A kernel on a device of which all times but the measured ones are hidden; programs that do not run there are left out."""

    device: str
    columns: Floats
    parameters: Floats
    others: tuple[str, ...]
    others_us: Floats
    us: Floats

    @staticmethod
    def of(table: KernelTable, device: str) -> LeftOut:
        """A device of a table."""
        place = table.devices.index(device)
        runs = ~np.isnan(table.us[:, place])
        columns = table.columns(device)[runs]
        return LeftOut(
            device=device,
            columns=columns[:, np.ptp(columns, axis=0) > 0],
            parameters=table.parameter_columns[runs],
            others=tuple(name for name in table.devices if name != device),
            others_us=np.delete(table.us[runs], place, axis=1),
            us=table.us[runs, place],
        )

    def half(self, seed: int) -> LeftOut:
        """Half of the programs, with times on the other devices that trees predict which saw those of the other half only."""
        order = np.random.default_rng(seed).permutation(len(self.us))
        kept, seen = np.sort(order[: len(order) // 2]), np.sort(order[len(order) // 2 :])
        log = logs(self.others_us)
        trees = _boosted(seed).fit(self.columns[seen], log[seen])
        predicted = np.exp(np.asarray(trees.predict(self.columns[kept]), dtype=float)).reshape(len(kept), -1)
        return LeftOut(
            device=self.device,
            columns=self.columns[kept],
            parameters=self.parameters[kept],
            others=self.others,
            others_us=predicted,
            us=self.us[kept],
        )


Way = Callable[[LeftOut, Places, int], Floats]


def score(
    table: KernelTable, device: str, seed: int, *, budgets: Sequence[int] = BUDGETS, compare: bool = True
) -> dict[str, Scores]:
    """Errors of the predictor by budget, and with `compare` of other predictors and ways to choose at the usual budget."""
    part = LeftOut.of(table, device)
    results: dict[str, Scores] = {}
    for budget in budgets:
        if budget == 0:
            results["0 measured: order"] = ordered(part)
        elif budget < len(part.us) // 2:
            results[f"{budget} measured"] = judged(part, chosen(part.columns, part.others_us, budget, seed=seed), seed)
    if compare and len(part.us) > 2 * USUAL_BUDGET:
        for way in CHOICES[1:]:
            places = chosen(part.columns, part.others_us, USUAL_BUDGET, seed=seed, way=way)
            results[f"{USUAL_BUDGET} measured, chosen by {way}"] = judged(part, places, seed)
        hidden = part.half(seed)
        places = chosen(hidden.columns, hidden.others_us, USUAL_BUDGET, seed=seed)
        results[f"{USUAL_BUDGET} measured, programs not timed elsewhere"] = judged(hidden, places, seed)
        places = chosen(part.columns, part.others_us, USUAL_BUDGET, seed=seed)
        for name, other in OTHERS.items():
            results[f"{name}, {USUAL_BUDGET} measured"] = errors(other(part, places, seed), part.us, places)
    return results


def judged(part: LeftOut, places: Places, seed: int) -> Scores:
    """Errors, coverage of intervals and order of the predictor with measured programs."""
    durations = ProgramLatency.fit(part.columns, part.others_us, places, part.us[places], seed=seed).predict()
    rest = np.setdiff1d(np.arange(len(part.us)), places)
    inside = (part.us >= durations.low_us) & (part.us <= durations.high_us)
    return errors(durations.us, part.us, places) | {
        "in_interval_pct": 100 * float(inside[rest].mean()),
        "half_width_pct": 100 * float(np.median(durations.high_us[rest] / durations.us[rest]) - 1),
        "tau": float(kendalltau(durations.us[rest], part.us[rest])[0]),
        "best_of_ten_pct": best_of(to_try((durations.us, _order(part)), BEST_OF), part.us),
    }


def ordered(part: LeftOut) -> Scores:
    """Order of all programs by the devices that are most alike, nothing measured."""
    order = _order(part)
    return {"tau": float(kendalltau(order, part.us)[0]), "best_of_ten_pct": best_of(to_try((order,), BEST_OF), part.us)}


def _order(part: LeftOut) -> Floats:
    limits = limits_of(part.device)
    return order_of(part.others_us, np.array([likeness(limits, limits_of(other)) for other in part.others]))


def errors(predicted_us: Floats, us: Floats, places: Places) -> Scores:
    """Mean, median and p90 of |predicted / measured - 1|, in per cent, of the programs that were not measured."""
    rest = np.setdiff1d(np.arange(len(us)), places)
    off = 100 * np.abs(predicted_us[rest] / us[rest] - 1)
    return {"mape_pct": float(off.mean()), "median_pct": float(np.median(off)), "p90_pct": float(np.quantile(off, 0.9))}


def best_of(places: Places, us: Floats) -> float:
    """By how much the best of some programs is slower than the best of all, in per cent."""
    return 100 * float(us[places].min() / us.min() - 1)


def _trees(columns: Floats, part: LeftOut, places: Places, seed: int) -> Floats:
    model = ExtraTreesRegressor(200, random_state=seed, n_jobs=1).fit(columns[places], np.log(part.us[places]))
    return np.asarray(np.exp(model.predict(columns)))


def _boosted(seed: int) -> XGBRegressor:
    return XGBRegressor(
        n_estimators=400, max_depth=6, learning_rate=0.05, subsample=0.8, colsample_bytree=0.5, n_jobs=1, random_state=seed
    )


def _pooled(part: LeftOut, places: Places, seed: int) -> Floats:
    """Boosted trees of all devices' programs, the device's own with the weight of all others together, and a flag of it."""
    log = logs(part.others_us)
    middle = float(np.median(np.log(part.us[places])))
    devices = log.shape[1]
    rows = [np.column_stack([part.columns, np.zeros(len(log))])] * devices
    rows.append(np.column_stack([part.columns[places], np.ones(len(places))]))
    learned = [*(log - np.median(log, axis=0)).T, np.log(part.us[places]) - middle]
    weight = np.concatenate([np.full(devices * len(log), 1 / (devices * len(log))), np.full(len(places), 1 / len(places))])
    model = _boosted(seed).fit(np.concatenate(rows), np.concatenate(learned), sample_weight=weight / weight.mean())
    seen = np.column_stack([part.columns, np.ones(len(log))])
    return np.exp(middle + np.asarray(model.predict(seen), dtype=float))


def _nearest_device(part: LeftOut, places: Places, seed: int) -> Floats:
    """Times on the other devices, weighted by likeness, times a factor."""
    order = np.exp(_order(part))
    order = np.where(np.isfinite(order), order, np.median(order[np.isfinite(order)]))
    return np.asarray(order * np.exp(np.median(np.log(part.us[places] / order[places]))))


def _without_others(part: LeftOut, places: Places, seed: int) -> Floats:
    nothing = np.empty((len(part.us), 0))
    return ProgramLatency.fit(part.columns, nothing, places, part.us[places], seed=seed).predict().us


def _with_parameters(part: LeftOut, places: Places, seed: int) -> Floats:
    return ProgramLatency.fit(part.parameters, part.others_us, places, part.us[places], seed=seed).predict().us


OTHERS: dict[str, Way] = {
    "parameters in place of the AST": _with_parameters,
    "no times on other devices": _without_others,
    "trees on parameters and times on other devices": lambda part, places, seed: _trees(
        np.column_stack([part.parameters, logs(part.others_us)]), part, places, seed
    ),
    "boosted trees of all devices": _pooled,
    "times on the devices most alike, a factor": _nearest_device,
}
