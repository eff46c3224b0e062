"""A Horovod job with other speeds, and what each improvement would gain."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from dpro_search.costmodel.horovod import CommCosts
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import DataflowGraph, RankProfile
from dpro_search.kinds.horovod.predictor import Predictor
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scale


def scaled(predictor: Predictor, scale: Scale) -> Predictor:
    """The predictor of the job with a part that takes another time.

    Raises
    ------
    InputError
        The rank does not exist, or the link's rate is not known.
    """
    if scale.what == "bandwidth":
        return predictor.at(cluster=predictor.wanted_cluster.faster(scale.factor, scale.text))
    if scale.what == "communication":
        if scale.rank is not None:
            raise InputError(f"'{scale.text}': communication of all ranks can be scaled, not of one")
        return predictor.at(costs=_cheaper(predictor.costs, scale.factor))
    scale.check_rank(predictor.graph.ranks)
    return predictor.at(graph=_faster(predictor.graph, scale.factor, scale.rank))


def gains(predictor: Predictor, plan: Plan | None = None) -> list[dict[str, float | str]]:
    """Iteration time and gain of the questions that every job raises, largest gain first.

    Those that a variable of the environment answers have it as ``knob``.
    """
    plan = plan or Plan()
    base_us = predictor.predict(plan).iteration_us
    texts = ["compute=0.9", "communication=0"]
    texts += [f"rank{rank}.compute=0.9" for rank in range(predictor.graph.ranks)]
    texts += ["bandwidth=2"] if predictor.cluster.rate_bps is not None else []
    found: list[dict[str, float | str]] = []
    for text in texts:
        changed_us = scaled(predictor, Scale.parse(text)).predict(plan).iteration_us
        found.append({"what_if": text, "predicted_iteration_us": changed_us, "gain_us": base_us - changed_us})
    for text, knob, changed in _knobs(plan):
        changed_us = predictor.predict(changed).iteration_us
        found.append({"what_if": text, "predicted_iteration_us": changed_us, "gain_us": base_us - changed_us, "knob": knob})
    return sorted(found, key=lambda row: -float(row["gain_us"]))


def _knobs(plan: Plan) -> list[tuple[str, str, Plan]]:
    """Settings of Horovod that are worth a look: (option of ``replay --set``, variable, plan)."""
    found = []
    for mib in (1, 8, 64):
        threshold = mib * 2**20
        changed = msgspec.structs.replace(plan, fusion_threshold_bytes=threshold, tensor_groups=None)
        found.append((f"fusion_threshold_bytes={threshold}", f"HOROVOD_FUSION_THRESHOLD={threshold}", changed))
    for cycle_ms in (1, 10):
        changed = msgspec.structs.replace(plan, cycle_time_us=cycle_ms * 1000.0)
        found.append((f"cycle_time_us={cycle_ms * 1000}", f"HOROVOD_CYCLE_TIME={cycle_ms}", changed))
    return found


def _faster(graph: DataflowGraph, factor: float, rank: int | None) -> DataflowGraph:
    profiles = tuple(
        _scaled(profile, factor) if rank is None or number == rank else profile for number, profile in enumerate(graph.profiles)
    )
    return replace(graph, profiles=profiles)


def _scaled(profile: RankProfile, factor: float) -> RankProfile:
    return replace(
        profile,
        post_us=profile.post_us * factor,
        main_us=profile.main_us * factor,
        releases=tuple(replace(release, work_us=release.work_us * factor) for release in profile.releases),
    )


def _cheaper(costs: CommCosts, factor: float) -> CommCosts:
    scaled = {name: getattr(costs, name) * factor for name in CommCosts.__dataclass_fields__ if name != "residual_pct"}
    scaled["beta_busy_us"] = max(scaled["beta_busy_us"], 1e-9)
    scaled["beta_tail_us"] = max(scaled["beta_tail_us"], 1e-9)
    for name in ("negotiate_busy_us", "negotiate_idle_us"):
        scaled[name] = np.maximum(scaled[name], 1.0)
    return replace(costs, **scaled)
