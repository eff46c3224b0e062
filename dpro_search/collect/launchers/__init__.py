"""The launchers of all kinds of jobs that can be recorded; ``_base.py`` says what a launcher is."""

from __future__ import annotations

from pathlib import Path

from dpro_search.collect.assembly import raw_format
from dpro_search.collect.launchers._base import Launcher as Launcher
from dpro_search.collect.launchers._base import Run as Run
from dpro_search.collect.launchers.horovod import MXNET_HOROVOD as MXNET_HOROVOD
from dpro_search.collect.launchers.horovod import TENSORFLOW_HOROVOD as TENSORFLOW_HOROVOD
from dpro_search.collect.launchers.ps_lite import MXNET_BYTEPS as MXNET_BYTEPS
from dpro_search.collect.launchers.ps_lite import MXNET_KVSTORE as MXNET_KVSTORE
from dpro_search.collect.launchers.torch import PYTORCH_DDP as PYTORCH_DDP
from dpro_search.collect.launchers.torch import PYTORCH_FSDP as PYTORCH_FSDP
from dpro_search.collect.trace import Trace
from dpro_search.errors import InputError

LAUNCHERS: tuple[Launcher, ...] = (
    TENSORFLOW_HOROVOD,
    PYTORCH_DDP,
    PYTORCH_FSDP,
    MXNET_KVSTORE,
    MXNET_BYTEPS,
    MXNET_HOROVOD,
)


def launcher_for(framework: str, comm: str) -> Launcher:
    """The launcher of a framework's jobs with a way to communicate; raises `InputError` if there is none."""
    for launcher in LAUNCHERS:
        if (launcher.framework, launcher.comm) == (framework, comm):
            return launcher
    known = ", ".join(f"--framework {launcher.framework} --comm {launcher.comm}" for launcher in LAUNCHERS)
    raise InputError(f"--framework {framework} --comm {comm}: cannot be recorded; known are {known}")


def assemble_raw(raw: Path) -> Trace:
    """Build the trace of a job from the raw folder that its launcher kept.

    Raises
    ------
    InputError
        It is no raw folder of a known recorder, a rank is missing, or the job held nothing to record.
    TraceFormatError
        A file is damaged, or contradicts another.
    """
    found = raw_format(raw)
    for launcher in LAUNCHERS:
        if launcher.format == found:
            return launcher.assemble(raw)
    raise InputError(f"{raw}/job.json: raw files of '{found}'; known are {', '.join(each.format for each in LAUNCHERS)}")
