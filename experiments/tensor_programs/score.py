# ruff: noqa: E501
"""Left-out targets and left-out models: trees, the paper's predictor, XGBoost on leaves alone, the roofline and a constant."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from experiments.tensor_programs.table import Programs, distinct, noise_pct
from experiments.tensor_programs.trees import Roofline, Rows, Trees, by_clusters, corrected

Places = npt.NDArray[np.int64]
Result = dict[str, dict[str, float]]
SAMPLES = 50
OURS = {"loops": True, "ratio": True}
PLAIN = {"loops": False, "ratio": False}
PARTS = ("target", "model", "paper")  # The last needs PyTorch.


def errors(predicted_us: npt.NDArray[Any], us: npt.NDArray[Any]) -> dict[str, float]:
    """Mean, median and p90 of |predicted / measured - 1| in per cent, and how many."""
    off = 100 * np.abs(predicted_us / us - 1)
    return {
        "mape_pct": float(off.mean()),
        "median_pct": float(np.median(off)),
        "p90_pct": float(np.quantile(off, 0.9)),
        "programs": float(len(off)),
    }


def noise(programs: Programs) -> dict[str, float]:
    """How far two timings of a program are apart, in per cent."""
    off = noise_pct(programs)
    return (
        {"mean_pct": float(off.mean()), "median_pct": float(np.median(off)), "pairs": float(off.size)}
        if off.size
        else {"pairs": 0.0}
    )


def score(programs: Programs, part: str, seed: int) -> Result:
    """Errors by row of a part: `target` and `model` are macro means over what was left out."""
    known = distinct(programs)
    rows = Rows.of(known)
    if part == "target":
        return _mean([_target(rows, target, seed) for target in range(len(known.isas))])
    if part == "model":
        return _mean([_model(known, rows, model, seed) for model in sorted({one for task in known.tasks for one in task.models})])
    return _paper(known, rows, seed)


def _target(rows: Rows, target: int, seed: int) -> Result:
    """A target that is left out; 50 programs are timed there. Their times are not judged."""
    every = np.arange(len(rows.us))
    others = [one for one in range(rows.us.shape[1]) if one != target]
    found: Result = {}

    def judge(name: str, predict: Callable[[Places], npt.NDArray[Any]], choose: str = "kmeans") -> None:
        random = np.random.default_rng(seed)
        sampled = by_clusters(rows, every, SAMPLES, seed) if choose == "kmeans" else random.choice(every, SAMPLES, replace=False)
        rest = np.setdiff1d(every, sampled)
        found[name] = errors(predict(sampled)[rest], rows.us[rest, target])

    trees = Trees.fit(rows, every, others, seed, **OURS).us(rows, every, target)
    plain = Trees.fit(rows, every, others, seed, **PLAIN).us(rows, every, target)
    same = np.exp(np.log(rows.us[:, others]).mean(axis=1))
    base = Roofline.fit(rows, every, others).us(rows, every)
    judge("trees, corrected", lambda sampled: corrected(rows, trees, sampled, target, seed))
    judge("trees, corrected, samples at random", lambda sampled: corrected(rows, trees, sampled, target, seed), "random")
    judge("trees, no samples", lambda sampled: trees)
    judge("times on the other targets, corrected", lambda sampled: corrected(rows, same, sampled, target, seed))
    judge("times on the other targets", lambda sampled: same)
    judge("XGBoost on leaves, log, corrected by a factor", lambda sampled: plain * _factor(rows, plain, sampled, target))
    judge("roofline, corrected by a factor", lambda sampled: base * _factor(rows, base, sampled, target))
    judge("constant", lambda sampled: np.full(len(every), np.median(rows.us[sampled, target])))
    return found


def _factor(rows: Rows, predicted: npt.NDArray[Any], sampled: Places, target: int) -> float:
    return float(np.exp(np.median(np.log(rows.us[sampled, target] / predicted[sampled]))))


def _model(programs: Programs, rows: Rows, model: str, seed: int) -> Result:
    """A model that is left out: all its tasks on all targets, those that other models run, too."""
    of_model = programs.used_by(model)
    fitted, wanted = np.flatnonzero(~of_model), np.flatnonzero(of_model)
    targets = list(range(rows.us.shape[1]))
    base = Roofline.fit(rows, fitted, targets)

    def by_trees(settings: dict[str, bool]) -> Callable[[int], npt.NDArray[Any]]:
        fit = Trees.fit(rows, fitted, targets, seed, **settings)
        return lambda target: fit.us(rows, wanted, target)

    ways: dict[str, Callable[[int], npt.NDArray[Any]]] = {
        "trees": by_trees(OURS),
        "trees, log": by_trees(OURS | {"ratio": False}),
        "XGBoost on leaves, log": by_trees(PLAIN),
        "roofline": lambda target: base.us(rows, wanted),
        "constant": lambda target: np.full(len(wanted), np.median(rows.us[fitted, target])),
    }
    measured = np.concatenate([rows.us[wanted, target] for target in targets])
    return {name: errors(np.concatenate([way(target) for target in targets]), measured) for name, way in ways.items()}


def _paper(programs: Programs, rows: Rows, seed: int) -> Result:
    """The last target left out, 50 programs timed there: the paper's predictor with and without its parts, and speeds of training."""
    from experiments.tensor_programs.transformer import Predictor, Settings

    target = rows.us.shape[1] - 1
    every, others = np.arange(len(rows.us)), list(range(target))

    def samples(places: Places, on: int) -> list[Any]:
        return [(programs.leaves[i], programs.positions[i], rows.targets[on]) for i in places]

    source = [one for on in others for one in samples(every, on)]
    source_us = np.concatenate([rows.us[:, on] for on in others])
    ways = {
        "paper": ({}, "kmeans"), "paper, no positions": ({"positions": False}, "kmeans"), "paper, MMD": ({"distance": "mmd"}, "kmeans"),
        "paper, no distance": ({"distance": "none"}, "kmeans"), "paper, log": ({"target": "log"}, "kmeans"), "paper, random": ({}, "random"),
    }  # fmt: skip
    found: Result = {}
    for name, (changes, choice) in ways.items():
        random = np.random.default_rng(seed)
        sampled = by_clusters(rows, every, SAMPLES, seed) if choice == "kmeans" else random.choice(every, SAMPLES, replace=False)
        rest = np.setdiff1d(every, sampled)
        predictor = Predictor(Settings(**changes), seed).fit(source, source_us)
        speed = predictor.samples_per_s_ / predictor.settings.epochs
        predictor.fine_tune(samples(sampled, target), rows.us[sampled, target], samples(rest, target), epochs=30)
        found[name] = errors(predictor.predict(samples(rest, target)), rows.us[rest, target]) | {"fitted_samples_per_s": speed}
    start = time.perf_counter()
    Trees.fit(rows, every, others, seed, **OURS).us(rows, every, target)
    found["trees (speed only)"] = {"fitted_samples_per_s": len(source) / (time.perf_counter() - start)}
    return found


def _mean(parts: list[Result]) -> Result:
    return {
        name: {key: float(np.mean([part[name][key] for part in parts])) for key in parts[0][name]}
        | {"worst_pct": _worst(parts, name)}
        for name in parts[0]
    }


def _worst(parts: list[Result], name: str) -> float:
    return max(part[name]["mape_pct"] for part in parts)
