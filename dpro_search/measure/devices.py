"""`add_device`: measures ops on this machine's device, and writes them with its specs into a device file.

The file is written after each op: an interrupted measurement goes on where it stopped, and a larger number of ops adds to it.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from dpro_search.cluster import Device, Provenance, Sample, bundled, device_toml
from dpro_search.cluster.files import load_device
from dpro_search.cluster.this_machine import core_of_this_machine
from dpro_search.collect._files import write_file
from dpro_search.collect.this_machine import machine
from dpro_search.costmodel.devices.choice import LONGEST_US, chosen
from dpro_search.costmodel.devices.written import OpSpec
from dpro_search.errors import InputError, JobError
from dpro_search.measure.device_ops import FoundDevice, OpTimer, TimedOp

_COPY = OpSpec.of("copy", "fp32", rows=2**13, length=2**12)


@dataclass(kw_only=True)
class MeasuringProgress:
    """State of a measurement, for who watches it."""

    budget: int
    samples: int = 0  # in the file
    new: int = 0
    op: str = ""  # that is measured
    offered: int = 0  # Ops that may be measured here, at most the budget.
    failed: Counter[str] = field(default_factory=Counter)  # ops, by reason


def add_device(
    timer: OpTimer,
    path: Path,
    *,
    budget: int,
    specs: Device | None = None,
    job_ops: Sequence[OpSpec] = (),
    longest_us: float = LONGEST_US,
    on_progress: Callable[[MeasuringProgress], None] = lambda _: None,
) -> tuple[Device, MeasuringProgress]:
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
    how = _how(timer)
    usual = None
    if path.exists():
        device = load_device(path, bundled.find)
        if device.samples and _before_date(device.provenance.of("samples")) != _before_date(how):
            raise InputError(f"{path}: was {device.provenance.of('samples')}; this is {_before_date(how)}: choose another --name")
    else:
        device, usual = _described(timer, specs)
    machine_name = usual or _machine_of(path)
    progress = MeasuringProgress(budget=budget, samples=len(device.samples))
    done = {sample.op for sample in device.samples}
    offered = chosen(device, budget, job_ops=job_ops, longest_us=longest_us)
    missing = [spec for spec in offered if str(spec) not in done]
    progress.offered = len(offered)
    for spec in missing[: max(budget - len(done), 0)]:
        progress.op = str(spec)
        on_progress(progress)
        timed = _timed(timer, spec)
        if timed.us is None:
            progress.failed[timed.failed] += 1
            continue
        sample = Sample(str(spec), float(f"{timed.us:.6g}"), round(timed.spread_pct, 2))
        exceptions = {**dict(device.provenance.exceptions), "samples": how}
        source = Provenance(source=device.provenance.source, exceptions=tuple(sorted(exceptions.items())))
        device = msgspec.structs.replace(device, samples=(*device.samples, sample), provenance=source)
        write_file(path, device_toml(device, **({"machine": machine_name} if machine_name else {})).encode())
        progress.samples += 1
        progress.new += 1
    if not progress.samples:
        raise JobError(f"no op could be measured on {device.name}: {next(iter(progress.failed), 'none is short enough')}")
    return device, progress


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
