"""Measures random clusters of real training steps: draws, compiles and times them in processes of the framework's environment.

A process measures clusters of one model until it is stopped; a compiler that crashes or hangs takes only its process along,
and the next one continues after the cluster that caused it. Which clusters are measured is decided here: none twice.
"""

from __future__ import annotations

import platform
import re
import shutil
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dpro_search.collect._files import scratch_folder
from dpro_search.collect.launch.ranks import require_framework, require_tools
from dpro_search.collect.readers.tensorflow.xplane import read_xplane
from dpro_search.collect.tables.clusters import FailedCluster, MeasuredCluster, OpCluster, Row, TableHeader, TableWriter
from dpro_search.collect.this_machine import processor
from dpro_search.errors import InputError, JobError
from dpro_search.measure.campaign import Campaign, Progress
from dpro_search.measure.json_worker import JsonWorker
from dpro_search.runtime import WORKERS

_WORKER = WORKERS / "dpro_search_cluster_worker.py"
_READY_S, _MEASURED_S = 300.0, 120.0
_SKIPS = 300  # clusters in a row that are known already: the model has no others
_STARTS = 3  # processes in a row that measure nothing: the model cannot be used
_PART = 150  # clusters of a model before it is the next one's turn, so that an unfinished table has all models
_FRAMEWORK_NODE = re.compile(r"(input_|constant_|placeholder|cluster_\d)|.*_retval_RetVal$|.*:_(Arg|Retval)$", re.I)


class _NodeTime(NamedTuple):
    us: float
    op_type: str  # under which it ran


_NOT_RUN = _NodeTime(0.0, "")


@dataclass(frozen=True, kw_only=True)
class CollectRequest:
    """The clusters to collect."""

    python: str  # Interpreter with TensorFlow.
    workloads: Path  # Python file with `BUILDERS`: name of a model -> function of `batch` that returns (model, (inputs, labels)).
    models: tuple[str, ...]  # Names from it; empty: all.
    limit: int  # Measured clusters in the table, in all.
    batch_scales: tuple[float, ...] = (1.0, 0.5)  # Factors of each model's own batch size.


@dataclass(kw_only=True)
class ClusterProgress(Progress):
    """State of a collection of clusters."""

    limit: int
    spent_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by what was done: start, build, compile, ...
    began_s: float = field(default_factory=time.monotonic)

    @property
    def per_minute(self) -> float:
        """Clusters that this call has measured a minute."""
        return self.new / max(time.monotonic() - self.began_s, 1e-9) * 60


def collect_clusters(
    request: CollectRequest, out: Path, on_progress: Callable[[ClusterProgress], None] = lambda _: None
) -> ClusterProgress:
    """Measure clusters until the table `out` has as many as requested; continues where an earlier call stopped.

    Raises
    ------
    InputError
        The workloads' file is missing, or the table is of another machine.
    MissingCapabilityError
        The interpreter has no TensorFlow.
    JobError
        No model could be used.
    """
    if not request.workloads.is_file():
        raise InputError(f"{request.workloads}: no such file; name a Python file with BUILDERS by --workloads")
    require_tools()
    require_framework(request.python, ("tensorflow",))
    campaign = _Clusters(request, TableWriter(out, _header(request.python)), on_progress)
    campaign.run()
    if not campaign.progress.rows:
        raise JobError(f"no cluster could be measured: {campaign.last_error or 'no model was named'}")
    return campaign.progress


class _Part(NamedTuple):
    """Some clusters of a model at a batch size."""

    model: str
    batch_scale: float
    clusters: int


class _Clusters(Campaign[_Part, ClusterProgress]):
    """Clusters of the requested models: a part of each model at a time, as long as it has further ones."""

    def __init__(self, request: CollectRequest, writer: TableWriter, on_progress: Callable[[ClusterProgress], None]) -> None:
        super().__init__(ClusterProgress(limit=request.limit), on_progress)
        self._request, self._writer = request, writer
        self._next_index: dict[tuple[str, int], int] = defaultdict(int)  # of a model at a batch size: after the last one tried
        self._known: set[str] = set()
        self._exhausted = False  # whether the model of the part that was measured last has no others
        self.last_error = ""
        for row in writer.rows:
            self._note(row)

    def missing(self) -> Iterator[_Part]:
        models = self._request.models or _models(self._request)
        left = [(model, scale) for scale in self._request.batch_scales for model in models]
        while left:
            share = min(_PART, -(-(self._request.limit - self.progress.rows) // len(left)))
            for model, scale in list(left):
                yield _Part(model, scale, share)
                if self._exhausted:
                    left.remove((model, scale))

    def measure(self, item: _Part) -> None:
        target = min(self.progress.rows + item.clusters, self._request.limit)
        self.progress.now, self._exhausted = item.model, False
        fruitless = 0
        while self.progress.rows < target and not self._exhausted:
            before = self.progress.rows
            with scratch_folder("dpro-search-clusters-") as scratch:
                process = _Process(self._request, item, scratch)
                try:
                    self._exhausted = self._converse(process, item, target)
                finally:
                    process.end()
            fruitless = 0 if self.progress.rows > before else fruitless + 1
            self._exhausted |= fruitless == _STARTS

    def _converse(self, process: _Process, part: _Part, target: int) -> bool:
        """Let a process measure until the table has as many clusters, or it ends; whether its model has no further ones."""
        started_s = time.monotonic()
        first = process.receive(_READY_S)
        if "ready" not in first:
            self.last_error = first.get("ended", "no answer")
            return False
        batch, spent_s = first["ready"], self.progress.spent_s
        step = _node_times(process.scratch / "step", statistics.median)
        spent_s["start"] += time.monotonic() - started_s
        process.send(str(self._next_index[part.model, batch]))
        skipped = 0
        while self.progress.rows < target:
            drawn = process.receive(_READY_S)
            if "ops" not in drawn:
                return "exhausted" in drawn
            cluster = _cluster(drawn)
            if cluster.fingerprint in self._known:
                skipped += 1
                if skipped == _SKIPS:
                    return True
                process.send("skip")
                continue
            skipped = 0
            process.send("measure")
            answer = process.receive(_MEASURED_S)
            answered_s = time.monotonic()
            row = _row(answer, drawn, part.model, batch, step, process.scratch)
            for what, seconds in answer.get("spent", {}).items():
                spent_s[what] += seconds
            spent_s["read"] += time.monotonic() - answered_s
            self._writer.append(row)
            self._note(row)
            self.added(0, isinstance(row, MeasuredCluster))
            if "ended" in answer:
                return False
            shutil.rmtree(process.scratch / str(row.index), ignore_errors=True)
        process.send("stop")
        return False

    def _note(self, row: Row) -> None:
        """Count a row of the table."""
        key = row.model, row.batch
        self._next_index[key] = max(self._next_index[key], row.index + 1)
        if isinstance(row, MeasuredCluster):
            self.progress.rows += 1
            self._known.add(row.cluster.fingerprint)
        else:
            self.progress.failed[row.reason] += 1


def _models(request: CollectRequest) -> tuple[str, ...]:
    """Names of all models that the workloads' file has."""
    done = subprocess.run([request.python, str(_WORKER), str(request.workloads)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"{request.workloads}: {(done.stderr.strip().splitlines() or ['no models'])[-1]}")
    return tuple(done.stdout.split())


class _Process(JsonWorker):
    """Measures clusters of one model."""

    def __init__(self, request: CollectRequest, part: _Part, scratch: Path) -> None:
        self.scratch = scratch
        command = [request.python, str(_WORKER), str(request.workloads), part.model, str(part.batch_scale), str(scratch)]
        super().__init__(command, scratch, "the compiler")


def _row(answer: dict[str, Any], drawn: dict[str, Any], model: str, batch: int, step: dict[str, _NodeTime], scratch: Path) -> Row:
    index = drawn["index"]
    if "times" not in answer:
        reason = answer.get("ended") or reason_of(answer.get("failed", "no answer"))
        return FailedCluster(model=model, batch=batch, index=index, reason=reason)
    times = answer["times"]
    try:
        ran = _node_times(scratch / str(index), min)
    except InputError:
        return FailedCluster(model=model, batch=batch, index=index, reason="its profile cannot be read")
    compiled_us = [node.us for name, node in ran.items() if name.endswith("/xla_run")]
    if not compiled_us:
        return FailedCluster(model=model, batch=batch, index=index, reason="ran without being compiled")
    members = [ran.pop(name, _NOT_RUN) for name in times["nodes"]]
    return MeasuredCluster(
        model=model,
        batch=batch,
        index=index,
        cluster=_cluster(drawn, members, [step.get(name, _NOT_RUN) for name in times["nodes"]]),
        unfused_min_us=times["unfused_min_us"],
        unfused_median_us=times["unfused_median_us"],
        fused_min_us=times["fused_min_us"],
        fused_median_us=times["fused_median_us"],
        call_min_us=times["call_min_us"],
        xla_run_us=round(sum(compiled_us), 2),
        other_us=round(sum(node.us for name, node in ran.items() if not _FRAMEWORK_NODE.match(name)), 2),
        compile_s=times["compile_s"],
    )


def _cluster(drawn: dict[str, Any], members: Sequence[_NodeTime] = (), in_step: Sequence[_NodeTime] = ()) -> OpCluster:
    """A drawn cluster with the times of its ops; without any, for its fingerprint."""
    ops = drawn["ops"]
    ran = members or [_NOT_RUN] * len(ops)
    return msgspec.convert(
        {
            "ops": [[*op, node.op_type] for op, node in zip(ops, ran, strict=True)],
            "tensors": drawn["tensors"],
            "op_us": [round(node.us, 2) for node in ran],
            "step_op_us": [round(node.us, 2) for node in in_step],
        },
        OpCluster,
    )


def _node_times(folder: Path, of: Callable[[list[float]], float]) -> dict[str, _NodeTime]:
    """Duration of each node in a profile: the least or the median of its executions."""
    path = next(folder.rglob("*.xplane.pb"), None)
    if path is None:
        raise InputError(f"{folder}: the profiler wrote nothing")
    profile = read_xplane(path)
    times_of_node: dict[int, list[float]] = defaultdict(list)
    for node, us in zip(profile.ops.node.tolist(), (profile.ops.end_us - profile.ops.start_us).tolist(), strict=True):
        times_of_node[node].append(us)
    return {profile.nodes[node]: _NodeTime(of(times), profile.op_types[node]) for node, times in times_of_node.items()}


def reason_of(error: str) -> str:
    """The reason of a compiler's error in few words, so that equal reasons count together."""
    unsupported = re.search(r"unsupported operations.*?\{\{node [^}]*\}\}[^a-z]*\(?.*?op:? ?'?(\w+)", error, re.S)
    if unsupported:
        return f"XLA cannot compile {unsupported.group(1)}"
    first = " ".join(error.split())
    return re.sub(r"\{\{[^}]*\}\}|'[^']*'|\d+", "...", first)[:160]


def _header(python: str) -> TableHeader:
    code = (
        "import importlib.metadata as m\n"
        "for name in ('tensorflow-cpu', 'tensorflow'):\n"
        "    try: print(m.version(name)); break\n"
        "    except m.PackageNotFoundError: pass"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return TableHeader(
        machine=_machine(),
        versions={"tensorflow": done.stdout.strip() or "unknown"},
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _machine() -> str:
    """The processor, which decides the times, by its name."""
    return f"{processor()}, {platform.machine()}, one thread"
