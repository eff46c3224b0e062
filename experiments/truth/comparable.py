"""`comparable_toml`: MFU of published runs by source, device, precision and size of the model, as a file that the package ships."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dpro_search.parallel.model import parameters_of
from dpro_search.parallel.prepared import model_flops
from experiments.truth.contradictions import consistent
from experiments.truth.jobs import workload_of
from experiments.truth.rows import publisher_of
from experiments.truth.score import Scored

SIZES = (2e9, 1.2e10, 5e10, 1e11)  # parameters at which a group of models ends
_HEAD = """# Written by `python -m experiments.truth comparable FOLDER`: MFU of published runs, without masked scores of attention.
# parameters: the least and the most of the models. mfu_pct: quantiles of 10, 50 and 90 % of the runs.
"""


class _Group(NamedTuple):
    source: str
    device: str
    precision: str
    size: int


def comparable_toml(scored: Sequence[Scored]) -> str:
    """The file's text."""
    groups: dict[_Group, list[tuple[float, float, int]]] = defaultdict(list)
    for one in consistent([each for each in scored if each.timed]):
        workload, step_s = workload_of(one.row), one.row.number("step_time_s") or math.nan
        device = workload.cluster.groups[0].host.device
        peak = device.peak_flops_per_s(workload.precision)
        if peak is None:
            continue
        flops = workload.strategy.global_batch * model_flops(workload.model, workload.sequence) / workload.strategy.devices
        parameters = parameters_of(workload.model)
        group = _Group(
            publisher_of(one.row.values["source"]), device.name, workload.precision, int(np.searchsorted(SIZES, parameters))
        )
        groups[group].append((flops / step_s / peak * 100, parameters, workload.strategy.devices))
    tables = []
    for group, runs in sorted(groups.items()):
        mfu, parameters, devices = map(np.array, zip(*runs, strict=True))
        low, middle, high = np.quantile(mfu, (0.1, 0.5, 0.9))
        tables.append(
            f'[[runs]]\nsource = "{group.source}"\ndevice = "{group.device}"\nprecision = "{group.precision}"\n'
            f"parameters = [{parameters.min():.3g}, {parameters.max():.3g}]\ndevices = [{devices.min()}, {devices.max()}]\n"
            f"runs = {len(runs)}\nmfu_pct = [{low:.1f}, {middle:.1f}, {high:.1f}]\n"
        )
    return "\n".join((_HEAD, *tables))
