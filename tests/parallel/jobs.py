"""Descriptions of parallel jobs for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dpro_search.kinds import JobInScenario, job_of, load_source
from dpro_search.parallel.job import ParallelJob
from dpro_search.parallel.prepared import PreparedJob

JOB = """\
model = "llama3-8b"
cluster = "2xhgx-h100"
global_batch = 64
sequence = 4096
"""


def text(runs: str | None = "tp = 2", **values: Any) -> str:
    """A description with other values, and a table of how it runs; None: without one."""
    lines = JOB.splitlines()
    for name, value in values.items():
        lines = [line for line in lines if not line.startswith(f"{name} ")]
        lines.append(f"{name} = {json.dumps(value) if isinstance(value, str | bool) else value}")
    return "\n".join(lines + ([] if runs is None else ["[runs]", runs])) + "\n"


def prepared(here: JobInScenario) -> PreparedJob:
    """What a described job prepares in a scenario for all its plans."""
    assert isinstance(here.job, ParallelJob)
    return here.job.prepared(here.scenario)


def job(folder: Path, runs: str | None = "tp = 2", **values: Any) -> Any:
    """The job of a description in a folder."""
    path = folder / "job.toml"
    path.write_text(text(runs, **values))
    return job_of(load_source(path))
