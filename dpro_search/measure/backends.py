"""The backends whose all-reduces can be measured, and how a job of each is started on shaped hosts."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dpro_search._text import listed
from dpro_search.collect.launch.mpi import among_hosts, hierarchy_env, hierarchy_rules, run_mpi_job
from dpro_search.collect.launch.mpich import MPIEXEC, run_mpich_job
from dpro_search.collect.launch.netns import ShapedHosts
from dpro_search.collect.launch.parameter_servers import ServerSpec, byteps_servers, run_with_servers
from dpro_search.collect.launch.ranks import JobSpec, default_cores, environment_python, require_framework
from dpro_search.collect.launch.torch_ranks import run_torch_ranks
from dpro_search.collect.tables.all_reduces import ALGORITHMS_OF_LIBRARY, HIERARCHY, LIBRARIES, all_reduces_over
from dpro_search.errors import InputError, MissingCapabilityError
from dpro_search.runtime import ALL_REDUCE
from dpro_search.runtime.all_reduce.dpro_search_all_reduce.library import OPEN_MPI

_WORKER = ALL_REDUCE / "dpro_search_comm_worker.py"
_PACKAGES = {
    "mpirun": "install OpenMPI (Debian: apt-get install openmpi-bin libopenmpi-dev)",
    MPIEXEC: "install MPICH (Debian: apt-get install mpich)",
    "setpriv": "install util-linux",
}
Launch = Callable[[JobSpec, Path, ShapedHosts], None]


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A backend."""

    name: str
    modules: tuple[str, ...] = ()  # What its interpreter must import.
    environment: str = ""  # Of `scripts/make_env.sh`, that has them; empty: any Python will do.
    tool: str = "setpriv"  # Program that starts its ranks.
    algorithms: tuple[str, ...]  # That it can be set to use.
    meets: bool = False  # Whether ranks meet before each timed call.
    polls: bool = False  # Whether ranks use a processor while they wait, so that its time carries no information.
    has_servers: bool = False  # Whether it has parameter servers, as many as ranks, on hosts of their own.
    env: Mapping[str, str] = field(default_factory=dict)  # Variables of its ranks.
    launch: Launch

    def servers(self, ranks: int) -> int:
        """Servers beside so many ranks."""
        return ranks if self.has_servers else 0

    def interpreter(self, given: str | None) -> str:
        """Python that has the backend: the one given, else that of its environment.

        Raises `MissingCapabilityError` if it is missing or has it not, or what starts the backend's ranks is.
        """
        if shutil.which(self.tool) is None:
            raise MissingCapabilityError(f"{self.name}: {self.tool} is missing; {_PACKAGES[self.tool]}")
        if not self.modules:
            return sys.executable
        python = given or (str(environment_python(self.environment)) if self.environment else sys.executable)
        if not Path(python).is_file():
            raise MissingCapabilityError(
                f"{self.name}: no interpreter {python}; 'scripts/make_env.sh {self.environment}' builds it; or name one by --python"
            )
        require_framework(python, self.modules, self.environment)
        return python

    def run(self, python: str, layout: tuple[int, int], hosts: ShapedHosts, folder: Path, timeout_s: float) -> None:
        """Run the ranks, which follow the orders in `folder`, to their end; `layout`: how many, and how many on a host.

        Raises `JobError` if one failed or they took longer than `timeout_s`.
        """
        ranks, ranks_per_host = layout
        spec = JobSpec(
            command=(python, str(_WORKER), self.name, str(folder)),
            ranks=ranks,
            ranks_per_host=ranks_per_host,
            cores=default_cores(ranks, ranks_per_host),
            env={"OMP_NUM_THREADS": "1", **self.env},
            timeout_s=timeout_s,
        )
        self.launch(spec, folder, hosts)


def _launch_gloo(spec: JobSpec, folder: Path, hosts: ShapedHosts) -> None:
    run_torch_ranks(spec, folder, hosts=hosts)


def _launch_mpi(spec: JobSpec, folder: Path, hosts: ShapedHosts) -> None:
    if spec.ranks_per_host > 1:
        rules = folder / "hierarchy.rules"
        rules.write_bytes(hierarchy_rules([(0, True)]))
        spec = replace(spec, env={**spec.env, **hierarchy_env(rules), "DPRO_SEARCH_AMONG_HOSTS": among_hosts(spec.hosts)})
    run_mpi_job(spec, folder, hosts=hosts)


def _launch_mpich(spec: JobSpec, folder: Path, hosts: ShapedHosts) -> None:
    run_mpich_job(spec, folder, hosts=hosts)


def _launch_kvstore(spec: JobSpec, folder: Path, hosts: ShapedHosts) -> None:
    run_with_servers(spec, folder, ServerSpec(count=spec.ranks), hosts=hosts)


def _launch_byteps(spec: JobSpec, folder: Path, hosts: ShapedHosts) -> None:
    run_with_servers(spec, folder, byteps_servers(spec.ranks), hosts=hosts)


_FORCED = {
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    # Ranks that share a core let each other run while they wait, as mpirun has them do when it knows that they share it.
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
_MPI = (*OPEN_MPI, HIERARCHY)


def _over_mpi4py(backend: str) -> tuple[str, ...]:
    """All-reduces of `dpro_search_all_reduce`, and beside them, in the same job, the MPI library's own."""
    return (*all_reduces_over(backend), *(f"{LIBRARIES[backend]}{name}" for name in ALGORITHMS_OF_LIBRARY[backend]))


_SEVERAL = ("mpi", *LIBRARIES)  # that can have several ranks on a host
BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(name="gloo", modules=("torch",), environment="torch", algorithms=("ring",), launch=_launch_gloo),
        Backend(name="mpi", tool="mpirun", algorithms=_MPI, meets=True, polls=True, env=_FORCED, launch=_launch_mpi),
        Backend(
            name="mpi4py",
            modules=("mpi4py", "numpy"),
            tool="mpirun",
            algorithms=_over_mpi4py("mpi4py"),
            meets=True,
            polls=True,
            env=_FORCED,
            launch=_launch_mpi,
        ),
        Backend(
            name="mpi4py-mpich",
            modules=("mpi4py", "numpy"),
            tool=MPIEXEC,
            algorithms=_over_mpi4py("mpi4py-mpich"),
            meets=True,
            polls=True,
            launch=_launch_mpich,
        ),
        Backend(
            name="kvstore",
            modules=("mxnet",),
            environment="mxnet",
            algorithms=("push-pull",),
            has_servers=True,
            launch=_launch_kvstore,
        ),
        Backend(
            name="byteps",
            modules=("mxnet", "byteps.mxnet"),
            environment="mxnet",
            algorithms=("push-pull",),
            polls=True,  # its loops sleep for a microsecond at a time
            has_servers=True,
            launch=_launch_byteps,
        ),
    )
}


def backends_named(names: tuple[str, ...], ranks_per_host: int = 1) -> tuple[Backend, ...]:
    """Backends by name, all if none is named; ``name:algorithm`` takes one of its algorithms, and may come several times.

    Raises `InputError` for an unknown one, or one that cannot have several ranks on a host.
    """
    several = ranks_per_host > 1
    if several and not names:
        names = ("mpi",)
    algorithms_of: dict[str, list[str]] = {}
    for text in names or BACKENDS:
        name, _, algorithm = text.partition(":")
        if name not in BACKENDS:
            raise InputError(f"--backends: '{name}' is not one of {', '.join(BACKENDS)}")
        known = BACKENDS[name].algorithms
        if several and name not in _SEVERAL:
            raise InputError(f"--backends {text}: several ranks on a host are measured with {listed(_SEVERAL)} only")
        if not several:
            known = tuple(one for one in known if one != HIERARCHY)
        if algorithm == HIERARCHY and not several:
            raise InputError(f"--backends {text}: a hierarchy needs several ranks on each host: --ranks-per-host")
        if algorithm and algorithm not in known:
            raise InputError(f"--backends {text}: {name} has {', '.join(known)}")
        algorithms_of.setdefault(name, []).extend((algorithm,) if algorithm else known)
    return tuple(replace(BACKENDS[name], algorithms=tuple(dict.fromkeys(algorithms))) for name, algorithms in algorithms_of.items())
