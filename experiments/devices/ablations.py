"""What single choices are worth: what trees are fitted to, and how the ops that are measured on a device are chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import inv_boxcox
from scipy.stats import boxcox

from experiments.devices.data import Target
from experiments.devices.fit import Measured, boosted_trees, fit_families, tree_weights
from experiments.devices.protocol import Judged, LeftOut, fitted, similarity_of


def of_other_targets(targets: Sequence[Target], seed: int, group: Callable[[Target], str], kind: str) -> list[LeftOut]:
    """As `protocol.left_out`, with trees that are fitted to log(latency) ("log") or to its Box-Cox transform ("box-cox").

    A transform has the mean and deviation of the ratio's logarithm, so that the settings of the trees fit it as well.
    """
    found: dict[str, LeftOut] = {}
    no_families = fit_families({}, seed)[0]
    for name in sorted({group(target) for target in targets}):
        parts = [fitted(target) for target in targets if group(target) != name]
        us = np.concatenate([part.us for part in parts])
        logs = np.log(us)
        made, power = (logs, 0.0) if kind == "log" else boxcox(us)
        middle, scale = float(np.mean(made)), float(np.std(made)) / float(np.std(logs))
        features = np.concatenate([part.features for part in parts])
        trees = boosted_trees(features, (made - middle) / scale, tree_weights(parts), seed=seed)
        for target in targets:
            if group(target) == name:
                part = target.measured
                predicted = trees.log_ratio(part.features) * scale + middle
                log = predicted if kind == "log" else np.log(np.maximum(inv_boxcox(predicted, power), 1e-3))
                log = np.where(np.isfinite(log), log, logs.max())
                ratio = np.asarray(log - np.log(part.base_us))
                found[target.name] = LeftOut(
                    target=target, group=name, ratio=ratio, of_base=ratio, trees=trees, families=no_families
                )
    return [found[target.name] for target in targets]


def judged_with_random_samples(found: Sequence[LeftOut], seed: int, budgets: Sequence[int]) -> list[Judged]:
    """As `protocol.judged`, with samples that are drawn at random from what is judged, beside the probes."""
    result = []
    for group in sorted({one.group for one in found}):
        similarity = similarity_of([one for one in found if one.group != group], seed)
        for one in found:
            if one.group != group:
                continue
            part = one.target.measured
            for budget in budgets:
                chosen = _random_samples(part, budget, seed, np.flatnonzero(one.target.judge))
                rest = one.target.judge.copy()
                rest[chosen] = False
                measured = similarity.residual(one.points[chosen], one.errors[chosen])
                shift, deviation = similarity.correction(measured, one.points[rest])
                error = shift - one.errors[rest]
                result.append(Judged(target=one.target.name, group=group, budget=budget, log_error=error, deviation=deviation))
    return result


def _random_samples(part: Measured, count: int, seed: int, pool: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    rest = np.random.default_rng(seed).permutation(np.setdiff1d(pool, part.probes))
    return np.concatenate([part.probes, rest[: max(count - len(part.probes), 0)]])
