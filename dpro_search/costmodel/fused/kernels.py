"""The kernels that XLA makes of clusters on a CPU: what is fused into one loop, what stands alone, and how much each of them does.

A loop whose result only other loops need becomes part of them (once for each); a reduction takes what makes its input along, but
its own result lies in memory (XLA's `InstructionFusion`). The steps that this begins with are those of `lowering`. Compiled with
numba: a search asks for thousands of clusters a second.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dpro_search._compiled import njit
from dpro_search.collect.trace import Floats, Ints
from dpro_search.costmodel.fused.flat import FlatClusters, Records
from dpro_search.costmodel.fused.lowering import COUNTED, STEP, UPDATE, VALUE, lower

# All but the first count something; a kernel's class is its number in `KERNELS`.
PART_FEATURES = (
    "class",
    "us",  # of the ops in it, by themselves; an op in several kernels counts for each in part
    "work",  # floating-point operations as compiled: a gradient of a strided convolution computes the holes, too, and that of a
    # depthwise filter all pairs of channels
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
Bools = npt.NDArray[np.bool_]
_PART = np.dtype([(name, "f8") for name in PART_FEATURES])
_LOOP, _LAST_ABSORBING = 1, 3  # in `KERNELS`: reductions take loops along, what comes behind them does not
_LARGEST_LOOP = 60  # ops; a larger one is split
_IN, _VARIABLE, _OUT = 0, 2, 4  # places in `ROLES`
_STEPS_MORE = 3  # than an op has results, or, of an optimizer's op, inputs
_READS_MORE = 2  # than an op has inputs


def kernel_parts(flat: FlatClusters, leads: Ints) -> tuple[Floats, Ints]:
    """The parts of n clusters: of each its call, then its kernels.

    Parameters
    ----------
    leads
        Of each op, the one that it ran with as one kernel (`timed.leaders`).

    Returns
    -------
    tuple
        The values of `PART_FEATURES`, [parts, features], and the cluster of each part, [parts].
    """
    inputs, outputs = np.diff(flat.input_ptr), np.diff(flat.output_ptr)
    steps = _STEPS_MORE + outputs + np.where(flat.ops["lowered"][flat.op] == UPDATE, inputs, 0)
    reads = steps * (inputs + _READS_MORE)
    tensors = np.diff(flat.tensor_ptr)
    most = [int(_by_cluster(needed, flat.op_ptr).max(initial=0)) for needed in (steps, reads)]
    parts = np.zeros(int(steps.sum()) + len(tensors), dtype=_PART)
    of = np.empty(len(parts), dtype=np.int64)
    count = _parts(
        flat,
        leads,
        np.empty(int(tensors.max(initial=0)) + most[0], dtype=VALUE),
        np.empty(most[0], dtype=STEP),
        np.empty(most[1], dtype=np.int64),
        np.empty(int(inputs.max(initial=0)) + 1, dtype=np.int64),
        parts,
        of,
    )
    return parts[:count].view(np.float64).reshape(count, len(PART_FEATURES)).copy(), of[:count].copy()


def _by_cluster(counts: Ints, op_ptr: Ints) -> Ints:
    total = np.concatenate(([0], np.cumsum(counts)))
    return np.asarray(np.diff(total[op_ptr]))


@njit(nogil=True)
def _parts(
    flat: FlatClusters, leads: Ints, values: Records, steps: Records, read: Ints, given: Ints, parts: Records, of: Ints
) -> int:
    """Fill in parts and the cluster of each; gives their number."""
    counts = np.zeros(COUNTED, np.int64)
    in_memory = np.zeros(len(steps), np.bool_)
    held = np.zeros(len(steps), np.int64)  # kernels that a step is part of
    members, sources = np.zeros(len(steps) + 1, np.int64), np.zeros(len(values) + 1, np.int64)
    seen = np.zeros(len(values), np.int64)
    stack = np.zeros(len(read) + 1, np.int64)
    shared = np.zeros(len(flat.op), np.int64)  # steps of an op that are in any kernel
    us = np.zeros(len(flat.op))
    part = stamp = 0
    for cluster in range(len(flat.op_ptr) - 1):
        lower(cluster, flat, values, steps, read, given, counts)
        step_count = counts[1]
        _decide(step_count, values, steps, read, in_memory)
        held[:step_count] = 0
        kernels = 0
        for k in range(step_count):
            if in_memory[k]:
                kernels += 1
                stamp += 1
                found, _ = _gather(k, values, steps, read, in_memory, members, sources, seen, stack, stamp)
                for at in range(found):
                    held[members[at]] += 1
        for k in range(step_count):
            if held[k]:
                shared[steps[k].op] += 1
        first, last = flat.op_ptr[cluster], flat.op_ptr[cluster + 1]
        for i in range(first, last):
            us[leads[i] if shared[leads[i]] else i] += flat.us[i]
        left_us = 0.0
        for i in range(first, last):
            if not shared[i]:
                left_us += us[i]
        cluster_bytes = 0.0
        tensors = flat.tensor_ptr[cluster + 1] - flat.tensor_ptr[cluster]
        for number in range(tensors):
            cluster_bytes += values[number].bytes
        _call(cluster, flat, values, parts, part)
        parts[part].us, parts[part].kernels, parts[part].cluster_bytes = left_us, kernels, cluster_bytes
        of[part] = cluster
        part += 1
        for k in range(step_count):
            if in_memory[k]:
                stamp += 1
                made_of = _gather(k, values, steps, read, in_memory, members, sources, seen, stack, stamp)
                parts[part].cluster_bytes = cluster_bytes
                for at in range(made_of[0]):
                    member = members[at]
                    op = steps[member].op
                    parts[part].us += us[op] / (shared[op] * held[member])
                    _add_step(steps, member, parts, part)
                for at in range(made_of[1]):
                    parts[part].read_bytes += values[sources[at]].bytes
                parts[part].sources, parts[part].ops = made_of[1], made_of[0]
                parts[part].written_bytes = values[steps[k].output].bytes
                _add_root(flat, steps, k, parts, part)
                of[part] = cluster
                part += 1
    return part


@njit(nogil=True)
def _decide(count: int, values: Records, steps: Records, read: Ints, in_memory: Bools) -> None:
    """Whether each step's result lies in memory: others' loops take the rest along."""
    for k in range(count):
        values[steps[k].output].maker = k
        for at in range(steps[k].first, steps[k].last):
            values[read[at]].users += 1
            if steps[k].kernel > _LAST_ABSORBING:
                values[read[at]].blocked = 1
    sizes = np.zeros(count, np.int64)  # ops in the loop of each step; 0: its result lies in memory
    has_costly = np.zeros(count, np.bool_)
    for k in range(count):
        size, costly = 1, steps[k].costly > 0
        for at in range(steps[k].first, steps[k].last):
            maker = values[read[at]].maker
            if 0 <= maker < k and not in_memory[maker]:
                size += sizes[maker]
                costly = costly or has_costly[maker]
        made = values[steps[k].output]
        used = made.users > 0 or made.kept > 0
        absorbed = (
            steps[k].kernel == _LOOP
            and made.kept == 0
            and made.blocked == 0
            and not (made.users > 1 and costly)
            and size < _LARGEST_LOOP
        )
        in_memory[k] = used and not absorbed
        if not in_memory[k]:
            sizes[k] = size
            has_costly[k] = costly


@njit(nogil=True)
def _gather(
    k: int,
    values: Records,
    steps: Records,
    read: Ints,
    in_memory: Bools,
    members: Ints,
    sources: Ints,
    seen: Ints,
    stack: Ints,
    stamp: int,
) -> tuple[int, int]:
    """Fill in the steps in the kernel of a step, itself the first, and the values in memory that it reads; how many of each."""
    members[0] = k
    found = 1
    source_count = depth = 0
    for at in range(steps[k].first, steps[k].last):
        stack[depth] = read[at]
        depth += 1
    while depth:
        depth -= 1
        number = stack[depth]
        if seen[number] == stamp:
            continue
        seen[number] = stamp
        maker = values[number].maker
        if maker < 0 or in_memory[maker]:
            sources[source_count] = number
            source_count += 1
            continue
        members[found] = maker
        found += 1
        for at in range(steps[maker].first, steps[maker].last):
            stack[depth] = read[at]
            depth += 1
    return found, source_count


@njit(nogil=True)
def _call(cluster: int, flat: FlatClusters, values: Records, parts: Records, part: int) -> None:
    """What is known of a call without its kernels."""
    first = flat.tensor_ptr[cluster]
    parts[part].ops = flat.op_ptr[cluster + 1] - flat.op_ptr[cluster]
    for at in range(first, flat.tensor_ptr[cluster + 1]):
        role, size = flat.role[at], values[at - first].bytes
        if role == _IN:
            parts[part].sources += 1
        if role == _VARIABLE:
            parts[part].variables += 1
        if role in (_IN, _VARIABLE):
            parts[part].read_bytes += size
        if role == _OUT:
            parts[part].outputs += 1
            parts[part].written_bytes += size


@njit(nogil=True)
def _add_step(steps: Records, k: int, parts: Records, part: int) -> None:
    """What a step adds to its kernel."""
    elements = steps[k].elements
    parts[part].work += elements
    if steps[k].costly:
        parts[part].costly += elements
    if steps[k].moving:
        parts[part].moved += elements
    if steps[k].windowed:
        parts[part].windowed += elements
    parts[part].strided += steps[k].strided
    parts[part].near_misses += steps[k].near_misses
    parts[part].far_misses += steps[k].far_misses


@njit(nogil=True)
def _add_root(flat: FlatClusters, steps: Records, k: int, parts: Records, part: int) -> None:
    """What is read off the step that a kernel is named after."""
    parts[part]["class"] = steps[k].kernel
    parts[part].elements, parts[part].inner = steps[k].elements, steps[k].inner
    known = flat.ops[flat.op[steps[k].op]]
    if known.multiplies:
        batches, rows, depth, columns = known.batches, known.rows, known.depth, known.columns
        parts[part].batches, parts[part].rows, parts[part].depth, parts[part].columns = batches, rows, depth, columns
        parts[part].pixels, parts[part].holes, parts[part].swapped = known.pixels, known.holes, known.swapped
        parts[part].work = 2 * known.pairs * batches * rows * depth * columns
        parts[part].left, parts[part].right = batches * rows * depth, batches * depth * columns
        parts[part].made = known.pairs * batches * rows * columns
