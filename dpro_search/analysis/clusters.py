"""``choice(rows)``: the best plans that searches found on several clusters or with several batches, and which of them to choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from dpro_search.kinds import JobInScenario
from dpro_search.kinds._work import EFFICIENCY_KEYS, efficiency
from dpro_search.search import SearchResult

ALMOST = 0.05
"""Iterations that differ by less count as equally fast: predictions are off by more."""


class BestPlanOnCluster(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The best plan on one cluster with one batch.

    Attributes
    ----------
    global_batch
        Given where several batches were asked for.
    run
        The run folder of the search.
    feasible
        False: nothing fits in memory, and the plan is the one that needs least.
    tokens_per_second, ..., energy_per_iteration_j
        See `kinds._work.Efficiency`; None: not known.
    """

    cluster: str
    global_batch: int | UnsetType = UNSET
    devices: int
    run: str
    feasible: bool
    plan: Mapping[str, object]
    name: str
    predicted_iteration_us: float
    interval_us: tuple[float, float]
    peak_memory_bytes: int | None
    tokens_per_second: float | None
    tokens_per_second_per_device: float | None
    mfu_pct: float | None
    cost_per_million_tokens: float | None
    cost_per_iteration_usd: float | None
    energy_per_iteration_j: float | None

    @property
    def batches_per_us(self) -> float:
        """Batches in a microsecond; sequences, where batches differ."""
        return (1 if self.global_batch is UNSET else self.global_batch) / self.predicted_iteration_us


class ImpossibleSearch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A cluster or a batch that the job cannot be searched with, and why."""

    cluster: str
    global_batch: int | UnsetType = UNSET
    error: str


class ClusterChoice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of the verb `run` for several clusters or batches; None: none fits, or none has a price.

    Attributes
    ----------
    fastest, cheapest, fewest_devices
        Names of clusters: with the most batches (of several batches, sequences) in a second, the cheapest tokens, and the fewest
        devices of those that are fast enough, where a speed was asked for.
    fastest_batch, cheapest_batch, fewest_devices_batch
        Their batches, where several were asked for.
    smallest_batch
        The smallest batch on the fastest cluster that is at most `ALMOST` slower. A larger batch changes the training and gains
        little.
    """

    clusters: tuple[BestPlanOnCluster | ImpossibleSearch, ...]
    fastest: str | None
    cheapest: str | None
    fewest_devices: str | UnsetType | None = UNSET
    fastest_batch: int | UnsetType | None = UNSET
    cheapest_batch: int | UnsetType | None = UNSET
    fewest_devices_batch: int | UnsetType | None = UNSET
    smallest_batch: int | UnsetType | None = UNSET

    @property
    def of_batches(self) -> bool:
        """Whether several batches are compared."""
        return any(row.global_batch is not UNSET for row in self.clusters)


def best_plan(cluster: str, batch: int | None, here: JobInScenario, result: SearchResult) -> BestPlanOnCluster:
    """The best plan of a search on a cluster; `batch`: None, where one was asked for."""
    best = result.plans[0]
    gives = None if here.work is None else efficiency(here.work, best.prediction.iteration_us)
    return BestPlanOnCluster(
        cluster=cluster,
        global_batch=UNSET if batch is None else batch,
        devices=here.cluster.ranks,
        run=result.run,
        feasible=result.feasible,
        plan=dict(best.plan.settings),
        name=result.names[0],
        predicted_iteration_us=best.prediction.iteration_us,
        interval_us=best.prediction.interval_us,
        peak_memory_bytes=best.prediction.peak_memory_bytes,
        **{key: None if gives is None else getattr(gives, key) for key in EFFICIENCY_KEYS},
    )


def choice(rows: Sequence[BestPlanOnCluster | ImpossibleSearch], tokens_per_second: float | None = None) -> ClusterChoice:
    """Choose among clusters and batches; `tokens_per_second`: what is fast enough, None: not asked for."""
    fit = [row for row in rows if isinstance(row, BestPlanOnCluster) and row.feasible]
    fastest = max(fit, key=lambda row: row.batches_per_us, default=None)
    priced = [(row.cost_per_million_tokens, row) for row in fit if row.cost_per_million_tokens is not None]
    cheapest = min(priced, key=lambda priced_row: priced_row[0])[1] if priced else None
    fewest: BestPlanOnCluster | UnsetType | None = UNSET
    if tokens_per_second is not None:
        enough = [row for row in fit if (row.tokens_per_second or 0.0) >= tokens_per_second]
        fewest = min(enough, key=lambda row: (row.devices, 0 if row.global_batch is UNSET else row.global_batch), default=None)
    answer = ClusterChoice(
        clusters=tuple(rows),
        fastest=None if fastest is None else fastest.cluster,
        cheapest=None if cheapest is None else cheapest.cluster,
        fewest_devices=fewest.cluster if isinstance(fewest, BestPlanOnCluster) else fewest,
    )
    if not answer.of_batches:
        return answer
    near = [
        row.global_batch
        for row in fit
        if fastest is not None and row.cluster == fastest.cluster and row.batches_per_us >= (1 - ALMOST) * fastest.batches_per_us
    ]
    return msgspec.structs.replace(
        answer,
        fastest_batch=None if fastest is None else fastest.global_batch,
        cheapest_batch=None if cheapest is None else cheapest.global_batch,
        fewest_devices_batch=fewest.global_batch if isinstance(fewest, BestPlanOnCluster) else fewest,
        smallest_batch=min((batch for batch in near if batch is not UNSET), default=None),
    )
