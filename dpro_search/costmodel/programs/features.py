"""Numbers that stand for GPU kernels: `program_columns` from their loops and accesses, `occupancy_columns` on a GPU.

Columns are logarithms to base 2 of counts, so that equal steps are equal factors; flags are 0 or 1. Accesses are counted as the
hardware serves them: the lanes of a warp together, in sectors of 32 bytes from global memory and by banks of shared memory (CUDA
C++ Best Practices Guide, "Memory Optimizations"; AMD HIP performance guidelines say the same of wavefronts).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dpro_search.costmodel.programs.kernel import Access, KernelProgram, Leaf, LoopKind, Memory
from dpro_search.costmodel.programs.limits import GpuLimits

Floats = npt.NDArray[np.float64]
LANES, SECTOR_BYTES, BANKS, BANK_BYTES = 32, 32, 32, 4
_GLOBAL = (Memory.GLOBAL, Memory.READ_ONLY)
_ALIGNED = 6  # powers of two beyond which alignment changes nothing


def program_columns(programs: Sequence[KernelProgram]) -> Floats:
    """Columns of programs of one kernel, [programs, columns]; those that are equal for all programs are left out.

    Raises
    ------
    ValueError
        Programs differ in the loops of their heaviest leaf: they are not of one kernel.
    """
    depths = {len(program.heaviest.loops) for program in programs}
    if len(depths) > 1:
        raise ValueError(f"programs of one kernel have the same loops, these have {sorted(depths)}")
    columns = np.array([_columns(program) for program in programs], dtype=float)
    return columns[:, np.ptp(columns, axis=0) > 0]


def occupancy_columns(programs: Sequence[KernelProgram], limits: GpuLimits) -> Floats:
    """Threads that a compute unit holds over those that it could, lanes in use, and accumulators held, [programs, 3]."""
    threads = np.array([program.threads for program in programs], dtype=float)
    shared = np.array([program.shared_bytes for program in programs], dtype=float)
    kept = np.array([accumulators(program.heaviest) for program in programs], dtype=float)
    rounded = np.ceil(threads / limits.warp) * limits.warp
    by_shared = np.where(shared > 0, limits.shared_bytes // np.maximum(shared, 1), np.inf)
    blocks = np.minimum(np.minimum(limits.threads // rounded, limits.blocks), by_shared)
    resident = np.maximum(blocks, 1) * threads
    return np.stack([np.log2(resident / limits.threads), np.log2(threads / rounded), np.log2(resident * kept)], axis=1)


def accumulators(leaf: Leaf) -> int:
    """Elements that a thread writes in the loops that it runs itself: they stay in registers, or are spilled."""
    return _product(leaf, leaf.accesses[0], varies=True)


def _product(leaf: Leaf, access: Access, *, varies: bool) -> int:
    """Iterations of a thread's own loops along which an access moves, or does not."""
    return math.prod(
        loop.extent
        for loop, stride in zip(leaf.loops, access.strides, strict=True)
        if loop.kind not in (LoopKind.GRID, LoopKind.THREAD) and (stride != 0) == varies
    )


def _columns(program: KernelProgram) -> list[float]:
    leaf = program.heaviest
    lanes = tuple(loop.extent for loop in leaf.loops if loop.kind == LoopKind.THREAD)
    kept = accumulators(leaf)
    unrolled = leaf.extent(LoopKind.UNROLLED, LoopKind.VECTOR)
    guarded = any(one.guarded for one in program.leaves)
    columns = [float(np.log2(loop.extent)) for loop in leaf.loops]
    columns += [
        math.log2(math.prod(lanes)),
        math.log2(leaf.extent(LoopKind.GRID)),
        math.log2(kept),
        math.log2(unrolled),
        math.log2(min(lanes[-1], LANES)),
        float(_twos(lanes[-1])),
        math.log2(program.needed),
        math.log2(1 + program.shared_bytes),
        float(guarded),
        # Accumulators behind a condition are no longer known by name to the compiler, and go to memory.
        float(guarded and (kept > 1 or leaf.guarded)),
        float(program.shared_bytes > 0),
    ]
    for access in leaf.accesses[1:]:
        columns += _access_columns(leaf, access, lanes)
    columns += [math.log2(1 + _moved_bytes(program)), *program.variant]
    return columns


def _access_columns(leaf: Leaf, access: Access, lanes: tuple[int, ...]) -> list[float]:
    steps = tuple(s for loop, s in zip(leaf.loops, access.strides, strict=True) if loop.kind == LoopKind.THREAD)
    shared = access.memory == Memory.SHARED
    served = bank_conflicts(steps, lanes) if shared else sectors(steps, lanes, access.element_bytes)
    thread_loops = zip(leaf.loops, access.strides, strict=True)
    loads = math.prod(
        loop.extent
        for loop, stride in thread_loops
        if loop.kind in (LoopKind.SERIAL, LoopKind.UNROLLED) and (stride != 0 or loop.kind == LoopKind.SERIAL)
    )
    reads_once = access.memory == Memory.READ_ONLY
    return [float(shared), float(reads_once), math.log2(served), math.log2(loads), math.log2(loads * served)]


def _moved_bytes(program: KernelProgram) -> float:
    """Bytes that all warps ask global memory for, as sectors; caches are not considered."""
    moved = 0.0
    for leaf in program.leaves:
        lanes = tuple(loop.extent for loop in leaf.loops if loop.kind == LoopKind.THREAD)
        for access in leaf.accesses:
            if access.memory in _GLOBAL:
                steps = tuple(s for loop, s in zip(leaf.loops, access.strides, strict=True) if loop.kind == LoopKind.THREAD)
                warps = leaf.iterations / max(min(math.prod(lanes), LANES), 1)
                moved += warps * sectors(steps, lanes, access.element_bytes) * SECTOR_BYTES
    return moved


@lru_cache(65536)
def sectors(steps: tuple[int, ...], lanes: tuple[int, ...], element_bytes: int) -> int:
    """Sectors of 32 bytes that the lanes of a warp touch in one access.

    Parameters
    ----------
    steps, lanes
        Strides in elements and extents of the loops over threads, the last of which runs along the lanes.
    """
    return len(np.unique(_addresses(steps, lanes) * element_bytes // SECTOR_BYTES))


@lru_cache(65536)
def bank_conflicts(steps: tuple[int, ...], lanes: tuple[int, ...]) -> int:
    """Most words of one bank of shared memory that the lanes of a warp ask for at once; they are served one after another."""
    words = np.unique(_addresses(steps, lanes))
    return int(np.bincount(words % BANKS).max())


def _addresses(steps: tuple[int, ...], lanes: tuple[int, ...]) -> npt.NDArray[np.int64]:
    lane = np.arange(min(math.prod(lanes), LANES))
    address = np.zeros(len(lane), dtype=np.int64)
    for step, extent in zip(reversed(steps), reversed(lanes), strict=True):
        address += lane % extent * step
        lane = lane // extent
    return address


def _twos(value: int) -> int:
    """Times that 2 divides a number, at most `_ALIGNED`."""
    return min((value & -value).bit_length() - 1, _ALIGNED)
