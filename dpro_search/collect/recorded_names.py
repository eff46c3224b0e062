"""Collectives, element types and ops from the names that libraries and profilers give: for readers of recordings only.

Everything behind the readers decides by the columns of a `Trace`, which are filled with this.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from dpro_search.collect.trace_columns import CollectiveKind, Role

_SEPARATORS = re.compile(r"[-_\s]")
# The first that is found counts: "all_gather" holds "gather", "reduce_scatter" holds "reduce". NCCL's kernel SendRecv also carries
# out all-to-alls, and a push-pull is two messages: neither identifies the collective.
_SPELLINGS: tuple[tuple[re.Pattern[str], CollectiveKind], ...] = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        ("sendrecv|pushpull", CollectiveKind.UNKNOWN),
        ("allreduce", CollectiveKind.ALL_REDUCE),
        ("allgather", CollectiveKind.ALL_GATHER),
        ("reducescatter", CollectiveKind.REDUCE_SCATTER),
        ("alltoall", CollectiveKind.ALL_TO_ALL),
        ("broadcast", CollectiveKind.BROADCAST),
        ("barrier", CollectiveKind.BARRIER),
        ("gather", CollectiveKind.GATHER),
        ("scatter", CollectiveKind.SCATTER),
        ("reduce", CollectiveKind.REDUCE),
        ("send", CollectiveKind.SEND),
        ("recv", CollectiveKind.RECV),
        ("push", CollectiveKind.PUSH),
        ("pull", CollectiveKind.PULL),
    )
)
_DTYPES = {
    "float": "float32", "double": "float64", "half": "float16", "byte": "uint8", "unsigned char": "uint8", "char": "int8",
    "signed char": "int8", "short": "int16", "int": "int32", "long": "int64", "long int": "int64", "long long": "int64",
    "complexfloat": "complex64", "complexdouble": "complex128", "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
}  # fmt: skip
_DTYPES |= {name: name for name in ("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "bool")}
_DTYPES |= {f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_FLOAT8 = re.compile(r"float8_e\dm\d(fn|fnuz|b11fnuz)?")


def collective_kind_of(name: str) -> CollectiveKind:
    """Of a collective's name as a library, a profiler or a device kernel has it.

    "ncclDevKernel_AllReduce_Sum_f32", "_allgather_base" and "nccl:send 0->1" are such names.
    `CollectiveKind.UNKNOWN` where it does not identify one.
    """
    plain = _SEPARATORS.sub("", name.partition("(")[0].lower())
    return next((kind for pattern, kind in _SPELLINGS if pattern.search(plain)), CollectiveKind.UNKNOWN)


def dtype_of(name: str) -> str:
    """An element type as numpy and PyTorch call it; "float32" of "float", "Float" and "c10::Float"; empty where it is none."""
    plain = name.lower().removeprefix("c10::").removeprefix("torch.")
    found = _DTYPES.get(name.lower()) or _DTYPES.get(plain)
    return found or (plain if _FLOAT8.fullmatch(plain) else "")


def role_in_mxnet(name: str) -> Role:
    """Of an operator of MXNet, by its own name or that of its node; a node's backward operator is "<node> backward"."""
    if "_update" in name:
        return Role.UPDATE
    if "CopyCPU2CPU" in name:
        return Role.COPY
    return Role.BACKWARD if name.endswith(" backward") or name.startswith("_backward_") else Role.FORWARD


def role_in_server(name: str) -> Role:
    """Of an operation of a parameter server, MXNet's or BytePS's: what updates or copies; sums have no role of their own."""
    role = Role.COPY if "COPY_" in name else role_in_mxnet(name)
    return role if role in (Role.UPDATE, Role.COPY) else Role.UNKNOWN


def made_for_backward(name: str, op: str) -> bool:
    """Of a node of an executed graph: by TensorFlow's scope of gradients, or MXNet's type of operators."""
    return "gradient_tape/" in name or name.startswith("gradients/") or op.startswith("_backward_")


def copies_of_gathers(units: Sequence[str | None], ops: Sequence[str]) -> list[tuple[int, int]]:
    """Ops that copy what PyTorch's ``fully_shard`` gathers, into and out of buffers: (gather, op), both by position.

    Parameters
    ----------
    units
        Of each collective of a rank's step, in enqueue order, the unit of the model that it gathers ("" for the model
        itself); None: it gathers none.
    ops
        Names of the step's ops on the main thread in their order, after the innermost annotation of ``fully_shard`` around each.
        Copies of a unit belong to its gathers in order, if there are as many.
    """
    gathers: defaultdict[str, list[int]] = defaultdict(list)
    for number, unit in enumerate(units):
        if unit is not None:
            gathers[unit].append(number)
    rows: defaultdict[str, list[int]] = defaultdict(list)
    for row, name in enumerate(ops):
        if name.startswith("FSDP::all_gather"):
            rows[name].append(row)
    found = []
    for unit, numbers in gathers.items():
        around = f" ({unit})" if unit else ""
        copied_in = rows[f"FSDP::all_gather{around}/fsdp::all_gather_copy_in"]
        copied_out = rows[f"FSDP::all_gather_copy_out{around}/fsdp::split_with_sizes_copy"]
        if len(copied_in) == len(copied_out) == len(numbers):
            found += [*zip(numbers, copied_in, strict=True), *zip(numbers, copied_out, strict=True)]
    return found
