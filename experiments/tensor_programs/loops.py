"""Loops around each leaf of a lowered program, with the strides of what it reads and writes (needs the environment `tvm`).

`PerStoreFeature` does not tell how large the vectors of the innermost loops are, nor what a cache of a given size holds; extents
and strides do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.ir import Call, Expr
from tvm.ir.expr import TensorLoad

KINDS = {0: 0, 1: 1, 2: 2, 3: 3}  # serial, parallel, vectorized, unrolled


@dataclass(frozen=True, kw_only=True)
class LoopNest:
    """Loops around a leaf, outermost first."""

    position: int  # of the leaf in pre-order, returns counted
    extents: list[int]
    kinds: list[int]  # 0 serial, 1 parallel, 2 vectorized, 3 unrolled.
    unroll: int  # Largest body that is unrolled without being told so.
    strides: list[list[int]]  # In elements, of each access (the store first) along each loop.
    buffers: list[int]  # Which buffer each access goes to, counted over the program.
    sizes: list[int]  # Elements of these buffers.
    loops: list[int]  # Which loop of the program each one is: leaves that share a loop run in turn.


def nests(body: Any) -> list[LoopNest]:
    """One for each stored buffer in the order of first stores; stores of constants (inits) do not count."""
    walk = _Walk()
    walk.visit(body)
    return list(walk.found.values())


class _Walk:
    def __init__(self) -> None:
        self.found: dict[Any, LoopNest] = {}
        self._loops: list[Any] = []
        self._buffers: dict[Any, int] = {}
        self._numbers: dict[Any, int] = {}
        self._unroll: list[int] = [0]
        self._step = 0

    def visit(self, node: Any) -> None:
        if isinstance(node, tirx.For):
            step = int(int(node.extent) > 1)  # A loop of one iteration is none.
            self._step += step
            self._loops.append(node)
            notes = node.annotations
            self._unroll.append(
                int(notes["pragma_auto_unroll_max_step"]) if "pragma_auto_unroll_max_step" in notes else self._unroll[-1]
            )
            self.visit(node.body)
            self._unroll.pop()
            self._loops.pop()
            self._step += step
        elif isinstance(node, tirx.SeqStmt):
            for one in node:
                self.visit(one)
        elif isinstance(node, tirx.BufferStore):
            self._store(node)
        elif hasattr(node, "block"):
            self.visit(node.block)
        elif isinstance(node, tirx.IfThenElse):
            self.visit(node.then_case)
            if node.else_case is not None:
                self.visit(node.else_case)
        elif hasattr(node, "body"):
            self.visit(node.body)

    def _store(self, node: Any) -> None:
        self._step += 1
        if isinstance(node.value, tirx.IntImm | tirx.FloatImm):
            return
        before = self.found.get(node.buffer)
        accesses = [(node.buffer, node.indices), *_loads(node.value)]
        loops = [loop for loop in self._loops if int(loop.extent) > 1]
        self.found[node.buffer] = LoopNest(
            position=before.position if before else self._step,
            extents=[int(loop.extent) for loop in loops],
            kinds=[KINDS.get(int(loop.kind), 0) for loop in loops],
            unroll=self._unroll[-1],
            strides=[_strides(buffer, indices, loops) for buffer, indices in accesses[:6]],
            buffers=[self._buffers.setdefault(buffer, len(self._buffers)) for buffer, _ in accesses[:6]],
            sizes=[math.prod(int(dim) for dim in buffer.shape) for buffer, _ in accesses[:6]],
            loops=[self._numbers.setdefault(loop.loop_var, len(self._numbers)) for loop in loops],
        )


def _loads(value: Any) -> list[tuple[Any, Any]]:
    """Buffers and indices that an expression reads."""
    found = []
    if isinstance(value, TensorLoad):
        found.append((value.source, value.indices))
        parts = list(value.indices)
    elif isinstance(value, Call):
        parts = [part for part in value.args if isinstance(part, Expr)]
    else:
        parts = [
            getattr(value, name) for name in ("condition", "true_value", "false_value", "value", "a", "b") if hasattr(value, name)
        ]
    for part in parts:
        if not isinstance(part, int | float | bool):
            found += _loads(part)
    return found


def _strides(buffer: Any, indices: Any, loops: list[Any]) -> list[int]:
    steps = [1]
    for dim in list(buffer.shape)[:0:-1]:
        steps.insert(0, steps[0] * int(dim))
    places = [_compiled(index) for index in indices]
    origin: dict[Any, int] = {}

    def offset(values: dict[Any, int]) -> int:
        return sum(step * place(values) for step, place in zip(steps, places, strict=True))

    start = offset(origin)
    return [offset({loop.loop_var: 1}) - start for loop in loops]


_BINARY: dict[type, Callable[[int, int], int]] = {
    tirx.Add: lambda a, b: a + b,
    tirx.Sub: lambda a, b: a - b,
    tirx.Mul: lambda a, b: a * b,
    tirx.FloorDiv: lambda a, b: a // b,
    tirx.FloorMod: lambda a, b: a % b,
    tirx.Min: min,
    tirx.Max: max,
}


def _compiled(index: Any) -> Callable[[dict[Any, int]], int]:
    """An index as a function of loop variables; those that are missing are 0, and so is what is looked up."""
    if isinstance(index, tirx.IntImm):
        value = int(index)
        return lambda values: value
    if isinstance(index, tirx.Var):
        return lambda values: values.get(index, 0)
    combine = _BINARY.get(type(index))
    if combine is not None:
        left, right = _compiled(index.a), _compiled(index.b)
        return lambda values: combine(left(values), right(values))
    return lambda values: 0
