"""``with_parameters(trace, path)``: a profiled PyTorch job with the names and sizes of its parameters, which it may not tell.

The file is what these lines of the training script write:

    rows = [[n, list(p.shape), str(p.dtype)] for n, p in model.named_parameters() if p.requires_grad]
    json.dump(rows, open("parameters.json", "w"))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from dpro_search._regular_files import read_regular
from dpro_search.collect._files import DAMAGED
from dpro_search.collect.recorded_names import dtype_of
from dpro_search.collect.trace import TensorInfo, Trace
from dpro_search.errors import InputError

GRADIENT = "torch::autograd::AccumulateGrad"
"""Name in PyTorch's profiler of the op that makes a parameter's gradient; `TensorInfo.node` of the added tensors."""

_HOW = (
    "write it in the training script: import json; json.dump([[n, list(p.shape), str(p.dtype)] for n, p in "
    'model.named_parameters() if p.requires_grad], open("parameters.json", "w"))'
)
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_Side = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
ParameterRow = tuple[str, tuple[_Side, ...], str]
"""Name, shape and dtype of a parameter."""


def with_parameters(trace: Trace, path: Path) -> Trace:
    """The trace with a tensor for each parameter, in the reverse of the file's order: so gradients usually become ready.

    Raises
    ------
    InputError
        The file is not readable, or the trace's steps have another number of gradients.
    """
    if not path.is_file():
        raise InputError(f"--parameters {path}: no such file; {_HOW}")
    try:
        rows = msgspec.json.decode(read_regular(path), type=list[ParameterRow])
    except DAMAGED as error:
        raise InputError(f"--parameters {path}: not a list of [name, shape, dtype] ({error}); {_HOW}") from error
    unknown = next((f"{name}: {dtype}" for name, _, dtype in rows if dtype_of(dtype) not in _BYTES), None)
    if unknown is not None:
        raise InputError(f"--parameters {path}: {unknown} is no type of a parameter (known: {', '.join(_BYTES)})")
    count = gradients_of_a_step(trace)
    if count != len(rows):
        raise InputError(
            f"--parameters {path}: {len(rows)} parameters, but a step of the profile makes {count} gradients; leave out those "
            "that need none"
        )
    return with_parameter_rows(trace, rows)


def with_parameter_rows(trace: Trace, rows: Sequence[ParameterRow]) -> Trace:
    """The trace with a tensor for each parameter, whose dtypes are known, in the reverse of the order of `rows`."""
    added = tuple(_tensor(name, shape, dtype_of(dtype)) for name, shape, dtype in reversed(rows))
    return replace(trace, tensors=(*trace.tensors, *added))


def _tensor(name: str, shape: tuple[int, ...], dtype: str) -> TensorInfo:
    return TensorInfo(name=name, node=GRADIENT, dtype=dtype, shape=shape, size_bytes=math.prod(shape) * _BYTES[dtype])


def gradients_of_a_step(trace: Trace) -> int:
    """Number of gradients that a step of the profile makes on rank 0; 0: no profiled step shows it."""
    events = trace.events
    if GRADIENT not in trace.names or not len(trace.steps.index):
        return 0
    made = (events.name == trace.names.index(GRADIENT)) & (events.rank == 0)
    counts = [int((made & (events.step == step)).sum()) for step in np.unique(trace.steps.index).tolist()]
    return max(counts)
