"""What-ifs about one category of recorded ops: ``scaled(recorded, step, graph, scale)`` is the graph of a step under one `Scale`.

An op's category is what the trace says of its event (the type of a collective), what its kernel computes
(`graph.event_names.kernel_class`), and what the op is to its event: a host thread's work before a launch, a launch, the work itself
(`recorded_ops`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import CollectiveKind, EventKind, Floats, Ints, Trace
from dpro_search.costmodel.roofline import LEAST_US
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.graph.event_names import kernel_class
from dpro_search.space.recorded.events import LAUNCHES
from dpro_search.space.recorded.fused_kernels import fused_us
from dpro_search.space.recorded.ops import RecordedOps
from dpro_search.space.replay_graph import OrderPolicy, ReplayGraph
from dpro_search.space.scenario import Scale

Bools = npt.NDArray[np.bool_]
_COPIES = "copies"
_SHOWN_MODULES = 8  # in an error


@dataclass(frozen=True)
class OpCategories:
    """The ops of each category, among n recorded ones."""

    trace: Trace
    ops: RecordedOps

    @cached_property
    def host(self) -> Bools:
        """Work of host threads, [n]."""
        selected: Bools = (self.ops.kind == OpKind.HOST) & ~self._launching
        return selected

    @cached_property
    def of_samples(self) -> Bools:
        """Kernels and copies of the forward and backward passes, which compute on the samples of a batch, [n]."""
        computes = np.isin(self._of_events(self.trace.events.kind), (EventKind.KERNEL, EventKind.COPY))
        optimizer = self.kernels.get("optimizer", np.zeros(len(self.ops), np.bool_)) | (self.ops.kind == OpKind.UPDATE)
        on_samples: Bools = computes & ~optimizer
        return on_samples

    @cached_property
    def unknown(self) -> Bools:
        """Time of devices that nothing in the recording explains, [n]."""
        unknown: Bools = self.ops.kind == OpKind.UNKNOWN
        return unknown

    @cached_property
    def launch(self) -> Bools:
        """Work of host threads up to a launch, and what each launch takes, [n]."""
        selected: Bools = (self.ops.kind == OpKind.HOST) & (self.ops.role == LAUNCHES)
        return selected

    @cached_property
    def kernels(self) -> dict[str, Bools]:
        """Kernels of each class, and copies, [n] each; the classes that take longest first."""
        kind = self._of_events(self.trace.events.kind)
        classes = {name: kernel_class(self.trace.names[name]) for name in np.unique(self._names[kind == EventKind.KERNEL]).tolist()}
        selected = {_COPIES: kind == EventKind.COPY}
        for one in set(classes.values()):
            selected[one] = (kind == EventKind.KERNEL) & np.isin(self._names, [name for name, its in classes.items() if its == one])
        return self._longest_first(selected)

    @cached_property
    def collectives(self) -> dict[str, Bools]:
        """Collectives of each known type, [n] each; the types that take longest first."""
        kind = np.where(self._of_events(self.trace.events.kind) == EventKind.COLLECTIVE, self._of_events(self._types), -1)
        return self._longest_first({CollectiveKind(one).name.lower(): kind == one for one in np.unique(kind[kind >= 0]).tolist()})

    @cached_property
    def modules(self) -> dict[str, Bools]:
        """Device ops of each module and of the modules within it, without communication, [n] each; the longest first."""
        computes = np.isin(self._of_events(self.trace.events.kind), (EventKind.OP, EventKind.KERNEL, EventKind.COPY))
        module = np.where(computes, self._of_events(self.trace.events.module), -1)
        numbers_of_path: dict[str, list[int]] = {}
        for number in np.unique(module[module >= 0]).tolist():
            parts = self.trace.names[number].split(".")
            for depth in range(1, len(parts) + 1):
                numbers_of_path.setdefault(".".join(parts[:depth]), []).append(number)
        return self._longest_first({path: np.isin(module, numbers) for path, numbers in numbers_of_path.items()})

    def _of_module(self, scale: Scale) -> Bools:
        """Ops of the module with a path, or else of all modules whose paths end so, [n]; raises `InputError` if none exists."""
        only, modules = scale.only or "", self.modules
        chosen = [only] if only in modules else [path for path in modules if path.endswith(f".{only}")]
        if not chosen:
            shown = ", ".join(list(modules)[:_SHOWN_MODULES]) + (" ..." if len(modules) > _SHOWN_MODULES else "")
            known = f"the modules of the trace are {shown}" if modules else "the trace has no modules; record it with_stack=True"
            raise InputError(f"'{scale.text}': {known}")
        selected: Bools = np.any([modules[path] for path in chosen], axis=0)
        return selected

    def of(self, scale: Scale) -> Bools:
        """The ops that a scale is about, [n]; raises `InputError` for a category of which there is none."""
        if scale.group is not None:
            return self._among(scale)
        simple = {"host": self.host, "launch": self.launch, "unknown": self.unknown, "loading": self.ops.loading_us > 0}
        ops = simple.get(scale.what)
        if scale.what == "module":
            ops = self._of_module(scale)
        elif ops is None:
            table = self.kernels if scale.what == "kernels" else self.collectives
            if scale.only not in table:
                raise InputError(f"'{scale.text}': the {scale.what} of the trace are {', '.join(table) or 'of unknown categories'}")
            ops = table[scale.only]
        if not ops.any():
            raise InputError(f"'{scale.text}': the trace shows no {'unknown time' if scale.what == 'unknown' else scale.what}")
        return ops if scale.rank is None else ops & (self.ops.rank_of_device[self.ops.device] == scale.rank)

    def _among(self, scale: Scale) -> Bools:
        """Collectives among exactly the ranks of a scale, [n]; raises `InputError` if none exist."""
        events = self.trace.events
        parts = np.flatnonzero((events.kind == EventKind.COLLECTIVE) & (events.collective >= 0))
        pairs = np.unique(np.stack((events.collective[parts], events.rank[parts])), axis=1)
        numbers, count = np.unique(pairs[0], return_counts=True)
        inside = np.isin(pairs[1], scale.group or ())
        _, matching = np.unique(np.concatenate((pairs[0][inside], numbers)), return_counts=True)
        size = len(scale.group or ())
        chosen = numbers[(count == size) & (matching - 1 == size)]
        selected: Bools = (
            (self.ops.kind == OpKind.COMM) & np.isin(self._of_events(events.collective), chosen) & (self.ops.event >= 0)
        )
        if not selected.any():
            raise InputError(f"'{scale.text}': the trace shows no collective among these ranks alone")
        return selected

    @cached_property
    def _launching(self) -> Bools:
        selected: Bools = self.ops.policy[self.ops.device] == OrderPolicy.UNBOUNDED
        return selected

    @property
    def _types(self) -> npt.NDArray[np.generic]:
        return self.trace.events.collective_kind

    @cached_property
    def _names(self) -> Ints:
        return self._of_events(self.trace.events.name)

    def _of_events(self, column: npt.NDArray[np.generic]) -> Ints:
        """A column of the events, for each op that is one; -1 for the others, [n]."""
        values: Ints = np.where(self.ops.event >= 0, column[self.ops.event].astype(np.int64), -1)
        return values

    def _longest_first(self, categories: dict[str, Bools]) -> dict[str, Bools]:
        total_us = {name: float(self.ops.duration_us[chosen].sum()) for name, chosen in categories.items() if chosen.any()}
        return {name: categories[name] for name in sorted(total_us, key=lambda name: -total_us[name])}


def scaled(categories: OpCategories, step: int, graph: ReplayGraph, scale: Scale) -> ReplayGraph:
    """The graph of a step with some of its ops scaled.

    Parameters
    ----------
    categories
        Of all recorded ops.
    graph
        Of the step's ops, in their order.

    Raises
    ------
    InputError
        The trace has no such ops, or no other ranks to compare with.
    """
    ops = categories.ops
    in_step = ops.step == step
    before_us = graph.duration_us
    if scale.what == "usual":
        return graph.with_durations(_usual(ops, np.flatnonzero(in_step), before_us, scale))
    if scale.what == "batch":
        return graph.with_durations(_of_batch(categories, in_step, before_us, scale))
    if scale.what == "compile":
        return graph.with_durations(fused_us(categories.trace, ops, np.flatnonzero(in_step), before_us, scale))
    chosen, loading_us = categories.of(scale)[in_step], np.minimum(ops.loading_us[in_step], before_us)
    if scale.what == "loading":
        after_us = before_us - (1 - scale.factor) * np.where(chosen, loading_us, 0.0)
    else:
        kept_us = loading_us if scale.what == "launch" else np.zeros(len(before_us))
        after_us = np.where(chosen, kept_us + (before_us - kept_us) * scale.factor, before_us)
    return graph.with_durations(after_us)


def _of_batch(categories: OpCategories, in_step: Bools, before_us: Floats, scale: Scale) -> Floats:
    """Durations with another batch: what kernels of the passes take above `LEAST_US` grows in proportion."""
    chosen = categories.of_samples[in_step]
    if not chosen.any():
        raise InputError(f"'{scale.text}': the trace shows no kernels, of which a batch could have more")
    after_us = before_us + (scale.factor - 1) * np.maximum(before_us - LEAST_US, 0.0)
    return np.where(chosen, after_us, before_us)


def _usual(ops: RecordedOps, in_step: Ints, duration_us: Floats, scale: Scale) -> Floats:
    """Durations with those of one rank's ops replaced by the median of the same op on the other ranks, where one exists."""
    rank = ops.rank_of_device[ops.device[in_step]]
    alone = ops.collective[in_step] < 0  # what a collective takes is not one rank's
    of_scaled_rank = alone & (rank == scale.rank)
    of_other_ranks = alone & ~of_scaled_rank & np.isin(ops.peer[in_step], ops.peer[in_step][of_scaled_rank])
    if not of_other_ranks.any():
        raise InputError(f"'{scale.text}': rank {scale.rank} has no op in common with another recorded rank")
    usual_us = dict(_medians(ops.peer[in_step][of_other_ranks], duration_us[of_other_ranks]))
    return np.array([usual_us.get(peer, us) if is_same_rank else us for peer, us, is_same_rank in zip(
        ops.peer[in_step].tolist(), duration_us.tolist(), of_scaled_rank.tolist(), strict=True)])  # fmt: skip


def _medians(key: Ints, value: Floats) -> Iterator[tuple[int, float]]:
    order = np.lexsort((value, key))
    keys, first = np.unique(key[order], return_index=True)
    for one, values in zip(keys.tolist(), np.split(value[order], first[1:]), strict=True):
        yield one, float(np.median(values))
