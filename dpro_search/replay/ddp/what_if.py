"""What-if questions about a PyTorch job: the forms are those of `replay/what_if.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import msgspec

from dpro_search.costmodel.horovod import CommCosts
from dpro_search.errors import InputError
from dpro_search.replay.ddp.predictor import DdpPredictor
from dpro_search.replay.ddp.program import ProgramPredictor
from dpro_search.replay.what_if import Question, parse_question
from dpro_search.space.plan import Plan, Prediction

_MIB = 2**20
_BUCKETS_MIB = (1, 5, 25, 100)  # largest buckets that `gains` asks for
_HOOKS = {"comm_hook=half": Plan(compression="fp16"), "comm_hook=powersgd-1": Plan(compression="powersgd-1")}
_Predictor = TypeVar("_Predictor", bound=ProgramPredictor)


def asked(predictor: _Predictor, question: Question) -> _Predictor:
    """The predictor of the job as the question would have it.

    Raises
    ------
    InputError
        The rank does not exist, or the link's rate is not known.
    """
    if question.what == "bandwidth":
        rate = predictor.cluster.rate_bps
        if rate is None:
            raise InputError(f"--what-if '{question.text}': the recording's link rate is not known; use --set rate=1gbit")
        return predictor.at(cluster=msgspec.structs.replace(predictor.cluster, rate_bps=rate * question.factor))
    if question.what == "communication":
        return predictor.at(costs=_cheaper(predictor.costs, question.factor))
    return predictor.faster(question.factor, question.rank)


def gains(predictor: DdpPredictor) -> list[dict[str, float | str]]:
    """Iteration time and gain of the questions that every job raises and of other bucket sizes, largest gain first."""
    changed = {f"bucket_cap_mb={mib}": predictor.predict(Plan(bucket_cap_bytes=mib * _MIB)) for mib in _BUCKETS_MIB}
    changed |= {f"first_bucket_mb={mib}": predictor.at(first_bucket_bytes=mib * _MIB).predict(Plan()) for mib in _BUCKETS_MIB}
    changed |= {name: predictor.predict(plan) for name, plan in _HOOKS.items() if predictor.refusal(plan) is None}
    return ranked_gains(predictor, changed)


def ranked_gains(predictor: ProgramPredictor, changed: Mapping[str, Prediction]) -> list[dict[str, float | str]]:
    """The questions that every job raises and those of its own kind with their answers, largest gain first."""
    base_us = predictor.predict(Plan()).iteration_us
    texts = ["compute=0.9", "communication=0"]
    texts += [f"rank{rank}.compute=0.9" for rank in range(predictor.graph.ranks)]
    texts += ["bandwidth=2"] if predictor.cluster.rate_bps is not None else []
    answers = {text: asked(predictor, parse_question(text)).predict(Plan()) for text in texts} | dict(changed)
    found: list[dict[str, float | str]] = [
        {"what_if": text, "predicted_iteration_us": answer.iteration_us, "gain_us": base_us - answer.iteration_us}
        for text, answer in answers.items()
    ]
    return sorted(found, key=lambda row: -float(row["gain_us"]))


def _cheaper(costs: CommCosts, factor: float) -> CommCosts:
    names = ("alpha_busy_us", "alpha_more_us", "alpha_tail_us", "beta_busy_us", "beta_tail_us", "cpu_us", "collective_cpu_us")
    return replace(costs, **{name: max(getattr(costs, name) * factor, 1e-9) for name in names})
