"""Tensor programs of a task with random schedules, and their compact ASTs (needs the environment `tvm`).

Schedules are drawn by MetaSchedule's ReplayTrace for one CPU core. A leaf is a stored buffer: its 164 features are those of
`PerStoreFeature`, in the order of first stores; its position is the pre-order index in the lowered program, where closing a loop
counts as a step, too (the paper's return marks), so that two nests with the same leaves but other loops around them differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import tvm
from tvm import te
from tvm.s_tir import meta_schedule, transform

from experiments.tensor_programs.loops import LoopNest, nests
from experiments.tensor_programs.operators import tensors
from experiments.tensor_programs.workloads import Task

SCHEDULED_FOR = "x86-64-v3"


@dataclass(frozen=True, kw_only=True)
class Program:
    """A scheduled task."""

    module: tvm.IRModule
    leaves: npt.NDArray[np.float32]  # [leaves, 164], log2(1 + x) of most.
    positions: npt.NDArray[np.int32]  # Pre-order, [leaves].
    nests: list[LoopNest]  # one for each leaf


def target(isa: str) -> tvm.target.Target:
    """LLVM for one core of an x86-64 level, as `x86-64-v3`."""
    return tvm.target.Target({"kind": "llvm", "mcpu": isa, "num-cores": 1})


def compiled(module: tvm.IRModule, isas: Sequence[str]) -> list[Callable[..., None]]:
    """A program's function for each x86-64 level: the code that `tvm.compile` makes, without checks of the arguments.

    Checks are no part of the program, and LLVM takes longer for them than for a small program. Passes before LLVM do not depend on
    the level, and take long where padding is unrolled: they run once for all levels.
    """
    targets = [target(isa) for isa in isas]
    first = targets[0].with_host(targets[0])
    pipeline, finalize, _ = tvm.tirx.get_default_tir_pipeline(first)
    general = tvm.tirx.transform.SkipAssert()(finalize()(pipeline(tvm.tirx.transform.BindTarget(first)(module))))
    build = tvm.get_global_func("target.build.llvm")
    functions = []
    for one in targets:
        parts = {name: part.with_attr("target", one.with_host(one)) for name, part in general.functions.items()}
        bound = tvm.IRModule(parts, attrs=general.attrs)
        functions.append(tvm.runtime.Executable(build(bound, one))["main"])
    return functions


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
        te.create_prim_func(tensors(task.op, task.dims)),
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
