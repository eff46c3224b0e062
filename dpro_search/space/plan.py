"""`Plan`: what to change about a job. An immutable value; the empty plan is "as recorded"."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from pathlib import Path
from typing import Literal

import msgspec

from dpro_search._repr import short_repr
from dpro_search.collect._files import DAMAGED
from dpro_search.costmodel.collectives import MpiAlgorithm
from dpro_search.errors import InputError

PLAN_VERSION = 1

MOST = 1e15  # of any number in a plan: a petabyte, or thirty years; arrays and clocks hold that
_NOT_NEGATIVE = ("fusion_threshold_bytes", "credit")
_POSITIVE = (
    *("cycle_time_us", "bucket_cap_bytes", "first_bucket_bytes", "servers", "bigarray_bound", "slice_threshold"),
    *("partition_bytes", "micro_batches"),
)
_NAME_SETS = {"bfloat16_ops": "op", "recomputed_ops": "op", "recomputed_modules": "module", "bfloat16_modules": "module"}


class Plan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, cache_hash=True):
    """Changes of strategy; None leaves a setting as it was recorded. Predictors refuse fields that their kind of job does not know.

    Attributes
    ----------
    fusion_threshold_bytes, cycle_time_us
        Horovod: largest fused collective (0: no fusion), and shortest distance between two wake-ups of the communication thread.
    tensor_groups
        Exact tensor fusion: names of the tensors of each group. A tensor in no group goes alone, when it is ready.
    allreduce_algorithms
        Horovod on Open MPI: how all-reduces of at least so many bytes add up, (bytes, algorithm) from the smallest on, which is 0.
        "hierarchy": within each host, among hosts, and back; where all hosts have several ranks.
    bucket_cap_bytes, first_bucket_bytes
        PyTorch DDP: size at which a gradient bucket is closed, and the same of the first bucket.
    prefetch, reshard_after_forward
        PyTorch FSDP: whether each unit's parameters are gathered while the unit before it computes, and whether a unit gives its
        parameters up after the forward pass.
    servers, bigarray_bound, p3, slice_threshold
        MXNet KVStore: number of servers; elements from which a tensor is spread over all of them; priority-based slices, and the
        elements of one.
    servers_on_workers
        MXNet KVStore, BytePS: servers run on the workers' hosts, in turn, in place of hosts of their own.
    partition_bytes, credit
        BytePS: size of a tensor's parts, and how many of them may be under way.
    op_clusters
        Op fusion: names of the ops of each cluster, without the rank; the same on all ranks.
    bfloat16_ops
        Mixed precision: names of the ops that compute in bfloat16.
    recomputed_ops
        Names of the ops whose results are not kept for the backward pass but computed again.
    recomputed_modules
        PyTorch: paths of the modules of which that is so, within the model; none is a part of another.
    bfloat16_modules
        PyTorch: paths of the modules that run under bfloat16 autocast and give float32 back; none is a part of another.
    micro_batches
        Gradient accumulation: parts that a step's batch is computed in; gradients are communicated once.
    compression
        Lossy compression of gradients: "fp16", "2bit", or PyTorch's PowerSGD with matrices of the named rank ("powersgd-1").
    """

    fusion_threshold_bytes: int | None = None
    cycle_time_us: float | None = None
    tensor_groups: tuple[tuple[str, ...], ...] | None = None
    allreduce_algorithms: tuple[tuple[int, MpiAlgorithm], ...] | None = None
    bucket_cap_bytes: int | None = None
    first_bucket_bytes: int | None = None
    prefetch: bool | None = None
    reshard_after_forward: bool | None = None
    servers: int | None = None
    bigarray_bound: int | None = None
    p3: bool | None = None
    slice_threshold: int | None = None
    servers_on_workers: bool | None = None
    partition_bytes: int | None = None
    credit: int | None = None
    op_clusters: tuple[tuple[str, ...], ...] | None = None
    bfloat16_ops: tuple[str, ...] | None = None
    recomputed_ops: tuple[str, ...] | None = None
    recomputed_modules: tuple[str, ...] | None = None
    bfloat16_modules: tuple[str, ...] | None = None
    micro_batches: int | None = None
    compression: Literal["fp16", "2bit", "powersgd-4", "powersgd-2", "powersgd-1"] | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        for name in (*_NOT_NEGATIVE, *_POSITIVE):
            value = getattr(self, name)
            if value is not None and not value <= MOST:
                raise InputError(f"{name} must be at most {MOST:.0e}")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if value is not None and value < 0:
                raise InputError(f"{name} must be >= 0, not {value}")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"{name} must be > 0, not {value}")
        _check_ranges("allreduce_algorithms", self.allreduce_algorithms)
        _check_disjoint("tensor_groups", "tensor", "group", self.tensor_groups)
        _check_disjoint("op_clusters", "op", "cluster", self.op_clusters)
        for name, member in _NAME_SETS.items():
            names = getattr(self, name) or ()
            if len(set(names)) != len(names):
                raise InputError(f"{name}: {member} '{next(one for one in names if names.count(one) > 1)}' is named twice")
        for name in ("recomputed_modules", "bfloat16_modules"):
            _check_not_nested(name, getattr(self, name) or ())

    @property
    def changes(self) -> tuple[str, ...]:
        """Names of the fields that the plan sets, in their order."""
        return tuple(name for name in self.__struct_fields__ if getattr(self, name) is not None)

    def to_json(self) -> bytes:
        """The plan as indented JSON, with its format's version."""
        return msgspec.json.format(msgspec.json.encode({"version": PLAN_VERSION, **msgspec.to_builtins(self)}), indent=1) + b"\n"

    @staticmethod
    def from_json(raw: bytes, where: str = "plan") -> Plan:
        """Read what `to_json` wrote; raises `InputError` that names `where`."""
        try:
            fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
            version = msgspec.json.decode(fields.pop("version", msgspec.Raw(b"null")))
            if version != PLAN_VERSION:
                raise InputError(f"{where}: plan version {version}, this program reads {PLAN_VERSION}")
            unknown = set(fields) - set(Plan.__struct_fields__)
            if unknown:
                raise InputError(f"{where}: unknown field {min(unknown)!r} (known: {', '.join(Plan.__struct_fields__)})")
            return msgspec.json.decode(msgspec.json.encode(fields), type=Plan)
        except DAMAGED as error:
            raise InputError(f"{where}: not a plan ({error})") from error

    @staticmethod
    def load(path: Path) -> Plan:
        """Read a plan file."""
        if not path.is_file():
            raise InputError(f"{path}: no such plan file")
        return Plan.from_json(path.read_bytes(), str(path))


def refuse_unknown(plan: Plan, known: Collection[str], job: str) -> None:
    """Raise `InputError` if a plan sets a field that a kind of job does not know.

    Parameters
    ----------
    known
        Names of the fields that it knows.
    job
        What the kind is called: "a Horovod job".
    """
    for name in plan.changes:
        if name not in known:
            raise InputError(f"plan: {job} has no {name}; it knows {', '.join(known) or 'no field'}")


def _check_disjoint(field: str, member: str, whole: str, groups: tuple[tuple[str, ...], ...] | None) -> None:
    names = [name for group in groups or () for name in group]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{field}: {member} '{twice}' is in two {whole}s")
    if any(not group for group in groups or ()):
        raise InputError(f"{field}: a {whole} is empty")


def _check_ranges(field: str, ranges: tuple[tuple[int, str], ...] | None) -> None:
    if ranges is None:
        return
    starts = [start for start, _ in ranges]
    if not starts or starts[0] != 0 or any(one >= other for one, other in itertools.pairwise(starts)) or starts[-1] > MOST:
        raise InputError(f"{field}: sizes must begin at 0 and grow, like [[0, 'ring'], [65536, 'rabenseifner']], not {starts}")


def _check_not_nested(field: str, paths: tuple[str, ...]) -> None:
    chosen = set(paths)
    for path in paths:
        parts = path.split(".")
        whole = next((outer for i in range(1, len(parts)) if (outer := ".".join(parts[:i])) in chosen), None)
        if whole is not None:
            raise InputError(f"{field}: module '{path}' is a part of module '{whole}'; name one of them")


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan would cost.

    Attributes
    ----------
    iteration_us, interval_us
        Settled iteration time, and the interval that should hold the measured median in 9 of 10 cases.
    breakdown_us
        Where an iteration goes on the slowest rank: compute, exposed communication, waiting, host.
    source
        "recorded" for the configuration of the trace, "extrapolated" for any other.
    infeasible
        Why the job could not run like this (it would need more memory than it may have); None: it could.
    """

    iteration_us: float
    interval_us: tuple[float, float]
    breakdown_us: dict[str, float]
    peak_memory_bytes: int | None
    source: str
    settled: bool = True
    infeasible: str | None = None
