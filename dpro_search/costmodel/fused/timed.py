"""Clusters as every trace knows them: types, times and wiring of their ops. All clusters at once, as columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpro_search._compiled import njit
from dpro_search.collect.tables.clusters import ROLES
from dpro_search.collect.trace import Floats, Ints
from dpro_search.costmodel.fused.flat import FlatClusters, pointers
from dpro_search.costmodel.fused.op_classes import KINDS
from dpro_search.costmodel.fused.parts import TIMED_PARTS

_EXTENT = ("ops", "depth", "width", "inputs", "outputs")
TIMED_FEATURES = (
    "members_us",
    "largest_member_us",
    *_EXTENT,
    *(f"{kind}_count" for kind in KINDS),
    *(f"{kind}_us" for kind in KINDS),
)
_LONGEST_EPILOGUE = 3
_IN, _VARIABLE, _OUT = 0, 2, 4  # places in `ROLES`


@dataclass(frozen=True, kw_only=True)
class TimedOps:
    """The ops with a time of their own in n clusters, k in all, as a trace holds them."""

    ptr: Ints  # Begin of the ops of each cluster, [n + 1].
    # kinds, us: Kind (a place in `KINDS`) and time of each op, [k].
    kinds: Ints
    us: Floats
    # depth, width: Ops on the longest chain; most ops at one distance from the cluster's inputs, [n].
    depth: Ints
    width: Ints
    # inputs, outputs: Tensors that come from outside, constants not counted; tensors that are needed outside, [n].
    inputs: Ints
    outputs: Ints


def timed_ops(flat: FlatClusters, leads: Ints | None = None) -> TimedOps:
    """Measured clusters as a trace would hold them; `leads`: the result of `leaders`, where it is known already."""
    leads = leaders(flat) if leads is None else leads
    ran = flat.us > 0
    roles = np.zeros((len(flat.op_ptr) - 1, len(ROLES)), dtype=np.int64)
    np.add.at(roles, (np.repeat(np.arange(len(roles)), np.diff(flat.tensor_ptr)), flat.role), 1)
    extent = _extent(flat)
    return TimedOps(
        ptr=pointers(np.add.reduceat(np.append(ran, False), flat.op_ptr[:-1], dtype=np.int64).tolist()),
        kinds=flat.ops["kind"][flat.op[leads[ran]]],
        us=flat.us[ran],
        depth=extent[:, 0],
        width=extent[:, 1],
        inputs=roles[:, _IN] + roles[:, _VARIABLE],
        outputs=roles[:, _OUT],
    )


def timed_whole(clusters: TimedOps) -> Floats:
    """The values of `TIMED_FEATURES`, [n, features]."""
    count, kinds = len(clusters.depth), len(KINDS)
    of, key = _keys(clusters)
    largest = np.zeros(count)
    np.maximum.at(largest, of, clusters.us)
    extent = np.diff(clusters.ptr), clusters.depth, clusters.width, clusters.inputs, clusters.outputs
    return np.column_stack(
        [
            np.bincount(of, clusters.us, count),
            largest,
            *extent,
            np.bincount(key, minlength=count * kinds).reshape(count, kinds),
            np.bincount(key, clusters.us, count * kinds).reshape(count, kinds),
        ]
    ).astype(np.float64)


def timed_parts(clusters: TimedOps) -> tuple[Floats, Ints]:
    """`TIMED_PARTS` of the call of each cluster, then of its ops of each kind, [parts, features]; the cluster of each, [parts]."""
    count, kinds = len(clusters.depth), len(KINDS)
    of, key = _keys(clusters)
    number = np.bincount(key, minlength=count * kinds)
    us = np.bincount(key, clusters.us, count * kinds)
    largest = np.zeros(count * kinds)
    np.maximum.at(largest, key, clusters.us)
    present = np.flatnonzero(number)
    cluster = np.concatenate((np.arange(count), present // kinds))
    whole = [np.bincount(of, clusters.us, count), np.diff(clusters.ptr), clusters.inputs, clusters.outputs]
    whole += [clusters.depth, clusters.width]
    parts = np.zeros((len(cluster), len(TIMED_PARTS)))
    parts[count:, :4] = np.column_stack((1 + present % kinds, us[present], number[present], largest[present]))
    parts[:, 4:] = np.column_stack(whole)[cluster]
    order = np.argsort(cluster, kind="stable")
    return parts[order], cluster[order]


def _keys(clusters: TimedOps) -> tuple[Ints, Ints]:
    """Cluster of each op, and its cluster and kind as one number."""
    of = np.repeat(np.arange(len(clusters.depth)), np.diff(clusters.ptr))
    return of, of * len(KINDS) + clusters.kinds


@njit(nogil=True)
def leaders(flat: FlatClusters) -> Ints:
    """For each op, the one that it ran with as one kernel: itself, but for what follows a product that was fused with it.

    A convolution or product that ran fused with its bias and activation has no time of its own; the time stands under the name of
    the last op of the chain. All ops of such a chain are led by its first.
    """
    leads = np.arange(len(flat.op))
    uses, user = np.zeros(len(flat.tensor), np.int64), np.zeros(len(flat.tensor), np.int64)
    chain = np.zeros(_LONGEST_EPILOGUE + 1, np.int64)
    for cluster in range(len(flat.op_ptr) - 1):
        tensors = flat.tensor_ptr[cluster]
        for i in range(flat.op_ptr[cluster], flat.op_ptr[cluster + 1]):
            for at in range(flat.input_ptr[i], flat.input_ptr[i + 1]):
                uses[tensors + flat.inputs[at]] += 1
                user[tensors + flat.inputs[at]] = i
        for i in range(flat.op_ptr[cluster], flat.op_ptr[cluster + 1]):
            if flat.us[i] > 0 or not flat.ops[flat.op[i]].leads:
                continue
            chain[0] = i
            length = 1
            while length <= _LONGEST_EPILOGUE and flat.us[chain[length - 1]] == 0:
                last = chain[length - 1]
                behind, count = -1, 0
                for at in range(flat.output_ptr[last], flat.output_ptr[last + 1]):
                    number = tensors + flat.outputs[at]
                    count += uses[number]
                    if uses[number]:
                        behind = user[number]
                if count != 1 or not flat.ops[flat.op[behind]].follows:
                    break
                chain[length] = behind
                length += 1
            if flat.us[chain[length - 1]] > 0:
                for member in chain[:length]:
                    leads[member] = i
    return leads


@njit(nogil=True)
def _extent(flat: FlatClusters) -> Ints:
    """Depth and width of each cluster, as `TimedOps` has them, [n, 2]."""
    extent = np.zeros((len(flat.op_ptr) - 1, 2), np.int64)
    maker = np.full(len(flat.tensor), len(flat.op), np.int64)
    level = np.zeros(len(flat.op), np.int64)
    for cluster in range(len(extent)):
        tensors, first, last = flat.tensor_ptr[cluster], flat.op_ptr[cluster], flat.op_ptr[cluster + 1]
        for i in range(first, last):
            for at in range(flat.output_ptr[i], flat.output_ptr[i + 1]):
                maker[tensors + flat.outputs[at]] = i
        at_level = np.zeros(last - first + 1, np.int64)
        for i in range(first, last):
            for at in range(flat.input_ptr[i], flat.input_ptr[i + 1]):
                source = maker[tensors + flat.inputs[at]]
                if source < i:
                    level[i] = max(level[i], level[source])
            if flat.us[i] > 0:
                level[i] += 1
                at_level[level[i]] += 1
        extent[cluster, 0], extent[cluster, 1] = depth_and_width(at_level)
    return extent


@njit(nogil=True)
def depth_and_width(at_level: Ints) -> tuple[int, int]:
    """The deepest level of a cluster that has any op, and the most ops at one level, from the number of ops that ran at each."""
    depth = width = 0
    for level in range(len(at_level)):
        if at_level[level]:
            depth = level
            width = max(width, at_level[level])
    return depth, width
