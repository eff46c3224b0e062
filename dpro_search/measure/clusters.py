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
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dpro_search.collect._files import scratch_folder
from dpro_search.collect.launch.ranks import require_framework, require_tools
from dpro_search.collect.readers.tensorflow.xplane import read_xplane
from dpro_search.collect.tables.clusters import Cluster, FailedCluster, MeasuredCluster, Row, TableHeader, TableWriter
from dpro_search.collect.this_machine import processor
from dpro_search.errors import InputError, JobError
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


@dataclass
class Progress:
    """State of a collection, for who watches it."""

    limit: int
    measured: int = 0  # in the table
    new: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    spent_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by what was done: start, build, compile, ...
    model: str = ""
    began_s: float = field(default_factory=time.monotonic)

    @property
    def per_minute(self) -> float:
        """Clusters that this call has measured a minute."""
        return self.new / max(time.monotonic() - self.began_s, 1e-9) * 60


def collect_clusters(request: CollectRequest, out: Path, on_progress: Callable[[Progress], None] = lambda _: None) -> Progress:
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
    writer = TableWriter(out, _header(request.python))
    state = _State(writer, Progress(limit=request.limit), on_progress)
    models = request.models or _models(request)
    jobs = [(model, scale) for scale in request.batch_scales for model in models]
    while jobs and not state.full:
        share = min(_PART, -(-(request.limit - state.progress.measured) // len(jobs)))
        for job in list(jobs):
            if state.full:
                break
            if not _measure_part(request, job, share, state):
                jobs.remove(job)
    if not state.progress.measured:
        raise JobError(f"no cluster could be measured: {state.last_error or 'no model was named'}")
    return state.progress


class _State:
    """The content of the table so far, and the callback for progress."""

    def __init__(self, writer: TableWriter, progress: Progress, on_progress: Callable[[Progress], None]) -> None:
        self._writer, self.progress, self._on_progress = writer, progress, on_progress
        self.next_index: dict[tuple[str, int], int] = defaultdict(int)  # of a model at a batch size: after the last one tried
        self.known: set[str] = set()
        self.last_error = ""
        for row in writer.rows:
            self._count(row)

    @property
    def full(self) -> bool:
        return self.progress.measured >= self.progress.limit

    def add(self, row: Row) -> None:
        self._writer.append(row)
        self._count(row)
        self.progress.new += isinstance(row, MeasuredCluster)
        self._on_progress(self.progress)

    def _count(self, row: Row) -> None:
        key = row.model, row.batch
        self.next_index[key] = max(self.next_index[key], row.index + 1)
        if isinstance(row, MeasuredCluster):
            self.progress.measured += 1
            self.known.add(row.cluster.fingerprint)
        else:
            self.progress.failed[row.reason] += 1


def _models(request: CollectRequest) -> tuple[str, ...]:
    """Names of all models that the workloads' file has."""
    done = subprocess.run([request.python, str(_WORKER), str(request.workloads)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"{request.workloads}: {(done.stderr.strip().splitlines() or ['no models'])[-1]}")
    return tuple(done.stdout.split())


def _measure_part(request: CollectRequest, job: tuple[str, float], share: int, state: _State) -> bool:
    """Measure some clusters of a model at a batch size; whether it may have more."""
    target = min(state.progress.measured + share, state.progress.limit)
    state.progress.model = job[0]
    fruitless = 0
    while state.progress.measured < target:
        before = state.progress.measured
        with scratch_folder("dpro-search-clusters-") as scratch:
            process = _Process(request, job, scratch)
            try:
                exhausted = _converse(process, job, target, state)
            finally:
                process.end()
        if exhausted:
            return False
        fruitless = 0 if state.progress.measured > before else fruitless + 1
        if fruitless == _STARTS:
            return False
    return True


def _converse(process: _Process, job: tuple[str, float], target: int, state: _State) -> bool:
    """Let a process measure until there are `wanted` clusters, or it ends; whether its model has no further ones."""
    started_s = time.monotonic()
    first = process.receive(_READY_S)
    if "ready" not in first:
        state.last_error = first.get("ended", "no answer")
        return False
    batch = first["ready"]
    step = _node_times(process.scratch / "step", statistics.median)
    state.progress.spent_s["start"] += time.monotonic() - started_s
    process.send(str(state.next_index[job[0], batch]))
    skipped = 0
    while state.progress.measured < target:
        drawn = process.receive(_READY_S)
        if "ops" not in drawn:
            return "exhausted" in drawn
        cluster = _cluster(drawn)
        if cluster.fingerprint in state.known:
            skipped += 1
            if skipped == _SKIPS:
                return True
            process.send("skip")
            continue
        skipped = 0
        process.send("measure")
        answer = process.receive(_MEASURED_S)
        answered_s = time.monotonic()
        row = _row(answer, drawn, job[0], batch, step, process.scratch)
        for what, seconds in answer.get("spent", {}).items():
            state.progress.spent_s[what] += seconds
        state.progress.spent_s["read"] += time.monotonic() - answered_s
        state.add(row)
        if "ended" in answer:
            return False
        shutil.rmtree(process.scratch / str(row.index), ignore_errors=True)
    process.send("stop")
    return False


class _Process(JsonWorker):
    """Measures clusters of one model."""

    def __init__(self, request: CollectRequest, job: tuple[str, float], scratch: Path) -> None:
        self.scratch = scratch
        command = [request.python, str(_WORKER), str(request.workloads), job[0], str(job[1]), str(scratch)]
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


def _cluster(drawn: dict[str, Any], members: Sequence[_NodeTime] = (), in_step: Sequence[_NodeTime] = ()) -> Cluster:
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
        Cluster,
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
