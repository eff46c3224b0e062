"""MXNet jobs with parameter servers on ps-lite: KVStore and BytePS.

The number of servers is DMLC_NUM_SERVER's, else that of the workers; on shaped hosts, DPRO_SEARCH_SERVER_HOSTS sets where they run.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dpro_search.collect.assemble.byteps import FORMAT as BYTEPS_FORMAT
from dpro_search.collect.assemble.byteps import KNOBS as BYTEPS_KNOBS
from dpro_search.collect.assemble.byteps import assemble_byteps, read_byteps_hook
from dpro_search.collect.assemble.common import RawJobFile
from dpro_search.collect.assemble.kvstore import FORMAT, MxnetHookFile, ServerJobFile, assemble_kvstore, read_mxnet_hook
from dpro_search.collect.assemble.kvstore_slices import DEFAULT_KNOBS
from dpro_search.collect.launch.parameter_servers import (
    SERVER_HOSTS,
    ServerSpec,
    byteps_servers,
    hosts_needed,
    on_workers_of,
    require_own_shm,
    run_with_servers,
    server_cores,
    server_hosts,
    servers_of,
)
from dpro_search.collect.launch.ranks import JobSpec
from dpro_search.collect.launchers._base import LaunchedJob, Launcher
from dpro_search.collect.this_machine import boot_id
from dpro_search.collect.trace import Trace
from dpro_search.errors import JobError

_TELL_NODE = ("PS_VERBOSE", "1")  # which of the servers each is
_SERVER_LOGS = (("BYTEPS_VAN_TRACE", "messages.log"), ("BYTEPS_SERVER_TRACE", "work.log"))


@dataclass(frozen=True, kw_only=True)
class PsLiteLauncher(Launcher):
    """The part that jobs on ps-lite share: the number of servers, their hosts, and their settings."""

    framework: str = "mxnet"
    environment: str = "mxnet"
    servers: bool = True

    @property
    @abstractmethod
    def default_knobs(self) -> Mapping[str, str]:
        """Settings of the communication where no variable sets them."""

    @property
    def knobs(self) -> frozenset[str]:
        return frozenset({*self.default_knobs, SERVER_HOSTS})

    def server_spec(self, spec: JobSpec) -> ServerSpec:
        """The servers of a job; raises `InputError` for an invalid number or place."""
        env = {**os.environ, **spec.env}
        return ServerSpec(count=servers_of(env, spec.ranks), on_workers=on_workers_of(env))

    def job_file(self, job: RawJobFile, spec: JobSpec, shaped: bool) -> ServerJobFile:
        env, servers = {**os.environ, **spec.env}, self.server_spec(spec)
        knobs = {name: env.get(name, value) for name, value in {**self.default_knobs, SERVER_HOSTS: "own"}.items()}
        return ServerJobFile(
            **{**msgspec.structs.asdict(job), "knobs": knobs},
            servers=servers.count,
            server_hosts=server_hosts(spec, servers, shaped),
            server_cores=server_cores(spec, servers.count),
            boot=boot_id(),
        )

    def hosts_needed(self, spec: JobSpec) -> int:
        """Those of workers and servers."""
        return hosts_needed(spec, self.server_spec(spec))

    def start(self, run: LaunchedJob) -> None:
        run_with_servers(run.spec, run.folder, self.servers_of_run(run), hosts=run.hosts, hook=run.hook)

    def servers_of_run(self, run: LaunchedJob) -> ServerSpec:
        """The servers of one run, and what it sets for its workers."""
        return self.server_spec(run.spec)


@dataclass(frozen=True, kw_only=True)
class KVStoreLauncher(PsLiteLauncher):
    """MXNet's own store."""

    comm: str = "kvstore"
    format: str = FORMAT
    modules: tuple[str, ...] = ("mxnet",)

    @property
    def default_knobs(self) -> Mapping[str, str]:
        return DEFAULT_KNOBS

    def assemble(self, raw: Path) -> Trace:
        return assemble_kvstore(raw)

    def read_hook(self, folder: Path) -> MxnetHookFile:
        return read_mxnet_hook(folder / "hook.json")


@dataclass(frozen=True, kw_only=True)
class BytePSLauncher(PsLiteLauncher):
    """BytePS, which needs root: every worker gets a /dev/shm of its own."""

    comm: str = "byteps"
    format: str = BYTEPS_FORMAT
    modules: tuple[str, ...] = ("mxnet", "byteps.mxnet")
    logs: bool = False  # Have a build of BytePS that can log every message and every operation of a server, which costs some time.

    @property
    def default_knobs(self) -> Mapping[str, str]:
        return BYTEPS_KNOBS

    def require(self, spec: JobSpec) -> None:
        super().require(spec)
        require_own_shm()

    def start(self, run: LaunchedJob) -> None:
        try:
            super().start(run)
        except JobError as error:
            raise explained(error) from error

    def servers_of_run(self, run: LaunchedJob) -> ServerSpec:
        placed = self.server_spec(run.spec)
        return byteps_servers(
            placed.count,
            placed.on_workers,
            env=(_TELL_NODE, *(_SERVER_LOGS if self.logs else ())),
            worker_env=lambda rank: self._tracer_env(run, rank) if run.mode == "record" else {},
        )

    def _tracer_env(self, run: LaunchedJob, rank: int) -> dict[str, str]:
        """Variables for BytePS's tracer: the steps, and the paths of a worker's trace and log. It adds a folder for the device."""
        folder = (run.folder / f"rank{rank}").resolve()
        (folder / "0").mkdir(parents=True, exist_ok=True)
        first = run.schedule.warmup + run.schedule.untraced
        return {
            "BYTEPS_TRACE_ON": "1",
            "BYTEPS_TRACE_START_STEP": str(first + 1),  # it counts steps from 1, the last included
            "BYTEPS_TRACE_END_STEP": str(first + run.schedule.traced),
            "BYTEPS_TRACE_DIR": str(folder),
            **({"BYTEPS_VAN_TRACE": str(folder / "messages.log")} if self.logs else {}),
        }

    def assemble(self, raw: Path) -> Trace:
        return assemble_byteps(raw)

    def read_hook(self, folder: Path) -> MxnetHookFile:
        return read_byteps_hook(folder / "hook.json")


def explained(error: JobError) -> JobError:
    """The same error, or what to do where BytePS's own tracer ended the job: it does at times, mostly with very many partitions."""
    if "'dur' has already been assigned" not in str(error):
        return error
    return JobError(
        "BytePS's own tracer ended the job ('dur' has already been assigned), as it does at times where there are very many "
        "partitions: record again, with a larger BYTEPS_PARTITION_BYTES, or fewer --traced steps"
    )


MXNET_KVSTORE = KVStoreLauncher()
MXNET_BYTEPS = BytePSLauncher()
