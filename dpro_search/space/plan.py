"""`Plan`: what to change about a job. An immutable value; the empty plan is "as recorded".

A *setting* is a name with a value, like ``cycle_time_us``; what people read and write are settings (``--set``, tables, keys of
``--json``). A plan holds those that several synchronisation schemes know as fields of its own, and those of its scheme together in
``scheme``. `Plan.of`, `Plan.changed` and `Plan.get` take any setting by its name.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from dpro_search._regular_files import read_regular
from dpro_search._repr import short_call
from dpro_search.collect._files import DAMAGED
from dpro_search.errors import InputError
from dpro_search.runtime.schemes.schemes import parse_scheme
from dpro_search.space.schemes import SchemeSettings, check_numbers, import_kinds, scheme_types

PLAN_VERSION = 2  # 1: all settings were fields of the plan

_NAME_SETS = {"bfloat16_ops": "op", "recomputed_ops": "op", "recomputed_modules": "module", "bfloat16_modules": "module"}


class Plan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, cache_hash=True, forbid_unknown_fields=True):
    """Changes of strategy; None leaves a setting as it was recorded. Predictors refuse settings that their kind of job has not.

    Attributes
    ----------
    tensor_groups
        Exact tensor fusion: names of the tensors of each group. A tensor in no group goes alone, when it is ready.
    servers, servers_on_workers
        Parameter servers: their number, and whether they run on the workers' hosts, in turn, in place of hosts of their own.
    scheme
        Settings that only one scheme knows, a `SchemeSettings` with at least one of them; None: there are none.
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
        Lossy compression of gradients: "fp16", "bf16", "2bit", or PyTorch's PowerSGD with matrices of a rank ("powersgd-1").
    synchronisation
        When workers exchange updates: the text of a `Scheme` of `runtime/schemes`, like "ssp(staleness=3)".
    """

    tensor_groups: tuple[tuple[str, ...], ...] | None = None
    servers: int | None = None
    servers_on_workers: bool | None = None
    scheme: Any = None  # SchemeSettings | None: decoders must not fix the types, which kinds of jobs add
    op_clusters: tuple[tuple[str, ...], ...] | None = None
    bfloat16_ops: tuple[str, ...] | None = None
    recomputed_ops: tuple[str, ...] | None = None
    recomputed_modules: tuple[str, ...] | None = None
    bfloat16_modules: tuple[str, ...] | None = None
    micro_batches: int | None = None
    compression: Literal["fp16", "bf16", "2bit", "powersgd-4", "powersgd-2", "powersgd-1"] | None = None
    synchronisation: str | None = None

    def __repr__(self) -> str:
        return short_call("Plan.of", self.settings) if self.settings else "Plan()"

    def __post_init__(self) -> None:
        if self.scheme is not None:
            scheme = self.scheme if isinstance(self.scheme, SchemeSettings) else _decoded_scheme(self.scheme)
            msgspec.structs.force_setattr(self, "scheme", scheme if scheme.settings else None)
        if self.synchronisation is not None:
            msgspec.structs.force_setattr(self, "synchronisation", str(parse_scheme(self.synchronisation)))
        check_numbers(self, ("servers", "micro_batches"))
        _check_disjoint("tensor_groups", "tensor", "group", self.tensor_groups)
        _check_disjoint("op_clusters", "op", "cluster", self.op_clusters)
        for name, member in _NAME_SETS.items():
            names = getattr(self, name)
            if names and len(set(names)) != len(names):
                raise InputError(f"{name}: {member} '{next(one for one in names if names.count(one) > 1)}' is named twice")
        for name in ("recomputed_modules", "bfloat16_modules"):
            if names := getattr(self, name):
                _check_not_nested(name, names)

    @staticmethod
    def of(**settings: Any) -> Plan:
        """A plan by settings of one scheme: ``Plan.of(cycle_time_us=2500.0, micro_batches=2)``. Raises what `changed` does."""
        return _EMPTY.changed(**settings)

    @property
    def is_lossy(self) -> bool:
        """Whether it rounds gradients or activations further than the recorded job: compression, or a smaller type."""
        return any(self.get(name) is not None for name in ("compression", "reduce_dtype", "bfloat16_ops", "bfloat16_modules"))

    def changed(self, **settings: Any) -> Plan:
        """The plan with other values of settings; None: as recorded.

        Raises `InputError` for an unknown name, a value out of range, and settings of two schemes.
        """
        common = {name: value for name, value in settings.items() if owner_of(name) is None}
        if len(common) == len(settings):
            return msgspec.structs.replace(self, **common)
        scheme_settings = {name: value for name, value in settings.items() if name not in common}
        if self.scheme is not None:
            scheme_settings = self.scheme.settings | scheme_settings
        scheme_settings = {name: value for name, value in scheme_settings.items() if value is not None}
        scheme = _only_owner(scheme_settings)(**scheme_settings) if scheme_settings else None
        return msgspec.structs.replace(self, scheme=scheme, **common)

    def get(self, name: str) -> Any:
        """The value of a setting; None: as recorded. Raises `InputError` for an unknown name."""
        return getattr(self if owner_of(name) is None else self.scheme, name, None)

    @property
    def settings(self) -> dict[str, Any]:
        """Values by name of all that the plan changes, in a fixed order."""
        values: dict[str, Any] = {}
        for name, value in zip(self.__struct_fields__, msgspec.structs.astuple(self), strict=True):
            if name == "scheme" and value is not None:
                values |= value.settings
            elif value is not None:
                values[name] = value
        return values

    def to_json(self) -> bytes:
        """The plan as indented JSON, with its format's version."""
        return msgspec.json.format(msgspec.json.encode({"version": PLAN_VERSION, **msgspec.to_builtins(self)}), indent=1) + b"\n"

    @staticmethod
    def from_json(raw: bytes, where: str = "plan") -> Plan:
        """Read what `to_json` wrote, now or in version 1, or settings by name; raises `InputError` that names `where`."""
        try:
            fields = msgspec.json.decode(raw, type=dict[str, Any])
            version = fields.pop("version", None)
            if version not in (1, PLAN_VERSION):
                raise InputError(f"{where}: plan version {version}, this program reads 1 to {PLAN_VERSION}")
            if unknown := _unknown(fields.keys() - {"scheme"}):
                raise InputError(f"{where}: unknown field {min(unknown)!r} (known: {', '.join(setting_names())})")
            return msgspec.convert(upgraded(fields), Plan)
        except DAMAGED as error:
            raise InputError(f"{where}: not a plan ({error})") from error

    @staticmethod
    def load(path: Path) -> Plan:
        """Read a plan file."""
        if not path.is_file():
            raise InputError(f"{path}: no such plan file")
        return Plan.from_json(read_regular(path), str(path))


def upgraded(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a plan as JSON has them, with settings of a scheme, which version 1 had beside the others, in ``scheme``.

    No two schemes have settings of one name, so that the names tell the scheme. Fields of this version, and unknown ones, stay.
    Raises `msgspec.ValidationError` for settings of two schemes.
    """
    names = setting_names()
    scheme_fields = {
        name: value for name, value in fields.items() if name in names and value is not None and owner_of(name) is not None
    }
    if not scheme_fields or "scheme" in fields:
        return dict(fields)
    try:
        owner = _only_owner(scheme_fields)
    except InputError as error:
        raise msgspec.ValidationError(str(error)) from error
    rest = {name: value for name, value in fields.items() if name not in scheme_fields and value is not None}
    return {"scheme": {"name": owner.__struct_config__.tag, **scheme_fields}, **rest}


def setting_names() -> tuple[str, ...]:
    """The names of all settings: those of each scheme, then those that several know."""
    of_schemes = [name for each in scheme_types() for name in each.__struct_fields__]
    return (*of_schemes, *(name for name in Plan.__struct_fields__ if name != "scheme"))


def setting_types() -> dict[str, Any]:
    """Their types, by name."""
    types: list[type[msgspec.Struct]] = [*scheme_types(), Plan]
    type_of = {field.name: field.type for each in types for field in msgspec.structs.fields(each)}
    return {name: type_of[name] for name in setting_names()}


@cache
def owner_of(name: str) -> type[SchemeSettings] | None:
    """The scheme that a setting belongs to; None: several know it. Raises `InputError` for an unknown name."""
    if _unknown({name}):
        near = difflib.get_close_matches(name, setting_names(), n=1)
        raise InputError(f"plan: no setting is called '{name}'" + (f"; did you mean {near[0]}?" if near else ""))
    owners = [each for each in scheme_types() if name in each.__struct_fields__]
    assert len(owners) + (name in Plan.__struct_fields__) == 1, f"several schemes have a setting '{name}'"
    return owners[0] if owners else None


def _unknown(names: AbstractSet[str]) -> AbstractSet[str]:
    """Those of some names that are no settings of any kind."""
    if names - {*setting_names()}:
        import_kinds()
    return names - {*setting_names()}


def _only_owner(settings: Mapping[str, Any]) -> type[SchemeSettings]:
    """The scheme of some settings; raises `InputError` if they are of several."""
    owners = {owner: name for name in settings if (owner := owner_of(name)) is not None}
    first, *others = owners
    if others:
        raise InputError(
            f"{owners[first]} is a setting of {first.title} and {owners[others[0]]} one of {others[0].title}: "
            "a plan has settings of one of them"
        )
    return first


def _decoded_scheme(plain: Any) -> SchemeSettings:
    """Settings of a scheme as JSON has them."""
    name = plain.get("name") if isinstance(plain, dict) else None
    if all(each.__struct_config__.tag != name for each in scheme_types()):
        import_kinds()
    types = {each.__struct_config__.tag: each for each in scheme_types()}
    if not isinstance(name, str) or name not in types:
        raise InputError(f"scheme: a name is one of {', '.join(map(str, types))}, not {name!r}")
    return msgspec.convert(plain, types[name])


def refuse_unknown(plan: Plan, known: Collection[str], job: str) -> None:
    """Raise `InputError` if a plan has a setting that a kind of job does not know.

    Parameters
    ----------
    known
        Names of the settings that it knows.
    job
        What the kind is called: "a Horovod job".
    """
    for name in plan.settings:
        if name not in known:
            owner = owner_of(name)
            whose = "" if owner is None else f" ({name} is a setting of {owner.title})"
            raise InputError(f"plan: {job} has no {name}; it knows {', '.join(known) or 'no field'}{whose}")


def _check_disjoint(field: str, member: str, whole: str, groups: tuple[tuple[str, ...], ...] | None) -> None:
    if groups is None:
        return
    names = [name for group in groups for name in group]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{field}: {member} '{twice}' is in two {whole}s")
    if not all(groups):
        raise InputError(f"{field}: a {whole} is empty")


def _check_not_nested(field: str, paths: tuple[str, ...]) -> None:
    chosen = set(paths)
    for path in paths:
        parts = path.split(".")
        whole = next((outer for i in range(1, len(parts)) if (outer := ".".join(parts[:i])) in chosen), None)
        if whole is not None:
            raise InputError(f"{field}: module '{path}' is a part of module '{whole}'; name one of them")


_EMPTY = Plan()


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted cost of a plan.

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
    floor_us
        The least that an iteration can take: the busy time of the busiest device, or the FLOPs at the peak of the device. The
        interval never begins below it. 0: not known.
    mean_us
        Mean of the recorded steps under the plan, which steps that stall make longer than the median; None: not known.
    """

    iteration_us: float
    interval_us: tuple[float, float]
    breakdown_us: dict[str, float]
    peak_memory_bytes: int | None
    source: str
    settled: bool = True
    infeasible: str | None = None
    floor_us: float = 0.0
    mean_us: float | None = None
