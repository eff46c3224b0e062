"""Start a job's ranks with MPICH's Hydra, without ssh, on this machine or on shaped hosts: `run_mpich_job`.

As `mpi.run_mpi_job` does with Open MPI: daemons are started by an agent that enters a host's namespace, messages keep to the hosts'
subnet. Python ranks import mpi4py for MPICH: its wheels have a module for each library, which looks for ``libmpi.so.12``, a name
that not every distribution gives MPICH.
"""

from __future__ import annotations

import ctypes.util
import os
import re
import shutil
from pathlib import Path

from dpro_search.collect._files import scratch_folder
from dpro_search.collect.launch.mpi import prepared, run_launcher, written_agent
from dpro_search.collect.launch.netns import ShapedHosts
from dpro_search.collect.launch.ranks import JobSpec, log_tail
from dpro_search.errors import JobError, MissingCapabilityError

MPIEXEC = "mpiexec.hydra"
_NAMES = ("libmpich.so.12", "libmpi.so.12")
_FOLDERS = ("/usr/lib64", "/usr/lib", "/usr/local/lib", "/opt/mpich/lib")
_FAILED_RANK = re.compile(r"^dpro-search: rank (\d+) ended with (\d+)$", re.MULTILINE)

# $0 is the folder of the ranks' folders, $1 the cores, comma-separated or "-"; the rest is the training command.
_RANK_SCRIPT = r"""
rank=$PMI_RANK out=$0 cores=$1; shift
export DPRO_SEARCH_HOOK_RANK="$rank"
if [ "$cores" != - ]; then set -- taskset -c "$(echo "$cores" | cut -d, -f$((rank + 1)))" "$@"; fi
(umask 077; : >"$out/rank$rank/log")
setpriv --pdeathsig KILL "$@" >"$out/rank$rank/log" 2>&1
code=$?
if [ $code != 0 ]; then echo "dpro-search: rank $rank ended with $code"; fi
exit $code
"""


def run_mpich_job(spec: JobSpec, out: Path, *, hosts: ShapedHosts | None = None) -> None:
    """Run a job under Hydra to its end; output of rank r goes to ``out/rank{r}/log``, Hydra's own to ``out/mpirun.log``.

    Settings of MPI are the user's, as MPIR_CVAR_* and UCX_* variables. Parameters are those of `ranks.run_ranks`.

    Raises
    ------
    JobError
        A rank failed or the job took longer than its spec allows; the last lines of its output are in the message.
    MissingCapabilityError
        MPICH is not installed.
    """
    if shutil.which(MPIEXEC) is None:
        raise MissingCapabilityError(f"{MPIEXEC} is missing: install MPICH (Debian: apt-get install mpich)")
    out, cores = prepared(spec, out)
    # In the order of their reading: the library first, for what starts the job is Open MPI's where both are installed.
    with scratch_folder("dps-mpich-") as work:
        (work / "libmpi.so.12").symlink_to(_library())
        env = {**os.environ, **_network_env(hosts, spec), **spec.env, "MPI4PY_MPIABI": "mpich"}
        env["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in (str(work), env.get("LD_LIBRARY_PATH", "")) if path)
        command = [
            *("setpriv", "--pdeathsig", "KILL", MPIEXEC, "-n", str(spec.ranks), "-genvall"),
            *_placed(hosts, work, spec),
            *("sh", "-c", _RANK_SCRIPT, str(out), cores, *spec.command),
        ]
        run_launcher(command, env, out, spec, _failure)


def _placed(hosts: ShapedHosts | None, work: Path, spec: JobSpec) -> list[str]:
    """Options of Hydra: where the ranks run."""
    if hosts is None:
        return ["-launcher", "fork"]
    agent = written_agent(hosts, work, spec)
    listed = ",".join(f"{hosts.address(i)}:{spec.ranks_per_host}" for i in range(spec.hosts))
    return ["-launcher", "ssh", "-launcher-exec", str(agent), "-hosts", listed, "-localhost", hosts.bridge_address]


def _network_env(hosts: ShapedHosts | None, spec: JobSpec) -> dict[str, str]:
    """Variables that keep MPICH to TCP on the hosts' links, of either of its devices (UCX, libfabric)."""
    if hosts is None:
        return {}
    memory = ",sysv,posix" if spec.ranks_per_host > 1 else ""
    return {
        "UCX_TLS": f"tcp,self{memory}",
        "UCX_NET_DEVICES": "eth0",
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": "eth0",
        "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",  # ranks of several hosts share a core, which MPICH does not see
    }


def _library() -> str:
    """The path of MPICH's library; raises `MissingCapabilityError` if none exists."""
    multiarch = [str(path) for path in Path("/usr/lib").glob("*-linux-gnu*")]
    for name in _NAMES:
        for folder in (*multiarch, *_FOLDERS):
            if (path := Path(folder) / name).exists():
                return str(path)
    library = ctypes.util.find_library("mpich")
    if library is None:
        raise MissingCapabilityError("MPICH's library is missing: install MPICH (Debian: apt-get install mpich)")
    return library


def _failure(out: Path, code: int) -> JobError:
    text = (out / "mpirun.log").read_text(errors="replace")
    match = _FAILED_RANK.search(text)
    if match is None:
        return JobError(f"{MPIEXEC} ended with code {code}: {log_tail(out / 'mpirun.log')}")
    return JobError(f"rank {match[1]} ended with code {match[2]}: {log_tail(out / f'rank{match[1]}' / 'log')}")
