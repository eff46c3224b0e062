"""What anybody could use instead: a roofline, and boosted trees on a data sheet's features."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import xgboost

from dpro_search.costmodel.devices.features import base_us, features
from dpro_search.costmodel.devices.ops import Floats
from dpro_search.costmodel.devices.profile import DeviceProfile, UsualShares
from experiments.devices.data import Target
from experiments.devices.fit import even_weights
from experiments.devices.protocol import Judged, samples

PEAKS = UsualShares(matrix=1.0, eight_bits=1.0, four_bits=1.0, stream=1.0)
"""A plain roofline: a device reaches what its data sheet says."""
_ONE_IN = 3  # Ops that are fitted: each target needs fits of its own.
_SAMPLE_WEIGHT = 0.5
"""Of a target's samples in a fit, all together, relative to one other device."""


def roofline(targets: Sequence[Target], group: Callable[[Target], str]) -> list[Judged]:
    """The data sheet's rates and the usual launch time."""
    return [_judged(one, group(one), 0, _base(one), np.ones(len(one.judge), bool), np.zeros(len(one.judge))) for one in targets]


def xgboost_alone(targets: Sequence[Target], seed: int, group: Callable[[Target], str], budgets: Sequence[int]) -> list[Judged]:
    """XGBoost on log(latency / roofline) with a data sheet's features; samples of a target are added to what it is fitted to."""
    found: list[Judged] = []
    seen = {one.name: features(one.measured.ops, DeviceProfile(device=one.measured.profile.device), PEAKS) for one in targets}
    ratio = {one.name: np.log(one.measured.us / _base(one)) for one in targets}
    for name in sorted({group(one) for one in targets}):
        others = [one for one in targets if group(one) != name]
        fit = {one.name: np.flatnonzero(one.fit)[::_ONE_IN] for one in others}
        x = np.concatenate([seen[one.name][fit[one.name]] for one in others])
        y = np.concatenate([ratio[one.name][fit[one.name]] for one in others])
        device = np.repeat(np.arange(len(others)), [len(fit[one.name]) for one in others])
        weight = even_weights(device, np.concatenate([one.measured.ops.kind[fit[one.name]] for one in others]))
        alone = _trees(x, y, weight, seed)
        for one in targets:
            if group(one) != name:
                continue
            for budget in budgets:
                chosen = samples(one.measured, budget, seed, np.flatnonzero(one.judge))
                rest = np.ones(len(one.judge), bool)
                rest[chosen] = False
                model = alone
                if budget > 5:
                    share = _SAMPLE_WEIGHT * weight.sum() / len(others) / len(chosen)
                    model = _trees(
                        np.concatenate([x, seen[one.name][chosen]]),
                        np.concatenate([y, ratio[one.name][chosen]]),
                        np.concatenate([weight, np.full(len(chosen), share)]),
                        seed,
                    )
                found.append(_judged(one, name, budget, _base(one), rest, model.inplace_predict(seen[one.name])))
    return found


def _trees(x: Floats, y: Floats, weight: Floats, seed: int) -> xgboost.Booster:
    data = xgboost.QuantileDMatrix(x, label=y, weight=weight, nthread=1)
    return xgboost.train({"max_depth": 6, "eta": 0.15, "subsample": 0.7, "nthread": 1, "seed": seed}, data, num_boost_round=100)


def _base(one: Target) -> Floats:
    return base_us(one.measured.ops, DeviceProfile(device=one.measured.profile.device), PEAKS)


def _judged(one: Target, group: str, budget: int, base: Floats, rest: Floats, log: Floats) -> Judged:
    rest = rest & one.judge
    error = np.log(base[rest]) + log[rest] - np.log(one.measured.us[rest])
    return Judged(target=one.name, group=group, budget=budget, log_error=error, deviation=np.ones(len(error)))
