"""``graph.json``: the step graph of a captured model, and `read_graph`."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec

from dpro_search._regular_files import read_regular
from dpro_search.collect._files import DAMAGED
from dpro_search.errors import InputError

VERSION = 1
GROWTH = {".": (0, 0), "b": (1, 0), "s": (0, 1), "x": (1, 1), "q": (0, 2), "y": (1, 2)}
"""Powers of batch and sequence with which a dim grows, by letter."""
Growth = Annotated[str, msgspec.Meta(pattern=f"^[{''.join(GROWTH)}]*$")]


class StepPhase(IntEnum):
    """Part of a step."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2


class CapturedTensor(msgspec.Struct, array_like=True, frozen=True):
    """A tensor that an op reads or writes."""

    storage: int  # Tensors that share memory have one number.
    shape: tuple[int, ...]
    dtype: str
    grows: Growth = ""  # A letter of `GROWTH` for each dim; empty: not known.

    @property
    def powers(self) -> tuple[int, int]:
        """Powers of batch and of sequence with which its elements grow."""
        growths = [GROWTH[letter] for letter in self.grows]
        return sum(batch for batch, _ in growths), sum(sequence for _, sequence in growths)

    @property
    def elements(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


class CapturedOp(msgspec.Struct, array_like=True, frozen=True):
    """An op that a step runs, as PyTorch dispatches it; views, which move nothing, are left out."""

    name: str  # Namespace and name: "aten::mm".
    phase: StepPhase
    module: str  # Path of the module that called it, or whose forward pass it differentiates.
    inputs: tuple[CapturedTensor, ...]
    outputs: tuple[CapturedTensor, ...]
    flops: int  # As FlopCounterMode counts: of matmuls, convolutions and attention; a multiply-add is two.
    read_bytes: int
    written_bytes: int
    forward: int = -1  # The op of the forward pass that it belongs to; -1: not known, or it is of the forward pass.
    attributes: dict[str, Any] = {}


class SavedTensor(msgspec.Struct, array_like=True, frozen=True):
    """Storages of the forward pass that autograd keeps for the backward pass, each once."""

    storage: int
    op: int  # Of the forward pass, which needs it first.
    size_bytes: int  # Of the storage at the end of the forward pass; 0: freed by then.
    shape: tuple[int, ...]
    dtype: str
    grows: tuple[int, int] = (0, 0)  # Powers of batch and sequence.


class CapturedParameter(msgspec.Struct, array_like=True, frozen=True):
    """A parameter of the whole model, before it is split."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool

    @property
    def elements(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


class IssuedCollective(msgspec.Struct, frozen=True):
    """A collective that the rank issues, or a message between two ranks."""

    type: str
    phase: StepPhase
    module: str
    elements: int  # Of the whole tensor of all ranks (all-gather, reduce-scatter), or of each rank's.
    bytes: int
    dtype: str
    ranks: tuple[int, ...]  # Of a message its sender and its receiver.
    op: int  # Ops of the step before it.


class CapturedStep(msgspec.Struct, frozen=True):
    """A training step of one rank, the second one: the first allocates the optimizer's state."""

    ops: tuple[CapturedOp, ...]
    collectives: tuple[IssuedCollective, ...]
    saved: tuple[SavedTensor, ...]
    # Storages of parameters and of what is computed from them alone (casts, gathered ones); of inputs; of buffers.
    parameter_tensors: tuple[int, ...]
    input_tensors: tuple[int, ...]
    buffer_tensors: tuple[int, ...]
    parameters: tuple[CapturedParameter, ...]
    local_parameter_bytes: int  # What the rank holds.
    gradient_bytes: int
    optimizer_bytes: int
    held_bytes: int  # At the end of the forward pass, in all.
    peak_bytes: int
    peak_phase: str
    kinds: dict[str, str]  # Class of each module, by its path.
    units: tuple[str, ...]  # Paths of modules that repeat, in the order of the model.
    layouts: dict[str, str]  # "columns" or "rows": how tensor parallel ranks split a linear layer's weight.
    tied: bool
    seconds: float

    def flops(self, *phases: StepPhase) -> int:
        """FLOPs of some phases, or of all."""
        return sum(op.flops for op in self.ops if not phases or op.phase in phases)

    @property
    def activation_bytes(self) -> int:
        """Bytes of the tensors that autograd keeps, without parameters and what is computed from them alone."""
        known = set(self.parameter_tensors)
        return sum(saved.size_bytes for saved in self.saved if saved.storage not in known)


class CapturedGraph(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a ``graph.json``.

    `plain` is the step of one device. `under_mesh` is that of rank 0 of the mesh that was asked for; of a pipeline, `places` are
    those of the first rank of each place in it, of `micro_batches` micro-batches of the captured batch.
    """

    version: int
    model: str  # Class.
    script: str
    function: str
    script_sha256: str
    torch: str
    python: str
    dpro_search: str
    batch: int
    sequence: int | None
    precision: str
    optimizer: str
    mesh: dict[str, int]
    grows: tuple[str, ...]  # Of "batch" and "sequence", those with which it is known how tensors grow.
    notes: tuple[str, ...]
    plain: CapturedStep
    under_mesh: CapturedStep | None = None
    places: tuple[CapturedStep, ...] = ()
    schedule: str = ""
    virtual_stages: int = 1
    micro_batches: int = 1
    rotate: str = "allgather"

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters of the whole model."""
        return sum(each.elements * dtype_bytes(each.dtype) for each in self.plain.parameters)


def dtype_bytes(name: str) -> int:
    """Bytes of an element."""
    digits = "".join(letter for letter in name.partition("_")[0] if letter.isdigit())
    return max(int(digits) // 8, 1) if digits and not name.startswith("float8") else 16 if name == "complex128" else 1


def read_graph(path: Path) -> CapturedGraph:
    """A file that `dpro-search capture` wrote; raises `InputError` with its path for anything else."""
    try:
        data = read_regular(path)
        version = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get("version")
        if version is not None and bytes(version) != str(VERSION).encode():
            raise InputError(f"{path}: version {bytes(version).decode()[:20]}, this reads {VERSION}: capture the model again")
        return msgspec.json.decode(data, type=CapturedGraph)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}: 'dpro-search capture' writes it") from error
    except DAMAGED as error:
        raise InputError(f"{path}: not a graph that 'dpro-search capture' wrote: {error}") from error


def written_graph(graph: CapturedGraph) -> bytes:
    """The file's content."""
    return msgspec.json.encode(graph)
