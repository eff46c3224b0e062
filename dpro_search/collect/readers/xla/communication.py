"""Communication of a program: collectives with their groups and sizes, asynchronous pairs, and transfers to and from the host.

A collective stands in a program in one of five forms:

* alone (``all-gather``): the device waits for it;
* as a pair (``all-gather-start``, ``all-gather-done``): it proceeds beside the instructions in between;
* within the computation of ``async-start`` or ``call-start`` (on TPU v7x of the SparseCores), up to ``call-done``;
* within a fusion: TPUs write a reduce-scatter as a fusion of an all-reduce with a slice of its result;
* within several fusions: TPUs start it in one (with a custom call ``AsyncCollectiveStart``), advance it in fusions that compute
  something else, and end it in one with ``AsyncCollectiveDone``. Each has a copy of the instruction, with one ``chain_id``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dpro_search.collect.readers.xla.groups import Ints, ReplicaGroups, parse_replica_groups, parse_source_target_pairs
from dpro_search.collect.readers.xla.hlo import HloComputation, HloInstruction, HloModule
from dpro_search.collect.readers.xla.shapes import HOST_MEMORY_SPACE, HloShape

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_START, _DONE, _UPDATE = "-start", "-done", "-update"
_KINDS = {name + ending: name for name in COLLECTIVES for ending in ("", _START)}
_WRAPPERS = ("fusion", "async-start", "call-start")  # their computations are parts of them, not steps of the schedule
_CONTROL = ("while", "conditional", "call")  # their computations have schedules of their own
_MESSAGES = {"send": "send-done", "recv": "recv-done"}
_CARRIERS = ("tuple", "get-tuple-element", "bitcast", "copy", "opt-barrier", "optimization-barrier")
_GLOBAL_IDS = ("all-reduce", "all-gather", "reduce-scatter")  # which say by `use_global_device_ids` whose numbers they have
_CHAIN_ENDS = {"AsyncCollectiveStart": "start", "AsyncCollectiveDone": "done"}
_CHAIN_ID = re.compile(r'\bchain_id="(\w+)"')
_SYNCHRONOUS_FLAG = ("collective_backend_config", "is_sync")  # GPUs: the pair is kept, but the start waits for the end


@dataclass(frozen=True, eq=False)
class AsyncOperation:
    """An operation that proceeds beside the instructions between its start and its end."""

    computation: HloComputation
    start: HloInstruction
    updates: tuple[HloInstruction, ...]  # Instructions that advance the operation, without those in loops in between.
    done: HloInstruction | None  # None where the end is not in the same computation, but in a later turn of a loop.


@dataclass(frozen=True, eq=False)
class Collective:
    """A collective as a device runs it."""

    kind: str  # One of `COLLECTIVES`.
    module: HloModule
    computation: HloComputation  # In whose schedule it stands.
    start: HloInstruction  # The instruction of the schedule that runs or starts it.
    done: HloInstruction | None  # The instruction that waits for its end; None if `start` does, or if the end is in another turn.
    op: HloInstruction  # The collective itself: `start`, or an instruction of the computation that `start` runs.
    operand_bytes: int  # Bytes that a device puts in.
    output_bytes: int  # Bytes that it gets: of an all-gather the whole result, of a reduce-scatter its part.
    is_async: bool  # Whether instructions between `start` and `done` may proceed beside it.

    @property
    def channel_id(self) -> int | None:
        return self.op.number("channel_id")

    @property
    def thread(self) -> str:
        """The unit that moves the data: "main", or "sparsecore" on TPUs that have them."""
        text = self.start.attributes.get("async_execution_thread", "").strip('"')
        return text or self.computation.execution_thread

    @cached_property
    def groups(self) -> ReplicaGroups | None:
        """The groups as the program has them; None for a collective-permute."""
        if self.kind == "collective-permute":
            return None
        participants = {
            "devices": self.module.devices,
            "replicas": self.module.replica_count,
            "partitions": self.module.num_partitions,
            "replicas with their partitions": self.module.replica_count,
        }
        return parse_replica_groups(self.op.attributes.get("replica_groups", "{}"), participants[self.numbered])

    @cached_property
    def pairs(self) -> Ints | None:
        """Devices that send and receive in a collective-permute. Shape [pairs, 2]; None for another kind."""
        if self.kind != "collective-permute":
            return None
        pairs = parse_source_target_pairs(self.op.attributes.get("source_target_pairs", "{}"))
        return self._devices(pairs)

    @cached_property
    def device_groups(self) -> Ints | None:
        """Devices of each group, whatever the program numbers. Shape [groups, size]; None for a collective-permute.

        The device of partition p of replica r is r * partitions + p (CollectiveOpGroupMode in xla/service/collective_ops_utils.h).
        """
        return None if self.groups is None else self._devices(self.groups.ids)

    @property
    def group_size(self) -> int:
        """Devices of a group; of a collective-permute two."""
        return 2 if self.device_groups is None else int(self.device_groups.shape[1])

    @property
    def numbered(self) -> str:
        """Meaning of the numbers in the groups: devices, replicas, partitions, or replicas with all of their partitions."""
        has_channel = self.channel_id is not None
        if self.kind in _GLOBAL_IDS:
            if not has_channel:
                return "replicas"
            uses_devices = self.op.attributes.get("use_global_device_ids") == "true"
            return "devices" if uses_devices else "replicas with their partitions"
        return "partitions" if has_channel else "replicas"

    @property
    def reduction(self) -> str:
        """Opcode of the operation that joins two values ("add", "maximum"); "" for a kind without one."""
        name = self.op.attributes.get("to_apply", "").lstrip("%")
        return self.module.computation(name).root.opcode if name else ""

    def __str__(self) -> str:
        where = f"{len(self.pairs)} pairs" if self.pairs is not None else str(self.groups)
        return f"{self.kind} of {self.operand_bytes} bytes in {where}"

    def _devices(self, ids: Ints) -> Ints:
        replicas, partitions = self.module.replica_count, self.module.num_partitions
        if self.numbered == "devices" or (self.numbered == "partitions" and replicas == 1):
            return ids
        if self.numbered == "partitions":
            return np.concatenate([np.where(ids < 0, -1, replica * partitions + ids) for replica in range(replicas)])
        if self.numbered == "replicas":
            return np.concatenate([np.where(ids < 0, -1, ids * partitions + partition) for partition in range(partitions)])
        each = np.where(ids[:, :, None] < 0, -1, ids[:, :, None] * partitions + np.arange(partitions))
        return each.reshape(len(ids), -1)


@dataclass(frozen=True, eq=False)
class HostTransfer:
    """Data that moves between a device and its host."""

    computation: HloComputation
    start: HloInstruction
    done: HloInstruction | None  # The instruction that waits for its end; None if `start` does, or if the end is in another turn.
    to_host: bool
    bytes: int


def collectives(module: HloModule) -> tuple[Collective, ...]:
    """The collectives of a program, each once, in the order of the computations and of their schedules.

    A collective in a loop is one; `dpro_search.graph.hlo.executions` says how often its computation runs.
    """
    holders = _holders(module)
    return tuple(
        collective
        for computation in scheduled_computations(module)
        for start in computation
        for collective in _started(module, computation, start, holders)
    )


def scheduled_computations(module: HloModule) -> tuple[HloComputation, ...]:
    """The computations that have a schedule of their own: the entry, and those of loops, branches and calls, callees first."""
    reached, left = {module.entry_name}, [module.entry]
    while left:
        for instruction in left.pop():
            if instruction.opcode in _CONTROL:
                for callee in module.called_by(instruction):
                    if callee.name not in reached:
                        reached.add(callee.name)
                        left.append(callee)
    return tuple(computation for name, computation in module.computations.items() if name in reached)


def async_operations(module: HloModule, computation: HloComputation) -> tuple[AsyncOperation, ...]:
    """The asynchronous operations that start in a computation of a module, in order."""
    holders = _holders(module)
    return tuple(
        AsyncOperation(computation, instruction, *_followed(computation, instruction, holders))
        for instruction in computation
        if instruction.opcode.endswith(_START)
        or instruction.opcode in _MESSAGES
        or (instruction.opcode == "fusion" and _part(instruction, holders).role == "start")
    )


def host_transfers(module: HloModule) -> tuple[HostTransfer, ...]:
    """Copies between the memories of a device and its host, messages between them, and infeeds and outfeeds, in order.

    A fusion that reads or writes the host's memory in passing is none of them: its operands' memory space says so.
    """
    return tuple(
        transfer
        for computation in scheduled_computations(module)
        for instruction in computation
        if (transfer := _host_transfer(computation, instruction)) is not None
    )


@dataclass(frozen=True)
class _Holder:
    """A computation that has collectives, and the part of a chain of fusions that it is."""

    ops: tuple[HloInstruction, ...] = ()
    role: str = ""  # "start", "update" or "done"; empty if it is the whole.
    chain_id: str = ""


_NO_HOLDER = _Holder()


def _holders(module: HloModule) -> dict[str, _Holder]:
    """The computations with collectives, by name."""
    return {
        name: _holder(computation, ops)
        for name, computation in module.computations.items()
        if (ops := tuple(one for one in computation if one.opcode in _KINDS))
    }


def _holder(computation: HloComputation, ops: tuple[HloInstruction, ...]) -> _Holder:
    chain = _CHAIN_ID.search(ops[0].attributes.get("frontend_attributes", ""))
    roles = [_CHAIN_ENDS.get(one.custom_call_target, "") for one in computation if one.opcode == "custom-call"]
    role = next(filter(None, roles), "update" if chain else "")
    return _Holder(ops, role, chain[1] if chain else "")


def _part(fusion: HloInstruction, holders: Mapping[str, _Holder]) -> _Holder:
    return next((holders[name] for name in fusion.called if name in holders), _NO_HOLDER) if holders else _NO_HOLDER


def _started(
    module: HloModule, computation: HloComputation, start: HloInstruction, holders: Mapping[str, _Holder]
) -> Iterator[Collective]:
    if start.opcode in _KINDS:
        yield _collective(module, computation, start, computation, start, holders)
    elif holders and start.opcode in _WRAPPERS:
        for name in start.called:
            holder = holders.get(name, _NO_HOLDER)
            if holder.role not in ("update", "done"):
                for op in holder.ops:
                    yield _collective(module, computation, start, module.computation(name), op, holders)


def _collective(
    module: HloModule,
    computation: HloComputation,
    start: HloInstruction,
    inner: HloComputation,
    op: HloInstruction,
    holders: Mapping[str, _Holder],
) -> Collective:
    kind = _KINDS[op.opcode]
    is_pair = start.opcode.endswith(_START) or holders.get(inner.name, _NO_HOLDER).role == "start"
    done = _followed(computation, start, holders)[1] if is_pair else None
    operands = [operand.shape for operand in inner.operands(op)]
    if kind == "ragged-all-to-all":
        operands = operands[:1]  # after it come the buffer of the output, and offsets and sizes
    operand_bytes = sum(shape.bytes for shape in operands)
    output_bytes = _result(op).bytes
    if inner is not computation and kind == "all-reduce" and not is_pair and _is_sliced(inner, op):
        kind, output_bytes = "reduce-scatter", inner.root.shape.bytes
    part, key = _SYNCHRONOUS_FLAG
    config = start.backend_config.get(part) if is_pair else None
    waits = isinstance(config, dict) and config.get(key) is True
    return Collective(kind, module, computation, start, done, op, operand_bytes, output_bytes, is_pair and not waits)


def _result(op: HloInstruction) -> HloShape:
    """The result of a collective: a start also has its operands and what it counts with."""
    shape = op.shape
    if op.opcode.endswith(_START) and shape.is_tuple and len(shape.elements) >= 2 and op.opcode != f"all-reduce{_START}":
        return shape.elements[1]
    return shape


def _is_sliced(computation: HloComputation, op: HloInstruction) -> bool:
    """Whether a fusion keeps only a part of an all-reduce's result, that of this device."""
    slices = {"dynamic-slice", "slice"}
    return computation.root.shape.size < op.shape.size and any(one.opcode in slices for one in computation)


def _followed(
    computation: HloComputation, start: HloInstruction, holders: Mapping[str, _Holder]
) -> tuple[tuple[HloInstruction, ...], HloInstruction | None]:
    """The updates and the end of an operation, which are found along the uses of its result."""
    updates: list[HloInstruction] = []
    done_opcode = _MESSAGES.get(start.opcode, "")
    chain_id = _part(start, holders).chain_id if start.opcode == "fusion" else ""
    seen, left = {start.name}, [start.name]
    while left:
        for user in computation.users.get(left.pop(), ()):
            if user.name in seen:
                continue
            role = _role(user, done_opcode, chain_id, holders)
            if role == "done":
                return tuple(updates), user
            if role:
                seen.add(user.name)
                left.append(user.name)
                if role == "update":
                    updates.append(user)
    return tuple(updates), None


def _role(user: HloInstruction, done_opcode: str, chain_id: str, holders: Mapping[str, _Holder]) -> str:
    """The role of an instruction for an operation whose result it reads: "done", "update", "pass" it on, or "" if it computes."""
    if user.opcode in _CARRIERS or (chain_id and user.opcode == "while"):  # fusions in a loop's body may advance it
        return "pass"
    if chain_id:
        part = _part(user, holders) if user.opcode == "fusion" else _NO_HOLDER
        return part.role if part.chain_id == chain_id else ""
    if user.opcode == done_opcode or (not done_opcode and user.opcode.endswith(_DONE)):
        return "done"
    return "update" if user.opcode.endswith(_UPDATE) else ""


def _host_transfer(computation: HloComputation, instruction: HloInstruction) -> HostTransfer | None:
    opcode = instruction.opcode
    base = opcode.removesuffix(_START)
    if base in ("copy", "slice", "dynamic-slice", "dynamic-update-slice"):
        return _copy(computation, instruction, base)
    if opcode in ("infeed", "outfeed"):
        shape = instruction.shape if opcode == "infeed" else computation.operands(instruction)[0].shape
        return HostTransfer(computation, instruction, None, opcode == "outfeed", shape.bytes)
    if opcode in _MESSAGES and instruction.attributes.get("is_host_transfer") == "true":
        data = instruction.shape.elements[0] if instruction.shape.is_tuple else instruction.shape
        return HostTransfer(computation, instruction, _followed(computation, instruction, {})[1], opcode == "send", data.bytes)
    return None


def _copy(computation: HloComputation, instruction: HloInstruction, base: str) -> HostTransfer | None:
    """A copy from one memory to another, of which one is the host's, or the same with a part of an array.

    Activations that a loop keeps in the host's memory are written as ``dynamic-update-slice`` and read as ``dynamic-slice``.
    """
    is_pair = instruction.opcode.endswith(_START)
    if (
        is_pair and f"S({HOST_MEMORY_SPACE})" not in instruction.shape_text
    ):  # the host's memory, which the result of a start names if it takes part
        return None
    operands = [operand.shape for operand in computation.operands(instruction)]
    if base == "dynamic-update-slice":
        source, target = operands[1], operands[0]
    else:
        source, target = operands[0], instruction.shape
        if is_pair:
            target = target.elements[0 if base == "copy" else 1]
    if target.in_host_memory == source.in_host_memory:
        return None
    done = _followed(computation, instruction, {})[1] if is_pair else None
    moved = source if base == "dynamic-update-slice" else target
    return HostTransfer(computation, instruction, done, target.in_host_memory, moved.bytes)
