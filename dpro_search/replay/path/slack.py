"""How much later each op could end without a later end of everything: its slack."""

from __future__ import annotations

from dpro_search._compiled import njit
from dpro_search.collect.trace import Floats
from dpro_search.replay.kernels.executed import carried_csr, executed
from dpro_search.replay.timeline import Timeline


def slack_us(timeline: Timeline) -> Floats:
    """Slack of every op, [iterations * n]: by how much it alone could end later, all else equal, without a later makespan.

    Devices keep the order in which they served, and every op the time that it took: what it shares links with, or is slowed by, is
    not looked at again. The parts of a collective end together, so they have one slack; how much later a part could be *posted* is
    that plus its wait. Ops on the critical path have none.

    The backward pass of the critical path method, Kelley and Walker, 1959, over the executed graph.
    """
    order, unit, previous = executed(timeline)
    times, graph = timeline.times, timeline.graph
    slack: Floats = timeline.makespan_us - times.end_us
    _backward(order, unit, previous, graph.pred_ptr, graph.pred_idx, *carried_csr(timeline), times.moved_us, times.end_us, slack)
    return slack


@njit(nogil=True)
def _backward(order, unit, previous, pred_ptr, pred_idx, carry_ptr, carry_idx, moved, end, slack):  # type: ignore[no-untyped-def]
    """Units (ops, or all parts of a collective) from the last to the first: each limits what it waited for.

    A part can start as late as its collective can move, which for other ops is their start; the gap to the end of what it waited
    for adds to the slack. Working with gaps instead of latest times keeps a chain without gaps at a slack of exactly 0.
    """
    count = len(pred_ptr) - 1
    last = len(order) - 1
    while last >= 0:
        first = last
        least = slack[order[last]]
        while first > 0 and unit[order[first - 1]] == unit[order[last]]:
            first -= 1
            least = min(least, slack[order[first]])
        for place in range(first, last + 1):
            op = order[place]
            slack[op] = least
            latest = moved[op]
            before = previous[op]
            if before >= 0:
                slack[before] = min(slack[before], least + (latest - end[before]))
            iteration, op_of_iteration = op // count, op % count
            for needed in pred_idx[pred_ptr[op_of_iteration] : pred_ptr[op_of_iteration + 1]]:
                needed_op = iteration * count + needed
                slack[needed_op] = min(slack[needed_op], least + (latest - end[needed_op]))
            if iteration > 0:
                for needed in carry_idx[carry_ptr[op_of_iteration] : carry_ptr[op_of_iteration + 1]]:
                    needed_op = (iteration - 1) * count + needed
                    slack[needed_op] = min(slack[needed_op], least + (latest - end[needed_op]))
        last = first - 1
