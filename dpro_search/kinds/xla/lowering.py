"""`step_of`: one step of a compiled program as a graph that can be replayed: what one device runs, and what moves beside it.

The device's core runs the instructions of the schedule in their order. An asynchronous operation starts on the device that moves
its data (the links of a mesh's axes, the engine that copies between memories, the link to the host), and the instruction that ends
it waits there. Collectives on the same links follow each other.

A loop stands in the graph once, and each of its ops lasts as long as in all turns together. As times scale alike, the loop takes as
long as all turns would one after the other. What is left out: an operation that starts in one turn and ends in the next is not
waited for within the loop.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from dpro_search._text import listed
from dpro_search.collect.readers.xla import (
    Collective,
    HloComputation,
    HloInstruction,
    HloModule,
    HostTransfer,
    async_operations,
    collectives,
    host_transfers,
)
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.graph.hlo import HloWork, instruction_work, trip_count
from dpro_search.kinds.xla.prices import Basis, Prices
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.replay_graph import OrderPolicy, ReplayGraph
from dpro_search.space.scenario import Scale

_CORE, _COPIES, _HOST = "core", "copies between memories", "host link"
_COPY_STARTS = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")
_OUTSIDE = "between instructions"
_NUMBER = re.compile(r"(?:\.(?:\d+|clone))+$")
_BACKWARD, _FORWARD, _RECOMPUTED = "transpose(", "jvp(", "rematted_computation"


@dataclass(frozen=True, kw_only=True)
class XlaStepOp:
    """An op of the graph, as people want to see it."""

    instruction: HloInstruction
    turns: float  # How often it runs in a step.
    basis: Basis | None  # Origin of its duration; None: a collective or a copy.
    collective: Collective | None = None
    axes: tuple[str, ...] = ()  # Axes of the mesh among which the collective is; empty: it follows none.
    waits_for: int | None = None  # For the end of an asynchronous operation: the op that it ends.


@dataclass(frozen=True, kw_only=True)
class XlaStep:
    """One step of a program on one of its devices."""

    graph: ReplayGraph
    ops: tuple[XlaStepOp, ...]  # The ops of the graph, in its order.
    work: HloWork
    recomputed_flops: float  # Part of the work's matrix FLOPs that the backward pass computes again.
    unknown_loops: tuple[str, ...] = ()  # Loops that count once, for nothing tells how often they run.
    branches: int = 0  # Conditionals, of which the longest branch counts.


def step_of(module: HloModule, prices: Prices, mesh: Mapping[str, int]) -> XlaStep:
    """The step of a program.

    Parameters
    ----------
    mesh
        Size of each axis of the mesh, the slowest varying first; empty: not known.

    Raises
    ------
    InputError
        An instruction has no price on the device.
    """
    lowering = _Lowering(module, prices, mesh)
    lowering.schedule(module.entry, 1.0)
    return lowering.step()


def axes_of(collective: Collective, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of a mesh among which a collective is: whose groups it has, or along which its pairs are; empty for others."""
    sizes = tuple(mesh.values())
    devices = collective.device_groups if collective.pairs is None else collective.pairs
    if devices is None or not sizes or not devices.size or devices.max() >= np.prod(sizes):
        return ()
    places = np.stack(np.unravel_index(devices, sizes), axis=-1)  # [groups, size, axes]
    differs = (places != places[:, :1]).any(axis=(0, 1))
    axes = tuple(axis for axis, changes in zip(mesh, differs, strict=True) if changes)
    if collective.pairs is not None:
        return axes if len(axes) == 1 else ()
    spanned = int(np.prod([mesh[axis] for axis in axes]))
    return axes if devices.size == np.prod(sizes) and spanned == devices.shape[1] else ()


def leads_back(collective: Collective, mesh: Mapping[str, int]) -> bool:
    """Whether all devices of a permute send the shorter way to those before them on an axis of the mesh."""
    axes = axes_of(collective, mesh)
    if collective.pairs is None or len(axes) != 1:
        return False
    place, size = list(mesh).index(axes[0]), mesh[axes[0]]
    from_place, to_place = np.unravel_index(collective.pairs, tuple(mesh.values()))[place].T
    return bool((2 * ((to_place - from_place) % size) > size).all())


@dataclass
class _Totals:
    work: HloWork = field(default_factory=HloWork)
    recomputed_flops: float = 0.0
    unknown_loops: list[str] = field(default_factory=list)
    branches: int = 0


class _Lowering:
    def __init__(self, module: HloModule, prices: Prices, mesh: Mapping[str, int]) -> None:
        self._module, self._prices, self._mesh = module, prices, mesh
        self._builder, self._ops, self._totals = GraphBuilder(), list[XlaStepOp](), _Totals()
        self._collectives: dict[int, list[Collective]] = defaultdict(list)
        for collective in collectives(module):
            self._collectives[id(collective.start)].append(collective)
        self._transfers = {id(transfer.start): transfer for transfer in host_transfers(module)}
        self._core = self._builder.add_device(0, OrderPolicy.PROGRAM, _CORE)
        self._devices = {_CORE: self._core}
        self._axes = {id(each): axes_of(each, mesh) for starts in self._collectives.values() for each in starts}
        self._links = self._link_names()
        self._last: int | None = None  # the last op of the core
        self._computed_us = 0.0
        self._trains = any(_FORWARD in each.op_name for each in module.entry) or any(
            _FORWARD in each.op_name for computation in module.computations.values() for each in computation
        )

    def step(self) -> XlaStep:
        if not self._ops:  # a program that only passes its arguments on
            self._add(self._module.entry.root, 0.0, 1.0, basis="nothing")
        outside_us = self._prices.outside_us(self._computed_us)
        if outside_us:
            self._add(self._module.entry.root, outside_us, 1.0, kind=OpKind.HOST, name=_OUTSIDE)
        totals = self._totals
        return XlaStep(
            graph=self._builder.build(),
            ops=tuple(self._ops),
            work=totals.work,
            recomputed_flops=totals.recomputed_flops,
            unknown_loops=tuple(totals.unknown_loops),
            branches=totals.branches,
        )

    def schedule(self, computation: HloComputation, turns: float) -> None:
        """Add the instructions of a computation that runs so often."""
        ends = {id(pair.done): pair.start for pair in async_operations(self._module, computation) if pair.done is not None}
        started: dict[int, list[int]] = {}
        for instruction in computation:
            opcode = instruction.opcode
            if id(instruction) in ends:
                self._end(instruction, started.get(id(ends[id(instruction)]), []), turns)
                if opcode == "fusion":  # it ends a collective of a TPU, and computes something as well
                    self._compute(computation, instruction, instruction_work(self._module, computation, instruction), turns)
            elif opcode == "while":
                self._loop(computation, instruction, turns)
            elif opcode == "conditional":
                self._conditional(instruction, turns)
            elif opcode == "call":
                for callee in self._module.called_by(instruction):
                    self.schedule(callee, turns)
            else:
                started[id(instruction)] = list(self._instruction(computation, instruction, turns))

    def _loop(self, computation: HloComputation, loop: HloInstruction, turns: float) -> None:
        count = trip_count(self._module, computation, loop)
        if count is None:
            self._totals.unknown_loops.append(loop.name)
            count = 1
        if count:
            self.schedule(self._module.computation(loop.computation("body")), turns * count)

    def _conditional(self, instruction: HloInstruction, turns: float) -> None:
        """Add the branch that takes longest: which one is taken depends on data."""
        branches = self._module.called_by(instruction)
        self._totals.branches += 1
        longest = max(branches, key=self._alone_us, default=None)
        if longest is not None:
            self.schedule(longest, turns)

    def _alone_us(self, computation: HloComputation) -> float:
        """Duration of the instructions of a computation one after the other, without its collectives."""
        return sum(
            self._prices.instruction(computation, each, instruction_work(self._module, computation, each)).us
            for each in computation
        )

    def _instruction(self, computation: HloComputation, instruction: HloInstruction, turns: float) -> Iterator[int]:
        """Add an instruction, and yield the ops that the end of an asynchronous operation waits for."""
        started, transfer = self._collectives.get(id(instruction), []), self._transfers.get(id(instruction))
        work = instruction_work(self._module, computation, instruction)
        self._count(instruction, work, turns)
        if started:
            yield from self._communicate(computation, instruction, started, work, turns)
        elif transfer is not None:
            yield self._transfer(instruction, transfer, turns)
        elif instruction.opcode in _COPY_STARTS:
            copies = self._device(_COPIES)
            us = self._prices.copy_us(max(work.read_bytes, work.written_bytes))
            yield self._add(instruction, us, turns, device=copies, kind=OpKind.IO)
        else:
            self._compute(computation, instruction, work, turns)

    def _compute(self, computation: HloComputation, instruction: HloInstruction, work: HloWork, turns: float) -> None:
        """Add what an instruction computes on the core, if it takes any time."""
        price = self._prices.instruction(computation, instruction, work)
        if price.us:
            self._add(instruction, price.us, turns, basis=price.basis)

    def _communicate(
        self, computation: HloComputation, instruction: HloInstruction, started: list[Collective], work: HloWork, turns: float
    ) -> Iterator[int]:
        """Add the collectives that an instruction runs, and what it computes: before one that it waits for, beside another."""
        asynchronous = all(collective.is_async for collective in started)
        fused = instruction.opcode == "fusion"
        if fused and not asynchronous:
            self._compute(computation, instruction, work, turns)
        for collective in started:
            us = self._prices.collective_us(collective)
            op = self._add(
                instruction,
                us,
                turns,
                device=self._device(self._links[id(collective)]),
                kind=OpKind.COMM,
                collective=collective,
            )
            if asynchronous:
                yield op
            else:
                self._end(instruction, [op], turns, collective=collective)
        if fused and asynchronous:
            self._compute(computation, instruction, work, turns)

    def _transfer(self, instruction: HloInstruction, transfer: HostTransfer, turns: float) -> int:
        op = self._add(instruction, self._prices.transfer_us(transfer), turns, device=self._device(_HOST), kind=OpKind.IO)
        if transfer.done is None and not instruction.opcode.endswith("-start"):
            self._end(instruction, [op], turns)
        return op

    def _end(self, instruction: HloInstruction, awaited: list[int], turns: float, collective: Collective | None = None) -> None:
        """Make the core wait for ops of other devices."""
        for op in awaited:
            self._add(instruction, 0.0, turns, after=[op], waits_for=op, collective=collective or self._ops[op].collective)

    def _add(
        self,
        instruction: HloInstruction,
        us: float,
        turns: float,
        *,
        device: int | None = None,
        kind: OpKind | None = None,
        basis: Basis | None = None,
        collective: Collective | None = None,
        after: list[int] | None = None,
        waits_for: int | None = None,
        name: str = "",
    ) -> int:
        on_core = device is None
        if on_core:
            self._computed_us += us * turns
        needed = list(after or ())
        if not on_core and self._last is not None:
            needed.append(self._last)  # the core starts it after what it ran before
        op = self._builder.add_op(
            self._core if device is None else device,
            us * turns,
            name=name or self._name(instruction, collective),
            kind=self._kind(instruction) if kind is None else kind,
            after=needed,
        )
        axes = () if collective is None else self._axes[id(collective)]
        self._ops.append(
            XlaStepOp(instruction=instruction, turns=turns, basis=basis, collective=collective, axes=axes, waits_for=waits_for)
        )
        if on_core:
            self._last = op
        return op

    def _name(self, instruction: HloInstruction, collective: Collective | None) -> str:
        """A name that another compilation of the same script has as well: the operation, its line and its pass."""
        operation = instruction.op_name.rpartition("/")[2] or _NUMBER.sub("", instruction.name)
        if collective is not None:
            operation = collective.kind
        elif instruction.opcode in _COPY_STARTS or not instruction.op_name:
            operation = _NUMBER.sub("", instruction.name)
        backward = "backward" if self._kind(instruction) is OpKind.BACKWARD else ""
        return " ".join(filter(None, [operation, source_text(self._module, instruction), backward]))

    def _kind(self, instruction: HloInstruction) -> OpKind:
        """The pass that an instruction belongs to, by the transformations in JAX's name of it."""
        name = instruction.op_name
        if _BACKWARD in name:
            return OpKind.BACKWARD
        return OpKind.FORWARD if _FORWARD in name or not self._trains else OpKind.UPDATE

    def _count(self, instruction: HloInstruction, work: HloWork, turns: float) -> None:
        self._totals.work += work.times(turns)
        if _RECOMPUTED in instruction.op_name:
            self._totals.recomputed_flops += work.matrix_flops * turns

    def _device(self, name: str) -> int:
        if name not in self._devices:
            self._devices[name] = self._builder.add_device(0, OrderPolicy.FIFO, name)
        return self._devices[name]

    def _link_names(self) -> dict[int, str]:
        """The device of each collective: one for all axes of the mesh that some collective uses together.

        Links carry both directions at the same time, so that permutes to the devices before have a device of their own.
        """
        axes = {key: names or ("mesh",) for key, names in self._axes.items()}
        joined: list[set[str]] = []
        for names in axes.values():
            touching = [group for group in joined if group & set(names)]
            joined = [group for group in joined if group not in touching] + [set(names).union(*touching)]
        group_of = {name: group for group in joined for name in group}
        order = [*self._mesh, "mesh"]
        back = {id(each) for starts in self._collectives.values() for each in starts if leads_back(each, self._mesh)}
        return {
            key: "links of " + " and ".join(sorted(group_of[names[0]], key=order.index)) + (", backwards" if key in back else "")
            for key, names in axes.items()
        }


def source_text(module: HloModule, instruction: HloInstruction) -> str:
    """The line of the user's program that an instruction was made from, "train.py:41"; empty if the text does not say."""
    line = module.source(instruction)
    return "" if line is None else f"{line.file.rpartition('/')[2]}:{line.line}"


def scaled(step: XlaStep, scale: Scale) -> XlaStep:
    """The step with computation, communication, or collectives of one kind that take so many times as long."""
    kinds = step.graph.op_kind
    if scale.what == "collectives":
        names = [None if op.collective is None else op.collective.kind.replace("-", "_") for op in step.ops]
        if scale.only not in names:
            known = listed(sorted({name for name in names if name is not None}))
            raise InputError(f"'{scale.text}': the program has no such collectives{f'; it has {known}' if known else ''}")
        changed = np.array([name == scale.only for name in names])
    elif scale.what == "communication":
        changed = kinds == OpKind.COMM
    else:
        changed = (kinds != OpKind.COMM) & (kinds != OpKind.IO) & (kinds != OpKind.HOST)
    return replace(step, graph=step.graph.with_durations(step.graph.duration_us * np.where(changed, scale.factor, 1.0)))
