"""The kinds of jobs: which module replays and diagnoses a trace, and what can be asked of it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from dpro_search.collect.trace import Trace

_MODULE_OF_FORMAT = {"pytorch-ddp": "_ddp", "pytorch-fsdp": "_fsdp", "mxnet-kvstore": "_kvstore", "mxnet-byteps": "_byteps"}


@dataclass(frozen=True, kw_only=True)
class ReplayRequest:
    """The options of the verb `replay`."""

    plan: Path | None = None
    changes: tuple[str, ...] = ()
    what_ifs: tuple[str, ...] = ()
    holdout_step: int | None = None
    own_durations: bool = False
    samples: int | None = None
    perfetto: Path | None = None
    timeline: Path | None = None
    cluster_model: Path | None = None  # what fused ops take; None: the package's model
    precision_table: Path | None = None  # what bfloat16 does to ops
    all_reduce_model: Path | None = None  # what Open MPI's algorithms take

    @property
    def compares(self) -> bool:
        """Whether profiled steps are compared with their own replay."""
        return self.holdout_step is not None or self.own_durations

    @property
    def changed(self) -> bool:
        """Whether anything but the recorded setting is asked for."""
        return bool(self.plan or self.changes or self.what_ifs)


class JobVerbs(Protocol):
    """What a module of a kind of job has."""

    def replay_trace(self, trace: Trace, request: ReplayRequest) -> dict[str, Any]:
        """The facts that the verb `replay` prints; raises `InputError` for what the job does not have."""

    def diagnose_trace(self, trace: Trace) -> dict[str, Any]:
        """The facts that the verb `diagnose` prints."""

    def print_diagnosis(self, result: dict[str, Any]) -> None:
        """What `diagnose_trace` found, for people."""


def verbs_of(trace: Trace) -> JobVerbs:
    """The module that knows the kind of a trace's job."""
    name = _MODULE_OF_FORMAT.get(trace.meta.format) or ("_recorded" if trace.meta.settings is None else "_horovod")
    return cast("JobVerbs", import_module(f"dpro_search.cli.{name}"))
