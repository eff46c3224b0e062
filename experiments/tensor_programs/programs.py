"""Tensor programs of a task with random schedules, and their compact ASTs (needs the environment `tvm`).

Schedules are drawn by MetaSchedule's ReplayTrace for one CPU core. A leaf is a stored buffer: its 164 features are those of
`PerStoreFeature`, in the order of first stores; its position is the pre-order index in the lowered program, where closing a loop
counts as a step, too (the paper's return marks), so that two nests with the same leaves but other loops around them differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import tvm
from tvm import te, topi
from tvm.s_tir import meta_schedule, transform

from experiments.tensor_programs.loops import LoopNest, nests
from experiments.tensor_programs.workloads import Task

SCHEDULED_FOR = "x86-64-v3"


@dataclass(frozen=True, kw_only=True)
class Program:
    """A scheduled task."""

    module: tvm.IRModule
    leaves: npt.NDArray[np.float32]  # [leaves, 164], log2(1 + x) of most.
    positions: npt.NDArray[np.int32]  # Pre-order, [leaves].
    nests: list[LoopNest]  # Of each leaf.


def target(isa: str) -> tvm.target.Target:
    """LLVM for one core of an x86-64 level, as `x86-64-v3`."""
    return tvm.target.Target({"kind": "llvm", "mcpu": isa, "num-cores": 1})


def _placeholder(*shape: int) -> te.Tensor:
    return te.placeholder(shape, name=f"arg{len(shape)}")


def _conv2d(channels: int, height: int, filters: int, kernel: int, stride: int, padding: int) -> list[te.Tensor]:
    data, weight, bias = (
        _placeholder(1, channels, height, height),
        _placeholder(filters, channels, kernel, kernel),
        _placeholder(1, filters, 1, 1),
    )
    out = topi.nn.conv2d(data, weight, stride, padding, 1, "NCHW", out_dtype="float32")
    return [data, weight, bias, topi.nn.relu(topi.add(out, bias))]


def _depthwise(channels: int, height: int, kernel: int, stride: int, padding: int) -> list[te.Tensor]:
    data, weight, bias = (
        _placeholder(1, channels, height, height),
        _placeholder(channels, 1, kernel, kernel),
        _placeholder(1, channels, 1, 1),
    )
    out = topi.nn.depthwise_conv2d_nchw(data, weight, stride, padding, 1, "float32")
    return [data, weight, bias, topi.nn.relu(topi.add(out, bias))]


def _dense(rows: int, columns: int, inner: int) -> list[te.Tensor]:
    data, weight, bias = _placeholder(rows, inner), _placeholder(columns, inner), _placeholder(columns)
    return [data, weight, bias, topi.add(topi.nn.dense(data, weight), bias)]


def _batch_matmul(batch: int, rows: int, columns: int, inner: int) -> list[te.Tensor]:
    left, right = _placeholder(batch, rows, inner), _placeholder(batch, columns, inner)
    return [left, right, topi.nn.batch_matmul(left, right)]


def _softmax(rows: int, columns: int) -> list[te.Tensor]:
    data = _placeholder(rows, columns)
    return [data, topi.nn.softmax(data, axis=1)]


def _layer_norm(rows: int, columns: int) -> list[te.Tensor]:
    data, scale, shift = _placeholder(rows, columns), _placeholder(columns), _placeholder(columns)
    return [data, scale, shift, topi.nn.layer_norm(data, scale, shift, [1])]


def _max_pool(channels: int, height: int, kernel: int, stride: int, padding: int) -> list[te.Tensor]:
    data = _placeholder(1, channels, height, height)
    return [data, topi.nn.pool2d(data, [kernel] * 2, [stride] * 2, [1, 1], [padding] * 4, "max")]


def _mean_pool(channels: int, height: int) -> list[te.Tensor]:
    data = _placeholder(1, channels, height, height)
    return [data, topi.nn.global_pool(data, "avg")]


def _add_relu(elements: int) -> list[te.Tensor]:
    left, right = _placeholder(elements), _placeholder(elements)
    return [left, right, topi.nn.relu(topi.add(left, right))]


def _gelu(elements: int) -> list[te.Tensor]:
    data = _placeholder(elements)
    inside = te.compute(
        (elements,), lambda i: data[i] * (0.5 + 0.5 * te.tanh(0.79788456 * (data[i] + 0.044715 * data[i] * data[i] * data[i])))
    )
    return [data, inside]


def _lookup(rows: int, width: int, table: int) -> list[te.Tensor]:
    weight, index = _placeholder(table, width), te.placeholder((rows,), dtype="int32", name="index")
    return [weight, index, te.compute((rows, width), lambda i, j: weight[index[i], j])]


BUILDERS: dict[str, Callable[..., list[te.Tensor]]] = {
    "conv2d": _conv2d,
    "depthwise": _depthwise,
    "dense": _dense,
    "batch_matmul": _batch_matmul,
    "softmax": _softmax,
    "layer_norm": _layer_norm,
    "max_pool": _max_pool,
    "mean_pool": _mean_pool,
    "add_relu": _add_relu,
    "gelu": _gelu,
    "lookup": _lookup,
}


def tensors(task: Task) -> list[te.Tensor]:
    """Arguments of a task's function, the result last."""
    return BUILDERS[task.op](*task.dims)


def arguments(dims: list[te.Tensor], seed: int) -> list[tvm.runtime.Tensor]:
    """Values for a function; indices lie in the table that comes before them."""
    random = np.random.default_rng(seed)
    found: list[tvm.runtime.Tensor] = []
    for tensor in dims:
        shape = tuple(int(dim) for dim in tensor.shape)
        if tensor.dtype == "int32":
            value = random.integers(0, int(dims[0].shape[0]), shape, dtype=np.int32)
        else:
            value = random.random(shape, dtype=np.float32) + 0.5
        found.append(tvm.runtime.tensor(value))
    return found


def random_programs(task: Task, count: int, seed: int) -> list[Program]:
    """Up to `count` programs of a task; fewer where it has few schedules. The same seed gives the same ones."""
    context = meta_schedule.TuneContext(
        te.create_prim_func(tensors(task)),
        target=target(SCHEDULED_FOR),
        space_generator="post-order-apply",
        search_strategy="replay-trace",
        rand_state=seed,
        num_threads=1,
    )
    context.pre_tuning(count, count, context.generate_design_space())
    candidates = context.generate_measure_candidates() or []
    features = meta_schedule.feature_extractor.PerStoreFeature().extract_from(context, candidates)
    return [
        compact_ast(candidate.sch.mod, np.asarray(leaves.numpy(), dtype=np.float32))
        for candidate, leaves in zip(candidates, features, strict=True)
    ]


def lowered(module: tvm.IRModule) -> tvm.IRModule:
    """As `PerStoreFeature` sees it."""
    passes = [
        transform.RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True),
        transform.LowerCrossThreadReduction(),
        transform.LowerInitBlock(),
        transform.PlanAndUpdateBufferAllocationLocation(),
        transform.ConvertBlocksToOpaque(),
        transform.CompactBufferAllocation(),
        transform.StmtSimplify(),
        transform.LowerAutoCopy(),
        transform.UnifyThreadBinding(),
        transform.LowerMatchBuffer(),
        transform.StmtSimplify(),
    ]
    return tvm.transform.Sequential(passes)(module)


def compact_ast(module: tvm.IRModule, leaves: npt.NDArray[np.float32]) -> Program:
    """A program with its leaves' positions and loops."""
    found = nests(lowered(module)["main"].body)
    if len(found) != len(leaves):
        raise RuntimeError(f"{len(leaves)} leaves, but {len(found)} stored buffers: this version of TVM lowers programs otherwise")
    positions = np.array([nest.position for nest in found], dtype=np.int32)
    return Program(module=module, leaves=leaves, positions=positions, nests=found)
