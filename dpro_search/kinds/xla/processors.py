"""`ProcessorPrices`: durations of a compiled program on processors, from those of a program that really ran there.

Instructions of the program that ran take what was measured. Those of another program of the same script (another mesh) take what
the same instruction took, or, where there was none, what a fitted sum says: a fixed time, and times for each operation and byte.
Collectives take what was measured of collectives of the same kind among as many devices, alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dpro_search.cluster import Cluster
from dpro_search.collect.readers.xla import Collective, HloComputation, HloInstruction, HloModule, collectives
from dpro_search.collect.trace import Floats
from dpro_search.errors import InputError
from dpro_search.graph.hlo import HloWork, executions, instruction_work
from dpro_search.kinds.xla.prices import NOTHING, Price, Prices
from dpro_search.kinds.xla.times import TIMES_FILE, ExchangeTime, ProgramTimes, wire_bytes

_CONTROL = frozenset({"while", "conditional", "call"})
_FEWEST = 4
"""A class of instructions with fewer measured ones takes the rates of a wider one."""
_ALL = "all"
_COPIES = frozenset(
    {"copy", "transpose", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "pad", "broadcast", "iota", "gather"}
)


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """An instruction that ran."""

    computation: str  # In which it is.
    same: Hashable  # Equal for instructions that do the same.
    families: tuple[str, ...]  # Classes of instructions that it belongs to, the narrowest first.
    work: Floats
    us: float


@dataclass(frozen=True, kw_only=True)
class TimedProgram:
    """A program that ran, and its times."""

    module: HloModule
    times: ProgramTimes

    def __post_init__(self) -> None:
        if not self.measured:
            raise InputError(f"{TIMES_FILE} names no instruction of {self.module.name}: capture the program again with --timed")

    @cached_property
    def measured(self) -> tuple[_Measured, ...]:
        """Instructions that computed."""
        us = self.times.instructions_us
        moving = {id(collective.start) for collective in collectives(self.module)}
        return tuple(
            _Measured(
                computation=computation.name,
                same=_signature(computation, each),
                families=_families(each, work),
                work=_features(work),
                us=us[each.name],
            )
            for computation in self.module.computations.values()
            for each in computation
            if us.get(each.name) and id(each) not in moving and each.opcode not in _CONTROL
            for work in [instruction_work(self.module, computation, each)]
        )

    @cached_property
    def same_us(self) -> Mapping[Hashable, float]:
        """The mean duration of instructions that do the same."""
        durations: dict[Hashable, list[float]] = defaultdict(list)
        for each in self.measured:
            durations[each.same].append(each.us)
        return {same: float(np.mean(us)) for same, us in durations.items()}

    @cached_property
    def rates(self) -> Mapping[str, Floats]:
        """For each class of instructions the fixed time, us, and times for each of its operations and bytes."""
        by_family: dict[str, list[_Measured]] = defaultdict(list)
        for each in self.measured:
            for family in each.families:
                by_family[family].append(each)
        return {family: _fitted(some) for family, some in by_family.items() if family == _ALL or len(some) >= _FEWEST}

    def fitted_us(self, instruction: HloInstruction, work: HloWork) -> float:
        """The duration of an instruction by the rates of the narrowest class that has some."""
        rates = next(self.rates[family] for family in _families(instruction, work) if family in self.rates)
        return float(rates @ _features(work))

    @cached_property
    def exchange_us(self) -> Mapping[tuple[str, int], Sequence[ExchangeTime]]:
        """Collectives that were timed alone, by kind and size of the group, the smallest first."""
        by_kind: dict[tuple[str, int], list[ExchangeTime]] = defaultdict(list)
        for each in sorted(self.times.exchanges, key=lambda each: each.bytes):
            by_kind[each.kind, each.group].append(each)
        return by_kind

    @cached_property
    def waiting_share(self) -> float:
        """Waiting for other processes in collectives, which took so much longer than alone, over the time of computation."""
        longer_us = sum(
            turns * (us - alone_us)
            for collective, turns, us in self._exchanged
            if (alone_us := self.alone_us(collective)) is not None
        )
        return max(longer_us, 0.0) / self._computed_us if self._computed_us else 0.0

    @property
    def start_us(self) -> float:
        """The part of a step that is in no instruction."""
        inside_us = self._computed_us + sum(turns * us for _, turns, us in self._exchanged)
        return max(self.times.iteration_us - inside_us, 0.0)

    @cached_property
    def _computed_us(self) -> float:
        turns = executions(self.module)
        return sum(each.us * (turns.get(each.computation) or 1) for each in self.measured)

    @cached_property
    def _exchanged(self) -> tuple[tuple[Collective, int, float], ...]:
        """Collectives that ran, how often, and how long each time."""
        us, turns = self.times.instructions_us, executions(self.module)
        return tuple(
            (each, turns.get(each.computation.name) or 1, us[each.start.name])
            for each in collectives(self.module)
            if each.start.name in us
        )

    def alone_us(self, collective: Collective) -> float | None:
        """A collective's duration where nobody waits; None: no such collective was timed."""
        group = 2 if collective.pairs is not None else collective.group_size
        timed = self.exchange_us.get((collective.kind, group))
        if timed is None:
            return None
        sizes, us = np.array([(each.bytes, each.us) for each in timed], dtype=np.float64).T
        return sum(_between(whole_bytes, sizes, us) for whole_bytes in _arrays_bytes(collective))


def _between(size: float, sizes: Floats, us: Floats) -> float:
    """A duration between those of measured sizes; beyond the largest it grows as between the last two."""
    if size <= sizes[-1] or len(sizes) < 2:
        return float(np.interp(size, sizes, us))
    slope = max(us[-1] - us[-2], 0.0) / (sizes[-1] - sizes[-2])
    return float(us[-1] + slope * (size - sizes[-1]))


def _arrays_bytes(collective: Collective) -> list[float]:
    """Bytes of each whole array of a collective, which XLA exchanges one after the other on processors."""
    if collective.kind in ("all-to-all", "collective-permute"):
        return [collective.operand_bytes]
    leaves = [float(leaf.bytes) for leaf in collective.start.shape.leaves()]
    return [collective.group_size * leaf for leaf in leaves] if collective.kind == "reduce-scatter" else leaves


def _signature(computation: HloComputation, instruction: HloInstruction) -> Hashable:
    shapes = tuple(operand.shape_text for operand in computation.operands(instruction))
    operation = instruction.op_name.rpartition("/")[2]
    return instruction.opcode, operation, shapes, instruction.shape_text


def _families(instruction: HloInstruction, work: HloWork) -> tuple[str, ...]:
    if work.matrix_flops:
        return f"product in {instruction.opcode}", "product", _ALL
    return "copy" if instruction.opcode in _COPIES else "other", _ALL


def _features(work: HloWork) -> Floats:
    """A fixed time, operations of products, of other arithmetic, transcendental functions, and bytes."""
    return np.array([1.0, work.matrix_flops, work.vector_flops, work.transcendentals, work.bytes])


def _fitted(some: Sequence[_Measured]) -> Floats:
    """Times for each feature, none below zero, with the least squares of relative errors."""
    from scipy.optimize import nnls

    features, us = np.array([each.work for each in some]), np.array([each.us for each in some])
    scale = np.maximum(np.abs(features).max(axis=0), 1e-9)
    times, _ = nnls(features / scale / us[:, None], np.ones(len(us)))
    return np.asarray(times / scale, dtype=np.float64)


class ProcessorPrices(Prices):
    """Durations on processors of the machine on which `ran` was timed."""

    def __init__(self, module: HloModule, cluster: Cluster, bandwidth: float, ran: TimedProgram) -> None:
        super().__init__(module, cluster, bandwidth)
        if ran.times.rate_bps != cluster.rate_bps:
            raise InputError(
                f"{cluster.name}: the program was timed on other links; ask --what-if bandwidth=N, or capture it there with --timed"
            )
        self._ran, self._is_it = ran, module is ran.module
        self._link_per_us = None if cluster.rate_bps is None else cluster.rate_bps / 8e6

    def instruction(self, computation: HloComputation, instruction: HloInstruction, work: HloWork) -> Price:
        if self._is_it:
            us = self._ran.times.instructions_us.get(instruction.name)
            return NOTHING if us is None or instruction.opcode in _CONTROL else Price(us, "measured")
        if not work.bytes and not work.flops:
            return NOTHING
        same = self._ran.same_us.get(_signature(computation, instruction))
        if same is not None:
            return Price(same, "measured")
        return Price(self._ran.fitted_us(instruction, work), "fitted")

    def copy_us(self, moved_bytes: float) -> float:
        return float(self._ran.rates[_ALL][-1] * moved_bytes)

    def collective_us(self, collective: Collective) -> float:
        if collective.pairs is None and collective.group_size == 1:
            return 0.0
        measured = self._ran.times.instructions_us.get(collective.start.name) if self._is_it else None
        us = self._ran.alone_us(collective) if measured is None else measured
        if us is None:
            raise InputError(
                f"line {collective.start.line}: no {collective.kind} among {collective.group_size} devices was timed beside the "
                "program"
            )
        if self._link_per_us is None or self._bandwidth == 1:
            return us
        wire_us = sum(wire_bytes(collective.kind, collective.group_size, each) for each in _arrays_bytes(collective))
        wire_us /= self._link_per_us
        return max(us - wire_us, 0.0) + wire_us / self._bandwidth

    def outside_us(self, computed_us: float) -> float:
        return self._ran.start_us + (0.0 if self._is_it else self._ran.waiting_share * computed_us)
