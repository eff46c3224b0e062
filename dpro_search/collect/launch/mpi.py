"""Start a job's ranks with OpenMPI's mpirun, without ssh, on this machine or on shaped hosts: `run_mpi_job`.

On shaped hosts mpirun starts its daemons through a remote-shell agent of ours, which enters the host's namespace instead of
logging in; MPI's own messages and the job's keep to the hosts' subnet, and ranks of one host talk through its memory. Each rank is
run by a small shell script that gives it its folder, its core and its log. mpirun, daemons and ranks are each killed when the one
that started them ends, whatever ends it.

Open MPI (4.1) can sum in a hierarchy: within each host, among the hosts' first ranks, and back. Its component `coll/han` has two
all-reduces. The one that goes in segments ends in a segmentation fault where the sum takes the place of what is summed and is
larger than a segment, as Horovod's are; so that `hierarchy_env` selects the other, which takes three steps one after the other.
Sizes that are not to go in a hierarchy are sent to a component that has no all-reduce of this kind (`libnbc`), on which han gives
them back to the one that would have them without it (`tuned`, whose own rules decide how); named outright, `tuned` fails in the
same way.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from dpro_search.collect._files import open_private, scratch_folder
from dpro_search.collect.launch.netns import ShapedHosts
from dpro_search.collect.launch.ranks import JobSpec, end_process, hook_env, log_tail, require_tools, wait_for
from dpro_search.errors import JobError, MissingCapabilityError

_FAILED_RANK = re.compile(r"Process name: \[\[\d+,\d+\],(\d+)\]\s+Exit code:\s+(\d+)")
_SIGNALLED_RANK = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)")
_OTHERS_LEFT = "Horovod has been shut down"

# Ranks that share a core let each other run while they wait.
_SHARED = {"OMPI_MCA_mpi_yield_when_idle": "1"}

# $0 is the folder of the ranks' folders, $1 the cores, comma-separated or "-"; the rest is the training command.
_RANK_SCRIPT = r"""
rank=$OMPI_COMM_WORLD_RANK out=$0 cores=$1; shift
export DPRO_SEARCH_HOOK_RANK="$rank"
if [ "$cores" != - ]; then set -- taskset -c "$(echo "$cores" | cut -d, -f$((rank + 1)))" "$@"; fi
(umask 077; : >"$out/rank$rank/log")
exec setpriv --pdeathsig KILL "$@" >"$out/rank$rank/log" 2>&1
"""
_ALLREDUCE = 2  # Open MPI's numbers of its collectives, coll_base_functions.h
_OTHERS = {
    0: "all-gather",
    1: "all-gather of several sizes",
    6: "barrier",
    7: "broadcast",
    9: "gather",
    11: "reduce",
    15: "scatter",
}
_AMONG_HOSTS, _WORLD = 1, 2  # and of levels


def run_mpi_job(spec: JobSpec, out: Path, *, hosts: ShapedHosts | None = None, hook: Mapping[str, str] | None = None) -> None:
    """Run a job under mpirun to its end; output of rank r goes to ``out/rank{r}/log``, mpirun's own to ``out/mpirun.log``.

    Settings of MPI are the user's, as OMPI_MCA_* variables. Parameters are those of `ranks.run_ranks`.

    Raises
    ------
    JobError
        A rank failed or the job took longer than its spec allows; the last lines of its output are in the message.
    MissingCapabilityError
        OpenMPI is not installed.
    """
    if shutil.which("mpirun") is None:
        raise MissingCapabilityError("mpirun is missing: install OpenMPI (Debian: apt-get install openmpi-bin libopenmpi-dev)")
    out, cores = prepared(spec, out)
    env = {**os.environ, **(_SHARED if _share_cores(spec) else {}), **spec.env}
    if hook is not None:
        env |= hook_env(hook, out, env)
    passed = sorted({*spec.env, *_SHARED, "PYTHONPATH", *(name for name in env if name.startswith(("DPRO_SEARCH_", "HOROVOD_")))})
    exported = [word for name in passed if name in env for word in ("-x", name)]
    # Short, for MPI puts sockets under it.
    with scratch_folder("dps-mpi-") as work:
        command = [
            *("setpriv", "--pdeathsig", "KILL", "mpirun", "--allow-run-as-root", "--bind-to", "none"),
            *("--leave-session-attached", "-mca", "orte_tmpdir_base", str(work), "-np", str(spec.ranks)),
            *_network(hosts, work, spec),
            *exported,
            *("sh", "-c", _RANK_SCRIPT, str(out), cores, *spec.command),
        ]
        run_launcher(command, env, out, spec, _failure)


def prepared(spec: JobSpec, out: Path) -> tuple[Path, str]:
    """The folder with one for each rank, and the ranks' cores as the script that runs a rank takes them."""
    require_tools()
    out = out.resolve()
    for rank in range(spec.ranks):
        (out / f"rank{rank}").mkdir(parents=True, exist_ok=True)
    return out, ",".join(map(str, spec.cores)) if spec.cores else "-"


def run_launcher(
    command: Sequence[str], env: Mapping[str, str], out: Path, spec: JobSpec, failure: Callable[[Path, int], JobError]
) -> None:
    """Run what starts the ranks of an MPI job to its end, with its output in ``out/mpirun.log``.

    `failure` makes the error of a job that ended with a code other than 0, from `out` and that code.
    """
    with open_private(out / "mpirun.log") as log:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_for([process], out, spec, lambda _, code: failure(out, code))
    finally:
        end_process(process)


def _share_cores(spec: JobSpec) -> bool:
    """Whether ranks of one host share a core, which mpirun, that counts the machine's, does not see."""
    return spec.ranks_per_host > 1 and len(set(spec.cores[: spec.ranks_per_host])) < spec.ranks_per_host


def _network(hosts: ShapedHosts | None, work: Path, spec: JobSpec) -> list[str]:
    """Options of mpirun: where the ranks run and which networks they use."""
    if hosts is None:
        return ["-host", f"localhost:{spec.ranks}"]
    agent = written_agent(hosts, work, spec)
    memory = ",vader" if spec.ranks_per_host > 1 else ""
    return [
        *("-host", ",".join(f"{hosts.address(i)}:{spec.ranks_per_host}" for i in range(spec.hosts)), "-map-by", "slot"),
        *("-mca", "plm_rsh_agent", str(agent), "-mca", "plm_rsh_no_tree_spawn", "1"),
        *("-mca", "oob_tcp_if_include", hosts.subnet, "-mca", "btl_tcp_if_include", hosts.subnet),
        *("-mca", "btl", f"tcp{memory},self", "-mca", "pml", "ob1"),
    ]


def written_agent(hosts: ShapedHosts, work: Path, spec: JobSpec) -> Path:
    """The remote-shell agent of the hosts, as a file."""
    agent = work / "agent"
    agent.write_text(agent_script([(hosts.address(i), hosts.command(i, ())) for i in range(spec.hosts)]))
    agent.chmod(0o700)
    return agent


def agent_script(prefixes: Sequence[tuple[str, Sequence[str]]]) -> str:
    """A shell script that is called like ``ssh [-x] ADDRESS COMMAND...`` and runs the command on that host."""
    cases = [f'{address}) exec setpriv --pdeathsig KILL {shlex.join(prefix)} sh -c "$*" ;;' for address, prefix in prefixes]
    head = ["#!/bin/sh", '[ "$1" != -x ] || shift', "host=$1; shift", 'case "$host" in']
    return "\n".join([*head, *cases, "esac", 'echo "no host $host" >&2; exit 255', ""])


def _failure(out: Path, code: int) -> JobError:
    """The error that mpirun reports about a failed job: a rank that failed, with its last lines.

    mpirun names the first that ended; where that one only reports that another left Horovod, the other is to blame.
    """
    text = (out / "mpirun.log").read_text(errors="replace")
    match = _FAILED_RANK.search(text) or _SIGNALLED_RANK.search(text)
    if match is None:
        return JobError(f"mpirun ended with code {code}: {log_tail(out / 'mpirun.log')}")
    logs = {number: out / f"rank{number}" / "log" for number in range(len(list(out.glob("rank*"))))}
    first, left = int(match[1]), [number for number, log in logs.items() if not _says_others_left(log)]
    if left and first not in left:
        return JobError(f"rank {left[0]} left the job: {log_tail(logs[left[0]])}")
    sign = "" if match.re is _FAILED_RANK else "-"
    return JobError(f"rank {first} ended with code {sign}{match[2]}: {log_tail(logs[first])}")


def _says_others_left(log: Path) -> bool:
    return not log.is_file() or _OTHERS_LEFT in log.read_text(errors="replace")


def among_hosts(hosts: int) -> Literal["recursive-doubling", "ring"]:
    """How the hosts' first ranks are to reduce: two by one exchange (a ring of two may be half-duplex), more in a ring."""
    return "recursive-doubling" if hosts == 2 else "ring"


def hierarchy_env(rules: str | Path) -> dict[str, str]:
    """Variables of all ranks that have `hierarchy_rules`, which lie at a path, followed."""
    return {
        "OMPI_MCA_coll_han_priority": "100",
        "OMPI_MCA_coll_han_use_simple_allreduce": "1",
        "OMPI_MCA_coll_han_use_dynamic_file_rules": "1",
        "OMPI_MCA_coll_han_dynamic_rules_filename": str(rules),
        "OMPI_MCA_coll_han_max_dynamic_errors": "0",  # it would report that it gives back what it is to give back
    }


def hierarchy_rules(ranges: Sequence[tuple[int, bool]]) -> bytes:
    """Open MPI's file of rules for `coll/han`.

    Parameters
    ----------
    ranges
        From how many bytes on all-reduces are in a hierarchy or not, from 0 on.
    """
    lines = [
        f"{1 + len(_OTHERS)}  # collectives",
        f"{_ALLREDUCE}  # all-reduce",
        "2  # levels",
        *_level(_AMONG_HOSTS, "among hosts", [(0, "tuned")]),
        *_level(_WORLD, "all ranks", [(start, "han" if chosen else "libnbc") for start, chosen in ranges]),
    ]
    for number, name in _OTHERS.items():
        lines += [f"{number}  # {name}, as ever", "1  # level", *_level(_WORLD, "all ranks", [(0, "libnbc")])]
    return "".join(f"{line}\n" for line in lines).encode()


def _level(number: int, name: str, rules: Sequence[tuple[int, str]]) -> list[str]:
    return [
        f"{number}  # {name}",
        "1  # number of ranks",
        "1  # or more",
        f"{len(rules)}  # ranges: from how many bytes, and whose",
        *(f"{start} {component}" for start, component in rules),
    ]
