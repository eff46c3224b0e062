"""Measures what of a machine's constants can be measured without a framework: copies, TCP, round trips, the scheduler's time slice.

In a job the same work takes longer: on the testbed Horovod's copies take three times, its transfers twice as long as these probes.
So a probe does not replace a constant. The constant is scaled by the probe's ratio between this machine and that of the bundled
file. All other constants stay the bundled ones and are marked as such.

The file is written after each probe, so that an interrupted measurement goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dpro_search.collect._files import write_file
from dpro_search.collect.this_machine import machine
from dpro_search.errors import InputError, JobError
from dpro_search.machine import BUNDLED, MachineConstants, Origin, load_machine, machine_toml
from dpro_search.measure.campaign import Campaign, Progress

_TENSOR_BYTES = 16 * 2**20  # that are all-reduced
_COPIED_BYTES = 128 * 2**20  # no cache keeps them
_CHUNK_BYTES = 256 * 2**10
_MESSAGE_BYTES = 64
_ROUND_TRIPS = 2000
_SLICES_S = 1.0  # of two processes on one core
_GAP_US = 100.0  # a process that did not read the clock for so long was not on the core
_PATIENCE_S = 60.0  # for the other process


class Partner:
    """Another process that runs one function, with a pipe to it; it ends with the block."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=function, args=(theirs, *arguments), daemon=True)

    def __enter__(self) -> Partner:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.join(5.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def receive(self) -> Any:
        """The next message of the process; raises `JobError` if it ended or sends nothing."""
        try:
            if self._pipe.poll(_PATIENCE_S):
                return self._pipe.recv()
        except EOFError:
            pass
        raise JobError("the other process of the measurement ended or hangs; measure again")

    def send(self, value: Any) -> None:
        """Send the process something."""
        self._pipe.send(value)


def copy_us_per_byte() -> float:
    """Core time to copy a byte of a tensor that no cache keeps."""
    source, target = (np.ones(_COPIED_BYTES // 4, dtype=np.float32) for _ in range(2))
    np.copyto(target, source)
    times_us = []
    for _ in range(9):
        started = time.thread_time()
        np.copyto(target, source)
        times_us.append((time.thread_time() - started) * 1e6)
    return float(np.median(times_us)) / _COPIED_BYTES


def tcp_us_per_byte() -> float:
    """Core time per byte of a tensor that two processes all-reduce over TCP: sent once, received once, half of it summed."""
    with _connected(_all_reduces, 5) as (partner, connection):
        rounds = _reduced_us_per_byte(connection, 5)
        partner.receive()
    return float(np.median(rounds))


def round_trip_us() -> float:
    """A fast round trip of a small message between two processes: the first percentile."""
    with _connected(_answers) as (_, connection):
        times_us = np.empty(_ROUND_TRIPS)
        message = bytes(_MESSAGE_BYTES)
        for number in range(_ROUND_TRIPS):
            started = time.perf_counter()
            connection.sendall(message)
            _receive(connection, _MESSAGE_BYTES)
            times_us[number] = (time.perf_counter() - started) * 1e6
    return float(np.percentile(times_us, 1))


def time_slice_us() -> float:
    """How long a process keeps a core that another wants all the time: the median."""
    core = max(os.sched_getaffinity(0))
    with Partner(_stretches, core) as one, Partner(_stretches, core) as other:
        for partner in (one, other):
            partner.receive()  # it is ready
        for partner in (one, other):
            partner.send(None)
        stretches_us = np.concatenate([partner.receive() for partner in (one, other)])
    if not len(stretches_us):
        raise JobError(f"two processes on core {core} did not interrupt each other; measure again")
    return float(np.median(stretches_us))


@dataclass(frozen=True)
class Probe:
    """A small measurement, what it is in words, and the constants that are proportional to it."""

    measure: Callable[[], float]
    how: str
    scaled: tuple[str, ...]


PROBES: dict[str, Probe] = {
    "copy_us_per_byte": Probe(copy_us_per_byte, "copies of 128 MiB of float32, core time", ("horovod.copy_us_per_byte",)),
    "tcp_us_per_byte": Probe(
        tcp_us_per_byte, "all-reduces of 16 MiB between two processes over loopback TCP, core time", ("horovod.cpu_us_per_byte",)
    ),
    "round_trip_us": Probe(
        round_trip_us, "round trips of 64 bytes over loopback TCP, first percentile", ("horovod.negotiation_floor_us",)
    ),
    "time_slice_us": Probe(
        time_slice_us, "two processes on one core that never sleep, median time on the core", ("kvstore.quantum_us",)
    ),
}


def measure_machine(out: Path, *, rounds: int = 3, on_progress: Callable[[str], None] = lambda _: None) -> MachineConstants:
    """Measure this machine into the file `out`; goes on where an earlier call stopped.

    Parameters
    ----------
    rounds
        How often each probe is measured; the median counts.
    on_progress
        Called with what is measured next.

    Raises
    ------
    InputError
        `out` is no machine file, or of another machine.
    JobError
        A measurement failed.
    """
    campaign = _Probes(out, rounds, on_progress)
    campaign.run()
    return campaign.constants


class _Probes(Campaign[str, Progress]):
    """Probes of this machine, by name."""

    def __init__(self, out: Path, rounds: int, on_progress: Callable[[str], None]) -> None:
        super().__init__(Progress(), lambda progress: on_progress(progress.now))
        self._out, self._rounds, self._machine = out, rounds, machine()
        self._bundled = load_machine(BUNDLED)
        self.constants = _begun(out, self._machine)

    def missing(self) -> Iterator[str]:
        return (name for name in PROBES if self.constants.origins[f"probes.{name}"].status != "measured")

    def measure(self, item: str) -> None:
        probe, measured = PROBES[item], []
        for number in range(self._rounds):
            self.announce(f"{item}, round {number + 1} of {self._rounds}")
            measured.append(probe.measure())
        value = float(f"{np.median(measured):.4g}")
        origin = Origin(
            machine=self._machine,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            how=f"dpro-search fit --collect machine: {probe.how}; {_spread(measured)}; {_load()}",
            status="measured",
        )
        constants = with_value(self.constants, f"probes.{item}", value, origin)
        ratio = value / getattr(self._bundled.probes, item)
        for scaled in probe.scaled:
            how = f"{ratio:.4g} times the bundled value, the ratio of probes.{item} here and there"
            of_probe = msgspec.structs.replace(origin, how=how, status="scaled")
            constants = with_value(constants, scaled, ratio * value_of(self._bundled, scaled), of_probe)
        write_file(self._out, machine_toml(constants).encode())
        self.constants = constants


def value_of(constants: MachineConstants, name: str) -> float:
    """The value of a constant that is one number, named "section.name"."""
    section, _, field = name.partition(".")
    return float(getattr(getattr(constants, section), field))


def with_value(constants: MachineConstants, name: str, value: float, origin: Origin) -> MachineConstants:
    """The constants with another value of one, named "section.name"."""
    section, _, field = name.partition(".")
    changed = msgspec.structs.replace(getattr(constants, section), **{field: value})
    return msgspec.structs.replace(constants, **{section: changed, "origins": {**constants.origins, name: origin}})


def _begun(out: Path, here: str) -> MachineConstants:
    """The constants measured so far, or the bundled ones."""
    if not out.exists():
        bundled = load_machine(BUNDLED)
        # Error bars and spreads are of kinds of jobs: they hold, or are widened, whatever the processor's model.
        origins = {
            name: origin
            if name.startswith("errors.") or ".spread_" in name
            else msgspec.structs.replace(origin, status="bundled", how=f"bundled, not measured here: {origin.how}")
            for name, origin in bundled.origins.items()
        }
        return msgspec.structs.replace(bundled, name=here, origins=origins)
    constants = load_machine(out)
    if constants.name != here:
        raise InputError(f"{out}: of another machine ({constants.name}; this is {here}); choose another --out")
    return constants


def _spread(values: list[float]) -> str:
    return f"median of {len(values)}, {min(values):.3g} to {max(values):.3g}"


def _load() -> str:
    """How busy the machine was: the load says whether other processes took cores."""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


@contextlib.contextmanager
def _connected(function: Callable[..., None], *arguments: Any) -> Iterator[tuple[Partner, socket.socket]]:
    """Another process that runs a function with a TCP connection to this one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_PATIENCE_S)
        with Partner(function, server.getsockname()[1], *arguments) as partner:
            try:
                connection, _ = server.accept()
            except TimeoutError as error:
                raise JobError("the other process of the measurement did not connect; measure again") from error
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                yield partner, connection


def _connection_to(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _answers(pipe: Connection, port: int) -> None:
    """The other end of round trips."""
    with _connection_to(port) as connection:
        for _ in range(_ROUND_TRIPS):
            connection.sendall(_receive(connection, _MESSAGE_BYTES))


def _all_reduces(pipe: Connection, port: int, count: int) -> None:
    """The other end of all-reduces."""
    with _connection_to(port) as connection:
        pipe.send(_reduced_us_per_byte(connection, count))


def _reduced_us_per_byte(connection: socket.socket, count: int) -> list[float]:
    """Core time per byte of all-reduces between two processes, as a ring makes them: halves are exchanged, summed, exchanged."""
    tensor = np.ones(_TENSOR_BYTES // 4, dtype=np.float32)
    received = np.empty(len(tensor) // 2, dtype=np.float32)
    local = tensor[: len(received)]
    connection.setblocking(False)
    rounds = []
    for _ in range(count + 1):
        started = time.thread_time()
        _exchange(connection, local, received)
        np.add(local, received, out=local)
        _exchange(connection, local, received)
        rounds.append((time.thread_time() - started) * 1e6 / _TENSOR_BYTES)
    return rounds[1:]  # the first one touches new memory


def _exchange(connection: socket.socket, out: np.ndarray[Any, Any], into: np.ndarray[Any, Any]) -> None:
    """Send and receive as many bytes at once."""
    sending, receiving = out.data.cast("B"), into.data.cast("B")
    sent = got = 0
    while sent < len(sending) or got < len(receiving):
        readable, writable, _ = select.select(
            [connection] if got < len(receiving) else [], [connection] if sent < len(sending) else [], [], _PATIENCE_S
        )
        if readable:
            count = connection.recv_into(receiving[got : got + _CHUNK_BYTES])
            if not count:
                raise JobError("the other process of the measurement ended; measure again")
            got += count
        if writable:
            sent += connection.send(sending[sent : sent + _CHUNK_BYTES])
        if not readable and not writable:
            raise JobError("the other process of the measurement hangs; measure again")


def _receive(connection: socket.socket, size_bytes: int) -> bytes:
    received = b""
    while len(received) < size_bytes:
        part = connection.recv(size_bytes - len(received))
        if not part:
            raise JobError("the other process of the measurement ended; measure again")
        received += part
    return received


def _stretches(pipe: Connection, core: int) -> None:
    """Send how long this process kept a core each time, in microseconds."""
    os.sched_setaffinity(0, {core})
    pipe.send(None)
    pipe.recv()
    end = time.perf_counter() + _SLICES_S
    begun = last = time.perf_counter()
    stretches_us = []
    while last < end:
        now = time.perf_counter()
        if (now - last) * 1e6 > _GAP_US:
            stretches_us.append((last - begun) * 1e6)
            begun = now
        last = now
    pipe.send(np.array(stretches_us[1:]))  # the first one began before the other process ran
