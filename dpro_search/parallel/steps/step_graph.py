"""`step_graph`: one training step of a pipeline as a `ReplayGraph`, one rank for each pipeline stage.

Ranks of the same stage do the same, so one stands for all of them. A rank has a compute device, a device for the collectives of
parameters and gradients (data parallel and ZeRO), and one for each direction in which it sends activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache

import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.graph.dataflow import OpKind
from dpro_search.parallel.schedule import Schedule
from dpro_search.parallel.steps.pipeline import Pass, pipeline_orders
from dpro_search.parallel.steps.step_costs import StepCosts, StepPart, StepPartName, StepStructure, part_us, structure_of
from dpro_search.replay.engine import Retimed
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.replay_graph import Int32s, ReplayGraph, SharedCores

_KEPT_TEMPLATES = 32  # of up to 20,000 ops each


_AXES = {  # of exchanges by how their names begin, the longest that fits
    "receives": "pp",
    "send": "pp",
    "gather": "dp",
    "reduce": "dp",
    "reduce shared gradients": "tp",
    "reduce gradients of the tied embedding": "pp",
    "reduce gradients of both copies": "pp",
    "sum norms": "world",
}


def axis_of(name: str) -> str:
    """The mesh axis of an exchange of a step's graph, by its name: pp, dp, tp, or world for all ranks."""
    return _AXES[max((begin for begin in _AXES if name.startswith(begin)), key=len)]


def step_graph(costs: StepCosts, orders: Sequence[Sequence[Pass]]) -> ReplayGraph:
    """The graph of one step; passes of each rank in the given order (`pipeline_orders`)."""
    template = _StepGraph(structure_of(costs), orders).template()
    return replace(template.graph, duration_us=template.duration_us(costs))


def step_us(costs: StepCosts, schedule: Schedule, ranks: int, stages_per_rank: int, micro_batches: int) -> float:
    """Time of one step in microseconds; the other parameters, and errors, are those of `pipeline_orders`."""
    template = _template(structure_of(costs), schedule, ranks, stages_per_rank, micro_batches)
    return template.retimed.end_us(template.duration_us(costs))


@lru_cache(maxsize=_KEPT_TEMPLATES)
def _template(structure: StepStructure, schedule: Schedule, ranks: int, stages_per_rank: int, micro_batches: int) -> _Template:
    return _StepGraph(structure, pipeline_orders(schedule, ranks, stages_per_rank, micro_batches)).template()


class _Template:
    """The graph of all steps of one structure.

    Attributes
    ----------
    graph
        Its durations have no meaning.
    """

    def __init__(self, graph: ReplayGraph, parts: Sequence[StepPart]) -> None:
        self.graph, self._parts = graph, parts
        self._part_of: Int32s = graph.duration_us.astype(np.int32)

    def duration_us(self, costs: StepCosts) -> Floats:
        """Duration of each op, [ops]."""
        return np.array([part_us(costs, part) for part in self._parts])[self._part_of]

    @cached_property
    def retimed(self) -> Retimed:
        """The graph, prepared for replays with other durations."""
        return Retimed(self.graph)


class _StepGraph:
    """Builds the graph; the duration of an op is the number of its `StepPart` until costs are known."""

    def __init__(self, structure: StepStructure, orders: Sequence[Sequence[Pass]]) -> None:
        self._structure, self._orders, self._builder = structure, orders, GraphBuilder()
        self._parts: dict[StepPart, int] = {}
        ranks = range(len(orders))
        self._compute = [self._builder.add_device(rank, name=f"stage {rank}") for rank in ranks]
        self._exchange = [self._builder.add_device(rank, name=f"collectives {rank}") for rank in ranks]
        self._forward_link = [self._builder.add_device(rank, name=f"sends {rank}") for rank in ranks]
        self._backward_link = [self._builder.add_device(rank, name=f"sends back {rank}") for rank in ranks]
        self._on_rank = [sorted({done.stage for done in order}) for order in orders]
        self._rank_of = {stage: rank for rank in ranks for stage in self._on_rank[rank]}
        self._ends: dict[Pass, int] = {}  # last op of each pass that was added, by what it makes
        self._arrivals: dict[Pass, int] = {}  # the op that brings a pass its input
        self._last: list[int | None] = [None for _ in ranks]  # last op on a rank's compute device
        self._gathered: list[list[int]] = [[] for _ in ranks]  # computes of a rank's layers, for prefetching
        self._reduces: list[list[int]] = [[] for _ in ranks]
        waits = structure.blocking or structure.receives or bool(structure.cores)
        self._waiting = [self._builder.add_device(rank, name=f"waits {rank}") for rank in ranks] if waits else self._exchange
        self._gathering = [any(layer.gathers for layer in stage) for stage in structure.stages]
        self._reducing = [any(layer.reduces for layer in stage) for stage in structure.stages]

    def template(self) -> _Template:
        """Adds passes in any order that their inputs allow; each rank keeps its own."""
        places = [0] * len(self._orders)
        first = {stage: self._first(order, stage) for order, stages in self._by_rank() for stage in stages}
        last = {stage: self._last_pass(order, stage) for order, stages in self._by_rank() for stage in stages}
        left = sum(map(len, self._orders))
        while left:
            before = left
            for rank, order in enumerate(self._orders):
                while places[rank] < len(order) and self._ready(order[places[rank]]):
                    done = order[places[rank]]
                    self._add(rank, done, first=done == first[done.stage], last=done == last[done.stage])
                    places[rank] += 1
                    left -= 1
            assert left < before, "the orders of the ranks wait for each other"
        self._updates()
        return _Template(self._builder.build(cores=self._shared_cores()), tuple(self._parts))

    def _add_op(self, device: int, part: StepPart, name: str, kind: OpKind, after: Sequence[int]) -> int:
        number = self._parts.setdefault(part, len(self._parts))
        return self._builder.add_op(device, number, name=name, kind=kind, after=after)

    def _shared_cores(self) -> SharedCores | None:
        if not self._structure.cores:
            return None
        core_of = {self._compute[rank]: core for rank, (core, _) in enumerate(self._structure.cores)}
        devices = max(self._waiting) + 1
        none, nowhere = np.zeros(len(self._builder)), np.zeros(0)
        return SharedCores(
            core=np.array([core_of.get(device, -1) for device in range(devices)], np.int32),
            idle_us=none,
            core_us=none,
            finish_us=none,
            idle_bytes_per_us=nowhere,
            core_us_per_byte=nowhere,
        )

    @property
    def _gathers_beside(self) -> bool:
        return self._structure.gathers_every_pass or (self._structure.overlap and self._structure.overlap_gathers)

    @property
    def _reduces_beside(self) -> bool:
        return self._structure.reduces_every_pass or self._structure.overlap

    def _by_rank(self) -> Iterator[tuple[Sequence[Pass], list[int]]]:
        return zip(self._orders, self._on_rank, strict=True)

    @staticmethod
    def _first(order: Sequence[Pass], stage: int) -> Pass:
        return next(step for step in order if step.direction == "F" and step.stage == stage)

    @staticmethod
    def _last_pass(order: Sequence[Pass], stage: int) -> Pass:
        """After which the stage's gradients are complete."""
        return next(step for step in reversed(order) if step.direction in "BW" and step.stage == stage)

    def _needs(self, done: Pass) -> Pass | None:
        """The pass whose result a pass needs, by what it makes."""
        if done.direction == "F":
            return None if self._is_end(done.stage, first=True) else Pass("F", done.stage - 1, done.micro_batch)
        if done.direction == "W":
            return _made(done._replace(direction="I"))
        last = self._is_end(done.stage, first=False)
        return Pass("F", done.stage, done.micro_batch) if last else Pass("B", done.stage + 1, done.micro_batch)

    def _is_end(self, stage: int, *, first: bool) -> bool:
        """Whether a stage is the first or the last one of a copy of the model."""
        stages = len(self._structure.stages) // self._structure.copies
        return stage % stages == (0 if first else stages - 1)

    def _ready(self, done: Pass) -> bool:
        needed = self._needs(done)
        return needed is None or needed in self._ends

    def _add(self, rank: int, done: Pass, *, first: bool, last: bool) -> None:
        after = [] if self._last[rank] is None else [self._last[rank]]
        needed = self._needs(done)
        if needed is not None:
            if self._structure.receives and self._rank_of[needed.stage] != rank:
                after = [self._received(rank, needed, [op for op in after if op is not None])]
            else:
                after.append(self._arrivals.get(needed, self._ends[needed]))
        structure = self._structure
        gathers = (
            self._gathers_beside
            and self._gathering[done.stage]
            and (
                (first and not structure.gathers_every_pass)
                or (structure.gathers_every_pass and (done.direction == "F" or (done.direction != "W" and structure.regather)))
            )
        )
        reduces = self._reduces_beside and done.direction in "BW" and self._reducing[done.stage]
        reduces = reduces and (last or structure.reduces_every_pass)
        inputs = [op for op in after if op is not None]
        end = self._layers(rank, done, inputs) if gathers or reduces else self._whole(rank, done, inputs)
        self._ends[_made(done)] = self._last[rank] = end
        self._send(rank, done, end)

    def _whole(self, rank: int, done: Pass, after: list[int]) -> int:
        kind = OpKind.FORWARD if done.direction == "F" else OpKind.BACKWARD
        shared = bool(self._structure.cores)  # Only there a wait is an op of its own.
        waits = shared and any(layer.waits(done.direction) for layer in self._structure.stages[done.stage])
        part = StepPart("computes", rank if shared else -1, (done.stage,), direction=done.direction)
        return self._computed(rank, part, waits, f"{done.direction}{done.micro_batch} of stage {done.stage}", kind, after)

    def _computed(self, rank: int, part: StepPart, waits: bool, name: str, kind: OpKind, after: Sequence[int]) -> int:
        """Work of a rank; of shared cores the ranks of its stage take turns, and none uses one while it waits."""
        op = self._add_op(self._compute[rank], part, name, kind, after)
        if waits and self._structure.cores:
            op = self._add_op(self._waiting[rank], part._replace(name="waits"), f"collectives of {name}", OpKind.COMM, [op])
        return op

    def _received(self, rank: int, needed: Pass, after: Sequence[int]) -> int:
        """The op that brings what another rank has made, which begins when this rank has nothing else to do."""
        name = f"receives {needed.direction}{needed.micro_batch} of stage {needed.stage}"
        return self._add_op(self._waiting[rank], StepPart("send"), name, OpKind.COMM, [*after, self._ends[needed]])

    def _layers(self, rank: int, done: Pass, after: list[int]) -> int:
        """A pass layer by layer, with the collectives of each layer's parameters and gradients beside it."""
        structure = self._structure
        forward = done.direction == "F"
        again = structure.gathers_every_pass and structure.regather and done.direction != "W"
        gathers = (forward or again) and (structure.gathers_every_pass or done.micro_batch == 0)
        gathers = gathers and self._gathers_beside
        layers = list(enumerate(structure.stages[done.stage]))
        for number, layer in layers if forward else reversed(layers):
            label = f"{done.direction}{done.micro_batch} of layer {number} of stage {done.stage}"
            needs = list(after)
            kept = (
                not forward and self._is_end(done.stage, first=False) and number == len(layers) - 1
            )  # the head, used last and first
            if gathers and layer.gathers and not kept:
                gathered = self._gathered[rank]
                ahead = structure.prefetch + 1
                start = gathered[-ahead : -ahead + 1 or None] if structure.gathers_every_pass and len(gathered) >= ahead else []
                exchange = (self._waiting if structure.blocking else self._exchange)[rank]
                part = StepPart("gather", stages=(done.stage,), layer=number)
                gather = self._add_op(exchange, part, f"gather for {label}", OpKind.COMM, needs if structure.blocking else start)
                needs = [gather] if structure.blocking else [*needs, gather]
            part = StepPart(
                "computes",
                rank if structure.cores else -1,
                (done.stage,),
                layer=number,
                direction=done.direction,
                beside_gather=gathers and not kept,
            )
            kind = OpKind.FORWARD if forward else OpKind.BACKWARD
            compute = self._computed(rank, part, layer.waits(done.direction), label, kind, needs)
            self._gathered[rank].append(compute)
            after = [compute]
            if done.direction in "BW" and layer.reduces:
                exchange = (self._waiting if structure.blocking else self._exchange)[rank]
                part = StepPart("reduce", stages=(done.stage,), layer=number)
                reduce = self._add_op(exchange, part, f"reduce of {label}", OpKind.COMM, [compute])
                self._reduces[rank].append(reduce)
                after = [reduce] if structure.blocking else after
        return after[0]

    def _send(self, rank: int, done: Pass, end: int) -> None:
        """To the rank of the next stage, if it is another one."""
        forward = done.direction == "F"
        target = self._rank_of.get(done.stage + (1 if forward else -1), rank)
        ends = target == rank or self._is_end(done.stage, first=not forward)
        if ends or done.direction == "W" or not self._structure.sends or self._structure.receives:
            return
        device = (
            (self._forward_link if forward else self._backward_link)[rank] if self._structure.overlap_send else self._compute[rank]
        )
        sent = self._add_op(device, StepPart("send"), f"send {done.direction}{done.micro_batch}", OpKind.COMM, [end])
        self._arrivals[_made(done)] = sent
        if not self._structure.overlap_send:
            self._last[rank] = sent

    def _updates(self) -> None:
        structure = self._structure
        after = [[*self._reduces[rank], *([] if last is None else [last])] for rank, last in enumerate(self._last)]
        if not self._reduces_beside:
            for rank, stages in enumerate(self._on_rank):
                after[rank] = [self._alone(rank, "reduce gradients", StepPart("reduces", stages=tuple(stages)), after[rank])]
        after = self._summed_at_the_end(after)
        for rank, stages in enumerate(self._on_rank):
            if structure.updates:
                after[rank] = [self._computed(rank, StepPart("update", rank), False, "update", OpKind.UPDATE, after[rank])]
            if not self._gathers_beside and any(self._gathering[stage] for stage in stages):
                self._alone(rank, "gather parameters", StepPart("gathers", stages=tuple(stages)), after[rank])

    def _summed_at_the_end(self, after: list[list[int]]) -> list[list[int]]:
        """The ops that each rank's update waits for, with the collectives that come once in a step."""
        structure = self._structure
        once: list[tuple[bool, str, StepPartName]] = [
            (structure.sums_copies, "reduce gradients of both copies", "copies"),
            (structure.sums_shared, "reduce shared gradients", "shared"),
        ]
        for takes_place, name, part in once:
            if takes_place:
                after = [[self._alone(rank, name, StepPart(part), before)] for rank, before in enumerate(after)]
        first, last = self._rank_of[0], self._rank_of[len(structure.stages) - 1]
        if structure.tied and first != last:
            both = [*after[first], *after[last]]
            after[first] = after[last] = [self._alone(first, "reduce gradients of the tied embedding", StepPart("tied"), both)]
        if structure.sums_norms:
            norm = self._alone(0, "sum norms of gradients", StepPart("norm"), [op for each in after for op in each])
            after = [[norm] for _ in after]
        return after

    def _alone(self, rank: int, name: str, part: StepPart, after: list[int]) -> int:
        """Collectives beside which nothing is computed."""
        return self._add_op(self._exchange[rank], part, name, OpKind.COMM, after)


def _made(done: Pass) -> Pass:
    """A pass by what it makes for others: the gradient of the input is that of a whole backward pass."""
    return done._replace(direction="B") if done.direction == "I" else done
