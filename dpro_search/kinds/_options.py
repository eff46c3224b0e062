"""Options for changes beyond communication, as every verb hands them to `Kind.job`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dpro_search.collect.trace import Trace
from dpro_search.errors import InputError
from dpro_search.machine import VARIABLE
from dpro_search.space.plan import Plan

COMPUTE = ("op-fusion", "precision", "recomputation", "accumulation")  # transformations that a search tries only where asked for
_COMPUTE_OF_FIELD = {
    "op_clusters": "op-fusion",
    "bfloat16_ops": "precision",
    "bfloat16_modules": "precision",
    "recomputed_ops": "recomputation",
    "recomputed_modules": "recomputation",
    "micro_batches": "accumulation",
}
_LOSSY = ("compression", "micro_batches", "reduce_dtype")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Changes beyond communication that plans may make."""

    compute: frozenset[str] = frozenset()  # Some of `COMPUTE`.
    allow_lossy: bool = False  # Also what changes the numbers: compression of gradients, batch normalisation over smaller batches.
    memory_limit_bytes: int | None = None  # Plans that need more than that on a rank are infeasible; None: no limit.
    # cluster_model, precision_table: What fused ops take: a folder of 'dpro-search fit', None: the package's model. What bfloat16
    # does to ops: a table of `costmodel.precision`, which "precision" needs.
    cluster_model: Path | None = None
    precision_table: Path | None = None
    # What all-reduces by each of Open MPI's algorithms take, a folder of 'dpro-search fit'; plans of a Horovod job on MPI then
    # choose among them. None: all-reduces are as recorded.
    all_reduce_model: Path | None = None

    def __post_init__(self) -> None:
        unknown = self.compute.difference(COMPUTE)
        if unknown:
            raise InputError(f"transformation '{min(unknown)}' is unknown (known: {', '.join(COMPUTE)})")
        if self.memory_limit_bytes is not None and self.memory_limit_bytes <= 0:
            raise InputError(f"the memory limit must be above 0 bytes, not {self.memory_limit_bytes}")

    @property
    def named(self) -> dict[str, str | Path]:
        """Inputs of predictions in addition to the trace, by name, for the run folder of a search."""
        named: dict[str, str | Path] = {}
        if self.compute:
            named["with"] = ",".join(sorted(self.compute))
        if self.allow_lossy:
            named["allow_lossy"] = "yes"
        if self.memory_limit_bytes is not None:
            named["memory_limit_bytes"] = str(self.memory_limit_bytes)
        for name in ("cluster_model", "precision_table", "all_reduce_model"):
            path: Path | None = getattr(self, name)
            if path is not None:
                named[name] = path
        if machine := os.environ.get(VARIABLE):
            named["machine"] = Path(machine)
        return named

    def allowing(self, plan: Plan) -> PlanOptions:
        """The options under which a plan with the fields of this one is legal: what is requested is predicted, not proposed."""
        return replace(
            self,
            compute=self.compute | {_COMPUTE_OF_FIELD[name] for name in plan.settings if name in _COMPUTE_OF_FIELD},
            allow_lossy=self.allow_lossy or any(name in plan.settings for name in _LOSSY),
        )


def refuse_compute(options: PlanOptions, trace: Trace, fields: Sequence[str] = ()) -> None:
    """Raise `InputError` if the options ask for changes of compute, or for algorithms of MPI, which such jobs do not have.

    `fields`: what their plans change instead.
    """
    refuse_algorithms(options, trace)
    if options.compute:
        raise InputError(
            "only jobs of TensorFlow with Horovod, and of PyTorch's DistributedDataParallel, have plans for compute, and this "
            f"trace ({trace.meta.format}) is of neither" + (f"; its plans change {', '.join(fields)}" if fields else "")
        )


def refuse_algorithms(options: PlanOptions, trace: Trace) -> None:
    """Raise `InputError` if the options ask for algorithms of MPI, which such jobs do not have."""
    if options.all_reduce_model is not None:
        raise InputError(f"the all-reduce model is for Horovod jobs on Open MPI, and this trace ({trace.meta.format}) is of none")
