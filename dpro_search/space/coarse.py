"""The coarsened view: ops that nothing can come between are one op, so that a step has about two ops for each tensor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Ints
from dpro_search.space.data_parallel import RankStep, together
from dpro_search.space.replay_graph import OrderPolicy


def coarsened(step: RankStep) -> RankStep:
    """The step with runs of ops of one stream put together; everything else happens when it did.

    An op joins the one before it on a stream in program order if both are of one kind, the first lets no other op start (it makes
    no tensor, and nothing on another stream or in the next iteration needs it), and the second waits for no other op. Streams that
    choose among ready ops are left as they are: updates may come between.
    """
    count = len(step)
    order = np.lexsort((np.arange(count), step.device))
    before = np.full(count, -1)
    same = step.device[order][1:] == step.device[order][:-1]
    before[order[1:][same]] = order[:-1][same]
    apart = step.device[step.edge_src] != step.device[step.edge_dst]
    lets_go = _marked(count, step.maker_op, step.edge_src[apart], step.carry_src)
    waits = _marked(count, step.user_op, step.edge_dst[apart], step.carry_dst)
    in_program = np.asarray(step.policy)[step.device] == OrderPolicy.PROGRAM
    joins = (before >= 0) & in_program & ~waits & ~lets_go[before] & (step.kind == step.kind[before])
    run = np.empty(count, np.int64)
    run[order] = np.cumsum(~joins[order]) - 1
    first = np.flatnonzero(~joins)  # of each run, by op number; ops of a device stay in their order
    number = np.empty(len(first), np.int64)
    number[run[first]] = np.arange(len(first))
    becomes = number[run]
    edges = np.stack((becomes[step.edge_src], becomes[step.edge_dst]))
    members = np.split(np.argsort(becomes, kind="stable"), np.cumsum(np.bincount(becomes))[:-1])
    return replace(
        step,
        duration_us=np.bincount(becomes, weights=step.duration_us).astype(np.float64),
        kind=np.asarray(step.kind)[first],
        device=np.asarray(step.device)[first],
        priority=np.asarray(step.priority)[first] if len(step.priority) else step.priority,
        edge_src=(kept := np.unique(edges[:, edges[0] != edges[1]], axis=1))[0],
        edge_dst=kept[1],
        maker_op=becomes[step.maker_op],
        user_op=becomes[step.user_op],
        carry_src=becomes[step.carry_src],
        carry_dst=becomes[step.carry_dst],
        op_names=tuple(together([step.op_names[op] for op in ops]) for ops in members) if step.op_names else (),
    )


def _marked(count: int, *ops: Ints) -> npt.NDArray[np.bool_]:
    marks = np.zeros(count, np.bool_)
    for some in ops:
        marks[some] = True
    return marks
