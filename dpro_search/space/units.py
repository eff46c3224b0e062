"""From tensors to units: when units are posted, and which update work waits for them; compiled, for a search asks for each plan."""

from __future__ import annotations

import numpy as np
from numba import njit

from dpro_search.collect.trace import Floats, Ints


@njit(cache=True, nogil=True)
def posts_of_units(post_us: Floats, unit_of: Ints, units: int) -> tuple[Floats, Ints, Ints]:
    """When and in which order ranks post units.

    Parameters
    ----------
    post_us
        Core time at which each tensor is posted, [samples, classes, tensors].
    unit_of
        Unit of each tensor, [tensors]; a unit is there with its last tensor.

    Returns
    -------
    tuple
        Core times, ascending, and the units that they belong to, both [samples, classes, units], units being numbered by their
        mean post; and the number of each unit of `unit_of`, [units].
    """
    samples, classes, tensors = post_us.shape
    last_us = np.zeros((samples, classes, units))
    total_us = np.zeros(units)
    for s in range(samples):
        for c in range(classes):
            row = last_us[s, c]
            for tensor in range(tensors):
                row[unit_of[tensor]] = max(row[unit_of[tensor]], post_us[s, c, tensor])
            total_us += row
    listing = np.argsort(total_us, kind="mergesort")
    number = np.empty(units, np.int64)
    for place in range(units):
        number[listing[place]] = place
    ascending = np.empty((samples, classes, units))
    order = np.empty((samples, classes, units), np.int64)
    for s in range(samples):
        for c in range(classes):
            times, unit_at = ascending[s, c], order[s, c]
            for place in range(units):  # nearly in order already
                value, at = last_us[s, c, listing[place]], place
                while at > 0 and times[at - 1] > value:
                    times[at], unit_at[at] = times[at - 1], unit_at[at - 1]
                    at -= 1
                times[at], unit_at[at] = value, place
    return ascending, order, number


@njit(cache=True, nogil=True)
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
    new_owner = np.empty(count, np.int64)
    new_ptr = np.zeros(count + 1, np.int64)
    new_unit = np.empty(len(tensor), np.int64)
    becomes = np.empty(count, np.int64)
    of_unit = np.full((classes, units), -1, np.int64)
    seen = np.full(units, -1, np.int64)  # the last release that waits for a unit
    found, filled = 0, 0
    for i in range(count):
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
            of_unit[owner[i], unit] = found
        becomes[i] = found
        new_owner[found] = owner[i]
        found += 1
        new_ptr[found] = filled
    merged_us = np.zeros((len(work_us), found))
    for s in range(len(work_us)):
        for i in range(count):
            merged_us[s, becomes[i]] += work_us[s, i]
    return new_owner[:found], merged_us, new_ptr[: found + 1], new_unit[:filled]
