"""Mixed precision: ops that compute in bfloat16, within TensorFlow's safety lists."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from dpro_search.costmodel.memory import cast_elements
from dpro_search.graph.dataflow import OpKind
from dpro_search.space.plan import Plan
from dpro_search.space.transformations._base import RECORDED, Choice, PlanningFacts
from dpro_search.space.transformations.compute import ComputeChange, ComputeGraph, ComputeTransformation

# By type, as TensorFlow's pass for mixed precision sorts them: always safe; as safe as what they are computed from; never.
_SAFE_TYPES = (
    "BatchMatMul BatchMatMulV2 Conv2D Conv2DBackpropFilter Conv2DBackpropInput DepthwiseConv2dNative Einsum MatMul "
    "DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput"
)
_BETWEEN_TYPES = (
    "Add AddN AddV2 AvgPool AvgPoolGrad BiasAdd BiasAddGrad Elu EluGrad Erf FusedBatchNormV3 FusedBatchNormGradV3 LeakyRelu "
    "LeakyReluGrad MaxPool MaxPoolGrad Mul Relu ReluGrad Relu6 Relu6Grad Sub Tanh TanhGrad"
)
_UNSAFE_TYPES = (
    "Exp Expm1 L2Loss Log Log1p LogSoftmax Mean Pow Prod Rsqrt Softmax SoftmaxCrossEntropyWithLogits Sqrt Sum "
    "SparseSoftmaxCrossEntropyWithLogits"
)
SAFE, BETWEEN, UNSAFE = (frozenset(types.split()) for types in (_SAFE_TYPES, _BETWEEN_TYPES, _UNSAFE_TYPES))
_TYPE_SHARE = 0.7  # of the moves change all ops of a type; the others one op


class Ratios(Protocol):
    """Says what bfloat16 does to an op's time; `costmodel.precision.PrecisionModel` does.

    Attributes
    ----------
    cast_share
        Time of casts over the float32 time of the ops that change, where sizes are not known.
    """

    @property
    def cast_share(self) -> float: ...

    def ratio(self, op_type: str, float32_us: float | None = None) -> tuple[float, float, float] | None:
        """Time in bfloat16 over that in float32, without casts, and its interval; None where it is not known."""

    def cast_us(self, elements: float) -> float:
        """Time of a cast between the two."""


class _Change(NamedTuple):
    """Effect of bfloat16 on an op: the factor of its time, the uncertainty, and its casts where sizes are not known."""

    factor: float
    uncertainty_us: float
    casts_us: float


class Precision(ComputeTransformation):
    """Forward and backward ops of types that were measured in both precisions."""

    name = "precision"
    fields = ("bfloat16_ops",)
    weight = 2.0

    def __init__(self, job: PlanningFacts, compute: ComputeGraph, ratios: Ratios) -> None:
        self._ratios = ratios
        self.compute = compute
        self._by_type: dict[str, list[str]] = {}
        for name in compute.ops:
            if self._refusal(name) is None:
                self._by_type.setdefault(self.type(name), []).append(name)
        self._able = frozenset(name for names in self._by_type.values() for name in names)
        self._changes: dict[str, _Change] = {}
        self._types = tuple(self._by_type)
        self._place = {name: ops[0] for name, ops in compute.ops.items()}
        super().__init__(job, compute)

    def legal(self, plan: Plan) -> str | None:
        return self.first_refusal(plan.bfloat16_ops or (), self._able, self._refusal)

    def propose(self, plan: Plan, rng: np.random.Generator, hot: Mapping[str, float]) -> Plan:
        if not self._types:
            return plan
        taken = self.taken(plan)
        chosen = set(plan.bfloat16_ops or ())
        alike = self._by_type[self._types[rng.integers(len(self._types))]]
        if rng.random() >= _TYPE_SHARE:
            alike = [alike[rng.integers(len(alike))]]
        moved = chosen - set(alike) if set(alike) - taken <= chosen else chosen | (set(alike) - taken)
        return self._with(plan, moved)

    def suggested(self, plan: Plan, delay_us: Mapping[str, float]) -> Plan | None:
        """All ops that gain."""
        if self.choice is None:
            return None
        taken = self.taken(plan)
        suggestion = self._with(plan, {*(plan.bfloat16_ops or ()), *self.choice.grids["set"][-1]["bfloat16_ops"]} - taken)
        return None if suggestion == plan else suggestion

    def gaining_us(self, float32_us: Mapping[str, float], without: Collection[str] = ()) -> dict[str, float]:
        """Times in bfloat16, about what is cast included, of the ops that are faster with it than the times given."""
        gain_us_of = {}
        for name in self._able.difference(without):
            change = self._change(name)
            us = float32_us[name] * change.factor + change.casts_us
            if us < float32_us[name]:
                gain_us_of[name] = us
        return gain_us_of

    def simplest(self, plan: Plan) -> Plan:
        return plan if plan.bfloat16_ops is None else self._with(plan, set(plan.bfloat16_ops))

    def apply(self, change: ComputeChange, plan: Plan) -> None:
        names = plan.bfloat16_ops or ()
        if not names:
            return
        casts_us = self._casts_us(names)
        changes = [self._change(name) for name in names]
        ops = np.array([self.compute.ops[name] for name in names])
        change.work_us[:, ops] *= np.array([one.factor for one in changes])[:, None]
        more_us = [one.casts_us for one in changes] if casts_us is None else [casts_us.get(name, 0.0) for name in names]
        change.work_us[:, ops] += np.array(more_us)[:, None]
        for one in changes:
            change.uncertainty_us += one.uncertainty_us

    def _change(self, name: str) -> _Change:
        """The change of an op. No other change of a legal plan touches that op."""
        if name not in self._changes:
            float32_us = float(self.compute.graph.op_work_us[:, list(self.compute.ops[name])].mean())
            ratio_bounds = self._ratios.ratio(self.type(name), float32_us)
            assert ratio_bounds is not None, "a legal plan has measured types only"
            self._changes[name] = _Change(
                ratio_bounds[0], float32_us * (ratio_bounds[2] - ratio_bounds[1]) / 2, float32_us * self._ratios.cast_share
            )
        return self._changes[name]

    def _casts_us(self, names: Sequence[str]) -> dict[str, float] | None:
        """Time of the casts beside each op; None where the recording does not tell what is cast."""
        step = self.compute.graph.memory
        if step is None:
            return None
        return {name: self._ratios.cast_us(elements) for name, elements in cast_elements(step, names).items()}

    @cached_property
    def choice(self) -> Choice | None:
        gaining = [
            op_type for op_type in self._types if (ratio_bounds := self._ratios.ratio(op_type)) is not None and ratio_bounds[0] < 1
        ]
        points = [self._names([op_type for op_type in gaining if _plain(op_type) in SAFE]), self._names(gaining)]
        distinct = [names for names in dict.fromkeys(points) if names]
        if not distinct:
            return None
        return Choice(
            name=self.name, fields=self.fields, grids={RECORDED: ({},), "set": tuple({"bfloat16_ops": names} for names in distinct)}
        )

    def _names(self, types: Sequence[str]) -> tuple[str, ...]:
        return self._ordered({name for op_type in types for name in self._by_type[op_type]})

    def _ordered(self, names: set[str]) -> tuple[str, ...]:
        return tuple(sorted(names, key=lambda name: (self._place.get(name, -1), name)))

    def _with(self, plan: Plan, names: set[str]) -> Plan:
        return plan.changed(bfloat16_ops=self._ordered(names) or None)

    def _refusal(self, name: str) -> str | None:
        kind, op_type = self.kind(name), self.type(name)
        if why := self.not_in_the_step(name):
            return why
        if kind not in (OpKind.FORWARD, OpKind.BACKWARD):
            return f"op '{name}' is of kind {kind.name}: only forward and backward ops change precision"
        if _plain(op_type) in UNSAFE:
            return f"op '{name}': {op_type} is not safe in bfloat16"
        if _plain(op_type) not in SAFE | BETWEEN:
            return f"op '{name}': TensorFlow keeps {op_type} in float32"
        if self._ratios.ratio(op_type) is None:
            return f"op '{name}': what {op_type} takes in bfloat16 was not measured"
        return None


def _plain(op_type: str) -> str:
    """A type as it was before oneDNN or a fusion of TensorFlow's own took it."""
    plain = op_type.removeprefix("_Mkl").removeprefix("Native").removeprefix("_")
    return plain.removeprefix("Fused") if plain.removeprefix("Fused") in SAFE else plain
