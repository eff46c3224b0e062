"""Durations of ops of a recorded job as one fused op, from its trace: for the search of op clusters.

    costs = ClusterCosts(default_model(), graph, recorded=trace.graphs[trace.graph_of_rank[0]])
    times = costs.times([("a", "b"), ("c", "d", "e")])      # many candidates at once cost little more than one
    pays = times.high_us < times.members_us                 # sure to pay; times.us < times.members_us: more likely than not

Every trace holds types, times and the wiring of ops; only some hold the shapes of tensors. A cluster without shapes is predicted
by a model that was trained without them, and whose intervals are as wide as its own errors on models that it had not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpro_search.collect.tables.clusters import bundled_model_path
from dpro_search.collect.trace import Floats, Ints, NodeGraph
from dpro_search.costmodel.fused.features import ClusterFeatures, shaped_features, timed_features
from dpro_search.costmodel.fused.flat import pointers
from dpro_search.costmodel.fused.model_file import FusionModel
from dpro_search.costmodel.fused.recorded_ops import shaped_clusters, tensors_of, timed_clusters, wiring_of
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import DataflowGraph, topological_order


@dataclass(frozen=True, kw_only=True)
class ClusterTimes:
    """Predictions of n clusters."""

    # us, low_us, high_us: Duration of each as one fused op, and its 90 % interval, [n]; NaN where `origin` is
    # `PredictionOrigin.REFUSED`.
    us: Floats
    low_us: Floats
    high_us: Floats
    members_us: Floats  # Its ops one after the other, as recorded, [n].
    origin: Ints  # `PredictionOrigin` of each, [n].
    shaped: npt.NDArray[np.bool_]  # Whether the shapes of its tensors were known, [n]; where not, the interval is wider for it.

    def __len__(self) -> int:
        return len(self.us)


def default_model() -> FusionModel:
    """The model that the package bundles; raises `MissingCapabilityError` if it was built without one."""
    return FusionModel.load(bundled_model_path())


class ClusterCosts:
    """Predicts clusters of one rank's ops.

    Parameters
    ----------
    model
        A trained model: `default_model()`, or `FusionModel.load` of a folder made by ``dpro-search fit``.
    graph
        The recorded job; op times are the medians over its sampled steps.
    recorded
        The rank's graph in the trace, which may hold shapes. None: there are none.
    rank
        Whose ops.
    """

    def __init__(self, model: FusionModel, graph: DataflowGraph, *, recorded: NodeGraph | None = None, rank: int = 0) -> None:
        self._model = model
        self._index = {graph.op_name[i]: i for i in np.flatnonzero(graph.op_rank == rank).tolist()}
        self._us = np.median(graph.op_work_us, axis=0)
        order = topological_order(graph.pred_ptr, graph.pred_idx)
        self._position = np.empty(len(order), dtype=np.int64)
        self._position[order] = np.arange(len(order))
        self._wiring = wiring_of(graph, rank, order)
        self._tensors = None
        if recorded is not None and recorded.tensors is not None:
            self._tensors = tensors_of(graph, recorded, recorded.tensors, self._index)

    def times(self, clusters: Sequence[Iterable[str]]) -> ClusterTimes:
        """Predictions of clusters, each the names of its ops without the rank.

        Raises
        ------
        InputError
            A name is not of an op of this rank, or a cluster has none.
        """
        ptr, members = self._members(clusters)
        shaped = np.zeros(len(clusters), dtype=np.bool_)
        if self._tensors is not None and len(clusters):
            # A cluster with a tensor that was not seen counts as one without shapes.
            shaped = np.logical_and.reduceat(self._tensors.known[members], ptr[:-1])
        columns = np.full((3, len(clusters)), np.nan)
        origin = np.zeros(len(clusters), dtype=np.int64)
        for cost, chosen in ((self._model.shaped, shaped), (self._model.timed, ~shaped)):
            if chosen.any():
                durations = cost.predict_interval(self._features(*_picked(ptr, members, chosen), cost.sees))
                columns[:, chosen] = np.stack([durations.us, durations.low_us, durations.high_us])
                origin[chosen] = durations.origin
        return ClusterTimes(
            us=columns[0],
            low_us=columns[1],
            high_us=columns[2],
            members_us=np.add.reduceat(self._us[members], ptr[:-1]) if len(clusters) else np.zeros(0),
            origin=origin,
            shaped=shaped,
        )

    def _members(self, clusters: Sequence[Iterable[str]]) -> tuple[Ints, Ints]:
        """Distinct ops of each cluster in topological order: those of cluster i from ptr[i] to ptr[i + 1]."""
        try:
            named = [{self._index[name] for name in names} for names in clusters]
        except KeyError as error:
            raise InputError(f"op '{error.args[0]}' is not in the recorded graph of this rank") from error
        if not all(named):
            raise InputError("a cluster has no ops")
        ptr = pointers(map(len, named))
        members = np.array([op for ops in named for op in ops], dtype=np.int64)
        of = np.repeat(np.arange(len(named)), np.diff(ptr))
        return ptr, members[np.lexsort((self._position[members], of))]

    def _features(self, ptr: Ints, members: Ints, sees: str) -> ClusterFeatures:
        if sees == "shapes":
            assert self._tensors is not None, "else no cluster is known with shapes"
            return shaped_features(shaped_clusters(ptr, members, self._us, self._tensors))
        return timed_features(timed_clusters(ptr, members, self._us, self._wiring))


def _picked(ptr: Ints, members: Ints, chosen: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Pointers and members of some of the clusters."""
    counts = np.diff(ptr)
    return np.concatenate(([0], np.cumsum(counts[chosen]))), members[np.repeat(chosen, counts)]
