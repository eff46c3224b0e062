"""Compiled XLA programs: what one device of a mesh runs in a step, as `jax.jit(step).lower(...).compile()` scheduled it."""

from __future__ import annotations

from pathlib import Path

from dpro_search.deploy.parts.part import JobFacts
from dpro_search.kinds._kind import DescribedKind
from dpro_search.kinds.xla.export import TARGET
from dpro_search.kinds.xla.program import XlaProgram, read_program


class XlaKind(DescribedKind[XlaProgram]):
    """Folders that `dpro-search capture --jax` writes, folders of ``--xla_dump_to``, and HLO texts."""

    title = "a compiled XLA program"
    targets = (TARGET,)
    job_name = "dpro_search.kinds.xla.job:XlaJob"
    source_type = XlaProgram
    reads_folders = True

    def read(self, path: Path) -> XlaProgram | None:
        return read_program(path)

    def facts(self, source: XlaProgram) -> JobFacts:
        return JobFacts(framework=source.framework, ranks=source.module.devices)


KIND = XlaKind()
