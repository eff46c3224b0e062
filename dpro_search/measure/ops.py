"""`add_device`: measures ops on this machine's device, and writes them with its specs into a device file.

The file is written after each op: an interrupted measurement goes on where it stopped, and a larger number of ops adds to it.
`OpTimer` times library ops on this machine's GPU, or on one core of its CPU, with PyTorch in a process of its own::

    with OpTimer(python) as timer:
        timer.device.gpu, timer.versions
        timer.time(name="gemm", precision="bf16", backward=False, sizes={"m": 4096, ...})
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from dpro_search.cluster import Device, Provenance, Sample, bundled, device_toml
from dpro_search.cluster.files import load_device
from dpro_search.cluster.this_machine import core_of_this_machine
from dpro_search.collect._files import scratch_folder, write_file
from dpro_search.collect.launch.ranks import require_framework, require_tools
from dpro_search.collect.this_machine import machine
from dpro_search.costmodel.devices.choice import LONGEST_US, chosen
from dpro_search.costmodel.devices.written import OpSpec
from dpro_search.errors import InputError, JobError, MissingCapabilityError
from dpro_search.measure.campaign import Campaign, Progress
from dpro_search.measure.json_worker import JsonWorker
from dpro_search.runtime import WORKERS

_WORKER = WORKERS / "dpro_search_device_worker.py"
_READY_S, _OP_S = 300.0, 120.0
_COPY = OpSpec.of("copy", "fp32", rows=2**13, length=2**12)


class FoundDevice(msgspec.Struct, frozen=True, kw_only=True):
    """PyTorch's description of the first GPU. If `gpu` is None, there is no GPU and ops are timed on a core."""

    gpu: str | None
    amd: bool = False
    memory_bytes: int | None = None
    cores: int | None = None
    l2_bytes: int | None = None
    clock_hz: float | None = None
    memory_bytes_per_s: float | None = None


class TimedOp(msgspec.Struct, frozen=True, kw_only=True):
    """Duration of an op, or the reason why it could not be timed."""

    us: float | None = None
    spread_pct: float = 0.0  # Half the distance of the quartiles of seven rounds, of the median.
    failed: str = ""


class OpTimer:
    """The measuring process; one that ends is started again for the next op.

    Raises
    ------
    MissingCapabilityError
        The interpreter is missing or has no PyTorch.
    JobError
        The process does not begin.
    """

    device: FoundDevice
    versions: Mapping[str, Any]

    def __init__(self, python: str) -> None:
        require_tools()
        try:
            require_framework(python, ("torch",), "torch")
        except OSError as error:
            raise MissingCapabilityError(f"{python}: no such interpreter; name one that has PyTorch by --python") from error
        self._python, self._stack = python, ExitStack()
        self._worker: JsonWorker | None = None

    def __enter__(self) -> OpTimer:
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._stack.close()

    def time(self, **spec: Any) -> TimedOp:
        """Time an op: its ``name``, ``precision``, whether ``backward``, and ``sizes``."""
        if self._worker is None:
            self._start()
        assert self._worker is not None
        self._worker.send(msgspec.json.encode(spec).decode())
        answer = self._worker.receive(_OP_S)
        if "ended" in answer or answer.get("ends"):
            self._stack.close()
            self._worker = None
        if "ended" in answer:
            return TimedOp(failed=str(answer["ended"]))
        try:
            return msgspec.convert(answer, TimedOp)
        except msgspec.ValidationError:
            return TimedOp(failed="the measuring process answered something else")

    def _start(self) -> None:
        folder = self._stack.enter_context(scratch_folder("device"))
        self._worker = JsonWorker([self._python, str(_WORKER)], folder, "PyTorch")
        self._stack.callback(self._worker.end)
        first = self._worker.receive(_READY_S)
        if "ready" not in first:
            self._stack.close()
            raise JobError(f"{self._python}: ops could not be timed: {first.get('ended', 'no answer')}")
        self.device = msgspec.convert(first["ready"], FoundDevice)
        self.versions = {name: version for name, version in first.get("versions", {}).items() if version}


@dataclass(kw_only=True)
class OpProgress(Progress):
    """State of a measurement of a device's ops."""

    offered: int = 0  # Ops that may be measured here, at most the limit.


def add_device(
    timer: OpTimer,
    path: Path,
    *,
    budget: int,
    specs: Device | None = None,
    job_ops: Sequence[OpSpec] = (),
    longest_us: float = LONGEST_US,
    on_progress: Callable[[OpProgress], None] = lambda _: None,
) -> tuple[Device, OpProgress]:
    """Measure ops until the file has `budget` of them.

    Parameters
    ----------
    specs
        Of the device; None: of the bundled device with the name that the driver reports, or of this machine's core.
    job_ops
        Ops of a job, to choose from instead of the usual ones.

    Raises
    ------
    InputError
        Specs are missing; the file is of another device, or was measured with other versions.
    JobError
        No op could be measured.
    """
    campaign = _DeviceOps(timer, path, OpProgress(limit=budget), on_progress, specs)
    campaign.offered = chosen(campaign.device, budget, job_ops=job_ops, longest_us=longest_us)
    campaign.progress.offered = len(campaign.offered)
    campaign.run()
    device, progress = campaign.device, campaign.progress
    if not progress.rows:
        raise JobError(f"no op could be measured on {device.name}: {next(iter(progress.failed), 'none is short enough')}")
    return device, progress


class _DeviceOps(Campaign[OpSpec, OpProgress]):
    """Ops of a device, whose file they are written to, out of those that are `offered`."""

    def __init__(
        self, timer: OpTimer, path: Path, progress: OpProgress, on_progress: Callable[[OpProgress], None], specs: Device | None
    ) -> None:
        super().__init__(progress, on_progress)
        self._timer, self._path, self._how = timer, path, _how(timer)
        self.offered: Sequence[OpSpec] = ()
        usual = None
        if path.exists():
            self.device = load_device(path, bundled.find)
            measured = self.device.provenance.of("samples")
            if self.device.samples and _before_date(measured) != _before_date(self._how):
                raise InputError(f"{path}: was {measured}; this is {_before_date(self._how)}: choose another --name")
        else:
            self.device, usual = _described(timer, specs)
        self._machine_name = usual or _machine_of(path)
        progress.rows = len(self.device.samples)

    def missing(self) -> Iterator[OpSpec]:
        assert self.progress.limit is not None
        done = {sample.op for sample in self.device.samples}
        missing = [spec for spec in self.offered if str(spec) not in done]
        return iter(missing[: max(self.progress.limit - len(done), 0)])

    def measure(self, item: OpSpec) -> None:
        self.announce(str(item))
        timed = _timed(self._timer, item)
        if timed.us is None:
            self.progress.failed[timed.failed] += 1
            return
        sample = Sample(str(item), float(f"{timed.us:.6g}"), round(timed.spread_pct, 2))
        known = self.device.provenance
        exceptions = {**dict(known.exceptions), "samples": self._how}
        source = Provenance(source=known.source, exceptions=tuple(sorted(exceptions.items())))
        self.device = msgspec.structs.replace(self.device, samples=(*self.device.samples, sample), provenance=source)
        extra = {"machine": self._machine_name} if self._machine_name else {}
        write_file(self._path, device_toml(self.device, **extra).encode())
        self.added()


def usual_name(device: FoundDevice) -> str:
    """The name of the device in the user's folder, if no other is given."""
    if device.gpu is None:
        return "my-cpu"
    return f"my-{bundled.aliases('device').get(bundled.plain(device.gpu), bundled.plain(device.gpu))}"


def _timed(timer: OpTimer, spec: OpSpec) -> TimedOp:
    return timer.time(name=spec.name, precision=spec.precision, backward=spec.backward, sizes=spec.all_sizes)


def _described(timer: OpTimer, specs: Device | None) -> tuple[Device, str | None]:
    """The device before anything of it was measured, and the machine that it usually is part of."""
    reported = timer.device
    if specs is not None:
        return specs, None
    if reported.gpu is None:
        copied = _timed(timer, _COPY)
        if copied.us is None:
            raise JobError(f"no copy could be timed on this machine's core: {copied.failed}")
        return core_of_this_machine(_COPY.held_bytes / copied.us * 1e6), None
    name = bundled.aliases("device").get(bundled.plain(reported.gpu))
    if name is not None:
        return bundled.device(name), bundled.usual_machine(name)
    seen = {"memory": reported.memory_bytes, "cores": reported.cores, "l2_cache": reported.l2_bytes, "clock": reported.clock_hz}
    known = ", ".join(f"{key} = {value:g}" for key, value in seen.items() if value is not None)
    raise InputError(
        f"no bundled device is called '{reported.gpu}': write its data sheet to a file (name, vendor, memory_rate, [peak] with "
        f"fp32 and bf16 or fp16; PyTorch says {known}) and name it by --specs FILE"
    )


def _machine_of(path: Path) -> str | None:
    """The usual machine that a device file has."""
    name = tomllib.loads(path.read_text("utf-8")).get("machine") if path.exists() else None
    return name if isinstance(name, str) else None


def _how(timer: OpTimer) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in sorted(timer.versions.items()))
    what = timer.device.gpu or f"one core of {machine()}"
    today = datetime.now(UTC).date().isoformat()
    return f"measured: median of 7 rounds in PyTorch on {what}, {versions}; began {today}"


def _before_date(text: str) -> str:
    return text.partition("; began ")[0]
