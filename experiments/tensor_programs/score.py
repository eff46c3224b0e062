# ruff: noqa: E501
"""Left-out targets and left-out models: trees, the paper's predictor, XGBoost on leaves alone, the roofline and a constant."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search.errors import DproSearchError
from experiments.tensor_programs.additive import AdditiveTrees, Settings
from experiments.tensor_programs.leaves import LeafRows
from experiments.tensor_programs.models import CHOSEN_ON, coverage_pct, groups, left_out, scaled, used_by, within_tasks
from experiments.tensor_programs.table import Programs, distinct, noise_pct
from experiments.tensor_programs.trees import Roofline, Rows, Trees, by_clusters, corrected

Places = npt.NDArray[np.int64]
Result = dict[str, dict[str, float]]
SAMPLES = 50
OURS = {"loops": True, "ratio": True}
PLAIN = {"loops": False, "ratio": False}
PARTS = ("target", "model", "machine", "curve", "paper", "paper-model")  # The last two need PyTorch.


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
    """Errors by row of a part; `target` is a mean over the targets that were left out."""
    if part not in PARTS:
        raise DproSearchError(f"part {part!r} is not known; parts are {', '.join(PARTS)}")
    known = distinct(programs)
    if part == "model":
        return _models(known, seed)
    if part == "machine":
        return _machine(known, seed)
    if part == "curve":
        return _curve(known, seed)
    rows = Rows.of(known)
    if part == "target":
        return _mean([_target(rows, target, seed) for target in range(len(known.isas))])
    if part == "paper":
        return _paper(known, rows, seed)
    return _paper_models(known, rows, seed)


def _target(rows: Rows, target: int, seed: int) -> Result:
    """A target that is left out; 50 programs are timed there. Their times are not judged."""
    every = np.arange(len(rows.us))
    others = [one for one in range(rows.us.shape[1]) if one != target]
    scores: Result = {}

    def judge(name: str, predict: Callable[[Places], npt.NDArray[Any]], choose: str = "kmeans") -> None:
        random = np.random.default_rng(seed)
        sampled = by_clusters(rows, every, SAMPLES, seed) if choose == "kmeans" else random.choice(every, SAMPLES, replace=False)
        rest = np.setdiff1d(every, sampled)
        scores[name] = errors(predict(sampled)[rest], rows.us[rest, target])

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
    return scores


def _factor(rows: Rows, predicted: npt.NDArray[Any], sampled: Places, target: int) -> float:
    return float(np.exp(np.median(np.log(rows.us[sampled, target] / predicted[sampled]))))


def _models(programs: Programs, seed: int) -> Result:
    """Models left out in groups: trees of leaves, and what they are worth inside of a task."""
    rows, us = LeafRows.of(programs), programs.us.T.ravel()
    prediction = left_out(programs, rows, seed, Settings())
    known = prediction.group >= 0
    scaled_us = scaled(prediction, us)
    estimate = np.bincount(rows.program, np.exp(rows.base))
    covered, width = coverage_pct(prediction, us)
    return {
        "trees of leaves": errors(scaled_us[known], us[known]) | {"fitted_samples_per_s": prediction.fitted_samples_per_s},
        "trees of leaves, mean of models": _by_model(programs, scaled_us, us),
        **_well_timed(programs, scaled_us, us),
        "trees of leaves, not scaled": errors(prediction.us[known], us[known]),
        "inside of tasks": within_tasks(programs, scaled_us, us),
        "intervals": {"covered_pct": covered, "ratio_of_ends": width},
        "estimate of cycles": errors(estimate[known] * np.exp(np.median(np.log(us / estimate)[~known])), us[known]),
        "constant": errors(np.full(known.sum(), np.median(us[~known])), us[known]),
    }


def _well_timed(programs: Programs, predicted_us: npt.NDArray[Any], us: npt.NDArray[Any]) -> Result:
    """The same errors where the time is the minimum of many rounds."""
    known = np.isfinite(predicted_us) & programs.timed_often.T.ravel()
    return {"trees of leaves, times of many rounds": errors(predicted_us[known], us[known])} if known.any() else {}


def _by_model(programs: Programs, predicted_us: npt.NDArray[Any], us: npt.NDArray[Any]) -> dict[str, float]:
    """Mean of the errors of each model that was left out, and the worst."""
    judged = np.isfinite(predicted_us)
    of_models = []
    for model in sorted({one for task in programs.tasks for one in task.models} - set(CHOSEN_ON)):
        places = judged & np.tile(programs.used_by(model), programs.us.shape[1])
        if places.any():
            of_models.append(errors(predicted_us[places], us[places]))
    return {key: float(np.mean([one[key] for one in of_models])) for key in ("mape_pct", "median_pct", "p90_pct")} | {
        "worst_pct": max(one["mape_pct"] for one in of_models), "models": float(len(of_models)),
    }  # fmt: skip


def _machine(programs: Programs, seed: int) -> Result:
    """A type of machine that is left out; 50 programs are timed there, for one factor. Their times are not judged."""
    rows, us = LeafRows.of(programs), programs.us.T.ravel()
    machine = np.tile(programs.machine, programs.us.shape[1])
    result: Result = {}
    for place, facts in enumerate(programs.machines):
        held_out = machine == place
        if held_out.all():
            raise DproSearchError("all programs were timed on one type of machine: give the table of another one, too")
        predicted = AdditiveTrees.fit(rows, np.log(us), ~held_out, seed, Settings()).us(rows, held_out)
        measured = us[held_out]
        sampled = np.random.default_rng(seed).choice(len(measured), SAMPLES, replace=False)
        rest = np.setdiff1d(np.arange(len(measured)), sampled)
        factor = np.exp(np.median(np.log(measured[sampled] / predicted[sampled])))
        name = f"family {facts['cpu_family']}, model {facts['cpu_model']}"
        result[name] = errors(factor * predicted[rest], measured[rest]) | {"factor": float(factor)}
    return result


def _curve(programs: Programs, seed: int) -> Result:
    """Error against the number of fitted tasks."""
    rows, us = LeafRows.of(programs), programs.us.T.ravel()
    scores: Result = {}
    for tasks in (140, 300, 600, 1200, 2400):
        if tasks < len(np.unique(programs.task)):
            prediction = left_out(programs, rows, seed, Settings(), tasks, limit=2)
            known = prediction.group >= 0
            scores[f"{tasks} tasks"] = errors(scaled(prediction, us)[known], us[known])
    return scores


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
    scores: Result = {}
    for name, (changes, choice) in ways.items():
        random = np.random.default_rng(seed)
        sampled = by_clusters(rows, every, SAMPLES, seed) if choice == "kmeans" else random.choice(every, SAMPLES, replace=False)
        rest = np.setdiff1d(every, sampled)
        predictor = Predictor(Settings(**changes), seed).fit(source, source_us)
        speed = predictor.samples_per_s_ / predictor.settings.epochs
        predictor.fine_tune(samples(sampled, target), rows.us[sampled, target], samples(rest, target), epochs=30)
        scores[name] = errors(predictor.predict(samples(rest, target)), rows.us[rest, target]) | {"fitted_samples_per_s": speed}
    start = time.process_time()
    Trees.fit(rows, every, others, seed, **OURS).us(rows, every, target)
    scores["trees (speed only)"] = {"fitted_samples_per_s": len(source) / (time.process_time() - start)}
    return scores


def _paper_models(programs: Programs, rows: Rows, seed: int) -> Result:
    """The first group of left-out models: the paper's predictor, pre-trained and fine-tuned with unlabelled programs of that group."""
    from experiments.tensor_programs.transformer import Predictor
    from experiments.tensor_programs.transformer import Settings as Trained

    out = used_by(programs, groups(programs, seed)[0])
    counts = programs.leaf_counts
    judged = out & np.isin(counts, np.unique(counts[~out]))  # It predicts no number of leaves that it has not seen.
    targets = range(len(programs.isas))

    def samples(places: npt.NDArray[np.bool_]) -> list[Any]:
        return [(programs.leaves[i], programs.positions[i], rows.targets[on]) for on in targets for i in np.flatnonzero(places)]

    fitted_us, us = programs.us[~out].T.ravel(), programs.us[judged].T.ravel()
    predictor = Predictor(Trained(), seed).fit(samples(~out), fitted_us)
    speed = predictor.samples_per_s_ / predictor.settings.epochs
    before = predictor.predict(samples(judged))
    predictor.fine_tune(samples(~out), fitted_us, samples(judged), epochs=5)
    return {
        "paper, another model": errors(predictor.predict(samples(judged)), us) | {"fitted_samples_per_s": speed},
        "paper, another model, not fine-tuned": errors(before, us),
    }


def _mean(parts: list[Result]) -> Result:
    return {
        name: {key: float(np.mean([part[name][key] for part in parts])) for key in parts[0][name]}
        | {"worst_pct": _worst(parts, name)}
        for name in parts[0]
    }


def _worst(parts: list[Result], name: str) -> float:
    return max(part[name]["mape_pct"] for part in parts)
