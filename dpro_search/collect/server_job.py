"""A job with parameter servers, as MXNet's KVStore and BytePS run it: what its launcher knows of it, and its run."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dpro_search.collect._files import write_file
from dpro_search.collect.job import machine, shaped_hosts
from dpro_search.collect.launch.parameter_servers import ServerSpec, hosts_needed, run_with_servers, server_cores, server_hosts
from dpro_search.collect.launch.ranks import JobSpec
from dpro_search.collect.mxnet_assemble import MxnetJobFile


@dataclass(frozen=True, kw_only=True)
class ServerJob:
    """Workers and servers, and the links between them.

    Attributes
    ----------
    knobs
        Every setting of the communication, by its variable.
    command
        What the user called, where the workers' is another.
    """

    spec: JobSpec
    servers: ServerSpec
    knobs: Mapping[str, str]
    command: tuple[str, ...]
    rate_bps: float | None
    shaped: bool

    def describe(self, raw: Path, format_name: str) -> None:
        """Write ``job.json`` of a raw folder."""
        count = self.servers.count
        job = MxnetJobFile(
            format=format_name,
            ranks=self.spec.ranks,
            servers=count,
            server_hosts=server_hosts(self.spec, self.servers, self.shaped),
            server_cores=server_cores(self.spec, count),
            command=self.command,
            machine=machine(),
            boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            recorded_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            rate_bps=self.rate_bps,
            knobs=dict(self.knobs),
        )
        write_file(raw / "job.json", msgspec.json.encode(job))

    def run(self, out: Path, hook: Mapping[str, str], worker_env: Callable[[int], Mapping[str, str]] = lambda rank: {}) -> None:
        """Run scheduler, servers and workers to their end; parameters and errors are those of `run_with_servers`."""
        with shaped_hosts(hosts_needed(self.spec, self.servers), self.rate_bps, self.shaped) as hosts:
            run_with_servers(
                self.spec,
                out,
                self.servers,
                hosts=hosts,
                hook={**hook, "FRAMEWORK": "mxnet"},
                worker_env=worker_env,
            )
