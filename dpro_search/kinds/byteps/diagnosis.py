"""Facts and findings of `diagnose` for a job with BytePS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpro_search.kinds import _store_diagnosis
from dpro_search.kinds._job import Table
from dpro_search.kinds._store_diagnosis import Rows, knob_finding, other_placement, spread_finding
from dpro_search.kinds._stores import StoreJob
from dpro_search.quantities import percent_text, size_text
from dpro_search.replay.timeline import Timeline
from dpro_search.space.plan import Plan
from dpro_search.space.servers.byteps_job import BytepsJob

_ITERATIONS = 16  # of a replay that answers one of many questions
_VARIABLES = {"servers": "DMLC_NUM_SERVER", "partition_bytes": "BYTEPS_PARTITION_BYTES"}


def diagnosis(job: StoreJob[BytepsJob]) -> dict[str, Any]:
    """The facts of `Job.diagnose`; also ``servers``."""
    processes = job.unplanned_job
    servers = _server_facts(processes)

    def kind_facts(timeline: Timeline, plan_gains: Rows) -> dict[str, Any]:
        return {
            "ranks": [{"rank": rank, "host": host} for rank, host in enumerate(job.hosts)],
            "servers": servers,
            "findings": _findings(processes, servers, plan_gains),
        }

    return _store_diagnosis.diagnosis(job, kind_facts, _ITERATIONS)


def server_table(facts: Mapping[str, Any]) -> Table:
    """The table of what each server sums."""
    rows = [
        (str(row["server"]), str(row["partitions"]), size_text(row["bytes"]), percent_text(row["share_pct"]))
        for row in facts["servers"]
    ]
    return Table(title="what the servers sum", columns=("server", "partitions", "sums", "share"), rows=rows)


def _server_facts(job: BytepsJob) -> Rows:
    """Load of each server, by the partitions that are hashed to it."""
    parts = [part for tensor in range(len(job.tensor_bytes)) for part in job.parts(tensor)]
    total = float(job.tensor_bytes.sum())
    rows = []
    for server in range(len(job.server_core)):
        sizes = [part.size_bytes for part in parts if part.server == server]
        rows.append({"server": server, "partitions": len(sizes), "bytes": sum(sizes), "share_pct": sum(sizes) / total * 100})
    return rows


def questions(job: StoreJob[BytepsJob]) -> dict[str, Plan]:
    """Other values of the knobs, by what they are called."""
    processes = job.unplanned_job
    servers, sizes = len(processes.server_core) + 1, (processes.partition_bytes // 4, processes.partition_bytes * 4)
    questions = {**other_placement(job), f"servers={servers}": Plan(servers=servers)}
    return questions | {f"partition_bytes={size}": Plan.of(partition_bytes=size) for size in sizes if size}


def _findings(job: BytepsJob, servers: Rows, plan_gains: Rows) -> list[str]:
    """Sentences with numbers and the knob to turn."""
    sentences = knob_finding(plan_gains, _variable)
    sentences += spread_finding(servers, "sums", "smaller BYTEPS_PARTITION_BYTES or another BYTEPS_KEY_HASH_FN")
    if job.worker_polling > 0.05:
        sentences.append(
            f"Looking for work takes {job.worker_polling * 100:.0f} % of each worker's core: give BytePS a core of its own."
        )
    return sentences


def _variable(change: str) -> str:
    key, _, value = change.partition("=")
    return f"{_VARIABLES[key]}={value}"
