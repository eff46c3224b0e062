"""The modules of a recorded PyTorch model, and when each ran: `ModuleInfo`, `ModuleCalls`; a part of a `Trace`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt


class LoweredOp(msgspec.Struct, frozen=True, array_like=True):
    """Ops of one type that a module would run in bfloat16; `us` is the time of all of them in float32."""

    type: str  # an operator, "aten::linear", or a backward function, "AddmmBackward0"
    backward: bool
    calls: int
    us: float


class LoweredOps(msgspec.Struct, frozen=True, kw_only=True):
    """Changes that bfloat16 autocast would make to a module."""

    # forward_us, backward_us: Its recorded passes, from start to end.
    forward_us: float
    backward_us: float
    ops: tuple[LoweredOp, ...]  # Those that would compute in bfloat16.
    # casts, cast_elements: Casts of the forward pass, and elements of all; the backward pass has as many.
    casts: int
    cast_elements: int


class ModuleInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A module that a plan can name."""

    # name, type: Its path within the model ("encoder.layers.3"), and its class.
    name: str
    type: str
    member: bool  # Whether it is a member of a Sequential or ModuleList: one of a row of blocks.
    frees_bytes: int = -1  # What its forward pass makes that nothing but its own backward pass reads; -1: not known.
    # What the forward pass keeps for the backward pass from where the module begins on, without that; -1: not known.
    behind_bytes: int = -1
    refusal: str = ""  # Why it cannot be computed again; empty: it can.
    lowered: LoweredOps | None = None  # What would run in bfloat16; None: not known, or nothing.


@dataclass(frozen=True, kw_only=True)
class ModuleCalls:
    """k forward passes of modules. Times are microseconds on the aligned clock."""

    module: npt.NDArray[np.int64]  # Index into `Trace.modules`.
    # rank, step: Where it ran, and in which training step.
    rank: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]
    # start_us, again_us, end_us: Its start; until when it is computed, if it is computed again: what comes behind is needed by no
    # backward function; its end.
    start_us: npt.NDArray[np.float64]
    again_us: npt.NDArray[np.float64]
    end_us: npt.NDArray[np.float64]
    # backward_us, backward_end_us: The start of its first backward function, and the end of the last.
    backward_us: npt.NDArray[np.float64]
    backward_end_us: npt.NDArray[np.float64]

    @staticmethod
    def none() -> ModuleCalls:
        """The modules of a job that has none, or that was recorded before modules were kept."""
        numbers, times = np.zeros(0, np.int64), np.zeros(0, np.float64)
        same = {"start_us": times, "again_us": times, "end_us": times, "backward_us": times, "backward_end_us": times}
        return ModuleCalls(module=numbers, rank=numbers, step=numbers, **same)

    def __len__(self) -> int:
        return len(self.module)

    def shifted(self, offset_us: npt.NDArray[np.float64]) -> ModuleCalls:
        """The same on clocks that are set back, each rank's by its own offset, [ranks]."""
        moved = {name: getattr(self, name) - offset_us[self.rank] for name in _TIMES}
        return replace(self, **moved)


_TIMES = ("start_us", "again_us", "end_us", "backward_us", "backward_end_us")
