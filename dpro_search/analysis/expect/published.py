"""`comparable_runs`: published runs that are most like a job, by source, with their MFU (``published.toml``)."""

from __future__ import annotations

from dpro_search.analysis.expect.answer import ComparableRuns
from dpro_search.parallel.prepared import PreparedJob


def comparable_runs(prepared: PreparedJob) -> tuple[ComparableRuns, ...]:
    return ()
