"""The checks of `dpro-search doctor`; none of them raises."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dpro_search.cli import printing

_PACKAGES = ("numpy", "numba", "networkx", "scikit-learn", "xgboost-cpu", "optuna", "msgspec", "typer", "rich", "scipy", "protobuf")
_INSTEAD = {"xgboost-cpu": "xgboost"}  # other distributions of the same library
_FRAMEWORKS = ("tensorflow", "torch", "mxnet")
_REPORT = {
    "tensorflow": "import tensorflow as tf, horovod, horovod.tensorflow as hvd; "
    "print('TensorFlow', tf.__version__, '+ Horovod', horovod.__version__, '(gloo)' if hvd.gloo_built() else '(no gloo)', "
    "'(mpi)' if hvd.mpi_built() else '(no mpi)')",
    "torch": "import torch, torch.distributed as dist; "
    "print('PyTorch', torch.__version__, '(gloo)' if dist.is_gloo_available() else '(no gloo)')",
    "mxnet": "import importlib.util as u, mxnet as mx, horovod, horovod.mxnet as hvd; "
    "print('MXNet', mx.__version__, '+ Horovod', horovod.__version__, '(mpi)' if hvd.mpi_built() else '(no mpi)', "
    "'+ BytePS' if u.find_spec('byteps') else '(no BytePS: build it there to record BytePS jobs)')",
}
_EXTRAS = {  # optional packages: the extra that installs them, and their use
    "pyarrow": ("parquet", "import StragglerAnalysis traces"),
    "psycopg": ("postgresql", "run --storage postgresql://"),
    "ray": ("ray", "run --engine ray"),
}
_REPORT_TIMEOUT_S = 120
_HOST_TOOLS = ("ip", "tc", "unshare", "mount", "taskset", "setpriv")
_MIN_FREE_BYTES = 2 * 2**30
_MOST_LOAD = 0.2  # of the cores
_MAX_CLOCK_READ_NS = 1000.0


@dataclass(frozen=True, kw_only=True)
class Check:
    """One finding. `needed`: every verb fails without it, rather than some."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    needed: bool = False


def check_machine() -> Iterator[Check]:
    """All that does not depend on a trace."""
    yield _python()
    yield _packages()
    for framework in _FRAMEWORKS:
        yield _framework(framework)
    yield _mpi()
    for name, (extra, use) in _EXTRAS.items():
        yield _extra(name, extra, use)
    yield _shaped_hosts()
    yield _cores()
    yield _load()
    yield _disk()
    yield _clock()


def _python() -> Check:
    return Check(
        name="Python",
        ok=sys.version_info >= (3, 11),
        detail=f"{platform.python_version()} ({sys.executable})",
        fix="install Python 3.11 or later",
        needed=True,
    )


def _packages() -> Check:
    present, missing = [], []
    for name in _PACKAGES:
        installed = _installed(name) or _installed(_INSTEAD.get(name, name))
        if installed:
            present.append(installed)
        else:
            missing.append(name)
    detail = f"missing: {', '.join(missing)}" if missing else ", ".join(present)
    return Check(name="packages", ok=not missing, detail=detail, fix=f"pip install {' '.join(missing)}", needed=True)


def _installed(name: str) -> str | None:
    """Name and version of an installed distribution."""
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return None


def _framework(framework: str) -> Check:
    root = Path(os.environ.get("DPRO_SEARCH_ENVS") or Path.home() / ".cache" / "dpro-search" / "envs")
    interpreter = root / framework / "bin" / "python"
    fix = f"scripts/make_env.sh {framework} (to record and to validate; not for replay and search)"
    if not interpreter.is_file():
        return Check(name=framework, ok=False, detail=f"no environment at {interpreter.parent.parent}", fix=fix)
    try:
        done = subprocess.run(
            [interpreter, "-c", _REPORT[framework]],
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            capture_output=True,
            text=True,
            timeout=_REPORT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(name=framework, ok=False, detail=f"{interpreter}: {error}", fix=f"remove {root / framework}, then {fix}")
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or ["no answer"]
    return Check(
        name=framework,
        ok=done.returncode == 0,
        detail=f"{lines[-1]} ({interpreter})",
        fix=f"remove {root / framework}, then {fix}",
    )


def _mpi() -> Check:
    mpirun = shutil.which("mpirun")
    return Check(
        name="MPI",
        ok=mpirun is not None,
        detail=mpirun or "no mpirun",
        fix="install OpenMPI (Debian: apt-get install openmpi-bin libopenmpi-dev), to record Horovod on MPI",
    )


def _extra(name: str, extra: str, use: str) -> Check:
    try:
        version = f"{importlib.metadata.version(name)} (for {use})"
    except importlib.metadata.PackageNotFoundError:
        return Check(name=name, ok=False, detail=f"not installed (only for {use})", fix=f"pip install 'dpro-search[{extra}]'")
    return Check(name=name, ok=True, detail=version)


def missing_for_shaped_hosts() -> list[str]:
    """The tools that are missing for hosts with links of their own."""
    missing = [tool for tool in _HOST_TOOLS if shutil.which(tool) is None]
    return ([f"no {', '.join(missing)}"] if missing else []) + ([] if os.geteuid() == 0 else ["not root"])


def _shaped_hosts() -> Check:
    problems = missing_for_shaped_hosts()
    return Check(
        name="shaped hosts",
        ok=not problems,
        detail="; ".join(problems) or f"root, {', '.join(_HOST_TOOLS)}",
        fix="run as root with iproute2 and util-linux installed (for --hosts and --rate)",
    )


def _cores() -> Check:
    cores = len(os.sched_getaffinity(0))
    return Check(name="cores", ok=cores >= 2, detail=f"{cores} usable", fix="allow this process one core for each rank to record")


def _load() -> Check:
    busy, cores = os.getloadavg()[0], os.cpu_count() or 1
    return Check(
        name="load",
        ok=busy <= _MOST_LOAD * cores,
        detail=f"{busy:.1f} processes ran at a time in the last minute, on {cores} cores",
        fix="record and validate when nothing else runs: other work makes steps longer",
    )


def _disk() -> Check:
    free_bytes = shutil.disk_usage(Path.cwd()).free
    return Check(
        name="disk",
        ok=free_bytes >= _MIN_FREE_BYTES,
        detail=f"{printing.size(free_bytes)} free in {Path.cwd()}",
        fix=f"free {printing.size(_MIN_FREE_BYTES)} for traces, or work in another folder",
    )


def _clock() -> Check:
    reads = 10_000
    start_ns = time.perf_counter_ns()
    for _ in range(reads):
        time.time_ns()
    read_ns = (time.perf_counter_ns() - start_ns) / reads
    source_file = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    source = source_file.read_text().strip() if source_file.is_file() else "unknown source"
    return Check(
        name="clock",
        ok=read_ns < _MAX_CLOCK_READ_NS,
        detail=f"{source}, {read_ns:.0f} ns to read",
        fix="a slow clock distorts short ops; choose tsc or kvm-clock as the kernel's clocksource",
    )
