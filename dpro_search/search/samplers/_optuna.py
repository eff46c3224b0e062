"""Tree-structured Parzen estimator over the outer knobs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optuna

from dpro_search.collect.trace import CommSettings, TensorInfo
from dpro_search.search.samplers._base import CYCLE_RANGE_US, Proposal, Sampler, as_change, rounded_cycle_us
from dpro_search.space.moves import contiguous_groups
from dpro_search.space.plan import Plan, Prediction

MOST_GROUPS = 32
_LOG2_THRESHOLD = (16.0, 28.0)  # 64 KiB to 256 MiB
_LOG2_STEP = 0.5
_LOG2_NO_FUSION = _LOG2_THRESHOLD[0] - _LOG2_STEP  # one step below the smallest threshold stands for 0: every tensor alone
_FRESH_ATTEMPTS = 4
_SAMPLERS: tuple[Callable[..., optuna.samplers.BaseSampler], ...] = (optuna.samplers.TPESampler, optuna.samplers.RandomSampler)


class OptunaSampler(Sampler):
    """TPE over three knobs, each of which may stay as recorded.

    How tensors fuse: dynamically up to a threshold, or in n contiguous groups of about equal bytes; and the cycle time. All are
    searched on a logarithmic scale, and to the resolution that a person would write down. Where TPE keeps to plans that were
    priced before, one is drawn at random instead. Plans on their way count as bad until their price is known (Optuna's constant
    liar, its default since version 5).
    """

    name = "optuna"

    def __init__(self, tensors: Sequence[TensorInfo], recorded: CommSettings, rng: np.random.Generator) -> None:
        super().__init__(tensors, recorded, rng)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._tpe, self._random = (kind(seed=int(rng.integers(2**31))) for kind in _SAMPLERS)
        self._study = optuna.create_study(sampler=self._tpe)
        self._asked: deque[optuna.Trial] = deque()  # open asks, the oldest first
        self._known: set[Plan] = set()  # priced, or on their way
        # Groups of a recording cannot be undone by a threshold.
        fusion = ["recorded", "groups"] if recorded.groups is not None else ["recorded", "threshold", "groups"]
        self._distributions: dict[str, optuna.distributions.BaseDistribution] = {
            "fusion": optuna.distributions.CategoricalDistribution(fusion),
            "log2_threshold": optuna.distributions.FloatDistribution(_LOG2_NO_FUSION, _LOG2_THRESHOLD[1], step=_LOG2_STEP),
            "groups": optuna.distributions.IntDistribution(1, min(MOST_GROUPS, len(self.tensors)), log=True),
            "cycle": optuna.distributions.CategoricalDistribution(["recorded", "set"]),
            "cycle_us": optuna.distributions.FloatDistribution(*CYCLE_RANGE_US, log=True),
        }

    def ask(self) -> Proposal:
        for sampler in (self._tpe,) * _FRESH_ATTEMPTS + (self._random,) * _FRESH_ATTEMPTS:
            self._study.sampler = sampler
            trial, plan = self._drawn()
            if plan not in self._known:
                break
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            trial, plan = self._drawn()
        self._asked.append(trial)
        self._known.add(plan)
        return Proposal(plan, self.name)

    def tell(self, proposal: Proposal, prediction: Prediction) -> None:
        assert self._asked, "tell without ask"
        self._study.tell(self._asked.popleft(), prediction.iteration_us)

    def observe(self, plan: Plan, prediction: Prediction) -> None:
        """A plan that the knobs can say is learnt; of any other, the nearest that they can say is asked for next."""
        self._known.add(plan)
        params = self._nearest_params(plan)
        if self._plan_of(params) == plan:
            distributions = {name: self._distributions[name] for name in params}
            self._study.add_trial(
                optuna.trial.create_trial(params=params, distributions=distributions, value=prediction.iteration_us)
            )
        else:
            self._study.enqueue_trial(params)

    def _drawn(self) -> tuple[optuna.Trial, Plan]:
        trial = self._study.ask()
        return trial, self._plan_of(self._suggested(trial))

    def _suggested(self, trial: optuna.Trial) -> dict[str, Any]:
        """Only the knobs that matter are drawn: a conditional space."""
        params: dict[str, Any] = {"fusion": self._draw(trial, "fusion")}
        if params["fusion"] == "threshold":
            params["log2_threshold"] = self._draw(trial, "log2_threshold")
        elif params["fusion"] == "groups":
            params["groups"] = self._draw(trial, "groups")
        params["cycle"] = self._draw(trial, "cycle")
        if params["cycle"] == "set":
            params["cycle_us"] = self._draw(trial, "cycle_us")
        return params

    def _draw(self, trial: optuna.Trial, name: str) -> Any:
        match self._distributions[name]:
            case optuna.distributions.CategoricalDistribution() as choice:
                return trial.suggest_categorical(name, choice.choices)
            case optuna.distributions.IntDistribution() as whole:
                return trial.suggest_int(name, whole.low, whole.high, log=whole.log)
            case optuna.distributions.FloatDistribution() as real:
                return trial.suggest_float(name, real.low, real.high, step=real.step, log=real.log)

    def _plan_of(self, params: dict[str, Any]) -> Plan:
        plan = Plan(
            fusion_threshold_bytes=_threshold_bytes(params["log2_threshold"]) if "log2_threshold" in params else None,
            tensor_groups=contiguous_groups(self.tensors, params["groups"]) if "groups" in params else None,
            cycle_time_us=rounded_cycle_us(params["cycle_us"]) if "cycle_us" in params else None,
        )
        return as_change(plan, self.recorded)

    def _nearest_params(self, plan: Plan) -> dict[str, Any]:
        params: dict[str, Any] = {"fusion": "recorded", "cycle": "recorded"}
        if plan.tensor_groups:
            params |= {"fusion": "groups", "groups": min(len(plan.tensor_groups), self._largest("groups"))}
        elif plan.fusion_threshold_bytes is not None and self.recorded.groups is None:
            params |= {"fusion": "threshold", "log2_threshold": _log2_threshold(plan.fusion_threshold_bytes)}
        if plan.cycle_time_us is not None:
            params |= {"cycle": "set", "cycle_us": rounded_cycle_us(plan.cycle_time_us)}
        return params

    def _largest(self, name: str) -> int:
        distribution = self._distributions[name]
        assert isinstance(distribution, optuna.distributions.IntDistribution)
        return distribution.high


def _threshold_bytes(log2_threshold: float) -> int:
    return 0 if log2_threshold < _LOG2_THRESHOLD[0] else round(2**log2_threshold)


def _log2_threshold(threshold_bytes: int) -> float:
    if threshold_bytes < 2 ** _LOG2_THRESHOLD[0] / 2:
        return _LOG2_NO_FUSION
    steps = round(math.log2(threshold_bytes) / _LOG2_STEP) * _LOG2_STEP
    return min(max(steps, _LOG2_THRESHOLD[0]), _LOG2_THRESHOLD[1])
