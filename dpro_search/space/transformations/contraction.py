"""`Contraction`: ops fused one cluster after the other, as long as there is an order that runs each cluster at one time.

    contraction = Contraction(compute)
    contraction.fuse(members)  # [ranks, ops]; False, and nothing is changed, where an op in between would need both

A step looks at what lies between the ops that it fuses, not at the graph: an order of the clusters is kept, a cycle can only go
through what lies between the first and the last of them, and only that is ordered anew (as Pearce and Kelly do it for edges: A
dynamic topological sort algorithm for directed acyclic graphs, 2006). Beside that it copies four columns of the graph's length,
to go back to where a later rank's ops cannot be fused.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dpro_search._compiled import njit
from dpro_search.collect.trace import Ints
from dpro_search.graph.dataflow import DataflowGraph


class _State(NamedTuple):
    """Nodes, each some ops, by the number of one of these."""

    node: Ints  # Of each op, [ops].
    after: Ints  # The next op of the same node, in a ring, [ops].
    place: Ints  # Of each node in an order that follows the dependencies, [ops].
    at: Ints  # The node at a place, -1: none, [ops].


class Contraction:
    """The nodes of a graph without cycles, at first its ops.

    Parameters
    ----------
    order
        All ops, each behind those that it needs, [ops].
    """

    def __init__(self, graph: DataflowGraph, order: Ints) -> None:
        source, target = graph.edges()
        by_source = np.argsort(source, kind="stable")
        self._user_idx = target[by_source]
        self._user_ptr = np.searchsorted(source[by_source], np.arange(len(graph) + 1))
        ops = np.arange(len(graph))
        self._state = _State(node=ops, after=ops.copy(), place=np.argsort(order), at=order.copy())

    def fuse(self, members: Ints) -> bool:
        """Make one node of the nodes of some ops on each rank, [ranks, ops]; False, and no change, if that would be a cycle."""
        before = _State(*(column.copy() for column in self._state))
        for ops in members:
            if not _fused(ops, self._user_ptr, self._user_idx, *self._state):
                self._state = before
                return False
        return True


@njit()
def _fused(ops, user_ptr, user_idx, node, after, place, at):  # type: ignore[no-untyped-def]
    """Fuse the nodes of some ops unless another node would come both before and after them; says whether."""
    low, high = len(place), -1
    for op in ops:
        low, high = min(low, place[node[op]]), max(high, place[node[op]])
    inside, reached = np.zeros(high - low + 1, np.bool_), np.zeros(high - low + 1, np.bool_)  # by place
    todo, count = np.empty(high - low + 1, np.int64), 0
    for op in ops:
        if not inside[place[node[op]] - low]:
            inside[place[node[op]] - low] = True
            todo[count] = node[op]
            count += 1
    fused = todo[:count].copy()
    while count:
        count -= 1
        first = op = todo[count]
        while True:
            for k in range(user_ptr[op], user_ptr[op + 1]):
                user = node[user_idx[k]]
                at_user = place[user] - low
                if at_user > high - low or user == first:
                    continue
                if inside[at_user]:
                    if not inside[place[first] - low]:
                        return False
                elif not reached[at_user]:
                    reached[at_user] = True
                    todo[count] = user
                    count += 1
            op = after[op]
            if op == first:
                break
    kept = fused[0]
    for one in fused[1:]:
        after[kept], after[one] = after[one], after[kept]  # two rings become one
    op = kept
    while True:
        node[op] = kept
        op = after[op]
        if op == kept:
            break
    _reorder(low, high, kept, inside, reached, place, at)
    return True


@njit()
def _reorder(low, high, kept, inside, reached, place, at):  # type: ignore[no-untyped-def]
    """Order around a new node: its successors go behind it, all other nodes between its parts go before it."""
    late, count = np.empty(high - low + 1, np.int64), 0
    free = low
    for old in range(low, high + 1):
        one = at[old]
        if one < 0 or inside[old - low]:
            continue
        if reached[old - low]:
            late[count] = one
            count += 1
        else:
            at[free], place[one] = one, free
            free += 1
    at[free], place[kept] = kept, free
    free += 1
    for one in late[:count]:
        at[free], place[one] = one, free
        free += 1
    at[free : high + 1] = -1
