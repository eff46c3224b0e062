"""How often each computation of a program runs in one step: trip counts of loops, and what loops contain.

XLA's compilers for CPUs and GPUs write a loop's trip count beside it. The one for TPUs does not, so it is computed here: a counter
that starts at a constant, grows by a constant in each turn and is compared with a constant runs a known number of times. Every
`lax.scan`, `fori_loop` with constant bounds and the loops in which XLA overlaps a matrix product with its all-gather are so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dpro_search.collect.readers.xla import HloComputation, HloInstruction, HloModule, scheduled_computations

_SAME_VALUE = ("copy", "bitcast", "convert", "reshape", "copy-start", "copy-done", "optimization-barrier", "opt-barrier")
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}
_MOST_DEPTH = 64  # of expressions and nested loops; deeper ones are unknown


class _Value(NamedTuple):
    """A whole number, or an element of a loop's state to which one is added."""

    element: int | None  # Index in the loop's tuple; None for a constant.
    number: int


def trip_count(module: HloModule, computation: HloComputation, loop: HloInstruction) -> int | None:
    """How often the body of a ``while`` runs; None if that depends on data or takes a form that is not understood.

    Parameters
    ----------
    computation
        The computation in which the loop stands.
    loop
        An instruction with the opcode ``while``.
    """
    if loop.known_trip_count is not None:
        return loop.known_trip_count
    condition = module.computation(loop.computation("condition"))
    compared = _comparison(module, condition)
    if compared is None:
        return None
    direction, left, right = compared
    if left.element is None or _growth(module, loop, left.element) == 0:  # the bound stands on the left
        direction, left, right = _MIRRORED.get(direction, ""), right, left
    if left.element is None:
        return None
    bound = right.number if right.element is None else _unchanged(module, computation, loop, right, 0)
    step = _growth(module, loop, left.element)
    first = _first_value(module, computation, loop, left.element, 0)
    if bound is None or step is None or first is None:
        return None
    return _turns(direction, first + left.number, step, bound)


def executions(module: HloModule) -> Mapping[str, int | None]:
    """How often each computation with a schedule runs in one step of the program, by name.

    It is None for what is in a loop whose trip count is unknown, and in a branch: which one is taken depends on data.
    """
    scheduled = scheduled_computations(module)
    counts: dict[str, int | None] = {computation.name: 0 for computation in scheduled}
    counts[module.entry_name] = 1
    for computation in reversed(scheduled):  # callers stand behind the computations that they call
        times = counts[computation.name]
        for instruction in computation:
            if instruction.opcode == "while":
                turns = trip_count(module, computation, instruction)
                _add(counts, instruction.computation("body"), times, turns)
                _add(counts, instruction.computation("condition"), times, None if turns is None else turns + 1)
            elif instruction.opcode == "call":
                _add(counts, instruction.computation("to_apply"), times, 1)
            elif instruction.opcode == "conditional":
                for name in instruction.called:
                    _add(counts, name, times, None)
    return counts


def _add(counts: dict[str, int | None], name: str, times: int | None, turns: int | None) -> None:
    before = counts.get(name, 0)
    counts[name] = None if times is None or turns is None or before is None else before + times * turns


def _turns(direction: str, first: int, step: int, bound: int) -> int | None:
    """How many of ``first, first + step, ...`` satisfy the comparison before the first that does not; None if all do."""
    if direction in ("LE", "GE"):
        direction, bound = ("LT", bound + 1) if direction == "LE" else ("GT", bound - 1)
    distance = bound - first
    if direction == "NE":
        turns = distance // step if step and distance % step == 0 else -1
        return turns if turns >= 0 else None
    if direction not in ("LT", "GT"):
        return None
    ahead = 1 if direction == "LT" else -1
    if distance * ahead <= 0:
        return 0
    return -(-distance // step) if step * ahead > 0 else None


def _comparison(module: HloModule, condition: HloComputation) -> tuple[str, _Value, _Value] | None:
    """Direction and the two sides of the comparison that a condition returns, also if it is the root of a fusion."""
    computation, arguments, root = condition, None, condition.root
    for _ in range(_MOST_DEPTH):
        if root.opcode == "compare":
            sides = [_value(module, computation, operand, arguments, 0) for operand in root.operands]
            if len(sides) != 2 or sides[0] is None or sides[1] is None:
                return None
            return root.attributes.get("direction", ""), sides[0], sides[1]
        if root.opcode in _SAME_VALUE:
            root = computation[root.operands[0]]
        elif root.opcode in ("fusion", "call"):
            arguments = [_value(module, computation, operand, arguments, 0) for operand in root.operands]
            computation = module.called_by(root)[0]
            root = computation.root
        else:
            return None
    return None


def _growth(module: HloModule, loop: HloInstruction, element: int) -> int | None:
    """By how much an element of a loop's state grows in one turn; None if it does not by a constant."""
    body = module.computation(loop.computation("body"))
    after = _element_of(module, body, body.root, element, 0)
    return after.number if after is not None and after.element == element else None


def _first_value(module: HloModule, computation: HloComputation, loop: HloInstruction, element: int, depth: int) -> int | None:
    """The constant with which an element of a loop's state begins; it may come from the state of a loop around this one."""
    if not loop.operands:
        return None
    start = _element_of(module, computation, computation[loop.operands[0]], element, depth)
    if start is None or start.element is None:
        return None if start is None else start.number
    callers = module.callers.get(computation.name, ())
    if len(callers) != 1 or callers[0][1].opcode != "while" or depth >= _MOST_DEPTH:
        return None
    return _unchanged(module, *callers[0], start, depth + 1)


def _unchanged(module: HloModule, computation: HloComputation, loop: HloInstruction, value: _Value, depth: int) -> int | None:
    """The number of an element that a loop passes on as it is; None if the loop changes it."""
    if value.element is None:
        return value.number
    if _growth(module, loop, value.element) != 0:
        return None
    first = _first_value(module, computation, loop, value.element, depth)
    return None if first is None else first + value.number


def _element_of(
    module: HloModule, computation: HloComputation, instruction: HloInstruction, element: int, depth: int
) -> _Value | None:
    """Value of an element of a tuple."""
    for _ in range(_MOST_DEPTH):
        if instruction.opcode == "tuple":
            operands = instruction.operands
            return _value(module, computation, operands[element], None, depth) if element < len(operands) else None
        if instruction.opcode == "parameter":
            return _Value(element, 0)
        if instruction.opcode not in _SAME_VALUE:
            return None
        instruction = computation[instruction.operands[0]]
    return None


def _value(
    module: HloModule, computation: HloComputation, name: str, arguments: list[_Value | None] | None, depth: int
) -> _Value | None:
    """Value of a scalar as a number, or as an element of the loop's state plus a number.

    `arguments` are the values of a fusion's parameters; None in the computation of a loop, whose parameter is its state.
    """
    instruction = computation.by_name.get(name)
    if instruction is None or depth > _MOST_DEPTH:
        return None
    opcode = instruction.opcode
    if opcode == "constant":
        return _constant(instruction.operand_text)
    if opcode == "parameter":
        number = int(instruction.operand_text) if instruction.operand_text.isdigit() else -1
        return arguments[number] if arguments is not None and 0 <= number < len(arguments) else None
    operands = instruction.operands
    if opcode == "get-tuple-element":
        index = instruction.number("index")
        return None if index is None else _element_of(module, computation, computation[operands[0]], index, depth + 1)
    if opcode in _SAME_VALUE:
        return _value(module, computation, operands[0], arguments, depth + 1)
    if opcode in ("add", "subtract"):
        sides = [_value(module, computation, operand, arguments, depth + 1) for operand in operands]
        return _sum(sides[0], sides[1], -1 if opcode == "subtract" else 1)
    if opcode in ("fusion", "call"):
        inner = module.called_by(instruction)[0]
        values = [_value(module, computation, operand, arguments, depth + 1) for operand in operands]
        return _value(module, inner, inner.root.name, values, depth + 1)
    return None


def _sum(left: _Value | None, right: _Value | None, sign: int) -> _Value | None:
    if left is None or right is None:
        return None
    if right.element is not None and (left.element is not None or sign < 0):
        return None
    return _Value(left.element if right.element is None else right.element, left.number + sign * right.number)


def _constant(text: str) -> _Value | None:
    try:
        return _Value(None, int(text.strip("{} ")))
    except ValueError:
        return None
