"""Kernels of the benchmark hub as compact ASTs, one function from parameters to loops and accesses for each source.

The loops follow from the kernels' sources and from how Kernel Tuner launches them (AutoTuningAssociation/benchmark_hub, MIT;
`kernels/convolution_milo`, `kernels/dedisp_milo`, `currently_unused/kernels/{convolution,gemm,pnpoly}`; the GEMM is CLBlast's).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil

from dpro_search.costmodel.programs.kernel import Access, KernelProgram, Leaf, Loop, LoopKind, Memory

Parameters = Mapping[str, int]
IMAGE, FILTER = 4096, 15  # a side of the image and of the filter
SAMPLES, MEASURES, CHANNELS = 25_000, 2048, 1536  # of dedispersion: samples in time, dispersion measures, channels
SHIFT = 3  # samples by which neighbouring dispersion measures are shifted in a channel, in the mean
MATRIX = 4096
POINTS, VERTICES = 20_000_000, 600


def _grid(extent: int) -> Loop:
    return Loop(extent=extent, kind=LoopKind.GRID)


def _thread(extent: int) -> Loop:
    return Loop(extent=extent, kind=LoopKind.THREAD)


def _serial(extent: int) -> Loop:
    return Loop(extent=extent, kind=LoopKind.SERIAL)


def _unrolled(extent: int) -> Loop:
    return Loop(extent=extent, kind=LoopKind.UNROLLED)


def convolution(values: Parameters) -> KernelProgram:
    """A 15 x 15 filter over an image of 4096 x 4096 elements: blocks of threads with tiles, input in shared memory or not."""
    threads_x, threads_y, tile_x, tile_y = (values[name] for name in ("block_size_x", "block_size_y", "tile_size_x", "tile_size_y"))
    shared, border = bool(values.get("use_shmem", 1)), FILTER - 1
    columns, rows = threads_x * tile_x, threads_y * tile_y
    blocks = (ceil(IMAGE / rows), ceil(IMAGE / columns))
    guarded = IMAGE % columns != 0 or IMAGE % rows != 0  # The source is compiled with conditions only then.
    pitch = columns + border + (values["use_padding"] if shared else 0)
    row = pitch if shared else IMAGE + border
    cached = Memory.READ_ONLY if values["read_only"] else Memory.GLOBAL
    outer = (_grid(blocks[0]), _grid(blocks[1]), _thread(threads_y), _thread(threads_x))
    computing = Leaf(
        loops=(*outer, _serial(FILTER), _serial(FILTER), _unrolled(tile_y), _unrolled(tile_x)),
        accesses=(
            Access(memory=Memory.REGISTER, strides=(0, 0, 0, 0, 0, 0, tile_x, 1)),
            Access(
                memory=Memory.SHARED if shared else cached,
                strides=(0 if shared else rows * row, 0 if shared else columns, row, 1, row, 1, threads_y * row, threads_x),
            ),
            Access(memory=Memory.CONSTANT, strides=(0, 0, 0, 0, FILTER, 1, 0, 0)),
        ),
        operations=2.0,
        guarded=guarded and not shared,
    )
    line = IMAGE + border
    loading = Leaf(
        loops=(*outer, _serial(ceil((rows + border) / threads_y)), _serial(ceil((columns + border) / threads_x))),
        accesses=(
            Access(memory=Memory.SHARED, strides=(0, 0, pitch, 1, threads_y * pitch, threads_x)),
            Access(memory=cached, strides=(rows * line, columns, line, 1, threads_y * line, threads_x)),
        ),
        guarded=guarded,
    )
    storing = Leaf(
        loops=(*outer, _unrolled(tile_y), _unrolled(tile_x)),
        accesses=(Access(memory=Memory.GLOBAL, strides=(rows * IMAGE, columns, IMAGE, 1, threads_y * IMAGE, threads_x)),),
        guarded=guarded,
    )
    return KernelProgram(
        leaves=(loading, computing, storing) if shared else (computing, storing),
        shared_bytes=4 * pitch * (rows + border) if shared else 0,
        needed=IMAGE * IMAGE / (blocks[0] * rows * blocks[1] * columns),
    )


def dedispersion(values: Parameters) -> KernelProgram:
    """Sums of 1536 channels, shifted by dispersion measure: 25000 samples x 2048 measures, input in bytes, no shared memory."""
    threads_x, threads_y, tile_x, tile_y = (values[name] for name in ("block_size_x", "block_size_y", "tile_size_x", "tile_size_y"))
    strided_x, strided_y = values["tile_stride_x"], values["tile_stride_y"]
    columns, rows = threads_x * tile_x, threads_y * tile_y
    blocks = (ceil(MEASURES / rows), ceil(SAMPLES / columns))
    lane_x, step_x = (
        (1, threads_x) if strided_x else (tile_x, 1)
    )  # A thread's tile lies together, or as far apart as a block is wide.
    lane_y, step_y = (1, threads_y) if strided_y else (tile_y, 1)
    outer = (_grid(blocks[0]), _grid(blocks[1]), _thread(threads_y), _thread(threads_x))
    guarded = SAMPLES % columns != 0 or MEASURES % rows != 0
    computing = Leaf(
        loops=(*outer, _serial(CHANNELS), _unrolled(tile_y), _unrolled(tile_x)),
        accesses=(
            Access(memory=Memory.REGISTER, strides=(0, 0, 0, 0, 0, tile_x, 1)),
            Access(
                memory=Memory.GLOBAL,
                strides=(rows * SHIFT, columns, lane_y * SHIFT, lane_x, SAMPLES, step_y * SHIFT, step_x),
                element_bytes=1,
            ),
        ),
        operations=1.0,
        guarded=guarded,
    )
    storing = Leaf(
        loops=(*outer, _unrolled(tile_y), _unrolled(tile_x)),
        accesses=(
            Access(
                memory=Memory.GLOBAL,
                strides=(rows * SAMPLES, columns, lane_y * SAMPLES, lane_x, step_y * SAMPLES, step_x),
            ),
        ),
        guarded=guarded,
    )
    needed = MEASURES * SAMPLES / (blocks[0] * rows * blocks[1] * columns)
    return KernelProgram(leaves=(computing, storing), needed=needed, variant=(float(strided_x), float(strided_y)))


def gemm(values: Parameters) -> KernelProgram:
    """CLBlast's product of two matrices of 4096: each operand through shared memory or not, vectors of 1 to 8 elements."""
    rows, columns, depth = values["MWG"], values["NWG"], values["KWG"]
    threads_m, threads_n = values["MDIMC"], values["NDIMC"]
    vector_m, vector_n = values["VWM"], values["VWN"]
    tile_m, tile_n = rows // threads_m, columns // threads_n
    inner, shared_a, shared_b = values["KWI"], bool(values["SA"]), bool(values["SB"])
    outer = (_grid(MATRIX // columns), _grid(MATRIX // rows), _thread(threads_n), _thread(threads_m))
    pitch_a, pitch_b = (rows if shared_a else MATRIX), (columns if shared_b else MATRIX)
    computing = Leaf(
        loops=(*outer, _serial(MATRIX // depth), _serial(depth // inner), _unrolled(inner), _unrolled(tile_n),
               _unrolled(tile_m // vector_m), Loop(extent=vector_m, kind=LoopKind.VECTOR)),
        accesses=(
            Access(memory=Memory.REGISTER, strides=(0, 0, 0, 0, 0, 0, 0, tile_m, vector_m, 1)),
            Access(
                memory=Memory.SHARED if shared_a else Memory.GLOBAL,
                strides=(0, rows, 0, tile_m, depth * pitch_a, inner * pitch_a, pitch_a, 0, vector_m, 1),
            ),
            Access(
                memory=Memory.SHARED if shared_b else Memory.GLOBAL,
                strides=(columns, 0, tile_n, 0, depth * pitch_b, inner * pitch_b, pitch_b, 1, 0, 0),
            ),
        ),
        operations=2.0,
    )  # fmt: skip
    loads = [
        _staged(outer, rows, depth, values["MDIMA"], vector_m, threads_m * threads_n) if shared_a else None,
        _staged(outer, columns, depth, values["NDIMB"], vector_n, threads_m * threads_n) if shared_b else None,
    ]
    storing = Leaf(
        loops=(*outer, _unrolled(tile_n), _unrolled(tile_m)),
        accesses=(Access(memory=Memory.GLOBAL, strides=(columns * MATRIX, rows, tile_n * MATRIX, tile_m, MATRIX, 1)),),
    )
    return KernelProgram(
        leaves=(*(one for one in loads if one is not None), computing, storing),
        shared_bytes=4 * depth * (rows * shared_a + columns * shared_b),
        variant=tuple(float(values[name]) for name in ("MDIMA", "NDIMB", "VWM", "VWN", "SA", "SB")),
    )


def _staged(outer: tuple[Loop, ...], width: int, depth: int, across: int, vector: int, threads: int) -> Leaf:
    """A tile of a matrix that all threads of a block bring to shared memory, `across` of them side by side."""
    down = threads // across
    return Leaf(
        loops=(*outer[:2], _thread(down), _thread(across), _serial(MATRIX // depth), _serial(depth // down),
               _unrolled(width // (across * vector)), Loop(extent=vector, kind=LoopKind.VECTOR)),
        accesses=(
            Access(memory=Memory.SHARED, strides=(0, 0, width, vector, 0, down * width, across * vector, 1)),
            Access(memory=Memory.GLOBAL, strides=(0, width, MATRIX, vector, depth * MATRIX, down * MATRIX, across * vector, 1)),
        ),
    )  # fmt: skip


def point_in_polygon(values: Parameters) -> KernelProgram:
    """20 million points against a polygon of 600 vertices; several formulas for whether an edge is crossed."""
    threads, tile = values["block_size_x"], values["tile_size"]
    blocks = ceil(POINTS / (threads * tile))
    outer = (_grid(blocks), _thread(threads))
    computing = Leaf(
        loops=(*outer, _serial(VERTICES), _unrolled(tile)),
        accesses=(
            Access(memory=Memory.REGISTER, strides=(0, 0, 0, 1)),
            Access(memory=Memory.CONSTANT, strides=(0, 0, 2, 0)),
        ),
        operations=6.0,
        guarded=True,
    )
    storing = Leaf(
        loops=(*outer, _unrolled(tile)),
        accesses=(Access(memory=Memory.GLOBAL, strides=(threads * tile, 1, threads)),),
        guarded=True,
    )
    methods = (values["between_method"], values["use_method"])
    flags = tuple(float(method == one) for method, count in zip(methods, (4, 3), strict=True) for one in range(count))
    return KernelProgram(leaves=(computing, storing), needed=POINTS / (blocks * threads * tile), variant=flags)


FRONT_ENDS: dict[str, Callable[[Parameters], KernelProgram]] = {
    "convolution_milo": convolution,
    "convolution_2022": convolution,
    "dedispersion_milo": dedispersion,
    "gemm_clblast": gemm,
    "pnpoly": point_in_polygon,
}
"""By the name in the column `kernel` of a table."""
