"""From tensors to units: when units are enqueued, and which update work waits for them; compiled: each plan needs it.

What NumPy does as fast (making arrays, a stable sort) is left to it: compiling that took longer than compiling all else here.
"""

from __future__ import annotations

import numpy as np

from dpro_search._compiled import njit
from dpro_search.collect.trace import Floats, Ints


def enqueues_of_units(post_us: Floats, unit_of: Ints, units: int) -> tuple[Floats, Ints, Ints]:
    """When and in which order ranks enqueue units.

    Parameters
    ----------
    post_us
        Core time at which each tensor is enqueued, [samples, classes, tensors].
    unit_of
        Unit of each tensor, [tensors]; a unit is there with its last tensor.

    Returns
    -------
    tuple
        Core times, ascending, and the units that they belong to, both [samples, classes, units], units being numbered by their
        mean enqueue; and the number of each unit of `unit_of`, [units].
    """
    samples, classes, _ = post_us.shape
    last_us, total_us = np.zeros((samples, classes, units)), np.zeros(units)
    _last_enqueues(post_us, unit_of, last_us, total_us)
    listing = np.argsort(total_us, kind="stable")
    number = np.empty(units, np.int64)
    number[listing] = np.arange(units)
    ascending, order = np.empty(last_us.shape), np.empty(last_us.shape, np.int64)
    _order_enqueues(last_us, listing, ascending, order)
    return ascending, order, number


@njit(nogil=True)
def _last_enqueues(post_us: Floats, unit_of: Ints, last_us: Floats, total_us: Floats) -> None:
    """When the last tensor of each unit is enqueued, and the sum over samples and classes; both 0 before."""
    samples, classes, tensors = post_us.shape
    for s in range(samples):
        for c in range(classes):
            for tensor in range(tensors):
                unit = unit_of[tensor]
                if post_us[s, c, tensor] > last_us[s, c, unit]:
                    last_us[s, c, unit] = post_us[s, c, tensor]
            for unit in range(len(total_us)):
                total_us[unit] += last_us[s, c, unit]


@njit(nogil=True)
def _order_enqueues(last_us: Floats, listing: Ints, ascending: Floats, order: Ints) -> None:
    """Sort the enqueues of each sample and class; taken in the order of their means they are nearly in order already."""
    samples, classes, units = last_us.shape
    for s in range(samples):
        for c in range(classes):
            for place in range(units):
                value, at = last_us[s, c, listing[place]], place
                while at > 0 and ascending[s, c, at - 1] > value:
                    ascending[s, c, at], order[s, c, at] = ascending[s, c, at - 1], order[s, c, at - 1]
                    at -= 1
                ascending[s, c, at], order[s, c, at] = value, place


def releases_of_units(
    owner: Ints, work_us: Floats, ptr: Ints, tensor: Ints, unit_of: Ints, classes: int, units: int
) -> tuple[Ints, Floats, Ints, Ints]:
    """Update work by the units that it waits for; on each class, work that waits for one and the same unit is one release.

    Parameters
    ----------
    owner, work_us, ptr, tensor
        Releases as recorded: class [releases], core time [samples, releases], and the tensors that they wait for, CSR.

    Returns
    -------
    tuple
        The same of the merged ones, with units in place of tensors.
    """
    count = len(owner)
    new_owner, new_ptr, new_unit = np.empty(count, np.int64), np.zeros(count + 1, np.int64), np.empty(len(tensor), np.int64)
    becomes = np.empty(count, np.int64)
    of_unit, seen = np.full((classes, units), -1, np.int64), np.full(units, -1, np.int64)
    merged = _merge(owner, ptr, tensor, unit_of, of_unit, seen, becomes, new_owner, new_ptr, new_unit)
    merged_us = np.zeros((len(work_us), merged))
    _add_work(work_us, becomes, merged_us)
    return new_owner[:merged], merged_us, new_ptr[: merged + 1], new_unit[: new_ptr[merged]]


@njit(nogil=True)
def _merge(
    owner: Ints,
    ptr: Ints,
    tensor: Ints,
    unit_of: Ints,
    of_unit: Ints,  # the merged release of each class that waits for one unit alone; -1: none
    seen: Ints,  # the last release that waits for a unit
    becomes: Ints,
    new_owner: Ints,
    new_ptr: Ints,
    new_unit: Ints,
) -> int:
    """Number the merged release of each release in `becomes`; returns their number."""
    count, filled = 0, 0
    for i in range(len(owner)):
        first = filled
        for k in range(ptr[i], ptr[i + 1]):
            unit = unit_of[tensor[k]]
            if seen[unit] != i:
                seen[unit] = i
                new_unit[filled] = unit
                filled += 1
        if filled - first == 1:
            unit = new_unit[first]
            if of_unit[owner[i], unit] >= 0:
                becomes[i] = of_unit[owner[i], unit]
                filled = first
                continue
            of_unit[owner[i], unit] = count
        becomes[i] = count
        new_owner[count] = owner[i]
        count += 1
        new_ptr[count] = filled
    return count


@njit(nogil=True)
def _add_work(work_us: Floats, becomes: Ints, merged_us: Floats) -> None:
    for s in range(len(work_us)):
        for i in range(len(becomes)):
            merged_us[s, becomes[i]] += work_us[s, i]
