"""Parts of fused clusters, whose times add up: the call, all ops that compute element by element, and each other op.

One rule stands for the compiler's fusion (XLA's `InstructionFusion`): an op that computes element by element, a *loop*, becomes
part of the loops, reductions and normalisations that read its result; all other results lie in memory. The rule decides which bytes
are read from memory and written to it. Compiled with numba: a search asks for thousands of clusters a second.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpro_search._compiled import njit
from dpro_search.collect.trace import Floats, Ints
from dpro_search.costmodel.fused.flat import FlatClusters, Records
from dpro_search.costmodel.fused.op_classes import HEAVY, OTHER

CALL, LOOP, SCATTER = "call", "loop", "scatter"
COMPOSED = ("norm", "norm_grad", "softmax")
# Classes of parts, in the order of their numbers.
PART_CLASSES = (CALL, LOOP, "row_reduction", "column_reduction", *COMPOSED, *HEAVY, "pool", "pool_grad", SCATTER, OTHER)

# How an op computes. Up to `UPDATE` it is about a variable: read, replaced, or changed by an optimizer's op.
READ, ASSIGN, UPDATE = 0, 1, 2
ALIAS, FILL, PICK, TRANSPOSE, MOVE, COSTLY, PLAIN = 3, 4, 5, 6, 7, 8, 9  # its input seen otherwise; loops
REDUCTION, NORM, SOFTMAX = 10, 11, 12  # take loops along
PRODUCT, WHOLE, WHOLE_MOVE = 13, 14, 15  # read and write memory
_LAST_LOOP, _LAST_ABSORBING = PLAIN, SOFTMAX

# All but the first count something; the class is a place in `PART_CLASSES`.
PART_FEATURES = (
    "class",
    "us",  # of the ops by themselves; of the call, that of ops without a part
    "work",  # floating-point operations as compiled: a gradient of a strided convolution computes the holes, too, and that of a
    # depthwise filter all pairs of channels
    "read_bytes",  # from memory
    "written_bytes",  # to memory
    "elements",  # of the result, of a reduction's input
    "costly",  # transcendental functions
    "moved",  # elements that are picked from elsewhere: transposed, concatenated, padded, gathered
    "kernels",  # results in memory; of the call: of all parts
    "sources",  # tensors read from memory; of the call: those that come from outside
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
    "far_misses",  # the same for a second-level cache
    "windowed",  # elements of reductions that XLA does in windows, one element after the other
    "longest",  # axis that a reduction does away with
    "outputs",  # the call's: results
    "variables",  # the call's
    "ops",  # of the call and of loops
    "cluster_us",  # of all ops of the cluster by themselves
    "cluster_bytes",  # of all tensors of the cluster, which may stay in a cache
)
Bools = npt.NDArray[np.bool_]
_PART = np.dtype([(name, "f8") for name in PART_FEATURES])
_WINDOW = 32  # the longest axis that XLA reduces at one go (`TreeReductionRewriter`)
NEAR, FAR = (8, 64), (8, 2048)  # ways and sets of two caches: a definition of features, whatever machine a model is of
_LINE_BYTES = 64
_COLUMN_REDUCTION = PART_CLASSES.index("column_reduction")
_IN, _CONST, _VARIABLE, _INNER, _OUT = range(5)  # places in `ROLES`


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


def op_parts(flat: FlatClusters, leads: Ints) -> tuple[Floats, Ints]:
    """Parts of n clusters: of each its call, its loops if it has any, then its other ops.

    Parameters
    ----------
    leads
        For each op, the one that it ran with as one kernel (`timed.leaders`).

    Returns
    -------
    tuple
        The values of `PART_FEATURES`, [parts, features], and the cluster of each part, [parts].
    """
    parts = np.zeros(len(flat.op) + 2 * (len(flat.op_ptr) - 1), dtype=_PART)
    of = np.empty(len(parts), dtype=np.int64)
    count = _fill_parts(flat, leads, parts, of)
    return parts[:count].view(np.float64).reshape(count, len(PART_FEATURES)).copy(), of[:count].copy()


@njit(nogil=True)
def _fill_parts(flat: FlatClusters, leads: Ints, parts: Records, of: Ints) -> int:
    """Fill in parts and the cluster of each; returns their number."""
    us = np.zeros(len(flat.op))
    for i in range(len(flat.op)):
        us[leads[i]] += flat.us[i]
    same = np.arange(len(flat.tensor))  # the tensor that each one is, seen otherwise
    size, users = np.zeros(len(flat.tensor)), np.zeros(len(flat.tensor), np.int64)
    in_memory, read = np.zeros(len(flat.tensor), np.bool_), np.zeros(len(flat.tensor), np.bool_)
    part = 0
    for cluster in range(len(flat.op_ptr) - 1):
        _place_results(cluster, flat, same, size, users, in_memory)
        call, loops = part, -1
        part += 1
        _fill_call(cluster, flat, size, parts, call)
        for i in range(flat.op_ptr[cluster], flat.op_ptr[cluster + 1]):
            parts[call].cluster_us += flat.us[i]
            way = flat.ops[flat.op[i]].way
            has_tensors = flat.input_ptr[i + 1] > flat.input_ptr[i] or flat.output_ptr[i + 1] > flat.output_ptr[i]
            if way in (READ, ALIAS) or not has_tensors:
                parts[call].us += us[i]
                continue
            at = loops
            if at < 0 or way > _LAST_LOOP:
                at = part
                part += 1
                parts[at]["class"] = flat.ops[flat.op[i]].part
            if way <= _LAST_LOOP:
                loops = at
            parts[at].us += us[i]
            parts[at].ops += 1
            _add_bytes(i, cluster, flat, same, size, in_memory, read, parts, at)
            _add_work(i, cluster, flat, parts, at)
        if loops >= 0 and parts[loops].elements > 0:
            parts[loops].inner /= parts[loops].elements
        for at in range(call, part):
            of[at] = cluster
            if at > call:
                parts[call].kernels += parts[at].kernels
                parts[at].cluster_us, parts[at].cluster_bytes = parts[call].cluster_us, parts[call].cluster_bytes
    return part


@njit(nogil=True)
def _root(same: Ints, tensor: int) -> int:
    while same[tensor] != tensor:
        tensor = same[tensor]
    return int(tensor)


@njit(nogil=True)
def _place_results(cluster: int, flat: FlatClusters, same: Ints, size: Floats, users: Ints, in_memory: Bools) -> None:
    """Decide which tensors of a cluster lie in memory, and count the ops that read each."""
    begin = flat.tensor_ptr[cluster]
    for tensor in range(begin, flat.tensor_ptr[cluster + 1]):
        size[tensor] = 0.0 if flat.role[tensor] == _CONST else flat.types[flat.tensor[tensor]].bytes
        in_memory[tensor] = flat.role[tensor] != _INNER
    for i in range(flat.op_ptr[cluster], flat.op_ptr[cluster + 1]):
        way = flat.ops[flat.op[i]].way
        inputs = flat.inputs[flat.input_ptr[i] : flat.input_ptr[i + 1]]
        outputs = flat.outputs[flat.output_ptr[i] : flat.output_ptr[i + 1]]
        if way in (READ, ALIAS):
            if len(inputs) > 0 and len(outputs) > 0 and inputs[0] != outputs[0]:
                source, seen = _root(same, begin + inputs[0]), begin + outputs[0]
                in_memory[source] = in_memory[source] or in_memory[seen]
                same[seen] = source
            continue
        for number in inputs:
            tensor = _root(same, begin + number)
            users[tensor] += 1
            if way > _LAST_ABSORBING:
                in_memory[tensor] = True
    for i in range(flat.op_ptr[cluster], flat.op_ptr[cluster + 1]):
        way = flat.ops[flat.op[i]].way
        for number in flat.outputs[flat.output_ptr[i] : flat.output_ptr[i + 1]]:
            tensor = _root(same, begin + number)
            if way > _LAST_LOOP or (way == COSTLY and users[tensor] > 1):
                in_memory[tensor] = True


@njit(nogil=True)
def _fill_call(cluster: int, flat: FlatClusters, size: Floats, parts: Records, call: int) -> None:
    """Fill in the call of a cluster, without its kernels and times."""
    parts[call].ops = flat.op_ptr[cluster + 1] - flat.op_ptr[cluster]
    for tensor in range(flat.tensor_ptr[cluster], flat.tensor_ptr[cluster + 1]):
        role = flat.role[tensor]
        parts[call].cluster_bytes += size[tensor]
        if role == _IN:
            parts[call].sources += 1
        if role == _VARIABLE:
            parts[call].variables += 1
        if role in (_IN, _VARIABLE):
            parts[call].read_bytes += size[tensor]
        if role == _OUT:
            parts[call].outputs += 1
            parts[call].written_bytes += size[tensor]


@njit(nogil=True)
def _add_bytes(
    i: int, cluster: int, flat: FlatClusters, same: Ints, size: Floats, in_memory: Bools, read: Bools, parts: Records, part: int
) -> None:
    """Add to a part what an op reads from memory and writes to it; all loops of a cluster read a tensor once."""
    begin, way = flat.tensor_ptr[cluster], flat.ops[flat.op[i]].way
    inputs = flat.inputs[flat.input_ptr[i] : flat.input_ptr[i + 1]]
    outputs = flat.outputs[flat.output_ptr[i] : flat.output_ptr[i + 1]]
    for at in range(len(inputs)):
        tensor = _root(same, begin + inputs[at])
        if way in (ASSIGN, UPDATE) and flat.role[tensor] == _VARIABLE:
            parts[part].written_bytes += size[tensor]
            parts[part].kernels += 1
        again = way <= _LAST_LOOP and read[tensor]
        for before in inputs[:at]:
            again = again or before == inputs[at]
        if again or not in_memory[tensor] or size[tensor] == 0.0:
            continue
        parts[part].sources += 1
        if way == PICK and at == 0 and len(outputs) > 0:  # of a table as much is read as is picked
            parts[part].read_bytes += min(size[tensor], size[begin + outputs[0]])
        else:
            parts[part].read_bytes += size[tensor]
            read[tensor] = read[tensor] or way <= _LAST_LOOP
    for number in outputs:
        if in_memory[_root(same, begin + number)]:
            parts[part].written_bytes += size[begin + number]
            parts[part].kernels += 1


@njit(nogil=True)
def _add_work(i: int, cluster: int, flat: FlatClusters, parts: Records, part: int) -> None:
    """Add to a part what an op computes."""
    begin, known = flat.tensor_ptr[cluster], flat.ops[flat.op[i]]
    inputs = flat.inputs[flat.input_ptr[i] : flat.input_ptr[i + 1]]
    outputs = flat.outputs[flat.output_ptr[i] : flat.output_ptr[i + 1]]
    over, most = -1, -1.0  # the tensor over whose elements the op runs: a loop's result, else its largest tensor
    for number in outputs:
        elements = _elements(flat, begin + number)
        if elements > most:
            over, most = number, elements
    if known.way > _LAST_LOOP or over < 0:
        for number in inputs:
            elements = _elements(flat, begin + number)
            if elements > most:
                over, most = number, elements
    lengths = _lengths(flat, begin + over)
    elements, inner = most, 1.0
    for length in lengths[::-1]:
        if length > 1:
            inner = float(length)
            break
    parts[part].elements += elements
    parts[part].work += elements
    parts[part].inner += inner * elements if known.way <= _LAST_LOOP else inner
    if known.way == COSTLY or known.way == SOFTMAX:
        parts[part].costly += elements
    if known.way == PICK or known.way == TRANSPOSE or known.way == MOVE or known.way == WHOLE_MOVE:
        parts[part].moved += elements
    if known.way == TRANSPOSE and len(inputs) > 0 and len(outputs) > 0:
        before, after = _lengths(flat, begin + inputs[0]), _lengths(flat, begin + outputs[0])
        if len(before) > 0 and len(after) > 0 and before[-1] != after[-1]:
            _add_strided(parts, part, elements, float(after[-1]), 4 * before[-1])
    if known.way == REDUCTION and len(inputs) > 0 and len(outputs) > 0:
        lengths = _lengths(flat, begin + inputs[0])
        longest = _longest_reduced(lengths, _lengths(flat, begin + outputs[0]), known.part == _COLUMN_REDUCTION)
        _add_reduction(parts, part, elements, longest, lengths, known.part == _COLUMN_REDUCTION)
    elif known.way == NORM and len(lengths) > 0:
        over_rows = len(lengths) == 4 and lengths[3] == 1 and lengths[1] > 1  # the rest of each image: a layer is normalised
        longest = lengths[2] if over_rows else lengths[:-1].max() if len(lengths) > 1 else 1
        _add_reduction(parts, part, elements, longest, lengths, not over_rows)
    elif known.way == SOFTMAX and len(lengths) > 0:
        _add_reduction(parts, part, elements, lengths[-1], lengths, False)
    elif known.multiplies:
        batches, rows, depth, columns = known.batches, known.rows, known.depth, known.columns
        parts[part].batches, parts[part].rows, parts[part].depth, parts[part].columns = batches, rows, depth, columns
        parts[part].pixels, parts[part].holes, parts[part].swapped = known.pixels, known.holes, known.swapped
        parts[part].work = 2 * known.pairs * batches * rows * depth * columns
        parts[part].left, parts[part].right = batches * rows * depth, batches * depth * columns
        parts[part].made = known.pairs * batches * rows * columns
        parts[part].strided = known.strided
        parts[part].near_misses, parts[part].far_misses = known.near_misses, known.far_misses


@njit(nogil=True)
def _lengths(flat: FlatClusters, tensor: int) -> Ints:
    known = flat.types[flat.tensor[tensor]]
    return flat.lengths[known.start : known.end]


@njit(nogil=True)
def _elements(flat: FlatClusters, tensor: int) -> float:
    elements = 1.0
    for length in _lengths(flat, tensor):
        elements *= length
    return elements


@njit(nogil=True)
def _add_strided(parts: Records, part: int, elements: float, rows: float, stride_bytes: int) -> None:
    parts[part].strided += elements
    parts[part].near_misses += _missed(elements, rows, stride_bytes, NEAR[0], NEAR[1])
    parts[part].far_misses += _missed(elements, rows, stride_bytes, FAR[0], FAR[1])


@njit(nogil=True)
def _add_reduction(parts: Records, part: int, elements: float, longest: int, lengths: Ints, by_columns: bool) -> None:
    """Add the axis that a reduction does away with; sums of columns are made one after the other."""
    parts[part].longest = longest
    if longest > _WINDOW:
        parts[part].windowed += elements
    if by_columns and len(lengths) > 0 and lengths[-1] > 0:
        _add_strided(parts, part, elements, elements / lengths[-1], 4 * lengths[-1])


@njit(nogil=True)
def _longest_reduced(before: Ints, after: Ints, by_columns: bool) -> int:
    """The longest axis that a reduction does away with."""
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
