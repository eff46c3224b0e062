"""`real_job`: a described job as it can run here, on hosts and links like those of its cluster; `on_one_gpu`: one rank of it.

Ranks are processes, one on each device of a cluster of CPU cores; they share the cores of this machine in turn. Where a core would
have more than `MOST_ON_A_CORE` ranks, times would be those of this machine's scheduler: such a job can only be paced, that is, its
ranks wait in place of computing.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from dpro_search.collect.launch.ranks import JobSpec, default_cores, require_framework, this_machines_cores
from dpro_search.collect.launchers.torch import PYTORCH_FSDP
from dpro_search.deploy.jobs import Paced, RecordedJob
from dpro_search.deploy.parts.part import JobFacts, Target
from dpro_search.errors import InputError, MissingCapabilityError
from dpro_search.parallel.prepared import PreparedJob
from dpro_search.parallel.timed.recording import paced_times
from dpro_search.parallel.timed.split import paced_split
from dpro_search.space.cluster import spec_on

MOST_ON_A_CORE = 2
MOST_PACED_ON_A_CORE = 8
TARGET = "pytorch"  # what a script follows here
_NAME = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
_SECONDS = 120.0  # that importing PyTorch may take


def real_job(
    job: PreparedJob, facts: JobFacts, targets: Sequence[Target], command: Sequence[str], *, paced: bool = False
) -> RecordedJob:
    """The job, to be started by a command that follows exported plans.

    Raises
    ------
    InputError
        No command was given, the cluster has other devices than this machine, or more ranks than its cores can carry.
    """
    startable_job = startable(job, facts, targets, command)
    description, ranks, cores = job.description, startable_job.spec.ranks, len(this_machines_cores())
    most = cores * (MOST_PACED_ON_A_CORE if paced else MOST_ON_A_CORE)
    if ranks > most:
        remedy = "describe a smaller cluster" if paced else f"--paced runs up to {cores * MOST_PACED_ON_A_CORE}"
        raise InputError(f"{ranks} ranks cannot run on {cores} cores: at most {most}; {remedy}")
    if not paced and ranks > cores != description.cores:
        raise InputError(
            f"{ranks} ranks share {cores} cores here, which the predictions do not know: write 'cores = {cores}' into the job's "
            "file and search again, or use --paced"
        )
    if not paced:
        return startable_job
    if description.cores is not None:
        raise InputError("--paced: ranks wait in place of computing, and share no cores: leave 'cores' out of the job's file")
    if description.times is None:
        raise InputError("--paced needs recorded times: 'times' in the job's file, written by 'dpro-search fit --collect parallel'")
    paced_ranks = Paced(
        times=lambda plan: paced_times(job, plan), split=lambda plan, folder, warmup: paced_split(job, plan, folder, warmup)
    )
    return replace(startable_job, spec=replace(startable_job.spec, cores=()), paced=paced_ranks)


def startable(job: PreparedJob, facts: JobFacts, targets: Sequence[Target], command: Sequence[str]) -> RecordedJob:
    """The job with hosts and links like those of its cluster, however many ranks these have; errors are those of `real_job`."""
    if not command:
        raise InputError("the job was described, so that its command is not known: write it after '--', like '-- python train.py'")
    description = job.description
    cluster, ranks = description.cluster, description.fixed.devices
    device = cluster.groups[0].host.device
    if device.kind != "cpu":
        raise InputError(
            f"{cluster.name} has devices of the kind '{device.name}', which are not here: its plans cannot be measured here. "
            "Export one with 'dpro-search export' and time it there, or describe the job on cores, like "
            f"{ranks}xtestbed@1gbit"
        )
    spec = spec_on(cluster, ranks).spec
    per_host = spec.ranks_per_host
    if per_host is None:
        raise InputError(f"{cluster.name} has hosts with different numbers of ranks: no such job can be started here")
    shaped = per_host < ranks
    return RecordedJob(
        launcher=PYTORCH_FSDP,
        targets=tuple(target for target in targets if target.name == TARGET),
        spec=JobSpec(command=tuple(command), ranks=ranks, ranks_per_host=per_host if shaped else 1, cores=default_cores(ranks)),
        facts=replace(facts, framework=None, workload=job.workload),
        rate_bps=spec.rate_bps,
        shaped=shaped,
        described=True,
        precision=description.precision,
    )


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
