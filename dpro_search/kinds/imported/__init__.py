"""Traces of any other job: what ran when on which stream is known, and nothing of how the job communicates."""

from __future__ import annotations

from dpro_search.collect.trace import Trace
from dpro_search.kinds._kind import Kind


class ImportedKind(Kind):
    """Whatever no other kind recognises."""

    title = "an imported trace"
    job_name = "dpro_search.kinds.imported.job:Imported"
    launcher_names = ("dpro_search.collect.launchers.torch_parallel:PYTORCH_MESH",)  # whose profiles any kind may recognise

    def recognises(self, trace: Trace) -> bool:
        return True


KIND = ImportedKind()
