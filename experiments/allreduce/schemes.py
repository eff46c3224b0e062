"""How each scheme's job is started: environment, processes and hosts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from dpro_search.collect.launch.horovod_gloo import run_horovod_gloo
from dpro_search.collect.launch.mpi import run_mpi_job
from dpro_search.collect.launch.mpich import run_mpich_job
from dpro_search.collect.launch.netns import ShapedHosts
from dpro_search.collect.launch.parameter_servers import ServerSpec, byteps_servers, run_with_servers
from dpro_search.collect.launch.ranks import JobSpec, default_cores, require_framework, run_ranks
from dpro_search.collect.launch.torch_ranks import run_torch_ranks
from dpro_search.errors import MissingCapabilityError
from dpro_search.runtime import ALL_REDUCE

JOB = Path(__file__).with_name("in_job") / "job.py"
MOST_SERVERS = 4
_TORCH_PORT, _GRPC_PORT = 29500, 5000
_CYCLE_MS = "5"  # Horovod's default of the paper's time
Run = Callable[[JobSpec, Path, ShapedHosts], None]


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A way to exchange gradients."""

    name: str
    title: str
    environment: str
    modules: tuple[str, ...]
    run: Run
    has_servers: bool = False
    with_mpi4py: bool = False

    def servers(self, workers: int) -> int:
        """Parameter servers beside so many workers."""
        return min(workers, MOST_SERVERS) if self.has_servers else 0

    def hosts(self, workers: int) -> int:
        """Hosts of its workers, its servers, and TensorFlow's coordinator."""
        return workers + self.servers(workers) + (1 if self.name == "tf-ps" else 0)

    def python(self) -> str:
        """The interpreter of its environment; raises `MissingCapabilityError` where it is missing or lacks a module."""
        root = Path(os.environ.get("DPRO_SEARCH_ENVS") or Path.home() / ".cache" / "dpro-search" / "envs")
        found = root / self.environment / "bin" / "python"
        if not found.is_file():
            raise MissingCapabilityError(f"{self.name}: no interpreter {found}; 'scripts/make_env.sh {self.environment}' builds it")
        require_framework(str(found), self.modules, self.environment)
        return str(found)

    def start(self, workers: int, folder: Path, rate_bps: float, timeout_s: float) -> None:
        """Run the job of ``folder/cases.json`` to its end on shaped hosts; raises `JobError` if it fails."""
        spec = JobSpec(
            command=(self.python(), str(JOB), self.name, str(folder)),
            ranks=workers,
            cores=default_cores(workers),
            env={"OMP_NUM_THREADS": "1"},
            timeout_s=timeout_s,
        )
        with ShapedHosts(self.hosts(workers), rate_bps) as hosts:
            if self.with_mpi4py:
                with _packages() as path:
                    master = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": str(_TORCH_PORT), "GLOO_SOCKET_IFNAME": "eth0"}
                    env = {**spec.env, **master, "PYTHONPATH": path}
                    if "DPRO_SEARCH_ALL_REDUCES" in os.environ:
                        env["DPRO_SEARCH_ALL_REDUCES"] = os.environ["DPRO_SEARCH_ALL_REDUCES"]
                    self.run(replace(spec, env=env), folder, hosts)
            else:
                self.run(spec, folder, hosts)


@contextmanager
def _packages() -> Iterator[str]:
    """A path with the library of all-reduces, and mpi4py of this interpreter, for one that has torch."""
    import tempfile

    try:
        import mpi4py
    except ImportError as error:
        raise MissingCapabilityError(f"{sys.executable}: cannot import mpi4py; pip install 'dpro-search[mpi]'") from error
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "mpi4py").symlink_to(Path(mpi4py.__file__).parent)
        yield os.pathsep.join((str(ALL_REDUCE), folder))


def _open_mpi(spec: JobSpec, folder: Path, hosts: ShapedHosts) -> None:
    run_mpi_job(replace(spec, env={"OMPI_MCA_mpi_yield_when_idle": "1", **spec.env}), folder, hosts=hosts)


def _mpich(spec: JobSpec, folder: Path, hosts: ShapedHosts) -> None:
    run_mpich_job(spec, folder, hosts=hosts)


def _torch(spec: JobSpec, folder: Path, hosts: ShapedHosts) -> None:
    run_torch_ranks(spec, folder, hosts=hosts)


def _horovod_mpi(spec: JobSpec, folder: Path, hosts: ShapedHosts) -> None:
    env = {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi", "HOROVOD_CYCLE_TIME": _CYCLE_MS}
    _open_mpi(replace(spec, env={**spec.env, **env}), folder, hosts)


def _horovod_gloo(spec: JobSpec, folder: Path, hosts: ShapedHosts) -> None:
    run_horovod_gloo(replace(spec, env={**spec.env, "HOROVOD_CYCLE_TIME": _CYCLE_MS}), folder, hosts=hosts)


def _kvstore(spec: JobSpec, folder: Path, hosts: ShapedHosts) -> None:
    run_with_servers(spec, folder, ServerSpec(count=min(spec.ranks, MOST_SERVERS)), hosts=hosts)


def _byteps(spec: JobSpec, folder: Path, hosts: ShapedHosts) -> None:
    run_with_servers(spec, folder, byteps_servers(min(spec.ranks, MOST_SERVERS)), hosts=hosts)


def _tf_ring(spec: JobSpec, folder: Path, hosts: ShapedHosts) -> None:
    cluster = {"worker": [_grpc(hosts, i) for i in range(spec.ranks)]}
    run_ranks(spec, folder, [_tf_config(cluster, "worker", i) for i in range(spec.ranks)], hosts=hosts)


def _tf_servers(spec: JobSpec, folder: Path, hosts: ShapedHosts) -> None:
    workers, servers = spec.ranks, min(spec.ranks, MOST_SERVERS)
    first = {"worker": 0, "ps": workers, "chief": workers + servers}
    counts = {"worker": workers, "ps": servers, "chief": 1}
    cluster = {role: [_grpc(hosts, first[role] + i) for i in range(count)] for role, count in counts.items()}
    env = [_tf_config(cluster, role, i) for role, count in counts.items() for i in range(count)]
    cores = (*spec.cores, *(spec.cores[i % len(spec.cores)] for i in range(servers + 1)))
    run_ranks(replace(spec, ranks=len(env), cores=cores), folder, env, hosts=hosts)


def _grpc(hosts: ShapedHosts, host: int) -> str:
    return f"{hosts.address(host)}:{_GRPC_PORT}"


def _tf_config(cluster: dict[str, list[str]], role: str, index: int) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}}), "GRPC_FAIL_FAST": "use_caller"}


_TENSORFLOW = ("tensorflow", ("tensorflow", "horovod"))
_MXNET = ("mxnet", ("mxnet",))
_PYTORCH = ("torch", ("torch", "numpy"))


def _scheme(name: str, title: str, environment: tuple[str, tuple[str, ...]], run: Run, **more: bool) -> Scheme:
    return Scheme(name=name, title=title, environment=environment[0], modules=environment[1], run=run, **more)


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        _scheme("tf-ps", "TensorFlow, ParameterServerStrategy (gRPC)", _TENSORFLOW, _tf_servers, has_servers=True),
        _scheme("tf-ring", "TensorFlow, MultiWorkerMirroredStrategy (gRPC ring)", _TENSORFLOW, _tf_ring),
        _scheme("horovod-mpi", "TensorFlow, Horovod on Open MPI", _TENSORFLOW, _horovod_mpi),
        _scheme("horovod-gloo", "TensorFlow, Horovod on Gloo", _TENSORFLOW, _horovod_gloo),
        _scheme("mxnet-kvstore", "MXNet, KVStore", _MXNET, _kvstore, has_servers=True),
        _scheme("mxnet-byteps", "MXNet, BytePS", ("mxnet", ("mxnet", "byteps.mxnet")), _byteps, has_servers=True),
        _scheme("ddp-gloo", "PyTorch DDP on Gloo", _PYTORCH, _torch),
        _scheme("ddp-hook", "PyTorch DDP, our hook on Open MPI", _PYTORCH, _open_mpi, with_mpi4py=True),
        _scheme("ddp-hook-mpich", "PyTorch DDP, our hook on MPICH", _PYTORCH, _mpich, with_mpi4py=True),
    )
}
