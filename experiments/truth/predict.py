"""Predictors of rows: ours, and two formulas that anybody could use."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from dpro_search.errors import InputError
from dpro_search.parallel.legality import check_stages_by_cost, check_strategy
from dpro_search.parallel.memory.peak import rank_memories
from dpro_search.parallel.model import blocks_of, parameters_of
from dpro_search.parallel.steps.step_prices import step_us
from dpro_search.parallel.strategy import Recompute
from dpro_search.parallel.workload import Workload
from experiments.truth.jobs import workload_of, workloads_of
from experiments.truth.memory import partly_recomputed, peak_bytes, phases_of, reported_bytes
from experiments.truth.rows import Row
from experiments.truth.score import Predicted, RefusedError

MODEL_FLOPS_UTILISATION = 0.4
"""Of the formula "constant MFU" (assumed, as the formula's users do)."""


def cold(row: Row) -> Predicted:
    """From public specifications and shipped tables only; the mean over all that the row's blanks may be."""
    each = [_predicted(row, workload) for workload in workloads_of(row)]
    known = [one.memory_bytes for one in each if one.memory_bytes is not None]
    return Predicted(
        float(np.exp(np.mean(np.log([one.step_s for one in each])))),
        float(np.mean(known)) if known else None,
        any(one.fits for one in each),
    )


def _predicted(row: Row, workload: Workload) -> Predicted:
    try:
        check_strategy(workload.strategy, workload.model, workload.sequence)
        if workload.runtime.stages_by_cost:
            check_stages_by_cost(workload.strategy, workload.model)
    except InputError as error:
        raise RefusedError(str(error)) from None
    limit_bytes = workload.cluster.groups[0].host.device.memory_bytes or math.inf
    memories = max((rank_memories(phase) for phase in phases_of(row, workload)), key=peak_bytes)
    fits = peak_bytes(memories) <= limit_bytes
    if not fits and not row.text("recompute") and workload.strategy.recompute is Recompute.NONE:
        # What a row does not say is what its job can run with: recomputation, of as few layers as it fits with.
        blocks = sum(block.count for block in blocks_of(workload.model)) // workload.strategy.pp or 1
        again = replace(workload, strategy=replace(workload.strategy, recompute=Recompute.FULL))
        memories = partly_recomputed(memories, rank_memories(again), limit_bytes, blocks)
        fits = peak_bytes(memories) <= limit_bytes
    seconds = math.nan if row.memory_alone else step_us(workload) / 1e6
    return Predicted(seconds, reported_bytes(row, memories, limit_bytes), fits)


def constant_mfu(row: Row) -> Predicted:
    """6 N FLOPs a token at a constant share of the peak."""
    workload = workload_of(row)
    tokens = workload.strategy.global_batch * workload.sequence
    peak = workload.cluster.groups[0].host.device.peak_flops_per_s(workload.precision)
    if peak is None:
        raise InputError("the device's peak is not known")
    return Predicted(6 * parameters_of(workload.model) * tokens / (workload.strategy.devices * peak * MODEL_FLOPS_UTILISATION))


def bubble(row: Row) -> Predicted:
    """6 N FLOPs a token at half the peak, and the pipeline's bubble."""
    workload = workload_of(row)
    strategy = workload.strategy
    ideal = constant_mfu(row).step_s * MODEL_FLOPS_UTILISATION / 0.5
    return Predicted(ideal * (1 + (strategy.pp - 1) / (strategy.micro_batches * strategy.virtual_stages)))


PREDICTORS = {"cold": cold, "constant-mfu": constant_mfu, "6nd-bubble": bubble}
