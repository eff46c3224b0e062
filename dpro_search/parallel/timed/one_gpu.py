"""`on_one_gpu`: a described job of GPUs as one rank of it can be timed on the GPU of this machine."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from dpro_search.collect.launch.ranks import JobSpec, require_framework
from dpro_search.collect.launchers.torch import PYTORCH_FSDP
from dpro_search.deploy.jobs import RecordedJob
from dpro_search.deploy.parts.part import JobFacts, Target
from dpro_search.errors import InputError, MissingCapabilityError

TARGET = "pytorch"  # what a script follows here
_NAME = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
_SECONDS = 120.0  # that importing PyTorch may take


def on_one_gpu(
    facts: JobFacts, targets: Sequence[Target], command: Sequence[str], name_of: Callable[[str], str | None]
) -> RecordedJob:
    """One process on this machine's GPU, for timing blocks.

    Parameters
    ----------
    name_of
        Finds the name of the GPU that an interpreter's PyTorch sees (`gpu_of`); None: it sees none.

    Raises
    ------
    InputError
        No command was given.
    MissingCapabilityError
        PyTorch is missing, or sees no GPU.
    """
    if not command:
        raise InputError("the job was described, so that its command is not known: name it with --command 'python train.py'")
    spec = JobSpec(command=tuple(command), ranks=1)
    if name_of(spec.interpreter) is None:
        raise MissingCapabilityError(
            f"{spec.interpreter}: its PyTorch sees no GPU here; blocks of a job on GPUs are timed on a machine that has one of them"
        )
    return RecordedJob(
        launcher=PYTORCH_FSDP,
        targets=tuple(target for target in targets if target.name == TARGET),
        spec=spec,
        facts=replace(facts, framework=None),
        rate_bps=None,
        shaped=False,
        described=True,
    )


@cache
def gpu_of(interpreter: str) -> str | None:
    """Name of the GPU that the interpreter's PyTorch sees; None: none."""
    require_framework(interpreter, ("torch",), "torch")
    try:
        done = subprocess.run([interpreter, "-c", _NAME], capture_output=True, text=True, check=False, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    lines = done.stdout.splitlines()
    return lines[-1].strip() or None if lines else None
