"""`SchemeSettings`: what a plan changes that only one synchronisation scheme knows. A `Plan` has those of at most one.

A kind of job with settings of its own subclasses `SchemeSettings` in its own module, with a ``tag`` for JSON. Nothing else names
the class: plans, ``--set`` and files find it as a subclass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Protocol, Self

import msgspec

from dpro_search._text import listed
from dpro_search.costmodel.collectives.counts import MpiAlgorithm
from dpro_search.errors import InputError
from dpro_search.quantities import size_text, time_text

MOST = 1e15  # of any number in a plan: a petabyte, or thirty years; arrays and clocks hold that


class _Plan(Protocol):
    """The part of a `Plan` that this module needs. `Plan` imports this module."""

    @property
    def scheme(self) -> Any: ...


class SchemeSettings(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, cache_hash=True, forbid_unknown_fields=True, tag_field="name"
):
    """Settings of one scheme; None leaves a setting as it was recorded. No two schemes have a setting of the same name.

    Attributes
    ----------
    title
        What the scheme is called in errors.
    positive, not_negative
        Settings that must be above 0, and at least 0.
    words
        By setting, a value in a few words for tables; ``name=value`` where none exist.
    """

    title: ClassVar[str]
    positive: ClassVar[tuple[str, ...]] = ()
    not_negative: ClassVar[tuple[str, ...]] = ()
    words: ClassVar[Mapping[str, Callable[[Any], str]]] = {}

    def __post_init__(self) -> None:
        check_numbers(self, self.positive, self.not_negative)

    @classmethod
    def of(cls, plan: _Plan) -> Self:
        """The settings of a plan for this scheme; none if the plan has settings of another scheme."""
        return plan.scheme if isinstance(plan.scheme, cls) else cls()

    @property
    def settings(self) -> dict[str, Any]:
        """Values by name, of what is set."""
        values = zip(self.__struct_fields__, msgspec.structs.astuple(self), strict=True)
        return {name: value for name, value in values if value is not None}

    def phrases(self) -> list[str]:
        """The settings, in a few words each; a scheme whose settings belong together names them together."""
        words = self.words
        return [words[name](value) if name in words else f"{name}={value}" for name, value in self.settings.items()]


_IMPORTERS: list[Callable[[], object]] = []


def scheme_types() -> tuple[type[SchemeSettings], ...]:
    """Those that are imported: of this module, and of kinds with settings of their own."""
    return tuple(SchemeSettings.__subclasses__())


def import_kinds_by(importer: Callable[[], object]) -> None:
    """Name a function that imports the modules of all kinds; it is called for a name that no imported scheme has."""
    _IMPORTERS.append(importer)


def import_kinds() -> None:
    """Import the modules of all kinds, as far as anything has named a way."""
    for importer in _IMPORTERS:
        importer()


def check_numbers(values: msgspec.Struct, positive: tuple[str, ...], not_negative: tuple[str, ...] = ()) -> None:
    """Raise `InputError` if one of the named fields is out of range; None is in range."""
    for name in (*not_negative, *positive):
        value = getattr(values, name)
        if value is None or 0 < value <= MOST:
            continue
        if not value <= MOST:
            raise InputError(f"{name} must be at most {MOST:.0e}")
        if value < 0 or name in positive:
            raise InputError(f"{name} must be {'>' if name in positive else '>='} 0, not {value}")


def counted(one: str, many: str | None = None) -> Callable[[Any], str]:
    """Words for a number, or for how many a tuple has."""

    def words(value: Any) -> str:
        number = value if isinstance(value, int) else len(value)
        return f"{number} {one}" if number == 1 else f"{number} {many or one + 's'}"

    return words


def _algorithms(ranges: tuple[tuple[int, str], ...]) -> str:
    first, *others = ranges
    return f"all-reduces by {', '.join([first[1], *(f'from {size_text(start)} {name}' for start, name in others)])}"


class HorovodSettings(SchemeSettings, tag="horovod", frozen=True, kw_only=True):
    """Horovod.

    Attributes
    ----------
    fusion_threshold_bytes, cycle_time_us
        Largest fused collective (0: no fusion), and shortest distance between two wake-ups of the communication thread.
    allreduce_algorithms
        On Open MPI: how all-reduces of at least so many bytes add up, (bytes, algorithm) from the smallest on, which is 0.
        "hierarchy": within each host, among hosts, and back; where all hosts have several ranks.
    """

    fusion_threshold_bytes: int | None = None
    cycle_time_us: float | None = None
    allreduce_algorithms: tuple[tuple[int, MpiAlgorithm], ...] | None = None

    title = "Horovod"
    positive = ("cycle_time_us",)
    not_negative = ("fusion_threshold_bytes",)
    words = {
        "fusion_threshold_bytes": lambda value: f"fusion {size_text(value)}" if value else "no fusion",
        "cycle_time_us": lambda value: f"cycle {time_text(value)}",
        "allreduce_algorithms": _algorithms,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.allreduce_algorithms is None:
            return
        starts = [start for start, _ in self.allreduce_algorithms]
        if not starts or starts[0] != 0 or any(one >= other for one, other in itertools.pairwise(starts)) or starts[-1] > MOST:
            example = "[[0, 'ring'], [65536, 'rabenseifner']]"
            raise InputError(f"allreduce_algorithms: sizes must begin at 0 and grow, like {example}, not {starts}")


class DdpSettings(SchemeSettings, tag="ddp", frozen=True, kw_only=True):
    """PyTorch DDP.

    Attributes
    ----------
    bucket_cap_bytes, first_bucket_bytes
        Size at which a gradient bucket is closed, and the same of the first bucket.
    gradient_as_bucket_view
        Whether gradients are views of the buckets, so that they are not copied out of them.
    static_graph
        Whether the model uses the same parameters in every step, so that DDP need not search those without a gradient.
    """

    bucket_cap_bytes: int | None = None
    first_bucket_bytes: int | None = None
    gradient_as_bucket_view: bool | None = None
    static_graph: bool | None = None

    title = "PyTorch DDP"
    positive = ("bucket_cap_bytes", "first_bucket_bytes")
    words = {
        "bucket_cap_bytes": lambda value: f"buckets of {size_text(value)}",
        "first_bucket_bytes": lambda value: f"first bucket of {size_text(value)}",
        "gradient_as_bucket_view": lambda value: "gradients in buckets" if value else "gradients beside buckets",
        "static_graph": lambda value: "static graph" if value else "no static graph",
    }


def _shown_units(names: tuple[str, ...]) -> str:
    return listed(names) if len(names) <= 2 else counted("unit")(len(names))


class FsdpSettings(SchemeSettings, tag="fsdp", frozen=True, kw_only=True):
    """PyTorch FSDP.

    Attributes
    ----------
    prefetch
        Whether each unit's parameters are gathered while the unit before it computes.
    prefetch_depth, backward_prefetch_depth
        How many units ahead parameters are gathered, with `prefetch` in the forward pass, and in the backward pass.
    reshard_after_forward
        Whether a unit gives its parameters up after the forward pass.
    kept_last_units
        How many units, the last ones of the forward pass, keep their parameters after it.
    kept_units
        Names of units that keep their parameters after the forward pass.
    units_together
        How many units, one after the other in the forward pass, are wrapped together.
    reduce_dtype
        Element type in which gradients are reduced.
    shard_ranks
        How many neighbouring ranks share the parameters; groups of so many ranks have copies of each other's (HSDP).
    """

    prefetch: bool | None = None
    prefetch_depth: int | None = None
    backward_prefetch_depth: int | None = None
    reshard_after_forward: bool | None = None
    kept_last_units: int | None = None
    kept_units: tuple[str, ...] | None = None
    units_together: int | None = None
    reduce_dtype: Literal["bfloat16", "float16"] | None = None
    shard_ranks: int | None = None

    title = "PyTorch FSDP"
    positive = ("prefetch_depth", "backward_prefetch_depth", "kept_last_units", "units_together", "shard_ranks")
    words = {
        "prefetch": lambda value: "prefetched all-gathers" if value else "no prefetching",
        "prefetch_depth": lambda value: f"{counted('unit')(value)} ahead",
        "backward_prefetch_depth": lambda value: f"{counted('unit')(value)} ahead in backward",
        "kept_last_units": lambda value: f"last {counted('unit')(value)} kept after forward",
        "kept_units": lambda value: f"{_shown_units(value)} kept after forward",
        "units_together": lambda value: f"{counted('unit')(value)} together",
        "reduce_dtype": lambda value: f"gradients reduced in {value}",
        "shard_ranks": lambda value: f"shards over {counted('rank')(value)}",
        "reshard_after_forward": lambda value: "parameters resharded after forward" if value else "parameters kept after forward",
    }


class KvstoreSettings(SchemeSettings, tag="kvstore", frozen=True, kw_only=True):
    """MXNet KVStore.

    Attributes
    ----------
    bigarray_bound
        Elements from which a tensor is spread over all servers.
    p3, slice_threshold
        Priority-based slices, and the elements of one.
    """

    bigarray_bound: int | None = None
    p3: bool | None = None
    slice_threshold: int | None = None

    title = "MXNet's KVStore"
    positive = ("bigarray_bound", "slice_threshold")
    words = {
        "bigarray_bound": lambda value: f"spread from {value} elements",
        "p3": lambda value: "priority slices" if value else "no priority slices",
        "slice_threshold": lambda value: f"slices of {value} elements",
    }


class BytepsSettings(SchemeSettings, tag="byteps", frozen=True, kw_only=True):
    """BytePS: size of a tensor's parts, and how many of them may be under way."""

    partition_bytes: int | None = None
    credit: int | None = None

    title = "BytePS"
    positive = ("partition_bytes",)
    not_negative = ("credit",)
    words = {
        "partition_bytes": lambda value: f"partitions of {size_text(value)}",
        "credit": lambda value: f"credit {value}" if value else "no credit",
    }
