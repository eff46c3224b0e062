"""Compiled XLA programs: what one device of a mesh runs in a step, as `jax.jit(step).lower(...).compile()` scheduled it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dpro_search.deploy.parts.part import CompiledStep, JobFacts
from dpro_search.errors import InputError
from dpro_search.kinds._job import JobInScenario
from dpro_search.kinds._kind import DescribedKind
from dpro_search.kinds.xla.export import TARGET
from dpro_search.kinds.xla.program import XlaProgram, read_program

if TYPE_CHECKING:
    from dpro_search.deploy.jobs import RecordedJob


class XlaKind(DescribedKind[XlaProgram]):
    """Folders that `dpro-search capture --jax` writes, folders of ``--xla_dump_to``, and HLO texts."""

    title = "a compiled XLA program"
    targets = (TARGET,)
    job_name = "dpro_search.kinds.xla.job:XlaJob"
    source_type = XlaProgram
    reads_folders = True

    def read(self, path: Path) -> XlaProgram | None:
        return read_program(path)

    def real_job(
        self, here: JobInScenario, source: XlaProgram, run: Path, command: Sequence[str], *, paced: bool = False
    ) -> RecordedJob:
        if paced:
            raise InputError("--paced: only of parallel jobs; a compiled program computes what it computes")
        from dpro_search.kinds.xla.real_runs import runnable

        return runnable(source, self.facts(source), self.targets, tuple(command))

    def facts(self, source: XlaProgram) -> JobFacts:
        facts = source.facts
        compiled = CompiledStep(mesh=facts.mesh, declared=facts.choices, chosen=facts.chosen, platform=facts.platform)
        return JobFacts(framework=source.framework, ranks=source.module.devices, compiled=compiled)


KIND = XlaKind()
