"""Data-parallel jobs of equal steps, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpro_search.collect.trace import CollectiveKind
from dpro_search.space.data_parallel import DataParallelJob, LinearCost, RankStep


def all_reduces(latency_us: float = 0.0, us_per_byte: float = 0.0) -> tuple[LinearCost, ...]:
    """The costs of a job that has all-reduces only."""
    return (LinearCost(kind=CollectiveKind.ALL_REDUCE, latency_us=latency_us, us_per_byte=us_per_byte),)


def replicated(step: RankStep, ranks: int, costs: tuple[LinearCost, ...], **options: Any) -> DataParallelJob:
    """All ranks run one step; options are fields of `DataParallelJob`."""
    return DataParallelJob(steps=(step,), step_of_rank=np.zeros(ranks, np.int64), costs=costs, **options)
