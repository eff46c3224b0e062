"""`step_graph`: one training step of a pipeline as a `ReplayGraph`, one rank for each pipeline stage.

Ranks of the same stage do the same, so one stands for all of them. A rank has a compute device, a device for the collectives of
parameters and gradients (data parallel and ZeRO), and one for each direction in which it sends activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dpro_search.graph.dataflow import OpKind
from dpro_search.parallel.steps.pipeline import Direction, Pass
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.replay_graph import ReplayGraph, SharedCores


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Costs of a layer on a rank for one micro-batch. Passes contain the tensor-, context- and expert-parallel collectives."""

    forward_us: float
    backward_us: float  # With what is computed again.
    weights_us: float = 0.0  # Of `backward_us`, for the gradients of weights, which no other stage waits for.
    # Of the passes, what the rank waits for in collectives; only where ranks share cores.
    waits_forward_us: float = 0.0
    waits_backward_us: float = 0.0
    gather_us: float = 0.0  # All-gather of its parameters.
    reduce_us: float = 0.0  # All-reduce or reduce-scatter of its gradients.

    def pass_us(self, direction: Direction) -> float:
        """Duration of the layer in one pass, in microseconds."""
        if direction == "F":
            return self.forward_us
        return {"B": self.backward_us, "I": self.backward_us - self.weights_us, "W": self.weights_us}[direction]

    def waits_us(self, direction: Direction) -> float:
        """Time of a pass in which the rank does not compute."""
        return {"F": self.waits_forward_us, "W": 0.0}.get(direction, self.waits_backward_us)


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Costs of the parts of a step.

    A stage's collectives of parameters overlap with its first forward pass, or with every pass where parameters are freed between
    passes; those of gradients overlap with its last backward pass, or with every one where no rank holds a sum of whole gradients.
    """

    stages: tuple[tuple[LayerCosts, ...], ...]  # Layers of each stage.
    send_us: float = 0.0  # Activations, or their gradients, of a micro-batch from one stage to the next.
    update_us: tuple[float, ...] = ()  # The optimizer's work on each rank; empty: none.
    tied_us: float = 0.0  # All-reduce of the gradients of an embedding of which the first and the last stage have a copy.
    copies: int = 1  # Of each stage: the second half of `stages` are the same as the first, with micro-batches of their own.
    copies_us: float = 0.0  # All-reduce of the gradients of both copies.
    shared_us: float = 0.0  # On every rank after its last pass: all-reduce of gradients of which tensor parallel ranks have parts.
    norm_us: float = 0.0  # All-reduce of the gradients' norm over all ranks; no rank updates before it.
    gathers_every_pass: bool = False  # Whether layers gather their parameters for every pass (ZeRO-3), or once.
    regather: bool = True  # Of `gathers_every_pass`: gather again for the backward pass.
    reduces_every_pass: bool = False  # Whether layers reduce their gradients after every backward pass (ZeRO-2 and 3), or the last.
    prefetch: int = 1  # Layers whose parameters are gathered ahead.
    overlap: bool = True  # False: gradients are reduced after the last pass, and parameters gathered after the update.
    overlap_gathers: bool = True  # False: parameters are gathered after the update, though gradients are reduced beside passes.
    slowed: float = 0.0  # What compute loses of the time of a collective that runs beside it.
    overlap_send: bool = True  # False: a rank computes nothing while it sends.
    blocking: bool = False  # A rank computes nothing while it exchanges parameters or gradients.
    receives: bool = False  # A rank computes nothing while it receives, and a message begins when both sides have come to it.
    # Of each pipeline rank: the core that it computes on, and how many ranks of its stage do; empty: each has its own.
    cores: tuple[tuple[int, int], ...] = ()


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
    return _StepGraph(costs, orders).graph()


class _StepGraph:
    def __init__(self, costs: StepCosts, orders: Sequence[Sequence[Pass]]) -> None:
        self._costs, self._orders, self._builder = costs, orders, GraphBuilder()
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
        self._pass_us: dict[tuple[int, Direction], tuple[float, float]] = {}  # of a stage, and what the rank waits of it
        waits = costs.blocking or costs.receives or bool(costs.cores)
        self._waiting = [self._builder.add_device(rank, name=f"waits {rank}") for rank in ranks] if waits else self._exchange
        self._gathering = [any(layer.gather_us for layer in stage) for stage in costs.stages]
        self._reducing = [any(layer.reduce_us for layer in stage) for stage in costs.stages]

    def graph(self) -> ReplayGraph:
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
        return self._builder.build(cores=self._shared_cores())

    def _shared_cores(self) -> SharedCores | None:
        if not self._costs.cores:
            return None
        core_of = {self._compute[rank]: core for rank, (core, _) in enumerate(self._costs.cores)}
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
        return self._costs.gathers_every_pass or (self._costs.overlap and self._costs.overlap_gathers)

    @property
    def _reduces_beside(self) -> bool:
        return self._costs.reduces_every_pass or self._costs.overlap

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
        stages = len(self._costs.stages) // self._costs.copies
        return stage % stages == (0 if first else stages - 1)

    def _ready(self, done: Pass) -> bool:
        needed = self._needs(done)
        return needed is None or needed in self._ends

    def _add(self, rank: int, done: Pass, *, first: bool, last: bool) -> None:
        after = [] if self._last[rank] is None else [self._last[rank]]
        needed = self._needs(done)
        if needed is not None:
            if self._costs.receives and self._rank_of[needed.stage] != rank:
                after = [self._received(rank, needed, [op for op in after if op is not None])]
            else:
                after.append(self._arrivals.get(needed, self._ends[needed]))
        costs = self._costs
        gathers = (
            self._gathers_beside
            and self._gathering[done.stage]
            and (
                (first and not costs.gathers_every_pass)
                or (costs.gathers_every_pass and (done.direction == "F" or (done.direction != "W" and costs.regather)))
            )
        )
        reduces = self._reduces_beside and done.direction in "BW" and self._reducing[done.stage]
        reduces = reduces and (last or costs.reduces_every_pass)
        inputs = [op for op in after if op is not None]
        end = self._layers(rank, done, inputs) if gathers or reduces else self._whole(rank, done, inputs)
        self._ends[_made(done)] = self._last[rank] = end
        self._send(rank, done, end)

    def _whole(self, rank: int, done: Pass, after: list[int]) -> int:
        forward = done.direction == "F"
        key = done.stage, done.direction
        if key not in self._pass_us:
            layers = self._costs.stages[done.stage]
            self._pass_us[key] = (
                sum(layer.pass_us(done.direction) for layer in layers),
                sum(layer.waits_us(done.direction) for layer in layers),
            )
        kind = OpKind.FORWARD if forward else OpKind.BACKWARD
        return self._computed(rank, *self._pass_us[key], f"{done.direction}{done.micro_batch} of stage {done.stage}", kind, after)

    def _computed(self, rank: int, total_us: float, waits_us: float, name: str, kind: OpKind, after: Sequence[int]) -> int:
        """Work of a rank; of shared cores the ranks of its stage take turns, and none uses one while it waits."""
        if not self._costs.cores:
            return self._builder.add_op(self._compute[rank], total_us, name=name, kind=kind, after=after)
        alike = self._costs.cores[rank][1]
        op = self._builder.add_op(self._compute[rank], (total_us - waits_us) * alike, name=name, kind=kind, after=after)
        if waits_us:
            op = self._builder.add_op(self._waiting[rank], waits_us, name=f"collectives of {name}", kind=OpKind.COMM, after=[op])
        return op

    def _received(self, rank: int, needed: Pass, after: Sequence[int]) -> int:
        """The op that brings what another rank has made, which begins when this rank has nothing else to do."""
        name = f"receives {needed.direction}{needed.micro_batch} of stage {needed.stage}"
        return self._builder.add_op(
            self._waiting[rank], self._costs.send_us, name=name, kind=OpKind.COMM, after=[*after, self._ends[needed]]
        )

    def _layers(self, rank: int, done: Pass, after: list[int]) -> int:
        """A pass layer by layer, with the collectives of each layer's parameters and gradients beside it."""
        costs, builder = self._costs, self._builder
        forward = done.direction == "F"
        again = costs.gathers_every_pass and costs.regather and done.direction != "W"
        gathers = (forward or again) and (costs.gathers_every_pass or done.micro_batch == 0)
        gathers = gathers and self._gathers_beside
        layers = list(enumerate(costs.stages[done.stage]))
        for number, layer in layers if forward else reversed(layers):
            label = f"{done.direction}{done.micro_batch} of layer {number} of stage {done.stage}"
            needs = list(after)
            kept = (
                not forward and self._is_end(done.stage, first=False) and number == len(layers) - 1
            )  # the head, used last and first
            if gathers and layer.gather_us and not kept:
                gathered = self._gathered[rank]
                ahead = costs.prefetch + 1
                start = gathered[-ahead : -ahead + 1 or None] if costs.gathers_every_pass and len(gathered) >= ahead else []
                gather = builder.add_op(
                    (self._waiting if costs.blocking else self._exchange)[rank],
                    layer.gather_us,
                    name=f"gather for {label}",
                    kind=OpKind.COMM,
                    after=needs if costs.blocking else start,
                )
                needs = [gather] if costs.blocking else [*needs, gather]
            beside_us = (layer.gather_us if gathers and not kept else 0.0) + (layer.reduce_us if done.direction in "BW" else 0.0)
            slower_us = 0.0 if costs.blocking else costs.slowed * beside_us
            kind = OpKind.FORWARD if forward else OpKind.BACKWARD
            compute = self._computed(
                rank, layer.pass_us(done.direction) + slower_us, layer.waits_us(done.direction), label, kind, needs
            )
            self._gathered[rank].append(compute)
            after = [compute]
            if done.direction in "BW" and layer.reduce_us:
                exchange = (self._waiting if costs.blocking else self._exchange)[rank]
                reduce = builder.add_op(exchange, layer.reduce_us, name=f"reduce of {label}", kind=OpKind.COMM, after=[compute])
                self._reduces[rank].append(reduce)
                after = [reduce] if costs.blocking else after
        return after[0]

    def _send(self, rank: int, done: Pass, end: int) -> None:
        """To the rank of the next stage, if it is another one."""
        forward = done.direction == "F"
        target = self._rank_of.get(done.stage + (1 if forward else -1), rank)
        ends = target == rank or self._is_end(done.stage, first=not forward)
        if ends or done.direction == "W" or not self._costs.send_us or self._costs.receives:
            return
        device = (self._forward_link if forward else self._backward_link)[rank] if self._costs.overlap_send else self._compute[rank]
        sent = self._builder.add_op(
            device, self._costs.send_us, name=f"send {done.direction}{done.micro_batch}", kind=OpKind.COMM, after=[end]
        )
        self._arrivals[_made(done)] = sent
        if not self._costs.overlap_send:
            self._last[rank] = sent

    def _updates(self) -> None:
        after = [[*self._reduces[rank], *([] if last is None else [last])] for rank, last in enumerate(self._last)]
        if not self._reduces_beside:
            for rank, stages in enumerate(self._on_rank):
                reduce_us = sum(layer.reduce_us for stage in stages for layer in self._costs.stages[stage])
                after[rank] = [self._alone(rank, "reduce gradients", reduce_us, after[rank])]
        after = self._summed_at_the_end(after)
        for rank, stages in enumerate(self._on_rank):
            if self._costs.update_us:
                update_us = self._costs.update_us[rank]
                after[rank] = [self._computed(rank, update_us, 0.0, "update", OpKind.UPDATE, after[rank])]
            gather_us = sum(layer.gather_us for stage in stages for layer in self._costs.stages[stage])
            if gather_us and not self._gathers_beside:
                self._alone(rank, "gather parameters", gather_us, after[rank])

    def _summed_at_the_end(self, after: list[list[int]]) -> list[list[int]]:
        """The ops that each rank's update waits for, with the collectives that come once in a step."""
        costs = self._costs
        if costs.copies_us:
            name = "reduce gradients of both copies"
            after = [[self._alone(rank, name, costs.copies_us, before)] for rank, before in enumerate(after)]
        if costs.shared_us:
            after = [[self._alone(rank, "reduce shared gradients", costs.shared_us, before)] for rank, before in enumerate(after)]
        first, last = self._rank_of[0], self._rank_of[len(costs.stages) - 1]
        if costs.tied_us and first != last:
            both = [*after[first], *after[last]]
            after[first] = after[last] = [self._alone(first, "reduce gradients of the tied embedding", costs.tied_us, both)]
        if costs.norm_us:
            norm = self._alone(0, "sum norms of gradients", costs.norm_us, [op for each in after for op in each])
            after = [[norm] for _ in after]
        return after

    def _alone(self, rank: int, name: str, us: float, after: list[int]) -> int:
        """Collectives beside which nothing is computed."""
        return self._builder.add_op(self._exchange[rank], us, name=name, kind=OpKind.COMM, after=after)


def _made(done: Pass) -> Pass:
    """A pass by what it makes for others: the gradient of the input is that of a whole backward pass."""
    return done._replace(direction="B") if done.direction == "I" else done
