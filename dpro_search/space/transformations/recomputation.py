"""Recomputation: results of forward ops that are not kept for the backward pass but computed again (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from dpro_search.graph.buffers import VIEWS
from dpro_search.graph.dataflow import OpKind, waits_for_gradients
from dpro_search.space.plan import Plan
from dpro_search.space.transformations._base import RECORDED, Choice, PlanningFacts
from dpro_search.space.transformations.compute import ComputeChange, ComputeGraph, ComputeTransformation

_SEGMENTS = (2, 4, 8, 16, 32)
_RANDOM = ("Random", "StatelessRandom", "Multinomial", "Dropout")
_STATE = ("Assign", "ResourceApply", "ReadVariable", "Iterator", "Placeholder", "VarHandle", "ResourceGather", "Queue", "Stack")


class Recomputation(ComputeTransformation):
    """Any forward ops that compute the same again; each runs a second time before the first backward op that needs it.

    `runtime/follow/graph_rewrites.py` makes the same choice in the job.
    """

    name = "recomputation"
    fields = ("recomputed_ops",)
    weight = 2.0

    def __init__(self, job: PlanningFacts, compute: ComputeGraph) -> None:
        self.compute = compute
        graph = compute.graph
        # Others of the backward pass run at once, and keep the first results.
        self._waiting = waits_for_gradients(graph.op_kind, graph.op_type, graph.pred_ptr, graph.pred_idx)
        self._views = sorted(
            (op for op in range(len(graph)) if graph.op_kind[op] == OpKind.FORWARD and graph.op_type[op] in VIEWS),
            key=lambda op: int(compute.position[op]),
        )
        able = [name for name in compute.ops if self._refusal(name) is None]
        self._able = frozenset(able)
        self._candidates = tuple(sorted(able, key=lambda name: int(compute.position[compute.ops[name][0]])))
        super().__init__(job, compute)

    def legal(self, plan: Plan) -> str | None:
        names = plan.recomputed_ops or ()
        bfloat16 = set(plan.bfloat16_ops or ()) if names else ()
        clash = next((name for name in names if name in bfloat16), None)
        if clash is not None:
            return f"op '{clash}' computes in bfloat16 and is recomputed: what that takes is not known"
        return self.first_refusal(names, self._able, self._refusal)

    def propose(self, plan: Plan, rng: np.random.Generator, hot: Mapping[str, float]) -> Plan:
        """Recompute a run of ops, or keep it."""
        if not self._candidates:
            return plan
        taken = self.taken(plan)
        first = int(rng.integers(len(self._candidates)))
        run = self._candidates[first : first + int(rng.geometric(4 / (len(self._candidates) + 4)))]
        toggled, chosen = set(run) - taken, set(plan.recomputed_ops or ())
        return self._with(plan, chosen - toggled if self._candidates[first] in chosen else chosen | toggled)

    def simplest(self, plan: Plan) -> Plan:
        return plan if plan.recomputed_ops is None else self._with(plan, set(plan.recomputed_ops))

    def apply(self, change: ComputeChange, plan: Plan) -> None:
        graph = self.compute.graph
        again = {op for name in plan.recomputed_ops or () for op in self.compute.ops[name]}
        for view in self._views:  # made again with what they show
            if not again.isdisjoint(self.compute.needs(view).tolist()):
                again.add(view)
        chosen = sorted(again, key=lambda op: int(self.compute.position[op]))
        for op in reversed(chosen):
            for user in self.compute.users(op).tolist():
                if self._waiting[user]:
                    change.again_due[op] = min(change.again_due[op], self.compute.due[user])
                elif user in again:
                    change.again_due[op] = min(change.again_due[op], change.again_due[user])
        runs = [op for op in chosen if change.again_due[op] < len(graph.tensors)]
        change.again_us[:, runs] = change.work_us[:, runs]

    @cached_property
    def choice(self) -> Choice | None:
        """All but the last op of each of some segments of about equal work."""
        if len(self._candidates) < 2:
            return None
        work = np.array([self.compute.graph.op_work_us[:, self.compute.ops[name][0]].mean() for name in self._candidates])
        upto = np.cumsum(work)
        points = []
        for segments in _SEGMENTS:
            kept = set(np.searchsorted(upto, upto[-1] * np.arange(1, segments + 1) / segments).tolist())
            names = tuple(name for i, name in enumerate(self._candidates) if i not in kept)
            points.append({"recomputed_ops": names})
        grids = {RECORDED: ({},), "segments": tuple(point for point in points if all(point.values()))}
        return Choice(name=self.name, fields=self.fields, grids={name: grid for name, grid in grids.items() if grid})

    def _with(self, plan: Plan, names: set[str]) -> Plan:
        known = [name for name in self._candidates if name in names]
        rest = sorted(names.difference(known))
        return plan.changed(recomputed_ops=(*known, *rest) or None)

    def _refusal(self, name: str) -> str | None:
        kind, op_type = self.kind(name), self.type(name)
        if why := self.not_in_the_step(name):
            return why
        if kind != OpKind.FORWARD:
            return f"op '{name}' is of kind {kind.name}: only forward ops are recomputed"
        if op_type.startswith(_RANDOM):
            return f"op '{name}': {op_type} would draw other numbers the second time"
        if op_type.startswith(_STATE):
            return f"op '{name}': {op_type} is no computation"
        if self.compute.due[self.compute.ops[name][0]] == len(self.compute.graph.tensors):
            return f"op '{name}': no gradient needs it"
        return None
