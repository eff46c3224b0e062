"""The kernels that XLA makes of a cluster on a CPU: what is fused into one loop, what stands alone, and how much each of them does.

A convolution or product is a call into a library, or loops of its own. All else is loops over a result's elements. A loop whose
result only other loops need becomes part of them (once for each); a reduction takes what makes its input along, but its own result
lies in memory. Normalisation and softmax are reductions and a loop. This follows XLA's rules (`InstructionFusion`,
`BatchNormExpander`, `TreeReductionRewriter`) as far as types and shapes tell; a rule that is
missing here makes a feature less exact and no prediction impossible.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import gcd, prod
from typing import NamedTuple

from dpro_search.collect.clusters.table import Cluster, ClusterOp
from dpro_search.costmodel.learned.op_classes import HEAVY, OTHER, class_of, kind_of, leaders, own_us, tensor_bytes
from dpro_search.costmodel.learned.products import product_of

CALL, LOOP, SCATTER = "call", "loop", "scatter"
ROWS, COLUMNS = "row_reduction", "column_reduction"
# In this order are the classes of kernels numbered.
KERNELS = (CALL, LOOP, ROWS, COLUMNS, *HEAVY, "pool", "pool_grad", SCATTER, OTHER)
# All but the first count something; a kernel's class is its number in `KERNELS`.
PART_FEATURES = (
    "class",
    "us",  # of the ops in it, by themselves; an op in several kernels counts for each in part
    "work",  # floating-point operations as compiled: a gradient of a strided convolution computes the holes, too
    "read_bytes",
    "written_bytes",
    "elements",  # of the result, of a reduction's input
    "costly",  # transcendental functions
    "moved",  # elements that are picked from elsewhere: transposed, concatenated, padded, gathered
    "sources",  # tensors read; of the call: those that come from outside
    "ops",
    "inner",  # length of the innermost axis: what vectors run along
    "batches",  # a product: so many times [rows, depth] x [depth, columns]
    "rows",
    "depth",
    "columns",
    "pixels",  # of a filter
    "holes",  # of a strided gradient: positions of the image for one of the result, along an axis
    "swapped",  # transposed operands
    "left",  # elements of a product's operands and result, as matrices: a compiler packs them
    "right",
    "made",
    "strided",  # elements that are read across the rows of a matrix, one from each
    "near_misses",  # of these: those that a first-level cache cannot keep until the next of their line is read
    "far_misses",  # likewise, a second-level cache
    "windowed",  # elements of reductions that XLA does in windows, one element after the other
    "outputs",  # the call's: results
    "variables",  # the call's
    "kernels",  # the call's
    "cluster_bytes",  # of all tensors of the cluster, which may stay in a cache
)
_OF_PRODUCTS = ("batches", "rows", "depth", "columns", "pixels", "holes", "swapped")
_CHEAP_TYPES = frozenset(["ZerosLike", "OnesLike", "Fill", "Range"])  # made of nothing
_SCATTERS = frozenset(["UnsortedSegmentSum", "ResourceScatterAdd", "ScatterNd"])
_WINDOW = 32  # the longest axis that XLA reduces at one go (`TreeReductionRewriter`)
_NEAR, _FAR = (8, 64), (8, 2048)  # ways and sets of the caches of usual processors
_LINE_BYTES = 64
_LARGEST_LOOP = 60  # ops; a larger one is split
_NOT_ABSORBING = frozenset([*HEAVY, "pool", "pool_grad", SCATTER, OTHER])


class Strided(NamedTuple):
    """Elements that are read across the rows of a matrix.

    `rows` elements, each of its own row of `stride_bytes`, are read before the next of the same line is.
    """

    elements: float = 0.0
    rows: float = 1.0
    stride_bytes: int = 4

    def misses(self, ways: int, sets: int) -> float:
        """Elements whose lines do not stay in a cache, because too many rows fall into the same sets."""
        lines = self.rows * min(self.stride_bytes, _LINE_BYTES) / _LINE_BYTES
        period = sets * _LINE_BYTES
        apart = max(gcd(self.stride_bytes, period), _LINE_BYTES)
        return self.elements if lines >= ways * period / apart else 0.0


_ALONG = Strided()


class _Step(NamedTuple):
    """What one kernel does at least: an op, or a part of it."""

    op: int
    name: str  # of `KERNELS`
    inputs: tuple[int, ...]
    output: int
    elements: float
    inner: int
    costly: bool
    moving: bool
    strided: Strided
    windowed: bool


def kernel_rows(cluster: Cluster) -> list[list[float]]:
    """The values of `PART_FEATURES` for the call of a cluster, then for each of its kernels."""
    return _Lowered(cluster).rows()


class _Lowered:
    """A cluster in loops, reductions and products, with what of its tensors lies in memory."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._shapes = [tensor.shape for tensor in cluster.tensors]
        self._bytes = [
            0.0 if tensor.role == "const" else float(tensor_bytes(cluster, number)) for number, tensor in enumerate(cluster.tensors)
        ]
        self._same: dict[int, int] = {}  # a tensor that is another one, seen otherwise
        self._variable: dict[int, int] = {}  # the tensor that a variable has become
        self._kept = {number for number, tensor in enumerate(cluster.tensors) if tensor.role == "out"}
        self._made: set[int] = set()
        self._steps: list[_Step] = []
        for i, op in enumerate(cluster.ops):
            self._lower(i, op)
        self._kept = {self._root(number) for number in self._kept}
        self._maker: dict[int, int] = {step.output: k for k, step in enumerate(self._steps)}
        self._users: dict[int, list[int]] = defaultdict(list)
        for k, step in enumerate(self._steps):
            for number in step.inputs:
                self._users[number].append(k)
        self._in_memory: list[bool] = []
        self._size: list[int] = []  # ops in the loop of each step
        self._has_costly: list[bool] = []
        for step in self._steps:
            self._decide(step)

    def rows(self) -> list[list[float]]:
        """Features of the call and of each kernel."""
        kernels = [(k, *self._gathered(k)) for k, kept in enumerate(self._in_memory) if kept]
        held: dict[int, int] = defaultdict(int)  # kernels that a step is part of
        for k, members, _ in kernels:
            for member in (k, *members):
                held[member] += 1
        parts: dict[int, int] = defaultdict(int)  # steps of an op that are in any kernel
        for k in held:
            parts[self._steps[k].op] += 1
        us = [0.0] * len(self._cluster.ops)
        for i, (lead, own) in enumerate(zip(leaders(self._cluster), own_us(self._cluster), strict=True)):
            us[lead if parts[lead] else i] += own
        share = {k: us[self._steps[k].op] / (parts[self._steps[k].op] * held[k]) for k in held}
        found = [self._kernel(k, members, sources, share) for k, members, sources in kernels]
        left = sum(own for i, own in enumerate(us) if not parts[i])
        return [self._call(len(kernels), left), *found]

    def _lower(self, i: int, op: ClusterOp) -> None:
        """Add the steps of an op."""
        kind, inputs = kind_of(op.type), tuple(self._root(number) for number in op.inputs)
        made = op.outputs[0] if op.outputs else None
        if kind == "variable":
            self._update(i, op, inputs)
        elif kind == "free" or op.type in _CHEAP_TYPES or made is None:
            if made is not None and inputs and op.type not in _CHEAP_TYPES:
                self._alias(made, inputs[0])
            elif made is not None:
                self._add(i, LOOP, (), made)
        elif kind == "reduction":
            name = class_of(self._cluster, op)
            if inputs:
                windowed = _longest_reduced(self._shapes[inputs[0]], self._shapes[made], name) > _WINDOW
                strided = self._down(name, inputs[0])
                self._add(i, name, inputs[:1], made, over=inputs[0], strided=strided, windowed=windowed)
        elif kind in ("norm", "norm_grad", "softmax"):
            self._composite(i, op, kind, inputs)
        elif kind in ("pool", "pool_grad", OTHER):
            for output in op.outputs:
                self._add(i, kind, inputs, output)
        elif class_of(self._cluster, op) in HEAVY:
            self._add(i, class_of(self._cluster, op), inputs, made, strided=self._across(op))
        elif kind == "gather":
            name = SCATTER if op.type in _SCATTERS else LOOP
            # Of a table as much is read as is picked.
            self._add(i, name, inputs if name == SCATTER else (self._new(self._shapes[made]), *inputs[1:]), made, moving=True)
        else:
            strided = self._turned(inputs[0], made) if kind == "layout" and inputs else _ALONG
            for output in op.outputs:
                moving = kind in ("layout", "movement")
                self._add(i, LOOP, inputs, output, costly=kind == "transcendental", moving=moving, strided=strided)

    def _composite(self, i: int, op: ClusterOp, kind: str, inputs: tuple[int, ...]) -> None:
        """Two reductions, and a loop that uses their results."""
        if not inputs:
            return
        image, given = inputs[0], inputs[: 2 if kind == "norm_grad" else 1]
        shape = self._shapes[image]
        if kind == "softmax":
            name, kept, longest = ROWS, shape[:-1], max(shape[-1:], default=1)
        elif len(shape) == 4 and shape[3] == 1 < shape[1]:  # over the rest of each image: a layer is normalised
            name, kept, longest = ROWS, shape[1:2], shape[2]
        else:
            name, kept, longest = COLUMNS, shape[-1:], max(shape[:-1], default=1)
        windowed, strided = longest > _WINDOW, self._down(name, image)
        first = self._add(i, name, given, self._new(kept), over=image, strided=strided, windowed=windowed)
        again = (*given, first) if kind == "softmax" else given
        second = self._add(
            i, name, again, self._new(kept), over=image, costly=kind == "softmax", strided=strided, windowed=windowed
        )
        large = [number for number in op.outputs if len(self._shapes[number]) == len(shape) and prod(self._shapes[number]) > 0]
        for number in op.outputs:
            if number in large:
                self._add(i, LOOP, (*inputs, first, second), number, costly=kind == "softmax")
            else:
                self._alias(number, second)

    def _update(self, i: int, op: ClusterOp, inputs: tuple[int, ...]) -> None:
        """A variable is read, or becomes another tensor."""
        if not op.inputs:
            return
        variable = op.inputs[0]
        now = self._variable.get(variable, variable)
        if op.type == "ReadVariableOp":
            if op.outputs:
                self._alias(op.outputs[0], self._root(now))
        elif op.type == "AssignVariableOp":
            if len(inputs) > 1:
                value = inputs[1]
                if value not in self._made:  # what comes from outside is copied
                    value = self._add(i, LOOP, (value,), self._new(self._shapes[value]))
                self._variable[variable] = value
                self._kept.add(value)
        else:
            # An optimizer's op makes each of its variables anew from all that it is given.
            given = tuple(self._root(self._variable.get(number, number)) for number in op.inputs)
            for number in dict.fromkeys(n for n in op.inputs if self._cluster.tensors[n].role == "variable"):
                updated = self._add(i, LOOP, given, self._new(self._shapes[number]))
                self._variable[number] = updated
                self._kept.add(updated)

    def _add(
        self,
        i: int,
        name: str,
        inputs: tuple[int, ...],
        output: int,
        *,
        over: int | None = None,
        costly: bool = False,
        moving: bool = False,
        strided: Strided = _ALONG,
        windowed: bool = False,
    ) -> int:
        shape = self._shapes[output if over is None else over]
        read = tuple(dict.fromkeys(number for number in inputs if self._bytes[number] > 0))
        inner = next((length for length in reversed(shape) if length > 1), 1)
        self._made.add(output)
        self._steps.append(_Step(i, name, read, output, float(prod(shape)), inner, costly, moving, strided, windowed))
        return output

    def _down(self, name: str, number: int) -> Strided:
        """Of a reduction: sums of columns are made one after the other."""
        shape = self._shapes[number]
        if name != COLUMNS or not shape or not shape[-1]:
            return _ALONG
        return Strided(float(prod(shape)), prod(shape) / shape[-1], 4 * shape[-1])

    def _turned(self, number: int, made: int) -> Strided:
        """Of a transposition that does not keep the innermost axis."""
        before, after = self._shapes[number], self._shapes[made]
        if not before or not after or before[-1] == after[-1]:
            return _ALONG
        return Strided(float(prod(before)), float(after[-1]), 4 * before[-1])

    def _across(self, op: ClusterOp) -> Strided:
        """Of a product: a transposed right operand, the filters of an input's gradient, the image of a filter's."""
        product, kind = product_of(self._cluster, op), kind_of(op.type)
        if product is None:
            return _ALONG
        if kind == "conv_filter_grad":
            channels = product.rows / product.pixels
            return Strided(product.rows * product.depth, product.depth, int(4 * channels))
        if kind == "conv_input_grad":
            return Strided(product.depth * product.columns, product.columns, int(4 * product.depth / product.pixels))
        if kind in ("matmul", "batch_matmul") and product.right_swapped:
            return Strided(product.batches * product.depth * product.columns, product.columns, int(4 * product.depth))
        return _ALONG

    def _new(self, shape: tuple[int, ...]) -> int:
        """A tensor that the cluster's description does not have."""
        self._shapes.append(shape)
        self._bytes.append(4.0 * prod(shape))
        return len(self._shapes) - 1

    def _alias(self, number: int, other: int) -> None:
        if number != other:
            self._same[number] = other

    def _root(self, number: int) -> int:
        while number in self._same:
            number = self._same[number]
        return number

    def _decide(self, step: _Step) -> None:
        """Whether a step's result lies in memory: others' loops take the rest along."""
        makers = (self._maker.get(number, len(self._in_memory)) for number in step.inputs)
        within = [k for k in makers if k < len(self._in_memory) and not self._in_memory[k]]
        size = 1 + sum(self._size[k] for k in within)
        costly = step.costly or any(self._has_costly[k] for k in within)
        users = self._users[step.output]
        used = bool(users) or step.output in self._kept
        absorbed = (
            step.name == LOOP
            and step.output not in self._kept
            and not any(self._steps[user].name in _NOT_ABSORBING for user in users)
            and not (len(users) > 1 and costly)
            and size < _LARGEST_LOOP
        )
        kept = used and not absorbed
        self._in_memory.append(kept)
        self._size.append(0 if kept else size)
        self._has_costly.append(False if kept else costly)

    def _gathered(self, k: int) -> tuple[list[int], list[int]]:
        """(other steps in the kernel of a step, tensors in memory that it reads)."""
        members: dict[int, None] = {}
        sources: dict[int, None] = {}
        stack = list(self._steps[k].inputs)
        while stack:
            number = stack.pop()
            maker = self._maker.get(number)
            if maker is None or self._in_memory[maker]:
                sources[number] = None
            elif maker not in members:
                members[maker] = None
                stack.extend(self._steps[maker].inputs)
        return list(members), list(sources)

    def _kernel(self, k: int, members: Sequence[int], sources: Sequence[int], share: dict[int, float]) -> list[float]:
        root = self._steps[k]
        steps = [root, *(self._steps[member] for member in members)]
        value = dict.fromkeys(PART_FEATURES, 0.0)
        value |= {
            "class": float(KERNELS.index(root.name)),
            "us": sum(share[member] for member in (k, *members)),
            "work": sum(step.elements for step in steps),
            "read_bytes": sum(self._bytes[number] for number in sources),
            "written_bytes": self._bytes[root.output],
            "elements": root.elements,
            "costly": sum(step.elements for step in steps if step.costly),
            "moved": sum(step.elements for step in steps if step.moving),
            "sources": float(len(sources)),
            "ops": float(len(steps)),
            "inner": float(root.inner),
            "strided": sum(step.strided.elements for step in steps),
            "near_misses": sum(step.strided.misses(*_NEAR) for step in steps),
            "far_misses": sum(step.strided.misses(*_FAR) for step in steps),
            "windowed": sum(step.elements for step in steps if step.windowed),
            "cluster_bytes": self._all_bytes(),
        }
        product = product_of(self._cluster, self._cluster.ops[root.op]) if root.name in HEAVY else None
        if product is not None:
            value |= {name: getattr(product, name) for name in _OF_PRODUCTS}
            value |= {
                "work": 2 * product.batches * product.rows * product.depth * product.columns,
                "left": product.batches * product.rows * product.depth,
                "right": product.batches * product.depth * product.columns,
                "made": product.batches * product.rows * product.columns,
            }
        return [value[name] for name in PART_FEATURES]

    def _call(self, kernels: int, us: float) -> list[float]:
        roles = [tensor.role for tensor in self._cluster.tensors]
        size = dict.fromkeys(("in", "variable", "out"), 0.0)
        for tensor, own in zip(self._cluster.tensors, self._bytes, strict=False):
            if tensor.role in size:
                size[tensor.role] += own
        value = dict.fromkeys(PART_FEATURES, 0.0)
        value |= {
            "class": float(KERNELS.index(CALL)),
            "us": us,
            "read_bytes": size["in"] + size["variable"],
            "written_bytes": size["out"],
            "sources": float(roles.count("in")),
            "ops": float(len(self._cluster.ops)),
            "outputs": float(roles.count("out")),
            "variables": float(roles.count("variable")),
            "kernels": float(kernels),
            "cluster_bytes": self._all_bytes(),
        }
        return [value[name] for name in PART_FEATURES]

    def _all_bytes(self) -> float:
        return sum(self._bytes[: len(self._cluster.tensors)])


def _longest_reduced(before: tuple[int, ...], after: tuple[int, ...], name: str) -> int:
    """The longest axis that a reduction does away with."""
    if len(before) == len(after):
        return max((old for old, new in zip(before, after, strict=True) if old != new), default=1)
    # Which of equal axes are left is not known: those that stay are taken to be the last of columns, and the first of rows.
    backwards = name == COLUMNS
    left = list(reversed(after) if backwards else after)
    gone = []
    for length in reversed(before) if backwards else before:
        if left and left[0] == length:
            left.pop(0)
        else:
            gone.append(length)
    return max(gone, default=1)
