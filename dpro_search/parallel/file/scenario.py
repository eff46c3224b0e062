"""`in_scenario`: a described job with another batch, sequence, precision or cluster, as its file could describe it."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from dpro_search.cluster import Cluster
from dpro_search.errors import InputError
from dpro_search.parallel.file.description import MOST, ParallelDescription, global_batch_of, options_on
from dpro_search.parallel.file.job_devices import refuse_tpus
from dpro_search.parallel.file.keys import PRECISIONS
from dpro_search.parallel.file.usual_strategy import usual_strategy
from dpro_search.parallel.gpu_ops import OpCosts
from dpro_search.parallel.model import CapturedModel
from dpro_search.parallel.settings import Fixed, resolved, under
from dpro_search.parallel.strategy import ParallelSettings
from dpro_search.space.scenario import ClusterChange, Scenario


def in_scenario(description: ParallelDescription, scenario: Scenario) -> ParallelDescription:
    """The job in a scenario, without the scenario's plan and scales.

    Raises
    ------
    InputError
        The job cannot run like that: the message names the nearest legal value.
    """
    if scenario.global_batch is not None:
        description = _with_batch(description, scenario.global_batch)
    if scenario.sequence is not None:
        description = _with_sequence(description, scenario.sequence)
    if scenario.precision is not None:
        description = _with_precision(description, scenario.precision)
    if scenario.cluster != ClusterChange():
        description = _on_cluster(description, scenario.cluster)
    if scenario.begins_with is not None:
        runs = under(description.runs, ParallelSettings.of(scenario.begins_with))
        description = replace(description, runs=runs, strategy=resolved(runs, description.fixed), chosen=False)
    return description


def _with_batch(description: ParallelDescription, global_batch: int) -> ParallelDescription:
    if not 0 < global_batch <= MOST:
        raise InputError(f"global_batch must be from 1 to {MOST:g}, not {global_batch}")
    fixed = replace(description.fixed, global_batch=global_batch)
    return _with_fixed(replace(description, batch_per_replica=None), fixed, description.cluster, description.runs)


def _with_sequence(description: ParallelDescription, tokens: int) -> ParallelDescription:
    if not description.fixed.has_tokens:
        raise InputError(f"{description.fixed.model.name} has no sequences of tokens")
    if not 0 < tokens <= MOST:
        raise InputError(f"sequence must be from 1 to {MOST:g} tokens, not {tokens}")
    return _with_fixed(description, replace(description.fixed, sequence=tokens), description.cluster, description.runs)


def _with_precision(description: ParallelDescription, precision: str) -> ParallelDescription:
    if precision not in PRECISIONS:
        raise InputError(f"'{precision}' is none of {', '.join(PRECISIONS)}")
    if precision != description.precision and (description.times is not None or isinstance(description.fixed.model, CapturedModel)):
        held = "times of blocks" if description.times is not None else "graph"
        raise InputError(f"the job's {held} are in {description.precision}: record them in {precision}, or leave precision= out")
    OpCosts(description.device, precision)  # the device must have such a speed
    return _with_fixed(replace(description, precision=precision), description.fixed, description.cluster, description.runs)


def _on_cluster(description: ParallelDescription, change: ClusterChange) -> ParallelDescription:
    """The same job on devices of a changed cluster; dp follows from their number."""
    change = change if change.machines is not None else replace(change, machines=description.cluster)
    assert change.machines is not None, "set above"
    refuse_tpus(change.machines)
    if not change.on_gpus:
        raise InputError(f"{change.machines.name}: a parallel job runs on machines with GPUs, like 16xhgx-h100")
    cluster = change.gpu_machines
    devices = cluster.ranks if change.ranks is None else change.ranks
    if not 1 <= devices <= cluster.ranks:
        raise InputError(f"{devices} ranks do not fit on {cluster.name}: it has {cluster.ranks} devices")
    runs = msgspec.structs.replace(description.runs, dp=None)
    fixed = replace(description.fixed, devices=devices, options=options_on(description.framework, cluster))
    if description.batch_per_replica is not None:
        given = None if description.chosen else runs
        fixed = replace(fixed, global_batch=global_batch_of(description.batch_per_replica, given, devices))
    return _with_fixed(description, fixed, cluster, runs)


def _with_fixed(description: ParallelDescription, fixed: Fixed, cluster: Cluster, runs: ParallelSettings) -> ParallelDescription:
    """The job as it runs today, or, where the description leaves that open, as is usual."""
    if description.chosen:
        runs = usual_strategy(fixed, cluster, description.precision, description.runtime, description.framework)
    strategy = resolved(runs, fixed)
    return replace(description, fixed=fixed, cluster=cluster, runs=runs, strategy=strategy)
