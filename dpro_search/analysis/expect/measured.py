"""`read_measured`: numbers that somebody saw of a job, checked against each other and against what its devices can do.

    step_time=12.4s   tokens_per_second=9000   mfu=38%   memory=71GiB   one_host_step_time=11s   all_reduce=180GB/s

A rate, an MFU and TFLOP/s all say how long a step takes. The key that was given is kept: a rate may count tokens otherwise, a
duration cannot.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dpro_search._regular_files import read_regular
from dpro_search._text import near_names
from dpro_search.analysis.expect.quantities import ABOUT, KEYS, Key, Quantity
from dpro_search.errors import InputError
from dpro_search.kinds._work import Work

CONTRADICTION = 1.15  # Two numbers of one quantity that differ by more contradict each other.
_SLIP = 1.3  # How near a corrected number must be to the other one, to say which unit was probably meant.


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The job that numbers are about.

    Attributes
    ----------
    work, one_host
        Work of a step, and of a step on one host.
    samples
        Sequences or samples of a step over all devices.
    sequence
        Tokens of a sequence; 1 for other samples.
    micro_batches
        Micro-batches of a step and replica.
    memory_bytes
        Memory of a device; None: not known.
    power_w
        The most that a device takes; None: not known.
    hosts
        Number of hosts.
    peak_is_measured
        Whether the peak of a device is what a product reached there, which another product may exceed.
    """

    work: Work
    one_host: Work
    samples: float
    sequence: int
    micro_batches: int
    memory_bytes: float | None
    power_w: float | None
    hosts: int
    peak_is_measured: bool = False


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A number that was given: its key, its text and the quantity that it says something about."""

    name: str
    text: str
    number: float
    value: float

    @property
    def key(self) -> Key:
        """The kind of number."""
        return KEYS[self.name]

    @property
    def counts(self) -> str:
        """The things that it counts: "tokens" (or samples), "flops"; empty: it is a duration or a size."""
        if not self.key.derived:
            return ""
        return "flops" if self.name.endswith(("mfu", "flops_per_device")) else "tokens"


def read_measured(texts: Iterable[str], files: Iterable[Path], facts: Facts) -> tuple[Reading, ...]:
    """The numbers of some texts, ``name=value``, and files, each quantity once.

    Raises
    ------
    InputError
        A name or value that cannot be read; numbers that contradict each other, or what the devices can do. The error names the
        unit that was probably meant.
    """
    pairs = [*(_pair(text) for text in texts), *(pair for path in files for pair in _pairs_of(path))]
    readings = [_reading(name, text, facts) for name, text in pairs]
    for reading in readings:
        _check_hardware(reading, facts)
    kept: dict[Quantity, Reading] = {}
    for reading in readings:
        other = kept.setdefault(reading.key.quantity, reading)
        if abs(math.log(reading.value / other.value)) > math.log(CONTRADICTION):
            raise InputError(_contradiction(other, reading, facts))
        if other.key.derived and not reading.key.derived:  # a duration says more than a rate: it cannot count otherwise
            kept[reading.key.quantity] = reading
    return tuple(kept.values())


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not value:
        raise InputError(f"--measured '{text}': write NAME=VALUE, like step_time=12.4s")
    return name, value


def _pairs_of(path: Path) -> list[tuple[str, str]]:
    """The numbers of a file: JSON or TOML, or lines ``name=value`` among others, as a script prints them."""
    text = read_regular(path).decode("utf-8", "replace")
    if path.suffix.lower() == ".toml":
        try:
            values: object = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"{path}: {error}") from error
    elif text.lstrip().startswith("{"):
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}: {error}") from error
    else:
        values = dict(_pair(line) for line in text.splitlines() if line.partition("=")[0].strip() in KEYS)
    if not isinstance(values, Mapping) or not values:
        names = ", ".join(KEYS)
        raise InputError(f"{path}: no measured number is in it; write lines NAME=VALUE, of {names}")
    return [(str(name), str(value)) for name, value in values.items()]


def _reading(name: str, text: str, facts: Facts) -> Reading:
    if name not in KEYS:
        near = near_names(name, KEYS)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(KEYS)}"
        raise InputError(f"--measured {name}: no such number; {hint}")
    key = KEYS[name]
    try:
        number = key.parse(text)
    except InputError as error:
        raise InputError(f"--measured {name}: {error}") from error
    if not 0 < number < math.inf:
        raise InputError(f"--measured {name}={text}: must be above 0; write it like {key.form}")
    if key.quantity is Quantity.ONE_HOST and facts.hosts == 1:
        raise InputError(f"--measured {name}: the job runs on one host; leave it out, or write {name.removeprefix('one_host_')}")
    value = _value(key, number, facts)
    if value is None:
        why = "the job has no tokens" if "tokens" in name else "the work of its step, or the peak of its devices, is not known"
        raise InputError(f"--measured {name}: {why}; give step_time instead")
    return Reading(name=name, text=text, number=number, value=value)


def _value(key: Key, number: float, facts: Facts) -> float | None:
    if key.quantity is Quantity.ONE_HOST:
        return key.value(number, facts.one_host, facts.samples / facts.hosts)
    return key.value(number, facts.work, facts.samples)


def _check_hardware(reading: Reading, facts: Facts) -> None:
    """Raise `InputError` for a number that the devices cannot reach."""
    name, quantity = f"--measured {reading.name}={reading.text}", reading.key.quantity
    limit_bytes, work = facts.memory_bytes, facts.work
    if quantity is Quantity.MEMORY and limit_bytes and reading.value > limit_bytes * 1.02:
        text = ABOUT[quantity].text
        many = f"that of all {work.devices} devices together" if work.devices > 1 else "another unit"
        raise InputError(f"{name}: a device has {text(limit_bytes)}; the number is probably {many}")
    if quantity is Quantity.POWER and facts.power_w and reading.value > facts.power_w * 1.2:
        raise InputError(
            f"{name}: a device takes {facts.power_w:.0f} W at most; the number is probably that of several, or of the host"
        )
    if work.flops is None or not work.peak_flops_per_s or facts.peak_is_measured:
        return
    if quantity is Quantity.GEMM and reading.value > work.peak_flops_per_s:
        raise InputError(
            f"{name}: the peak in {work.precision} is {work.peak_flops_per_s / 1e12:.0f} TFLOP/s; was it sparse, or another type?"
        )
    if quantity in (Quantity.STEP, Quantity.MEDIAN_STEP, Quantity.ONE_HOST):
        share = work.flops / reading.value * 1e6 / work.peak_flops_per_s
        if share > 1:
            meant = _meant(reading, facts, lambda value: 0.05 < work.flops / value * 1e6 / work.peak_flops_per_s < 0.75)
            advice = f"; probably {meant} was meant" if meant else "; check model, batch and unit"
            raise InputError(f"{name}: that is {share:.0%} of the peak of {work.devices} x {work.device}{advice}")


def _meant(reading: Reading, facts: Facts, is_right: object) -> str | None:
    """The unit in which a number would be possible; None: none is."""
    assert callable(is_right)
    for words, factor in _units(reading, facts):
        value = _value(reading.key, reading.number * factor, facts)
        if factor != 1 and value is not None and is_right(value):
            return words
    return None


def _units(reading: Reading, facts: Facts) -> Sequence[tuple[str, float]]:
    """Other units that people give a number in, and the factor from these to the one that its name says."""
    name, devices = reading.name, facts.work.devices
    if name.endswith("step_time"):
        return (
            ("the time of one micro-batch", facts.micro_batches),
            ("a time in seconds, not milliseconds,", 1000.0),
            ("a time in milliseconds, not seconds,", 1 / 1000),
        )
    if name.endswith("_per_device") and not name.endswith("flops_per_device"):
        return (("the rate of the whole job", 1 / devices), ("the rate of a host", facts.hosts / devices))
    if name.endswith("samples_per_second"):
        return (("tokens a second", 1 / facts.sequence), ("the rate of one device", devices))
    if name.endswith("tokens_per_second"):
        return (("the rate of one device", devices), ("samples a second", facts.sequence), ("the rate of a host", facts.hosts))
    if name.endswith("flops_per_device"):
        return (("the rate of the whole job", 1 / devices), ("the rate of a host", facts.hosts / devices))
    return ()


def _contradiction(first: Reading, second: Reading, facts: Facts) -> str:
    quantity = ABOUT[first.key.quantity]
    said = " and ".join(f"{one.name}={one.text} (a {quantity.words} of {quantity.text(one.value)})" for one in (first, second))
    for reading, other in ((second, first), (first, second)):
        meant = _meant(reading, facts, lambda value, right=other.value: abs(math.log(value / right)) < math.log(_SLIP))
        if meant:
            return f"--measured: {said} contradict each other; probably {reading.name} is {meant}"
    flops, other = (first, second) if first.counts == "flops" else (second, first)
    if flops.counts == "flops":
        return f"--measured: {said} contradict each other: {_flops_text(flops, other, facts)}"
    return f"--measured: {said} contradict each other; give the one that you are sure of"


def one_host_work(work: Work, hosts: int) -> Work:
    """The work of a step on one of several equal hosts."""
    return replace(work, devices=max(work.devices // hosts, 1), tokens=None if work.tokens is None else work.tokens / hosts)


def _flops_text(flops: Reading, other: Reading, facts: Facts) -> str:
    """Why a number of FLOPs is another than what a duration, a rate or another number of FLOPs makes of the job."""
    peak = facts.work.peak_flops_per_s
    if other.counts == "flops" and peak:
        rate, share = (flops, other) if flops.name.endswith("per_device") else (other, flops)
        return (
            f"they mean a peak of {rate.number / share.number / 1e12:.0f} TFLOP/s, and that of {facts.work.device} in "
            f"{facts.work.precision} is {peak / 1e12:.0f}: the MFU was probably counted otherwise, by the peak of another type, "
            "of sparse matrices or of another device"
        )
    made = other.value / flops.value
    return (
        f"{flops.name} says {made:.2f} times as much as {other.name}: FLOPs were probably counted otherwise (parameters of one "
        "shard, attention, FLOPs computed again, or the peak of another device or type)"
    )
