"""What ops of a recorded job would take as one fused op, from what its trace knows of them: for the search of op clusters.

    costs = ClusterCosts(default_model(), graph, recorded=trace.graphs[trace.graph_of_rank[0]])
    found = costs.times([("a", "b"), ("c", "d", "e")])      # many candidates at once cost little more than one
    pays = found.high_us < found.members_us                 # sure to pay; found.us < found.members_us: more likely than not

Every trace holds types, times and the wiring of ops; only some hold the shapes of tensors. A cluster without shapes is predicted
by a model that was trained without them, and whose intervals are as wide as its own errors on models that it had not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpro_search.collect.clusters.bundled import bundled_model_path
from dpro_search.collect.clusters.table import Cluster, ClusterOp, ClusterTensor
from dpro_search.collect.trace import Floats, GraphTensors, Ints, NodeGraph
from dpro_search.costmodel.learned.features import TimedOps, extent, shaped_features, timed_features
from dpro_search.costmodel.learned.model_file import FusionModel
from dpro_search.costmodel.learned.op_classes import kind_of
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import DataflowGraph, topological_order

_PASSING = frozenset(["Identity", "IdentityN", "StopGradient", "PreventGradient", "Snapshot"])  # hand their input on
_NO_TENSOR = frozenset(["Const", "NoOp"])  # a constant is compiled in, and an order is no data
_HANDLES = frozenset(["_Arg", "VarHandleOp"])  # a variable's handle has no shape
_UPDATES = frozenset(["variable", "gather"])  # kinds whose inputs may be handles


@dataclass(frozen=True, kw_only=True)
class ClusterTimes:
    """Predictions of n clusters.

    Attributes
    ----------
    us, low_us, high_us
        Duration of each as one fused op, and its 90 % interval, [n]; NaN where `origin` is `Origin.REFUSED`.
    members_us
        Its ops one after the other, as recorded, [n].
    origin
        `Origin` of each, [n].
    shaped
        Whether the shapes of its tensors were known, [n]; where not, the interval is wider for it.
    """

    us: Floats
    low_us: Floats
    high_us: Floats
    members_us: Floats
    origin: Ints
    shaped: npt.NDArray[np.bool_]

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
        self._types = graph.op_type
        mine = np.flatnonzero(graph.op_rank == rank)
        self._index = {graph.op_name[i]: int(i) for i in mine}
        self._us = np.median(graph.op_work_us, axis=0).tolist()
        self._needs = {int(i): graph.pred_idx[graph.pred_ptr[i] : graph.pred_ptr[i + 1]].tolist() for i in mine}
        self._users: dict[int, list[int]] = {int(i): [] for i in mine}
        for op, needs in self._needs.items():
            for source in needs:
                if source in self._users:  # a communication op also needs ops of other ranks
                    self._users[source].append(op)
        order = topological_order(graph.pred_ptr, graph.pred_idx)
        self._position = np.empty(len(order), dtype=np.int64)
        self._position[order] = np.arange(len(order))
        self._tensors = _Tensors(recorded, recorded.tensors, self._index) if recorded and recorded.tensors else None

    def times(self, clusters: Sequence[Iterable[str]]) -> ClusterTimes:
        """Predictions of clusters, each the names of its ops without the rank.

        Raises
        ------
        InputError
            A name is not of an op of this rank.
        """
        members = [self._members(names) for names in clusters]
        shaped = [self._shaped(ops) for ops in members]
        columns = np.full((3, len(members)), np.nan)
        origin = np.zeros(len(members), dtype=np.int64)
        known = np.array([cluster is not None for cluster in shaped], dtype=np.bool_)
        for estimator, chosen, features in (
            (self._model.estimator, known, shaped_features([cluster for cluster in shaped if cluster is not None])),
            (self._model.timed, ~known, timed_features([self._timed(members[i]) for i in np.flatnonzero(~known)])),
        ):
            if chosen.any():
                found = estimator.predict_interval(features)
                columns[:, chosen] = np.stack([found.us, found.low_us, found.high_us])
                origin[chosen] = found.origin
        return ClusterTimes(
            us=columns[0],
            low_us=columns[1],
            high_us=columns[2],
            members_us=np.array([sum(self._us[op] for op in ops) for ops in members], dtype=np.float64),
            origin=origin,
            shaped=known,
        )

    def _members(self, names: Iterable[str]) -> list[int]:
        """Ops of a cluster in topological order."""
        try:
            return sorted({self._index[name] for name in names}, key=lambda op: int(self._position[op]))
        except KeyError as error:
            raise InputError(f"op '{error.args[0]}' is not in the recorded graph of this rank") from error

    def _timed(self, members: list[int]) -> TimedOps:
        number = {op: k for k, op in enumerate(members)}
        ran = [self._us[op] > 0 for op in members]
        depth, width = extent([[number[s] for s in self._needs[op] if s in number] for op in members], ran)
        sources = {self._maker(s) for op in members for s in self._needs[op] if s not in number}
        return TimedOps(
            kinds=tuple(kind_of(self._types[op]) for op, did in zip(members, ran, strict=True) if did),
            us=tuple(self._us[op] for op in members if self._us[op] > 0),
            depth=depth,
            width=width,
            inputs=sum(s not in number and self._types[s] not in _NO_TENSOR for s in sources),
            outputs=sum(not users or any(u not in number for u in users) for users in map(self._users.__getitem__, members)),
        )

    def _maker(self, op: int) -> int:
        """The op that made what an op hands on."""
        while self._types[op] in _PASSING and self._needs.get(op):
            op = self._needs[op][0]
        return op

    def _shaped(self, members: list[int]) -> Cluster | None:
        """A cluster with its tensors; None where one of them was not seen."""
        if self._tensors is None:
            return None
        inside = set(members)
        numbers: dict[tuple[int, int], int] = {}
        tensors: list[ClusterTensor] = []

        def number(key: tuple[int, int], dtype: str, shape: tuple[int, ...], role: str) -> int:
            if key not in numbers:
                numbers[key] = len(tensors)
                tensors.append(ClusterTensor(dtype, shape, role))
            return numbers[key]

        made: dict[int, tuple[int, ...]] = {}
        for op in members:
            ports = self._tensors.outputs(op)
            if any(not seen for seen, _ in ports.values()):
                return None
            made[op] = tuple(
                number((op, port), seen[0], seen[1], "out" if any(user not in inside for user in users) else "inner")
                for port, (seen, users) in sorted(ports.items())
                if seen
            )
        ops = []
        for op in members:
            used = []
            for source, port, seen in self._tensors.inputs(op):
                kind = self._types[source]
                if not seen and not (kind in _HANDLES and kind_of(self._types[op]) in _UPDATES):
                    return None
                dtype, shape = seen or ("resource", ())
                used.append(number((source, port), dtype, shape, "const" if kind == "Const" else "in" if seen else "variable"))
            ops.append(ClusterOp(self._types[op], tuple(used), made[op]))
        return Cluster(ops=tuple(ops), tensors=tuple(tensors), op_us=tuple(self._us[op] for op in members))


_Seen = tuple[str, tuple[int, ...]] | None  # type and shape of a tensor; None: not seen


class _Tensors:
    """The recorded types of the tensors along a rank's data edges, by the numbers that its ops have in the dataflow graph."""

    def __init__(self, recorded: NodeGraph, tensors: GraphTensors, index: dict[str, int]) -> None:
        self._inputs: dict[int, list[tuple[int, int, _Seen]]] = {}
        self._outputs: dict[int, dict[int, tuple[_Seen, list[int]]]] = {op: {} for op in index.values()}
        unknown = next((name for name in recorded.name if name not in index), None)
        if unknown is not None:
            raise InputError(f"the recorded graph is of another rank or job: it has op '{unknown}'")
        numbers = [index[name] for name in recorded.name]
        for node, op in enumerate(numbers):
            edges = range(int(recorded.input_ptr[node]), int(recorded.input_ptr[node + 1]))
            own = self._inputs.setdefault(op, [])
            for edge in edges:
                port, kind = int(tensors.input_port[edge]), int(tensors.input_type[edge])
                if port < 0:
                    continue
                seen = (tensors.types[kind].dtype, tensors.types[kind].shape) if kind >= 0 else None
                source = numbers[int(recorded.input_idx[edge])]
                own.append((source, port, seen))
                known, users = self._outputs[source].get(port, (None, []))
                self._outputs[source][port] = known or seen, [*users, op]

    def inputs(self, op: int) -> list[tuple[int, int, _Seen]]:
        """(source, its port, what was seen) of each argument, in order."""
        return self._inputs[op]

    def outputs(self, op: int) -> dict[int, tuple[_Seen, list[int]]]:
        """Of each used port: what was seen, and the ops that use it."""
        return self._outputs[op]


def cluster_time_us(
    model: FusionModel, graph: DataflowGraph, ops: Iterable[str], *, recorded: NodeGraph | None = None, rank: int = 0
) -> tuple[float, float, float]:
    """(duration, lower end, upper end of its 90 % interval) of one cluster, us; NaN where nothing can be said.

    For many clusters of a graph, `ClusterCosts` does the common work once.
    """
    found = ClusterCosts(model, graph, recorded=recorded, rank=rank).times([tuple(ops)])
    return float(found.us[0]), float(found.low_us[0]), float(found.high_us[0])
