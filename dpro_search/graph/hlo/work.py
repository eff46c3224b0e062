"""How much an instruction of a compiled program computes, and how many bytes it moves.

The counts are those of XLA's own analysis (xla/service/hlo_cost_analysis.cc): a multiplication and an addition are two operations;
an elementwise operation is one for each element of its result, or a transcendental one; a reduction is one for each element that is
joined to another, also by an all-reduce (but XLA counts none for a reduce-scatter, and nearly none for a reduction that is written
as a window). Matrix products and convolutions are counted apart from the rest, because matrix units run them.

Bytes are those in the memory's layout, with the padding of tiles. A fusion reads its operands and writes its results, and of an
operand that it only slices the slice. XLA counts an asynchronous copy at its start and at its end, and an operand that is converted
before it is sliced as a whole; here a copy counts once, and only the slice: on the programs of `tests/data/xla` the bytes are 54 to
100 % of XLA's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dpro_search.collect.readers.xla import COLLECTIVES, HloComputation, HloInstruction, HloModule, HloShape
from dpro_search.errors import InputError, TraceFormatError
from dpro_search.graph.hlo.executions import trip_count
from dpro_search.graph.hlo.products import convolution_flops, dot_flops, library_product_flops


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TRANSCENDENTAL = _words(
    "acos acosh asin asinh atan2 atanh cbrt cosh cosine erf exponential exponential-minus-one log log-plus-one logistic "
    "power rsqrt sine sinh sqrt tan tanh"
)
_ELEMENTWISE = _words(
    "abs add and ceil clamp compare complex convert count-leading-zeros divide floor imag is-finite maximum minimum "
    "multiply negate not or popcnt real reduce-precision remainder round-nearest-afz round-nearest-even select shift-left "
    "shift-right-arithmetic shift-right-logical sign stochastic-convert subtract xor"
)
_MOVES = _words(  # no arithmetic: read the operands, write the result
    "all-gather all-to-all broadcast collective-broadcast collective-permute concatenate copy dynamic-reshape gather "
    "infeed iota outfeed pad ragged-all-to-all reduce-scatter reshape reverse rng-bit-generator rng-get-and-update-state "
    "set-dimension-size slice dynamic-slice transpose triangular-solve cholesky fft topk get-dimension-size recv send "
    "bitcast-convert rng"
)
_NOTHING = _words(  # names, numbers and marks in the schedule
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency domain partition-id replica-id "
    "optimization-barrier opt-barrier while conditional call"
)
_NO_WORK_CALLS = _words(  # custom calls with which compilers mark values
    "AllocateBuffer AsyncCollectiveStart AsyncCollectiveDone ConcatBitcast AssumeGatherIndicesInBound "
    "GatherScatterIndicesBitpacked PrepareAsyncCallStart PrepareAsyncCallDone Sharding SPMDFullToShardShape "
    "SPMDShardToFullShape annotate_device_placement"
)
_CHAIN_START, _CHAIN_DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"
_VIEWS = ("bitcast", "reshape", "convert", "get-tuple-element", "copy")
_SLICES = ("dynamic-slice", "slice", "gather")
_NO_SHAPE = HloShape("token")


@dataclass(frozen=True)
class HloWork:
    """Operations and bytes of one device."""

    matrix_flops: float = 0.0  # Operations of matrix products and convolutions, 2 for each multiplication with its addition.
    vector_flops: float = 0.0  # Operations of all other arithmetic but transcendental functions.
    transcendentals: float = 0.0  # Number of exponentials, logarithms, roots and the like.
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    unknown: int = 0  # Instructions whose operations are not known, such as a custom call without an estimate; not in the flops.

    @property
    def flops(self) -> float:
        return self.matrix_flops + self.vector_flops

    @property
    def bytes(self) -> float:
        return self.read_bytes + self.written_bytes

    def __add__(self, other: HloWork) -> HloWork:
        return HloWork(
            self.matrix_flops + other.matrix_flops,
            self.vector_flops + other.vector_flops,
            self.transcendentals + other.transcendentals,
            self.read_bytes + other.read_bytes,
            self.written_bytes + other.written_bytes,
            self.unknown + other.unknown,
        )

    def times(self, count: float) -> HloWork:
        """The work of so many executions; the number of unknown instructions stays."""
        return HloWork(
            self.matrix_flops * count,
            self.vector_flops * count,
            self.transcendentals * count,
            self.read_bytes * count,
            self.written_bytes * count,
            self.unknown,
        )

    def without_bytes(self) -> HloWork:
        """The operations alone, as within a fusion."""
        return HloWork(self.matrix_flops, self.vector_flops, self.transcendentals, unknown=self.unknown)


_NONE = HloWork()


def program_work(module: HloModule, *, each_loop_once: bool = False) -> HloWork:
    """The work of one execution of a program on one device.

    Parameters
    ----------
    each_loop_once
        Count a loop's body once, whatever its trip count, as ``compiled.cost_analysis()`` does. Otherwise a loop whose trip
        count is unknown counts once and is one unknown instruction.

    Of a conditional the branch with the most operations counts.
    """
    return _schedule_work(module, module.entry, each_loop_once)


def instruction_work(module: HloModule, computation: HloComputation, instruction: HloInstruction) -> HloWork:
    """The work of one execution of an instruction; that of an asynchronous operation counts at its start.

    Loops, branches and calls have none of their own: their computations have schedules. Raises `TraceFormatError` with the line if
    the instruction contradicts its operands.
    """
    try:
        return _work(module, computation, instruction)
    except InputError:
        raise
    except (ArithmeticError, IndexError, KeyError, TypeError, ValueError) as error:
        raise TraceFormatError(
            f"line {instruction.line}: the {instruction} contradicts its operands or is damaged ({error})"
        ) from error


def _work(module: HloModule, computation: HloComputation, instruction: HloInstruction) -> HloWork:
    opcode = instruction.opcode
    if opcode in _NOTHING or opcode.endswith(("-done", "-update")):
        return _NONE
    if opcode == "fusion":
        return _fusion(module, computation, instruction)
    if opcode in ("async-start", "call-start", "fusion-start"):
        inner = module.called_by(instruction)
        return sum((instruction_work(module, one, part) for one in inner for part in one), _NONE)
    if opcode == "custom-call":
        return _custom_call(computation, instruction)
    base = opcode.removesuffix("-start")
    result = _result(instruction)
    operations = _operations(module, computation, instruction, base, result)
    read, written = _bytes(computation, instruction, base, result)
    return operations + HloWork(read_bytes=read, written_bytes=written)


def _schedule_work(module: HloModule, computation: HloComputation, each_loop_once: bool) -> HloWork:
    work = _NONE
    for instruction in computation:
        opcode = instruction.opcode
        if opcode == "while":
            turns = 1 if each_loop_once else trip_count(module, computation, instruction)
            body, condition = (
                _schedule_work(module, module.computation(instruction.computation(key)), each_loop_once)
                for key in ("body", "condition")
            )
            work += body.times(1 if turns is None else turns) + condition.times(1 if turns is None or each_loop_once else turns + 1)
            work += HloWork(unknown=1) if turns is None else _NONE
        elif opcode == "conditional":
            branches = [_schedule_work(module, branch, each_loop_once) for branch in module.called_by(instruction)]
            work += max(branches, key=lambda branch: branch.flops, default=_NONE)
        elif opcode == "call":
            work += sum((_schedule_work(module, callee, each_loop_once) for callee in module.called_by(instruction)), _NONE)
        else:
            work += instruction_work(module, computation, instruction)
    return work


def _operations(
    module: HloModule, computation: HloComputation, instruction: HloInstruction, base: str, result: HloShape
) -> HloWork:
    if base in _ELEMENTWISE:
        return HloWork(vector_flops=result.size)
    if base in _TRANSCENDENTAL:
        return HloWork(transcendentals=result.size)
    if base in _MOVES:
        return _NONE
    operands = [operand.shape for operand in computation.operands(instruction)]
    if base == "dot":
        return HloWork(matrix_flops=dot_flops(instruction, operands[0], result))
    if base == "convolution":
        return HloWork(matrix_flops=convolution_flops(instruction, operands[0], operands[1], result))
    if base == "sort":  # comparisons, of all elements together
        size = operands[0].size
        return HloWork(vector_flops=size * math.ceil(math.log2(size)) if size > 1 else 0)
    count = _COUNTS.get(base)
    if count is None:
        return HloWork(unknown=1)
    return _joining(module, instruction).times(count(operands, result, instruction))


def _joining(module: HloModule, instruction: HloInstruction) -> HloWork:
    """The work of joining two elements: that of the computation that a reduction applies, or one operation."""
    work = _NONE
    for callee in module.called_by(instruction):
        for part in callee:
            work += instruction_work(module, callee, part).without_bytes()
    return work if work.flops or work.transcendentals else HloWork(vector_flops=1)


def _reduced(operands: list[HloShape], result: HloShape, _: HloInstruction) -> float:
    values = len(operands) // 2  # then come the initial values
    first = result.elements[0] if result.is_tuple else result
    return max(0, operands[0].size - first.size) if values else 0


def _windows(operands: list[HloShape], result: HloShape, instruction: HloInstruction) -> float:
    first = result.elements[0] if result.is_tuple else result
    whole = _whole_dimension(first, instruction)
    if whole:
        return first.size // whole * (whole - 1)
    return first.size * max(0, _window_size(instruction) - 1)


def _whole_dimension(result: HloShape, instruction: HloInstruction) -> int:
    """Size of the dimension that a window covers from each of its places; 0 if it covers none.

    TPUs write so what is reduced along a dimension and broadcast back, as the maximum of a softmax: each line is reduced once.
    """
    fields = dict(part.partition("=")[::2] for part in instruction.attributes.get("window", "").strip("{}").split())
    sizes = [int(size) for size in fields.get("size", "").split("x") if size]
    paddings = fields.get("pad", "").split("x")
    reduced = [dim for dim, size in enumerate(sizes) if size != 1]
    if len(reduced) != 1 or len(paddings) != len(sizes) or set(fields) - {"size", "pad"}:
        return 0
    size, dim = sizes[reduced[0]], result.dimensions[reduced[0]]
    return dim if size == 2 * dim - 1 and paddings[reduced[0]] == f"{dim - 1}_{dim - 1}" else 0


def _selected(operands: list[HloShape], result: HloShape, instruction: HloInstruction) -> float:
    """Choose in each window, and add what belongs there (the gradient of a maximum pool)."""
    return operands[1].size * _window_size(instruction) if len(operands) > 1 else 0


def _window_size(instruction: HloInstruction) -> int:
    text = instruction.attributes.get("window", "")
    sizes = next((part[5:] for part in text.strip("{}").split() if part.startswith("size=")), "1")
    return math.prod(int(size) for size in sizes.split("x"))


# Pairs of elements that an instruction joins.
_COUNTS: dict[str, Callable[[list[HloShape], HloShape, HloInstruction], float]] = {
    "reduce": _reduced,
    "reduce-window": _windows,
    "select-and-scatter": _selected,
    "map": lambda operands, result, _: result.size,
    "scatter": lambda operands, result, _: operands[-1].size,
    "dynamic-update-slice": lambda operands, result, _: 0,
    "all-reduce": lambda operands, result, _: result.size,
}


def _bytes(computation: HloComputation, instruction: HloInstruction, base: str, result: HloShape) -> tuple[float, float]:
    """Bytes that an instruction outside of a fusion reads and writes."""
    operands = [operand.shape.padded_bytes for operand in computation.operands(instruction)]
    size = result.padded_bytes
    if base in ("dynamic-slice", "slice"):
        return size, size
    if base == "gather":
        return size + sum(operands[1:]), size
    if base == "dynamic-update-slice":
        return operands[1], operands[1]
    if base == "scatter":
        return sum(operands[1:]) + operands[-1], operands[-1]
    if base == "ragged-all-to-all":
        return operands[0] + sum(operands[2:]), size
    return sum(operands), size


def _fusion(module: HloModule, computation: HloComputation, instruction: HloInstruction) -> HloWork:
    """The operations of the instructions within, and the bytes that cross the fusion's border.

    Of a collective that is spread over several fusions the bytes count where it starts.
    """
    work = _NONE
    for inner in module.called_by(instruction):
        for part in inner:
            work += instruction_work(module, inner, part).without_bytes()
        target = inner.root.custom_call_target
        if target == _CHAIN_START:
            put_in = sum(parameter.shape.padded_bytes for parameter in inner.parameters)
            work += HloWork(read_bytes=put_in, written_bytes=inner.operands(inner.root)[0].shape.padded_bytes)
        elif target != _CHAIN_DONE:
            read = sum(_read_of_parameter(module, inner, parameter) for parameter in inner.parameters)
            written = sum(_written(inner, root) for root in _roots(inner))
            work += HloWork(read_bytes=read, written_bytes=written)
    return work


def _advances(instruction: HloInstruction) -> bool:
    """Whether it is a collective that another fusion started, and that this one advances while it computes."""
    return instruction.opcode in COLLECTIVES and 'chain_id="' in instruction.attribute_text


def _read_of_parameter(module: HloModule, computation: HloComputation, parameter: HloInstruction) -> float:
    """Bytes of a fusion's operand that it reads: all, unless all of its uses are slices, or updates in place."""
    total, whole = 0.0, parameter.shape.padded_bytes
    left = [parameter]
    while left:
        value = left.pop()
        for user in computation.users.get(value.name, ()):
            operands = user.operands
            if user.opcode in _SLICES and operands[0] == value.name:
                total += user.shape.padded_bytes * operands.count(value.name)
            elif _is_passed_on(value, user):
                continue
            elif user.opcode in _VIEWS:
                left.append(user)
            elif user.opcode == "fusion":
                inner = module.called_by(user)[0]
                places = [place for place, name in enumerate(operands) if name == value.name]
                total += sum(_read_of_parameter(module, inner, inner.parameters[place]) for place in places)
            else:
                return whole
        if total >= whole or (value.is_root and value is not parameter):
            return whole
    return min(total, whole)


def _is_passed_on(value: HloInstruction, user: HloInstruction) -> bool:
    """Whether a value is not read, but updated in place or returned."""
    if user.opcode == "dynamic-update-slice":
        return user.operands[0] == value.name and value.name not in user.operands[1:]
    return _advances(user) or (user.opcode == "tuple" and user.is_root and value.opcode == "parameter")


def _roots(computation: HloComputation) -> Iterable[HloInstruction]:
    root = computation.root
    return computation.operands(root) if root.opcode == "tuple" else (root,)


def _written(computation: HloComputation, root: HloInstruction) -> float:
    """Bytes of a fusion's result that it writes: of an update in place the new part."""
    if root.opcode == "parameter" or _advances(root):
        return 0.0
    value = root
    while value.opcode in _VIEWS and value.operands:
        value = computation[value.operands[0]]
    if value.opcode == "dynamic-update-slice":
        return computation.operands(value)[1].shape.padded_bytes
    return root.shape.padded_bytes


def _custom_call(computation: HloComputation, instruction: HloInstruction) -> HloWork:
    target = instruction.custom_call_target
    if target in _NO_WORK_CALLS:
        return _NONE
    operands = [operand.shape for operand in computation.operands(instruction)]
    result = instruction.shape
    estimate = _estimate(instruction)
    moved = HloWork(
        read_bytes=sum(shape.padded_bytes for shape in operands),
        written_bytes=sum(leaf.padded_bytes for leaf in result.leaves() if not _is_workspace(leaf)),
    )
    if estimate:
        # The kernel's author says how much it computes, and knows better than the shapes how often it reads.
        accessed = estimate.get("bytes_accessed")
        read = max(0.0, float(accessed) - moved.written_bytes) if accessed else moved.read_bytes
        return HloWork(
            matrix_flops=float(estimate.get("flops", 0)),
            transcendentals=float(estimate.get("transcendentals", 0)),
            read_bytes=read,
            written_bytes=moved.written_bytes,
        )
    flops = library_product_flops(instruction, operands)
    return moved + (HloWork(unknown=1) if flops is None else HloWork(matrix_flops=flops))


def _estimate(instruction: HloInstruction) -> dict[str, Any]:
    """The estimate of a Pallas kernel's author; empty if there is none. JSON has no schema for it."""
    config = instruction.backend_config.get("custom_call_config")
    estimate = config.get("cost_estimate") if isinstance(config, dict) else None
    return estimate if isinstance(estimate, dict) else {}


def _is_workspace(shape: HloShape) -> bool:
    """The scratch memory of a library, which stands among the results as bytes of a line."""
    return shape.dtype in ("s8", "u8") and len(shape.dimensions) == 1


def _result(instruction: HloInstruction) -> HloShape:
    """The result of an operation; a start has its operands before it."""
    shape = instruction.shape
    if instruction.opcode == "copy-start" and shape.is_tuple:
        return shape.elements[0]
    if instruction.opcode.endswith("-start") and shape.is_tuple and instruction.opcode != "all-reduce-start":
        return shape.elements[1] if len(shape.elements) > 1 else _NO_SHAPE
    return shape
