"""The jobs of `testbed`: how each is recorded and started, and its grid of 30 settings of the knobs that its framework has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from dpro_search.space.plan import Plan

_EXPERIMENTS = Path(__file__).resolve().parents[1]
SWITCHING = _EXPERIMENTS / "search" / "switching.py"
_KIB, _MIB = 2**10, 2**20
_GRID_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A framework with a way to communicate.

    Attributes
    ----------
    framework, comm
        What `dpro-search collect` calls them.
    script
        The training script and its own arguments.
    grid
        Settings for real runs; the first N of them are spread over the whole grid.
    at_once
        Settings that one process goes through (see `switching`); 1: each has a job of its own.
    """

    framework: str
    comm: str
    script: tuple[str, ...]
    grid: tuple[Plan, ...]
    at_once: int = 1

    def command(self, python: str, workload: str, steps: int, *, switched: Path | None = None) -> tuple[str, ...]:
        """The command of one rank; `switched` names the settings that one process goes through."""
        script, *arguments = self.script
        before = () if switched is None else (str(SWITCHING), str(switched.resolve()))
        training = (str(_EXPERIMENTS / "workloads" / script), *arguments, "--model", workload, "--steps", str(steps))
        return (python, *before, *training)

    def setting(self, plan: Plan) -> Mapping[str, Any]:
        """A grid's plan as `switching` takes it."""
        if plan.get("bucket_cap_bytes") is not None:
            return {"bucket_cap_mb": plan.get("bucket_cap_bytes") / _MIB}
        assert plan.get("cycle_time_us") is not None, "a grid of buckets or of Horovod's knobs"
        return {"threshold_bytes": plan.get("fusion_threshold_bytes"), "cycle_time_ms": plan.get("cycle_time_us") / 1e3}


def _spread(plans: list[Plan]) -> tuple[Plan, ...]:
    """In an order of which every beginning is spread over all, and which is always the same."""
    order = np.random.default_rng(_GRID_SEED).permutation(len(plans))
    return tuple(plans[i] for i in order)


def _horovod_grid() -> tuple[Plan, ...]:
    thresholds = [mib * _MIB for mib in (1, 4, 8, 16, 32, 128)]
    cycles_us = (1000.0, 2500.0, 5000.0, 10_000.0, 25_000.0)
    return _spread([Plan.of(fusion_threshold_bytes=size, cycle_time_us=us) for size, us in product(thresholds, cycles_us)])


def _kvstore_grid() -> tuple[Plan, ...]:
    servers = (1, 2, 4)
    bounds = (30_000, 100_000, 300_000, 1_000_000, 3_000_000)
    slices = (40_000, 100_000, 400_000, 1_000_000, 4_000_000)
    plain = [Plan.of(servers=count, bigarray_bound=bound) for count, bound in product(servers, bounds)]
    return _spread([*plain, *(Plan.of(servers=count, p3=True, slice_threshold=size) for count, size in product(servers, slices))])


def _byteps_grid() -> tuple[Plan, ...]:
    partitions = (256_000, 512_000, 1_024_000, 2_048_000, 4_096_000)
    choices = product((1, 2), partitions, (0, 4, 16))
    return _spread([Plan.of(servers=count, partition_bytes=size, credit=credit) for count, size, credit in choices])


def _bucket_grid() -> tuple[Plan, ...]:
    sizes = np.geomspace(0.25 * _MIB, 128 * _MIB, 30)
    return _spread([Plan.of(bucket_cap_bytes=round(size / (64 * _KIB)) * 64 * _KIB) for size in sizes.tolist()])


SCHEMES = {
    "tensorflow": Scheme(framework="tensorflow", comm="horovod", script=("train.py",), grid=_horovod_grid(), at_once=15),
    "ps": Scheme(framework="mxnet", comm="kvstore", script=("mxnet_train.py", "--comm", "kvstore"), grid=_kvstore_grid()),
    "byteps": Scheme(framework="mxnet", comm="byteps", script=("mxnet_train.py", "--comm", "byteps"), grid=_byteps_grid()),
    "ddp": Scheme(framework="pytorch", comm="ddp", script=("torch_train.py",), grid=_bucket_grid(), at_once=15),
}
