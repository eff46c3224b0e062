"""`contradictions`: rows that contradict themselves or other rows of the same network, told without any prediction.

Three tests, of what sources give:

* *one device's throughput*: a run that reached its target has seen as many samples as other runs of the network, within a factor
  of `ALIKE`. Where throughput times time to the target is too little, and times the number of GPUs it is enough, the throughput is
  that of one GPU. What runs need is what most of them agree on, as given or times their GPUs.
* *another unit*: on the same network and GPU in the same source, throughput of a GPU is less than 1/`FARTHEST` of the median.
* *faster than the device*: the step is shorter than its matmuls at the peak rate of all devices.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from dpro_search.errors import DproSearchError
from dpro_search.parallel.model import Architecture, Experts, parameters_of
from dpro_search.parallel.strategy import Recompute
from experiments.truth.jobs import workload_of
from experiments.truth.machines import machine_of
from experiments.truth.models import model_of
from experiments.truth.rows import Row
from experiments.truth.score import Scored

ALIKE = 2.0
FARTHEST = 100.0
_TO_TARGET = re.compile(r"time-to-train median ([\d.]+) s")


def contradictions(rows: Sequence[Row]) -> Mapping[int, str]:
    """The reason by the place of a row that cannot be what it says."""
    found: dict[int, str] = {}
    timed = [place for place, row in enumerate(rows) if row.measured]
    by_network, by_source = defaultdict(list), defaultdict(list)
    for place in timed:
        row = rows[place]
        by_network[row.text("model")].append(place)
        by_source[row.text("source"), _network(row), machine_of(row)].append(place)
    for places in by_source.values():
        found.update(_other_units(rows, places))
    for places in by_network.values():
        found.update(_one_devices(rows, places))
    found.update({place: "faster than its matmuls at the devices' peak" for place in timed if _beyond_peak(rows[place])})
    return found


def consistent(scored: Sequence[Scored]) -> list[Scored]:
    """Those whose rows contradict nothing."""
    wrong = contradictions([found.row for found in scored])
    return [found for place, found in enumerate(scored) if place not in wrong]


def _network(row: Row) -> str:
    """The model that a row's name stands for, which may be one of several."""
    try:
        return f"{row.text('model')} {model_of(row).name}"
    except DproSearchError:
        return row.text("model")


def _one_devices(rows: Sequence[Row], places: Sequence[int]) -> dict[int, str]:
    seen: dict[int, tuple[float, float]] = {}
    for place in places:
        row, to_target = rows[place], _TO_TARGET.search(rows[place].text("notes"))
        rate = row.number("samples_per_s")
        if to_target and rate:
            samples = rate * float(to_target.group(1))
            seen[place] = float(np.log(samples)), float(np.log(samples * row.whole("n_gpus", 1)))
    if not seen:
        return {}
    logs = np.array(list(seen.values()))
    near = [(np.abs(logs - needed) < np.log(ALIKE)) for needed in logs.ravel()]
    agree = max(near, key=lambda each: (each.any(axis=1).sum(), each[:, 0].sum()))
    return {
        place: "its throughput is that of one GPU: times the time to the target it is too few samples"
        for place, (given, times_devices) in zip(seen, agree, strict=True)
        if times_devices and not given
    }


def _other_units(rows: Sequence[Row], places: Sequence[int]) -> dict[int, str]:
    rates = {place: (rows[place].number("samples_per_s") or 0.0) / rows[place].whole("n_gpus", 1) for place in places}
    usual = float(np.median([rate for rate in rates.values() if rate] or [0.0]))
    reason = f"less than 1/{FARTHEST:.0f} of the throughput of the same network and GPU in the same source"
    return {place: reason for place, rate in rates.items() if 0 < rate < usual / FARTHEST}


def _beyond_peak(row: Row) -> bool:
    """Whether a dense transformer's step is faster than its FLOPs: 6 a token and parameter, 4 where only adapters are trained.

    A forward pass that is computed again is 2 more.
    """
    try:
        workload = workload_of(row)
    except DproSearchError:
        return False
    model, strategy = workload.model, workload.strategy
    if not isinstance(model, Architecture) or any(isinstance(layer.feed_forward, Experts) for layer in model.layers):
        return False
    peak = workload.cluster.groups[0].host.device.peak_flops_per_s(workload.precision)
    tokens = strategy.global_batch * workload.sequence
    used = parameters_of(model) - model.vocab * model.hidden
    step_s = row.number("step_time_s")
    each = (4 if workload.frozen else 6) + (2 if strategy.recompute is Recompute.FULL and not strategy.recompute_layers else 0)
    return bool(peak and step_s and each * used * tokens / (strategy.devices * peak) > step_s)
