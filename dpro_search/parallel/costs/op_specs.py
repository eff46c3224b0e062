"""`products_of`: the matrix products, convolutions and attention of a described job, as ops that can be timed on a device."""

from __future__ import annotations

import math

from dpro_search.costmodel.devices import OpSpec
from dpro_search.errors import InputError
from dpro_search.parallel.costs.compile import LocalOp
from dpro_search.parallel.costs.pricer import Pricer
from dpro_search.parallel.gpu_ops import NARROW
from dpro_search.parallel.model import OpType, elements
from dpro_search.parallel.workload import Workload, stages_of

_SIZES = {"batch": "batch", "heads": "heads", "queries": "sequence", "keys": "keys", "head_dim": "head_dim"}


def products_of(workload: Workload) -> list[OpSpec]:
    """Distinct products of one rank's blocks, forward and backward, with the sizes that the strategy leaves to a rank."""
    pricer = Pricer(workload)
    precision = "bf16" if workload.precision in NARROW else "fp32" if workload.precision == "tf32" else workload.precision
    specs: set[OpSpec] = set()
    for block in {block.name: block for stage in stages_of(workload) for block in stage}.values():
        for step in pricer.program(block).forward:
            if isinstance(step, LocalOp):
                specs |= {spec for backward in (False, True) if (spec := _spec(step, precision, backward)) is not None}
    return sorted(specs)


def _spec(step: LocalOp, precision: str, backward: bool) -> OpSpec | None:
    op, sizes = step.op, step.sizes
    try:
        if op.type is OpType.MATMUL:
            m, k, n = (max(math.ceil(elements(shape, sizes)), 1) for shape in (op.rows, op.reduction, op.columns))
            return OpSpec.of("gemm", precision, backward=backward, m=m, n=n, k=k, transposes=0 if backward else 1)
        if op.type is OpType.ATTENTION:
            size_of = {name: max(math.ceil(sizes[key]), 1) for name, key in _SIZES.items()}
            return OpSpec.of("attention", precision, backward=backward, **size_of)
    except (InputError, KeyError):  # sizes of a model that has no such attention
        return None
    return None
