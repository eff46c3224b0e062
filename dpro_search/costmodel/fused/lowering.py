"""What XLA makes of the ops of a cluster on a CPU before it fuses them: loops, reductions and products, compiled with numba.

A convolution or product is a call into a library, or loops of its own. All else is loops over a result's elements. Normalisation
and softmax are reductions and a loop; a variable becomes another tensor where it is updated. This follows XLA's rules
(`BatchNormExpander`, `TreeReductionRewriter`) as far as types and shapes show; a rule that is missing here makes a feature less
exact and no prediction impossible.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import numpy as np

from dpro_search._compiled import njit
from dpro_search.collect.trace import Ints
from dpro_search.costmodel.fused.flat import FlatClusters, Records
from dpro_search.costmodel.fused.op_classes import HEAVY, OTHER

CALL, LOOP, SCATTER = "call", "loop", "scatter"
ROWS, COLUMNS = "row_reduction", "column_reduction"
# In this order are the classes of kernels numbered.
KERNELS = (CALL, LOOP, ROWS, COLUMNS, *HEAVY, "pool", "pool_grad", SCATTER, OTHER)
_LOOP, _ROWS, _COLUMNS = 1, 2, 3

# Ways to lower an op
READ, ASSIGN, UPDATE = 0, 1, 2  # a variable: read, replaced, or changed by an optimizer's op
FREE, NOTHING = 3, 4  # the first input seen otherwise; a loop that reads nothing
REDUCTION, NORM, NORM_GRAD, SOFTMAX = 5, 6, 7, 8
PRODUCT, WHOLE, WHOLE_MOVE = 9, 10, 11  # a kernel of its own; one for each result; one that moves elements
PICK, TURN, MOVE, COSTLY, PLAIN = 12, 13, 14, 15, 16  # loops
_WINDOW = 32  # the longest axis that XLA reduces at one go (`TreeReductionRewriter`)
NEAR, FAR = (8, 64), (8, 2048)  # ways and sets of two caches: a definition of features, whatever machine a model is of
_LINE_BYTES = 64

# A loop, reduction or product: what one kernel does at least.
STEP = np.dtype(
    [
        *((name, "i8") for name in ("op", "kernel", "output", "first", "last")),  # what it reads: from first to last
        *((name, "f8") for name in ("elements", "inner", "strided", "near_misses", "far_misses")),
        *((name, "i8") for name in ("costly", "moving", "windowed")),  # 1: yes
    ]
)
# A tensor of the cluster, or between steps. `same`: the one that it is, seen otherwise; `now`: what a variable has become; else -1.
# `users`: steps that read it; `blocked`: one of these takes no loops along.
VALUE = np.dtype(
    [("bytes", "f8"), *((name, "i8") for name in ("start", "end", "same", "now", "kept", "made", "maker", "users", "blocked"))]
)
_CONST, _VARIABLE, _OUT = 1, 2, 4  # places in `ROLES`
_VALUES, _STEPS, _READ = 0, 1, 2  # of what is counted
COUNTED = 3


class Strided(NamedTuple):
    """Elements that are read across the rows of a matrix.

    `rows` elements, each of its own row of `stride_bytes`, are read before the next of the same line is.
    """

    elements: float = 0.0
    rows: float = 1.0
    stride_bytes: int = 4

    def misses(self, ways: int, sets: int) -> float:
        """Elements whose lines do not stay in a cache, because too many rows fall into the same sets."""
        return float(_missed(self.elements, self.rows, self.stride_bytes, ways, sets))


ALONG = Strided()


@njit(nogil=True)
def _missed(elements: float, rows: float, stride_bytes: int, ways: int, sets: int) -> float:
    lines = rows * min(stride_bytes, _LINE_BYTES) / _LINE_BYTES
    period = sets * _LINE_BYTES
    apart = max(gcd(stride_bytes, period), _LINE_BYTES)
    return elements if lines >= ways * period / apart else 0.0


@njit(nogil=True)
def lower(cluster: int, flat: FlatClusters, values: Records, steps: Records, read: Ints, given: Ints, counts: Ints) -> None:
    """Fill in the steps of a cluster in the order of its ops, the tensors that they read, and all values.

    Parameters
    ----------
    values, steps, read, given
        Room for `VALUE`, `STEP`, the values that steps read, and those that an op reads; `flat.rooms` gives how much is needed.
    counts
        Becomes how many there are of the first three, [COUNTED].
    """
    _begin(cluster, flat, values, counts)
    for i in range(flat.op_ptr[cluster], flat.op_ptr[cluster + 1]):
        known = flat.ops[flat.op[i]]
        way = known.lowered
        inputs = flat.inputs[flat.input_ptr[i] : flat.input_ptr[i + 1]]
        outputs = flat.outputs[flat.output_ptr[i] : flat.output_ptr[i + 1]]
        count = len(inputs)
        for at in range(count):
            given[at] = _root(values, inputs[at])
        if way <= UPDATE:
            if count > 0:
                _change(i, way, cluster, flat, inputs, outputs, values, steps, read, given, counts)
        elif len(outputs) == 0:
            continue
        elif way == FREE and count > 0:
            _alias(values, outputs[0], given[0])
        elif way in (FREE, NOTHING):
            _add(i, _LOOP, given[:0], outputs[0], outputs[0], values, flat.lengths, steps, read, counts)
        elif way == REDUCTION:
            if count > 0:
                made = outputs[0]
                k = _add(i, known.kernel, given[:1], made, given[0], values, flat.lengths, steps, read, counts)
                longest = _longest_reduced(values, given[0], made, flat.lengths, known.kernel == _COLUMNS)
                steps[k].windowed = int(longest > _WINDOW)
                _down(steps, k, values, given[0], flat.lengths)
        elif NORM <= way <= SOFTMAX:
            if count > 0:
                _compose(i, way, outputs, given[:count], values, flat.lengths, steps, read, counts)
        elif way == PRODUCT:
            k = _add(i, known.kernel, given[:count], outputs[0], outputs[0], values, flat.lengths, steps, read, counts)
            steps[k].strided = known.strided
            steps[k].near_misses = known.near_misses
            steps[k].far_misses = known.far_misses
        elif way == WHOLE_MOVE:
            k = _add(i, known.kernel, given[:count], outputs[0], outputs[0], values, flat.lengths, steps, read, counts)
            steps[k].moving = 1
        elif way == PICK:
            # Of a table as much is read as is picked.
            picked = _new(values, values[outputs[0]].start, values[outputs[0]].end, flat.lengths, counts)
            if count > 0:
                given[0] = picked
            k = _add(i, _LOOP, given[:count], outputs[0], outputs[0], values, flat.lengths, steps, read, counts)
            steps[k].moving = 1
        else:
            for output in outputs:
                k = _add(i, known.kernel, given[:count], output, output, values, flat.lengths, steps, read, counts)
                steps[k].costly = int(way == COSTLY)
                steps[k].moving = int(way in (TURN, MOVE))
                if way == TURN and count > 0:
                    _turn(steps, k, values, given[0], outputs[0], flat.lengths)
    for number in range(counts[_VALUES]):
        if values[number].kept:
            values[_root(values, number)].kept = 1


@njit(nogil=True)
def _begin(cluster: int, flat: FlatClusters, values: Records, counts: Ints) -> None:
    """The values that the cluster's own tensors are."""
    first, last = flat.tensor_ptr[cluster], flat.tensor_ptr[cluster + 1]
    counts[_VALUES], counts[_STEPS], counts[_READ] = 0, 0, 0
    for at in range(first, last):
        known = flat.types[flat.tensor[at]]
        number = _new(values, known.start, known.end, flat.lengths, counts)
        values[number].bytes = 0.0 if flat.role[at] == _CONST else known.bytes
        values[number].kept = int(flat.role[at] == _OUT)


@njit(nogil=True)
def _new(values: Records, start: int, end: int, lengths: Ints, counts: Ints) -> int:
    """A value of float32 that has the lengths from start to end as its shape."""
    number = counts[_VALUES]
    counts[_VALUES] = number + 1
    size = 4.0
    for axis in range(start, end):
        size *= lengths[axis]
    values[number].bytes = size
    values[number].start, values[number].end = start, end
    values[number].same, values[number].now, values[number].maker = -1, -1, -1
    values[number].kept, values[number].made, values[number].users, values[number].blocked = 0, 0, 0, 0
    return int(number)


@njit(nogil=True)
def _root(values: Records, number: int) -> int:
    while values[number].same >= 0:
        number = values[number].same
    return int(number)


@njit(nogil=True)
def _alias(values: Records, number: int, other: int) -> None:
    if number != other:
        values[number].same = other


@njit(nogil=True)
def _add(
    op: int,
    kernel: int,
    given: Ints,
    output: int,
    over: int,
    values: Records,
    lengths: Ints,
    steps: Records,
    read: Ints,
    counts: Ints,
) -> int:
    """A step over the elements of a value, which reads what is given but constants, each once."""
    k = counts[_STEPS]
    counts[_STEPS] = k + 1
    elements, inner = 1.0, 1.0
    for axis in range(values[over].end - 1, values[over].start - 1, -1):
        elements *= lengths[axis]
        if inner == 1.0 and lengths[axis] > 1:
            inner = float(lengths[axis])
    first = last = counts[_READ]
    for number in given:
        if values[number].bytes <= 0:
            continue
        known = False
        for at in range(first, last):
            known = known or read[at] == number
        if not known:
            read[last] = number
            last += 1
    counts[_READ] = last
    values[output].made = 1
    steps[k].op, steps[k].kernel, steps[k].output = op, kernel, output
    steps[k].first, steps[k].last = first, last
    steps[k].elements, steps[k].inner = elements, inner
    steps[k].strided, steps[k].near_misses, steps[k].far_misses = 0.0, 0.0, 0.0
    steps[k].costly, steps[k].moving, steps[k].windowed = 0, 0, 0
    return int(k)


@njit(nogil=True)
def _change(
    op: int,
    way: int,
    cluster: int,
    flat: FlatClusters,
    inputs: Ints,
    outputs: Ints,
    values: Records,
    steps: Records,
    read: Ints,
    given: Ints,
    counts: Ints,
) -> None:
    """A variable is read, or becomes another value."""
    count = len(inputs)
    variable = inputs[0]
    if way == READ:
        now = values[variable].now
        if len(outputs) > 0:
            _alias(values, outputs[0], _root(values, now if now >= 0 else variable))
    elif way == ASSIGN:
        if count > 1:
            value = given[1]
            if not values[value].made:  # what comes from outside is copied
                copied = _new(values, values[value].start, values[value].end, flat.lengths, counts)
                _add(op, _LOOP, given[1:2], copied, copied, values, flat.lengths, steps, read, counts)
                value = copied
            values[variable].now = value
            values[value].kept = 1
    else:
        # An optimizer's op makes each of its variables anew from all that it is given.
        for at in range(count):
            now = values[inputs[at]].now
            given[at] = _root(values, now if now >= 0 else inputs[at])
        role = flat.role[flat.tensor_ptr[cluster] : flat.tensor_ptr[cluster + 1]]
        for at in range(count):
            number = inputs[at]
            again = False
            for before in range(at):
                again = again or inputs[before] == number
            if role[number] == _VARIABLE and not again:
                updated = _new(values, values[number].start, values[number].end, flat.lengths, counts)
                _add(op, _LOOP, given[:count], updated, updated, values, flat.lengths, steps, read, counts)
                values[number].now = updated
                values[updated].kept = 1


@njit(nogil=True)
def _compose(
    op: int, way: int, outputs: Ints, given: Ints, values: Records, lengths: Ints, steps: Records, read: Ints, counts: Ints
) -> None:
    """Two reductions, and a loop that uses their results."""
    image, count = given[0], len(given)
    start, end = values[image].start, values[image].end
    rank = end - start
    longest = 1
    kernel, low, high = _COLUMNS, max(end - 1, start), end
    if way == SOFTMAX:
        kernel, low, high = _ROWS, start, max(end - 1, start)
        if rank > 0:
            longest = lengths[end - 1]
    elif rank == 4 and lengths[start + 3] == 1 and lengths[start + 1] > 1:  # over the rest of each image: a layer is normalised
        kernel, low, high = _ROWS, start + 1, start + 2
        longest = lengths[start + 2]
    elif rank > 1:
        longest = lengths[start : end - 1].max()
    reads = min(2 if way == NORM_GRAD else 1, count)
    all_read = np.empty(count + 2, np.int64)
    all_read[:count] = given
    some_read = np.empty(reads + 1, np.int64)
    some_read[:reads] = given[:reads]
    first = _new(values, low, high, lengths, counts)
    k = _add(op, kernel, some_read[:reads], first, image, values, lengths, steps, read, counts)
    steps[k].windowed = int(longest > _WINDOW)
    _down(steps, k, values, image, lengths)
    some_read[reads] = first
    second = _new(values, low, high, lengths, counts)
    k = _add(op, kernel, some_read if way == SOFTMAX else some_read[:reads], second, image, values, lengths, steps, read, counts)
    steps[k].windowed = int(longest > _WINDOW)
    steps[k].costly = int(way == SOFTMAX)
    _down(steps, k, values, image, lengths)
    all_read[count], all_read[count + 1] = first, second
    for output in outputs:
        alike = values[output].end - values[output].start == rank
        for axis in range(values[output].start, values[output].end):
            alike = alike and lengths[axis] > 0
        if alike:
            k = _add(op, _LOOP, all_read, output, output, values, lengths, steps, read, counts)
            steps[k].costly = int(way == SOFTMAX)
        else:
            _alias(values, output, second)


@njit(nogil=True)
def _stride(steps: Records, k: int, elements: float, rows: float, stride_bytes: int) -> None:
    steps[k].strided = elements
    steps[k].near_misses = _missed(elements, rows, stride_bytes, NEAR[0], NEAR[1])
    steps[k].far_misses = _missed(elements, rows, stride_bytes, FAR[0], FAR[1])


@njit(nogil=True)
def _down(steps: Records, k: int, values: Records, number: int, lengths: Ints) -> None:
    """Of a reduction: sums of columns are made one after the other."""
    start, end = values[number].start, values[number].end
    if steps[k].kernel == _COLUMNS and end > start and lengths[end - 1] > 0:
        _stride(steps, k, steps[k].elements, steps[k].elements / lengths[end - 1], 4 * lengths[end - 1])


@njit(nogil=True)
def _turn(steps: Records, k: int, values: Records, number: int, made: int, lengths: Ints) -> None:
    """Of a transposition that does not keep the innermost axis."""
    start, end, made_end = values[number].start, values[number].end, values[made].end
    if start == end or values[made].start == made_end or lengths[end - 1] == lengths[made_end - 1]:
        return
    elements = 1.0
    for axis in range(start, end):
        elements *= lengths[axis]
    _stride(steps, k, elements, float(lengths[made_end - 1]), 4 * lengths[end - 1])


@njit(nogil=True)
def _longest_reduced(values: Records, number: int, made: int, lengths: Ints, by_columns: bool) -> int:
    """The longest axis that a reduction does away with."""
    before = lengths[values[number].start : values[number].end]
    after = lengths[values[made].start : values[made].end]
    longest = 1
    if len(before) == len(after):
        for axis in range(len(before)):
            if before[axis] != after[axis]:
                longest = max(longest, before[axis])
        return longest
    # Which of equal axes are left is not known: those that stay are taken to be the last of columns, and the first of rows.
    stayed = 0
    for at in range(len(before)):
        length = before[len(before) - 1 - at] if by_columns else before[at]
        if stayed < len(after) and length == (after[len(after) - 1 - stayed] if by_columns else after[stayed]):
            stayed += 1
        else:
            longest = max(longest, length)
    return longest
