"""GPU kernels as compact ASTs: what their loops and accesses cost, and what a compute unit holds of them."""

from __future__ import annotations

import numpy as np
import pytest

from dpro_search.costmodel.programs.features import accumulators, bank_conflicts, occupancy_columns, program_columns, sectors
from dpro_search.costmodel.programs.kernel import Access, KernelProgram, Leaf, Loop, LoopKind, Memory
from dpro_search.costmodel.programs.limits import ARCHITECTURES, likeness, limits_of


def copying(threads: int, tile: int, *, shared_bytes: int = 0) -> KernelProgram:
    """A kernel that copies 2^20 elements, `tile` of them in each thread."""
    loops = (
        Loop(extent=2**20 // (threads * tile), kind=LoopKind.GRID),
        Loop(extent=threads, kind=LoopKind.THREAD),
        Loop(extent=tile, kind=LoopKind.UNROLLED),
    )
    moved = Access(memory=Memory.GLOBAL, strides=(threads * tile, 1, threads))
    return KernelProgram(leaves=(Leaf(loops=loops, accesses=(moved, moved), operations=1.0),), shared_bytes=shared_bytes)


@pytest.mark.parametrize(("step", "element_bytes", "asked"), [(1, 4, 4), (2, 4, 8), (8, 4, 32), (1, 1, 1), (0, 4, 1)])
def test_a_warp_asks_for_the_sectors_that_its_lanes_touch(step: int, element_bytes: int, asked: int) -> None:
    assert sectors((step,), (64,), element_bytes) == asked


def test_lanes_of_a_narrow_block_reach_several_rows() -> None:
    assert sectors((4096, 1), (4, 8), 4) == 4


@pytest.mark.parametrize(("pitch", "served"), [(32, 4), (36, 2), (40, 1)])
def test_rows_of_shared_memory_collide_in_its_banks_unless_they_are_padded(pitch: int, served: int) -> None:
    assert bank_conflicts((pitch, 1), (4, 8)) == served


def test_a_thread_keeps_as_many_sums_as_its_own_loops_write() -> None:
    assert accumulators(copying(128, 4).heaviest) == 4


@pytest.mark.parametrize(
    ("threads", "shared_bytes", "name", "share"),
    [(256, 0, "A100", 1.0), (1024, 0, "A6000", 1024 / 1536), (256, 48 * 1024, "RTX_2080_Ti", 0.25), (32, 0, "W6600", 1.0)],
)
def test_a_compute_unit_holds_what_its_threads_and_shared_memory_allow(
    threads: int, shared_bytes: int, name: str, share: float
) -> None:
    limits = limits_of(name)
    assert limits is not None
    resident = 2 ** occupancy_columns([copying(threads, 1, shared_bytes=shared_bytes)], limits)[0, 0]
    assert resident == pytest.approx(share)


def test_half_a_wavefront_is_idle_where_a_block_has_32_threads() -> None:
    lanes = {name: occupancy_columns([copying(32, 1)], ARCHITECTURES[name])[0, 1] for name in ("CDNA", "Ampere")}
    assert lanes == {"CDNA": -1.0, "Ampere": 0.0}


def test_columns_tell_programs_apart_and_leave_out_what_all_have_in_common() -> None:
    columns = program_columns([copying(64, 1), copying(64, 2), copying(128, 2)])
    assert len(np.unique(columns, axis=0)) == 3
    assert (np.ptp(columns, axis=0) > 0).all()


def test_programs_of_two_kernels_are_refused() -> None:
    other = KernelProgram(leaves=(Leaf(loops=(), accesses=(), operations=1.0),))
    with pytest.raises(ValueError, match="of one kernel"):
        program_columns([copying(64, 1), other])


def test_an_access_has_a_stride_for_each_loop() -> None:
    with pytest.raises(ValueError, match="1 strides in a nest of 0 loops"):
        Leaf(loops=(), accesses=(Access(memory=Memory.GLOBAL, strides=(1,)),))


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("A100", "Ampere"), ("NVIDIA RTX A6000", "Ampere (GA10x)"), ("RTX_3060_laptop", "Ampere (GA10x)"),
        ("RTX_2080_Ti", "Turing"), ("NVIDIA H100 80GB HBM3", "Hopper"),
        ("AMD Instinct MI250X", "CDNA"), ("W6600", "RDNA"), ("NVIDIA L40S", "Ada"),
    ],
)  # fmt: skip
def test_the_architecture_follows_from_the_name(name: str, architecture: str) -> None:
    limits = limits_of(name)
    assert limits is not None
    assert limits.architecture == architecture


def test_a_device_of_an_unknown_name_has_no_limits_and_counts_like_one_of_its_vendor() -> None:
    assert limits_of("Accelerator 9") is None
    assert likeness(None, ARCHITECTURES["Ada"]) == likeness(ARCHITECTURES["Turing"], ARCHITECTURES["Ada"])
    assert likeness(ARCHITECTURES["RDNA"], ARCHITECTURES["Ada"]) < likeness(ARCHITECTURES["RDNA"], ARCHITECTURES["CDNA"])
