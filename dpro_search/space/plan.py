"""`Plan`: what to change about a job. An immutable value; the empty plan is "as recorded"."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dpro_search.errors import InputError

PLAN_VERSION = 1


class Plan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Changes of strategy; None leaves a setting as it was recorded.

    Attributes
    ----------
    fusion_threshold_bytes
        Largest fused collective; 0: no fusion.
    cycle_time_us
        Shortest distance between two wake-ups of the communication thread.
    tensor_groups
        Exact tensor fusion: names of the tensors of each group. A tensor in no group goes alone, when it is ready.
    """

    fusion_threshold_bytes: int | None = None
    cycle_time_us: float | None = None
    tensor_groups: tuple[tuple[str, ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.fusion_threshold_bytes is not None and self.fusion_threshold_bytes < 0:
            raise InputError(f"fusion_threshold_bytes must be >= 0, not {self.fusion_threshold_bytes}")
        if self.cycle_time_us is not None and self.cycle_time_us <= 0:
            raise InputError(f"cycle_time_us must be > 0, not {self.cycle_time_us}")
        if self.tensor_groups is not None:
            names = [name for group in self.tensor_groups for name in group]
            if len(set(names)) != len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise InputError(f"tensor_groups: tensor '{twice}' is in two groups")
            if any(not group for group in self.tensor_groups):
                raise InputError("tensor_groups: a group is empty")

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
                raise InputError(f"{where}: unknown field '{min(unknown)}' (known: {', '.join(Plan.__struct_fields__)})")
            return msgspec.json.decode(msgspec.json.encode(fields), type=Plan)
        except msgspec.MsgspecError as error:
            raise InputError(f"{where}: not a plan ({error})") from error

    @staticmethod
    def load(path: Path) -> Plan:
        """Read a plan file."""
        if not path.is_file():
            raise InputError(f"{path}: no such plan file")
        return Plan.from_json(path.read_bytes(), str(path))


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
    """

    iteration_us: float
    interval_us: tuple[float, float]
    breakdown_us: dict[str, float]
    peak_memory_bytes: int | None
    source: str
    settled: bool = True
