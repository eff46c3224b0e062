"""`signals`: what a workload would show, quantity by quantity, and `slopes`: how errors of efficiencies would move that."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dpro_search.analysis.expect.quantities import Quantity
from dpro_search.costmodel.collectives.nccl import collective_us, placement_of
from dpro_search.errors import InputError
from dpro_search.parallel.costs.scales import MEASURED
from dpro_search.parallel.gpu_ops import OpCosts
from dpro_search.parallel.legality import check_strategy
from dpro_search.parallel.steps.step_prices import StepPrices
from dpro_search.parallel.workload import Workload

Floats = npt.NDArray[np.float64]

ALL_REDUCE_BYTES = 2**30
GEMM_ROWS = 8192
IDLE_POWER = 0.3
"""Share of its power that a device takes while its kernels wait for others (estimated: no measured run at hand has it)."""
_OF_STEPS = {Quantity.STEP, Quantity.MEDIAN_STEP, Quantity.UTILISATION, Quantity.POWER}
_MOVE = 0.1  # of the logarithm of an efficiency, to find slopes


def signals(workload: Workload, quantities: Collection[Quantity]) -> dict[Quantity, float]:
    """The quantities that a workload would show. A quantity that it does not have, or whose parts are not known, is left out.

    Raises
    ------
    InputError
        The strategy is impossible.
    """
    check_strategy(workload.strategy, workload.model, workload.sequence)
    prices, shown = StepPrices(workload), dict[Quantity, float]()
    step_us = prices.step_us(workload.strategy) if _OF_STEPS & set(quantities) else math.nan
    for quantity in quantities:
        value: float | None
        match quantity:
            case Quantity.STEP | Quantity.MEDIAN_STEP:
                value = step_us
            case Quantity.MEMORY:
                value = prices.memory(workload.strategy).total_bytes
            case Quantity.ONE_HOST:
                value = _one_host_us(workload)
            case Quantity.ALL_REDUCE:
                value = _all_reduce_bytes_per_s(workload)
            case Quantity.GEMM:
                value = _gemm_flops_per_s(workload)
            case Quantity.UTILISATION:
                value = _utilisation(prices, workload, step_us)
            case Quantity.POWER:
                value = _power_w(prices, workload, step_us)
        if value is not None:
            shown[quantity] = value
    return shown


def slopes(workload: Workload, quantities: Collection[Quantity], shown: Mapping[Quantity, float]) -> dict[Quantity, Floats]:
    """Growth of the logarithm of each quantity with that of the time factor of each of `MEASURED`, [len(MEASURED)].

    `shown` are the values without a change; quantities that no efficiency moves have zeros.
    """
    moved = [name for name in (Quantity.STEP, Quantity.MEDIAN_STEP, Quantity.ONE_HOST) if name in quantities]
    columns: dict[Quantity, list[float]] = {name: [] for name in moved}
    for name in MEASURED:
        factor = getattr(workload.scales, name) * float(np.exp(_MOVE))
        changed = signals(replace(workload, scales=replace(workload.scales, **{name: factor})), moved)
        for quantity in moved:
            columns[quantity].append(float(np.log(changed[quantity] / shown[quantity])) / _MOVE)
    rows = {quantity: np.array(column) for quantity, column in columns.items()}
    zeros = {quantity: np.zeros(len(MEASURED)) for quantity in quantities if quantity not in moved}
    if Quantity.GEMM in zeros:
        zeros[Quantity.GEMM][MEASURED.index("matmul")] = -1.0
    if Quantity.ALL_REDUCE in zeros:
        zeros[Quantity.ALL_REDUCE][MEASURED.index(_slowest_links(workload))] = -1.0
    return {**rows, **zeros}


def on_one_host(workload: Workload) -> Workload | None:
    """The job on one of its hosts, each device with as many sequences; None: it runs on one, or does not fit on one."""
    cluster, strategy = workload.cluster, workload.strategy
    per_host = cluster.ranks_per_host
    if not per_host or strategy.devices <= per_host or strategy.devices % per_host:
        return None
    if workload.times is not None and cluster.groups[0].host.device.kind == "gpu":
        return None  # their exchanges were not timed, and a step on one GPU stands for all
    hosts, rest = strategy.devices // per_host, strategy.tp * strategy.pp * strategy.cp
    if per_host % rest or strategy.global_batch % hosts:
        return None
    dp = per_host // rest
    kept = {"dp": dp, "ep": min(strategy.ep, per_host), "dp_replicate": min(strategy.dp_replicate, dp)}
    smaller = replace(strategy, **kept, global_batch=strategy.global_batch // hosts)  # type: ignore[arg-type]  # all are numbers
    return replace(workload, strategy=smaller, cluster=cluster.with_hosts(1))


def _one_host_us(workload: Workload) -> float | None:
    try:
        smaller = on_one_host(workload)
        if smaller is None:
            return None
        check_strategy(smaller.strategy, smaller.model, smaller.sequence)
        return StepPrices(smaller).step_us(smaller.strategy)
    except InputError:
        return None


def _all_reduce_bytes_per_s(workload: Workload) -> float | None:
    """Bus bandwidth of an all-reduce over all devices: 2 (n - 1) / n of its bytes over its time (nccl-tests, PERFORMANCE.md)."""
    count, cluster, scales = workload.strategy.devices, workload.cluster, workload.scales
    if count == 1:
        return None
    placement = placement_of(cluster, range(count))
    if cluster.groups[0].host.device.kind == "gpu":
        time_us = float(collective_us("all_reduce", ALL_REDUCE_BYTES, cluster, placement))
    elif workload.times is not None:
        recorded_us = workload.times.collective_us("all_reduce", placement, ALL_REDUCE_BYTES)
        if recorded_us is None:
            return None
        time_us = recorded_us
    else:
        return None
    time_us *= scales.communication * getattr(scales, _slowest_links(workload)) / scales.bandwidth
    return float(2 * (count - 1) / count * ALL_REDUCE_BYTES / time_us * 1e6)


def _slowest_links(workload: Workload) -> str:
    return "inside" if workload.cluster.hosts == 1 else "between"


def _gemm_flops_per_s(workload: Workload) -> float | None:
    """Rate of one large product, by itself, so that the power limit does not lower the clock for long."""
    device, scales = workload.cluster.groups[0].host.device, workload.scales
    if device.kind != "gpu":
        if workload.times is None or not workload.times.times.flops_per_s:
            return None
        return workload.times.times.flops_per_s / (scales.compute * scales.matmul)
    costs = OpCosts(scales.device(device), workload.precision, workload.element_bytes, workload.runtime.kernels, continuous=True)
    time_us = costs.matmul_us(GEMM_ROWS, GEMM_ROWS, GEMM_ROWS) * scales.matmul
    return 2.0 * GEMM_ROWS**3 / time_us * 1e6


def _utilisation(prices: StepPrices, workload: Workload, step_us: float) -> float | None:
    """The share of the time in which a GPU runs kernels; those of NCCL that wait count. Cores have no such number."""
    if workload.cluster.groups[0].host.device.kind != "gpu":
        return None
    return _without_host_us(prices, workload) / step_us


def _without_host_us(prices: StepPrices, workload: Workload) -> float:
    """The time of a step whose host starts everything at once."""
    return prices.scaled(replace(workload.scales, host=0.0, checks=0.0)).step_us(workload.strategy)


def _power_w(prices: StepPrices, workload: Workload, step_us: float) -> float | None:
    device = workload.cluster.groups[0].host.device
    if device.power_w is None or device.kind != "gpu":
        return None
    scales = replace(workload.scales, host=0.0, checks=0.0, communication=0.0)
    busy = prices.scaled(scales).step_us(workload.strategy) / step_us
    return device.power_w * (IDLE_POWER + (1 - IDLE_POWER) * busy)
