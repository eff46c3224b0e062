"""BERT-base as a job of TensorFlow with Horovod, op by op with their types, so that all transformations apply: 16 workers.

    plans = bert_plans()                        # prices, space and guide of a search
    plans = recorded_plans(Trace.load(folder))  # the same questions to a recorded job

Sizes of the tensors are the published ones; ops and their wiring are about those that Keras makes of the model and of Adam. Nothing
was measured: an op takes its launch, its floating-point operations at the rate of a V100 and its bytes at that of its memory; steps
differ by a few per cent. The network is 25 Gbit/s. What fused ops and bfloat16 take is asked of the models that the package
bundles.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dpro_search.collect.trace import CommSettings, Floats, TensorInfo, Trace
from dpro_search.costmodel.collectives.horovod import CommCosts, wire_us_per_byte
from dpro_search.costmodel.precision import BUNDLED_TABLE
from dpro_search.graph.dataflow import DataflowGraph, OpKind, RankProfile, Release, TensorOps
from dpro_search.kinds import COMPUTE, JobInScenario, PlanOptions
from dpro_search.kinds._measured import MeasuredStep
from dpro_search.kinds.horovod.job import Horovod
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.scenario import ClusterChange, Scenario

_ALL = PlanOptions(compute=frozenset(COMPUTE), allow_lossy=True, precision_table=BUNDLED_TABLE)
WORKERS = 16
_RANKS, _SAMPLES = 2, 4  # profiled ranks, which the workers take after in turn, and their steps
_RATE_BPS, _MESSAGE_US = 25e9, 30.0
_BLOCKS, _WIDTH, _HEADS, _LENGTH, _BATCH = 12, 768, 12, 128, 32
_TOKENS = _BATCH * _LENGTH
_HIDDEN, _SCORES = _TOKENS * _WIDTH, _BATCH * _HEADS * _LENGTH * _LENGTH  # elements
_LAUNCH_US, _FLOPS_PER_US, _BYTES_PER_US = 4.0, 10e6, 0.6e6
_STREAMS = 3 * 4  # bytes that an op moves for an element: two float32 read, one written

# What the gradient of an op's input takes (left out: an op of its type), and that of its parameter: ops in a chain.
_INPUT_GRADIENT = {
    "AddV2": "", "BiasAdd": "", "Erf": "Square Neg Exp Mul Mul", "GatherV2": "", "Mean": "Reshape RealDiv", "Rsqrt": "RsqrtGrad",
    "Softmax": "Mul Sum Sub Mul", "SparseSoftmaxCrossEntropyWithLogits": "Mul", "SquaredDifference": "Sub Mul Mul",
    "StridedSlice": "StridedSliceGrad", "Sub": "Neg", "Tanh": "TanhGrad",
}  # fmt: skip
_PARAMETER_GRADIENT = {
    "AddV2": "Sum", "BiasAdd": "BiasAddGrad", "GatherV2": "UnsortedSegmentSum", "MatMul": "MatMul", "Mul": "Mul Sum", "Sub": "Sum",
}  # fmt: skip
_PRODUCTS = ("MatMul", "BatchMatMulV2")
_ADAM = (
    "Sub Mul AssignAddVariableOp Square Sub Mul AssignAddVariableOp ReadVariableOp Mul ReadVariableOp Sqrt AddV2 RealDiv "
    "AssignSubVariableOp"
)


def bert_plans() -> JobInScenario:
    """Prices of the plans of the job, under all transformations but a memory limit: the memory of its ops is not known."""
    graph = bert_graph()
    cluster = ClusterSpec(cores=tuple(range(WORKERS)), rate_bps=_RATE_BPS)
    recorded = CommSettings(fusion_threshold_bytes=128 * 2**20, cycle_time_us=1000.0)
    return JobInScenario(Horovod(MeasuredStep(graph=graph, costs=_costs(), cluster=cluster), recorded, _ALL))


def recorded_plans(trace: Trace, workers: int = WORKERS) -> JobInScenario:
    """Prices of the plans of a recorded job of TensorFlow with Horovod on so many workers, each on a core of its own."""
    return JobInScenario(Horovod.of(trace, _ALL)).under(Scenario(cluster=ClusterChange(ranks=workers)))[0]


def bert_graph() -> DataflowGraph:
    """The step of `_RANKS` ranks."""
    step = _Step()
    loss = _model(step)
    step.differentiate(loss)
    return _graph(step)


def _model(step: _Step) -> int:
    """The forward pass; gives the op of the loss."""
    hidden = step.forward("GatherV2", _HIDDEN, [], parameter=("embeddings.words", 30_522 * _WIDTH))
    hidden = step.forward("AddV2", _HIDDEN, [hidden], parameter=("embeddings.positions", 512 * _WIDTH))
    hidden = step.forward("AddV2", _HIDDEN, [hidden], parameter=("embeddings.types", 2 * _WIDTH))
    hidden = _dropout(step, _norm(step, hidden, "embeddings"), _HIDDEN)
    for block in range(_BLOCKS):
        hidden = _block(step, hidden, f"block{block}")
    first = step.forward("StridedSlice", _BATCH * _WIDTH, [hidden])
    pooled = _dense(step, first, "pooler", _WIDTH, _WIDTH, rows=_BATCH)
    pooled = step.forward("Tanh", _BATCH * _WIDTH, [pooled])
    losses = step.forward("SparseSoftmaxCrossEntropyWithLogits", _BATCH * _WIDTH, [pooled])
    return step.forward("Mean", _BATCH, [losses])


def _block(step: _Step, hidden: int, name: str) -> int:
    """Attention and two dense layers, each with dropout, residual and normalisation."""
    query, key, value = (_head(step, hidden, f"{name}.{part}") for part in ("query", "key", "value"))
    flops = 2.0 * _TOKENS * _LENGTH * _WIDTH
    scores = step.forward("BatchMatMulV2", _SCORES, [query, key], flops=flops)
    for op_type in ("Mul", "AddV2", "Softmax"):  # scale and mask
        scores = step.forward(op_type, _SCORES, [scores])
    context = step.forward("BatchMatMulV2", _HIDDEN, [_dropout(step, scores, _SCORES), value], flops=flops)
    context = step.forward("Reshape", _HIDDEN, [step.forward("Transpose", _HIDDEN, [context])])
    attended = _dropout(step, _dense(step, context, f"{name}.projection", _WIDTH, _WIDTH), _HIDDEN)
    hidden = _norm(step, step.forward("AddV2", _HIDDEN, [hidden, attended]), f"{name}.norm1")
    wide = _gelu(step, _dense(step, hidden, f"{name}.expand", _WIDTH, 4 * _WIDTH), 4 * _HIDDEN)
    narrow = _dropout(step, _dense(step, wide, f"{name}.contract", 4 * _WIDTH, _WIDTH), _HIDDEN)
    return _norm(step, step.forward("AddV2", _HIDDEN, [hidden, narrow]), f"{name}.norm2")


def _head(step: _Step, hidden: int, name: str) -> int:
    dense = step.forward("Reshape", _HIDDEN, [_dense(step, hidden, name, _WIDTH, _WIDTH)])
    return step.forward("Transpose", _HIDDEN, [dense])


def _dense(step: _Step, hidden: int, name: str, inputs: int, outputs: int, rows: int = _TOKENS) -> int:
    kernel, flops = (f"{name}.kernel", inputs * outputs), 2.0 * rows * inputs * outputs
    product = step.forward("MatMul", rows * outputs, [hidden], flops=flops, parameter=kernel)
    return step.forward("BiasAdd", rows * outputs, [product], parameter=(f"{name}.bias", outputs))


def _dropout(step: _Step, hidden: int, elements: int) -> int:
    return step.forward("Mul", elements, [step.forward("Mul", elements, [hidden])])


def _gelu(step: _Step, hidden: int, elements: int) -> int:
    smooth = hidden
    for op_type in ("Mul", "Erf", "AddV2"):
        smooth = step.forward(op_type, elements, [smooth])
    return step.forward("Mul", elements, [smooth, step.forward("Mul", elements, [hidden])])


def _norm(step: _Step, hidden: int, name: str) -> int:
    """Layer normalisation as Keras writes it out."""
    mean = step.forward("Mean", _HIDDEN, [hidden])
    variance = step.forward("Mean", _HIDDEN, [step.forward("SquaredDifference", _HIDDEN, [hidden, mean])])
    inverse = step.forward("Rsqrt", _TOKENS, [step.forward("AddV2", _TOKENS, [variance])])
    scale = step.forward("Mul", _HIDDEN, [inverse], parameter=(f"{name}.gamma", _WIDTH))
    scaled, shift = step.forward("Mul", _HIDDEN, [hidden, scale]), step.forward("Mul", _HIDDEN, [mean, scale])
    shift = step.forward("Sub", _HIDDEN, [shift], parameter=(f"{name}.beta", _WIDTH))
    return step.forward("AddV2", _HIDDEN, [scaled, shift])


@dataclass(frozen=True, kw_only=True)
class _Forward:
    """A forward op that gradients go back through: its inputs without the parameter, and the parameter's number or -1."""

    op: int
    elements: int
    flops: float
    inputs: list[int]
    parameter: int


@dataclass
class _Step:
    """One rank's forward and backward ops in the order of their execution; columns are [ops]."""

    type: list[str] = field(default_factory=list)
    kind: list[OpKind] = field(default_factory=list)
    us: list[float] = field(default_factory=list)
    needs: list[list[int]] = field(default_factory=list)
    parameters: list[tuple[str, int]] = field(default_factory=list)  # name and elements
    gradient: dict[int, int] = field(default_factory=dict)  # the op that ends each parameter's gradient
    _forward: list[_Forward] = field(default_factory=list)

    def op(self, op_type: str, kind: OpKind, elements: int, needs: list[int], flops: float = 0.0) -> int:
        self.type.append(op_type)
        self.kind.append(kind)
        self.us.append(op_us(elements, flops))
        self.needs.append(needs)
        return len(self.type) - 1

    def forward(
        self, op_type: str, elements: int, inputs: list[int], *, flops: float = 0.0, parameter: tuple[str, int] | None = None
    ) -> int:
        needs, number = inputs, -1
        if parameter is not None:
            needs = [*inputs, self.op("ReadVariableOp", OpKind.FORWARD, 0, [])]
            number = len(self.parameters)
            self.parameters.append(parameter)
        op = self.op(op_type, OpKind.FORWARD, elements, needs, flops)
        self._forward.append(_Forward(op=op, elements=elements, flops=flops, inputs=inputs, parameter=number))
        return op

    def differentiate(self, loss: int) -> None:
        """Add the backward pass: from the loss back, one chain of ops for each input, and one for the parameter."""
        arrived: dict[int, list[int]] = {loss: [loss]}
        for made in reversed(self._forward):
            op_type, known = self.type[made.op], arrived.pop(made.op)
            gradient = known[0] if len(known) == 1 else self.op("AddN", OpKind.BACKWARD, made.elements, known)
            if made.parameter >= 0:
                self.gradient[made.parameter] = self._chain(_PARAMETER_GRADIENT[op_type], made, gradient)
            for source in made.inputs:
                arrived.setdefault(source, []).append(self._chain(_INPUT_GRADIENT.get(op_type, op_type), made, gradient))

    def _chain(self, types: str, made: _Forward, gradient: int) -> int:
        """Ops one behind the other, the first of which also reads what the forward op read."""
        op = gradient
        for number, op_type in enumerate(types.split()):
            needs = [op] if number else list(dict.fromkeys([op, *self.needs[made.op]]))
            op = self.op(op_type, OpKind.BACKWARD, made.elements, needs, made.flops if op_type in _PRODUCTS else 0.0)
        return op


def op_us(elements: int, flops: float = 0.0) -> float:
    """What an op takes that makes so many elements; nothing where it makes none."""
    return _LAUNCH_US + flops / _FLOPS_PER_US + _STREAMS * elements / _BYTES_PER_US if elements else 0.0


def _graph(step: _Step) -> DataflowGraph:
    """All ranks' ops: forward and backward, then an all-reduce and its update for each gradient."""
    main, adam = len(step.type), _ADAM.split()
    rng = np.random.default_rng(0)
    order = sorted(range(len(step.parameters)), key=step.gradient.__getitem__)  # of the posts, in which tensors are numbered
    types, kinds, us, needs = list(step.type), list(step.kind), list(step.us), list(step.needs)
    comm: list[int] = []
    for parameter in order:
        comm.append(len(types))
        types += ["HorovodAllreduce", *adam]
        kinds += [OpKind.COMM] + [OpKind.UPDATE] * len(adam)
        us += [0.0] + [op_us(step.parameters[parameter][1])] * len(adam)
        needs += [[], *([op] for op in range(comm[-1], comm[-1] + len(adam)))]
    count = len(types)
    work_us = np.array(us) * rng.normal(1.0, 0.02, (_SAMPLES, _RANKS, 1)) * rng.normal(1.0, 0.03, (_SAMPLES, _RANKS, count))
    work_us = np.maximum(work_us, 0.0)
    ptr, idx = [0], list[int]()
    producer = {op: step.gradient[parameter] for op, parameter in zip(comm, order, strict=True)}
    for rank in range(_RANKS):
        for op in range(count):
            if op in producer:  # what is reduced comes from all ranks
                idx += [other * count + producer[op] for other in range(_RANKS)]
            else:
                idx += sorted({rank * count + source for source in needs[op]})
            ptr.append(len(idx))
    return DataflowGraph(
        op_name=tuple(f"{op_type}_{number}" for number, op_type in enumerate(types)) * _RANKS,
        op_type=tuple(types) * _RANKS,
        op_rank=np.repeat(np.arange(_RANKS), count),
        op_kind=np.tile(np.array(kinds, dtype=np.int64), _RANKS),
        op_work_us=work_us.reshape(_SAMPLES, _RANKS * count),
        pred_ptr=np.array(ptr),
        pred_idx=np.array(idx),
        tensors=tuple(
            _tensor(*step.parameters[number], node=f"HorovodAllreduce_{op}") for op, number in zip(comm, order, strict=True)
        ),
        placements=tuple(
            TensorOps(
                producer=tuple(rank * count + producer[op] for rank in range(_RANKS)),
                comm=tuple(rank * count + op for rank in range(_RANKS)),
                consumers=tuple((rank * count + op + 1,) for rank in range(_RANKS)),
            )
            for op in comm
        ),
        profiles=tuple(_profile(work_us[:, rank], main, comm, producer, len(adam)) for rank in range(_RANKS)),
        steps=np.arange(_SAMPLES),
        unplaced={},
    )


def _profile(work_us: Floats, main: int, comm: list[int], producer: dict[int, int], updates: int) -> RankProfile:
    """A rank's ops one behind the other, [samples, ops], as the replay takes them."""
    ended_us = np.cumsum(work_us[:, :main], axis=1)
    return RankProfile(
        post_us=ended_us[:, [producer[op] for op in comm]],
        main_us=ended_us[:, -1],
        releases=tuple(
            Release(tensors=(tensor,), work_us=work_us[:, op + 1 : op + 1 + updates].sum(axis=1)) for tensor, op in enumerate(comm)
        ),
        host_us=np.full(_SAMPLES, 200.0),
        concurrency=1.0,
    )


def _tensor(name: str, elements: int, node: str) -> TensorInfo:
    return TensorInfo(name=name, node=node, dtype="float32", shape=(elements,), size_bytes=4 * elements)


def _costs() -> CommCosts:
    """A ring of so many messages, hardly any of whose work is done where the ops run."""
    alpha_us, beta_us = 2 * (WORKERS - 1) * _MESSAGE_US, wire_us_per_byte(_RATE_BPS, WORKERS)
    negotiate_us = np.random.default_rng(1).normal(200.0, 20.0, 64)
    return CommCosts(
        alpha_busy_us=alpha_us,
        alpha_more_us=0.0,
        alpha_tail_us=alpha_us,
        dispatch_us=20.0,
        beta_busy_us=beta_us,
        beta_tail_us=beta_us,
        negotiate_busy_us=negotiate_us,
        negotiate_idle_us=negotiate_us,
        copy_in_us=2 / _BYTES_PER_US,
        copy_out_us=2 / _BYTES_PER_US,
        cpu_us=0.05 * beta_us,
        cycle_cpu_us=5.0,
        collective_cpu_us=10.0,
        residual_pct=1.0,
    )
