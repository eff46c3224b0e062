"""Records of a Kineto file as the profiler spells them, and their notes about the collectives that they are part of."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dpro_search.collect._files import DAMAGED
from dpro_search.collect.recorded_names import (
    collective_kind_of,
    communicates,
    dtype_of,
    is_library_span,
    is_one_sided,
    kernel_communication,
)
from dpro_search.collect.trace import CollectiveKind, ProcessGroup, Shapes

_LABEL = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|send_?recv|broadcast|barrier|reduce|gather|scatter|send|recv|dispatch|combine",
    re.IGNORECASE,
)
ITEM_BYTES = {
    "float": 4, "float32": 4, "double": 8, "float64": 8, "half": 2, "float16": 2, "bfloat16": 2, "byte": 1, "char": 1, "int8": 1,
    "uint8": 1, "bool": 1, "short": 2, "int": 4, "int32": 4, "long": 8, "long int": 8, "int64": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


class RecordArgs(msgspec.Struct, gc=False, frozen=True):
    """Arguments of a record, beside its span; -1, None or nothing where the record does not have them."""

    correlation: int | None = -1
    stream: int | None = -1
    device: int | None = -1
    bytes: int | None = -1
    collective_name: str | None = msgspec.field(name="Collective name", default=None)
    in_elements: int | None = msgspec.field(name="In msg nelems", default=None)
    out_elements: int | None = msgspec.field(name="Out msg nelems", default=None)
    dtype: str | None = None
    group_name: str | None = msgspec.field(name="Process Group Name", default=None)
    group_description: str | None = msgspec.field(name="Process Group Description", default=None)
    group_ranks: str | list[int] | None = msgspec.field(name="Process Group Ranks", default=None)
    group_size: int | None = msgspec.field(name="Group size", default=None)
    sequence: int | None = msgspec.field(name="Seq", default=None)
    input_dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw())
    old_input_dims: msgspec.Raw = msgspec.field(name="Input dims", default=msgspec.Raw())  # of PyTorch 1.8
    input_types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw())
    external: int | None = msgspec.field(name="External id", default=-1)
    old_external: int | None = msgspec.field(name="external id", default=-1)  # of PyTorch 1.8
    autograd: int | None = msgspec.field(name="Sequence number", default=-1)
    forward_thread: int | None = msgspec.field(name="Fwd thread id", default=-1)
    allocated: int | None = msgspec.field(name="Total Allocated", default=-1)  # of an instant "[memory]"
    device_type: int | None = msgspec.field(name="Device Type", default=-1)
    # name, labels: Of a record of phase M, which describes a process.
    described: msgspec.Raw = msgspec.field(name="name", default=msgspec.Raw())
    labels: msgspec.Raw = msgspec.Raw()
    wait_stream: int | None = msgspec.field(name="wait_on_stream", default=-1)
    wait_record: int | None = msgspec.field(name="wait_on_cuda_event_record_corr_id", default=-1)


class SpanRecord(msgspec.Struct, gc=False, frozen=True):
    """A record of the list, whatever its phase."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: int | float | None = None  # nanoseconds since the epoch are exact as integers only
    dur: float | None = None
    args: RecordArgs | None = None


@dataclass(frozen=True, kw_only=True)
class Note:
    """Fields of a record about the collective that it is part of; None where the record does not have them."""

    span: str  # the record's own name, "nccl:all_reduce" around the launch of a collective's kernel
    collective: str | None = None
    elements: int | None = None
    dtype: str | None = None
    group: str | None = None
    group_description: str | None = None
    group_ranks: tuple[int, ...] | None = None
    group_size: int | None = None
    sequence: int | None = None


def note_of(args: RecordArgs, name: str) -> Note | None:
    """The note of a record about a collective; None: the record has none."""
    if args.collective_name is None and args.sequence is None and args.group_name is None:
        around = name.startswith(("nccl:", "gloo:")) or name == "record_param_comms"
        return _note_of_inputs(args, name) if around and len(args.input_dims) else None
    elements = max(args.in_elements or 0, args.out_elements or 0)
    return Note(
        span=name,
        collective=args.collective_name,
        elements=elements or None,
        dtype=args.dtype,
        group=args.group_name,
        group_description=args.group_description,
        group_ranks=_ranks(args.group_ranks),
        group_size=args.group_size,
        sequence=args.sequence,
    )


def _ranks(value: str | list[int] | None) -> tuple[int, ...] | None:
    """Ranks of a process group; None where the list is missing or abridged ("[0, 1, ..., 31]")."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value, type=list[int])
        except DAMAGED:
            return None
    return tuple(value) if value else None


def _note_of_inputs(args: RecordArgs, name: str) -> Note:
    """The elements of a collective's first tensor: what older versions record instead."""
    try:
        dims = msgspec.json.decode(args.input_dims, type=list[Any])
        types = msgspec.json.decode(args.input_types, type=list[Any]) if len(args.input_types) else []
    except DAMAGED:
        dims, types = [], []
    shape = dims[0] if dims else None
    while isinstance(shape, list) and shape and isinstance(shape[0], list):
        shape = shape[0]
    known = isinstance(shape, list) and shape and all(isinstance(n, int) and 0 <= n < 2**40 for n in shape)
    dtype = types[0] if types and isinstance(types[0], str) and types[0] else None
    elements = math.prod(shape) if known and isinstance(shape, list) else None
    return Note(span=name, elements=elements, dtype=dtype)


def shapes_of(text: bytes) -> Shapes:
    """Shapes of an op's inputs, from "Input Dims"; those of a list of tensors follow each other. Empty where no input has sides.

    "[[8, 64], [], [[3], [3]]]" has the shapes (8, 64), (), (3,), (3,).
    """
    try:
        inputs = msgspec.json.decode(text, type=list[Any])
    except DAMAGED:
        return ()
    shapes: list[tuple[int, ...]] = []
    for sides in inputs:
        listed = isinstance(sides, list) and any(isinstance(side, list) for side in sides)
        shapes += [_shape(each) for each in sides] if listed else [_shape(sides)]
    return tuple(shapes) if any(shapes) else ()


def _shape(sides: object) -> tuple[int, ...]:
    known = isinstance(sides, list) and all(isinstance(side, int) and 0 <= side < 2**40 for side in sides)
    return tuple(sides) if known and isinstance(sides, list) else ()


def first_dtype(text: bytes) -> str:
    """Element type of an op's first tensor, from "Input type"; empty where none is recorded."""
    try:
        types = msgspec.json.decode(text, type=list[Any])
    except DAMAGED:
        return ""
    return next((dtype for name in types if isinstance(name, str) and (dtype := dtype_of(name))), "")


@dataclass(frozen=True, kw_only=True)
class NotedCollective:
    """A rank's part of a collective, as far as it is known.

    Attributes
    ----------
    label
        Kind in lower case without underscores: allreduce, alltoall, sendrecv...
    kind
        From the call of the library, else from the kernel's name: an all-to-all of NCCL runs kernels named SendRecv.
    group, group_ranks
        Name of the process group and its members; None where the profile does not have it.
    process_group
        All that is known of it; None: nothing.
    sequence
        Number within its group.
    size_bytes, dtype
        -1 and "" where unknown.
    one_sided
        Whether no other rank has to take part.
    """

    label: str
    kind: CollectiveKind
    group: str | None = None
    process_group: ProcessGroup | None = None
    group_ranks: tuple[int, ...] | None = None
    sequence: int | None = None
    size_bytes: int = -1
    dtype: str = ""
    one_sided: bool = False


def collective_of(kernel: str, notes: Sequence[Note]) -> NotedCollective:
    """A rank's part of a collective, from the name of its kernel and from notes, the most telling first."""

    def first(attribute: str) -> object:
        return next((value for note in notes if (value := getattr(note, attribute)) is not None), None)

    sized = next((note for note in notes if note.elements is not None and (note.dtype or "").lower() in ITEM_BYTES), None)
    group, ranks, sequence, named = first("group"), first("group_ranks"), first("sequence"), first("collective")
    short = kernel.split("(")[0]
    match = _LABEL.search(short) if communicates(kernel) or is_library_span(kernel) else None
    label = str(match[0] if match else named or short)
    return NotedCollective(
        label=label.lower().replace("_", ""),
        kind=_collective_kind(kernel, notes),
        one_sided=is_one_sided(kernel),
        process_group=_process_group(notes),
        group=group if isinstance(group, str) else None,
        group_ranks=ranks if isinstance(ranks, tuple) else None,
        sequence=sequence if isinstance(sequence, int) else None,
        size_bytes=(sized.elements or 0) * ITEM_BYTES[(sized.dtype or "").lower()] if sized else -1,
        dtype=(sized.dtype or "").lower() if sized else "",
    )


def _collective_kind(kernel: str, notes: Sequence[Note]) -> CollectiveKind:
    named = [name for note in notes for name in (note.collective, note.span) if name]
    kinds = [*map(collective_kind_of, named), kernel_communication(kernel)]
    return next((kind for kind in kinds if kind is not CollectiveKind.UNKNOWN), CollectiveKind.UNKNOWN)


def _process_group(notes: Sequence[Note]) -> ProcessGroup | None:
    note = next((note for note in notes if note.group is not None or note.group_ranks or note.group_size), None)
    if note is None:
        return None
    ranks = note.group_ranks or ()
    listed = len(set(ranks)) == len(ranks) and all(0 <= rank < 1 << 20 for rank in ranks)
    size = note.group_size if note.group_size is not None and note.group_size > 0 else -1
    ranks = ranks if listed and size in (-1, len(ranks)) else ()
    return ProcessGroup(name=note.group or "", description=note.group_description or "", ranks=ranks, size=len(ranks) or size)
