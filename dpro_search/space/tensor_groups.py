"""`TensorGroups`: the tensors that one message carries, as recorded and under plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dpro_search.collect.trace import EventKind, TensorInfo, Trace


@dataclass(frozen=True, kw_only=True)
class Group:
    """Tensors, or parts of one, that one message carries; `unnamed` is the number of those whose names are not known."""

    tensors: tuple[str, ...]
    size_bytes: int
    unnamed: int = 0

    @property
    def count(self) -> int:
        """How many tensors."""
        return len(self.tensors) + self.unnamed


@dataclass(frozen=True, kw_only=True)
class TensorGroups:
    """The groups of tensors in each of some settings.

    Attributes
    ----------
    groups
        Of each setting, by its name; the recorded one first.
    noun
        What carries a group: "collective", "bucket".
    note
        How the groups are known, if that is not obvious.
    """

    groups: Mapping[str, Sequence[Group]]
    noun: str = "collective"
    note: str = ""


def recorded_groups(trace: Trace, step: int) -> tuple[Group, ...]:
    """The collectives of a step as rank 0 saw them, in order; empty if the recording does not contain their tensors."""
    events = trace.events
    communicates = (events.kind == EventKind.COMM) & (events.collective >= 0)
    collectives = np.flatnonzero(communicates & (events.step == step) & (events.rank == 0))
    collectives = collectives[events.tensor[collectives] >= 0]
    order = collectives[np.argsort(events.end_us[collectives], kind="stable")]
    members: dict[int, dict[int, None]] = {}
    for collective, tensor in zip(events.collective[order].tolist(), events.tensor[order].tolist(), strict=True):
        members.setdefault(collective, {})[tensor] = None
    return tuple(_group([trace.tensors[tensor] for tensor in tensors]) for tensors in members.values())


def planned_groups(tensors: Sequence[TensorInfo], groups: Sequence[Sequence[str]]) -> tuple[Group, ...]:
    """Exact groups, and every other tensor alone, in the order in which their last tensor is enqueued."""
    position = {tensor.name: place for place, tensor in enumerate(tensors)}
    of = {name: tuple(group) for group in groups for name in group if name in position}
    distinct_groups = {of.get(tensor.name, (tensor.name,)): None for tensor in tensors}
    ordered = sorted(distinct_groups, key=lambda names: max(position[name] for name in names if name in position))
    return tuple(_group([tensors[position[name]] for name in names if name in position]) for names in ordered)


def _group(tensors: Sequence[TensorInfo]) -> Group:
    return Group(tensors=tuple(tensor.name for tensor in tensors), size_bytes=sum(tensor.size_bytes for tensor in tensors))
