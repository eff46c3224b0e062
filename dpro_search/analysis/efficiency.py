"""Tokens a second, MFU, price and energy of an iteration; what is not known is said, with what would make it known.

Facts that no trace has are given with ``--set``, beside changes: `OPTIONS`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec
import numpy as np

from dpro_search.cluster import Cluster, bundled
from dpro_search.cluster.device import Device
from dpro_search.collect.trace import EventKind, Trace
from dpro_search.costmodel.roofline import COMPUTE_BOUND, product_precision
from dpro_search.errors import InputError
from dpro_search.graph.event_names import kernel_class
from dpro_search.graph.op_flops import step_flops
from dpro_search.kinds import JobInScenario
from dpro_search.kinds._work import EFFICIENCY_KEYS, Efficiency, Work, efficiency, price_source
from dpro_search.quantities import count_text, energy_text, flops_text, money_text, parse_amount, percent_text
from dpro_search.space.scenario import Scenario, changes_in

_FIELDS = {
    "tokens": "tokens",
    "flops": "flops",
    "peak": "peak_flops_per_s",
    "price": "price_per_device_hour_usd",
    "power": "power_per_device_w",
}
OPTIONS = tuple(_FIELDS)


def split_options(changes: Iterable[str]) -> tuple[dict[str, float], tuple[str, ...]]:
    """Options among ``name=value`` texts with their values, and the other texts; raises `InputError` for what is no amount."""
    options: dict[str, float] = {}
    rest = []
    for text in (part for each in changes for part in changes_in(each)):
        name, equals, value = (part.strip() for part in text.partition("="))
        if name in OPTIONS and equals:
            try:
                options[name] = parse_amount(value)
            except InputError as error:
                raise InputError(f"{name}={value}: {error}") from error
        else:
            rest.append(text)
    return options, tuple(rest)


def efficiency_of(here: JobInScenario, scenario: Scenario, given: Mapping[str, float], iteration_us: float) -> Efficiency | None:
    """The efficiency of a job in a scenario; None for a job without accelerators of which nothing was `given`."""
    work = None if here.work is None else here.under(scenario)[0].work
    if work is not None:
        return efficiency(with_options(work, given), iteration_us, what_ifs=bool(scenario.scales))
    trace = here.trace
    if not given and (trace is None or not (trace.events.kind == EventKind.KERNEL).any()):
        return None
    change = scenario.cluster
    devices = change.ranks or (None if change.machines is None else len(change.machines.devices))
    work = work_of(trace, change.machines, given, devices)
    if scenario.precision is not None:
        device = _device("" if trace is None else trace.meta.device, change.machines)
        peak = None if device is None else device.peak_flops_per_s(scenario.precision)
        work = with_options(replace(work, precision=scenario.precision, peak_flops_per_s=peak), given)
    batch = math.prod(scale.factor for scale in scenario.scales if scale.what == "batch")
    work = replace(
        work,
        tokens=None if work.tokens is None else work.tokens * batch,
        flops=None if work.flops is None else work.flops * batch,
    )
    return efficiency(work, iteration_us, what_ifs=bool(scenario.scales))


def efficiency_in(answer: msgspec.Struct) -> Efficiency | None:
    """The efficiency that an answer has among its fields; None: it does not have any."""
    values = {name: getattr(answer, name) for name in Efficiency.__struct_fields__}
    return None if msgspec.UNSET in values.values() else Efficiency(**values)


def work_of(trace: Trace | None, cluster: Cluster | None, given: Mapping[str, float], devices: int | None = None) -> Work:
    """Known facts about a job's iteration.

    Parameters
    ----------
    cluster
        What it runs on, if not on what was recorded.
    given
        Options, which count before what a trace or a cluster has.
    devices
        Number of ranks, if it is not the recorded one.
    """
    meta = None if trace is None else trace.meta
    flops = None if trace is None else step_flops(trace)
    device = _device("" if meta is None else meta.device, cluster)
    machine = cluster if cluster is not None else _machine("" if meta is None else meta.device)
    precision = "" if flops is None else flops.precision
    if not precision and trace is not None:
        precision = _usual_precision(trace, device)
    recorded = 1 if meta is None else meta.world_size or meta.ranks
    power_w = machine.power_per_device_w if machine is not None else None
    work = Work(
        devices=devices or recorded,
        device=device.name if device is not None else "" if meta is None else meta.device,
        flops=None if flops is None else flops.flops,
        flops_note="" if flops is None else flops.left_out,
        peak_flops_per_s=device.peak_flops_per_s(precision) if device is not None and precision else None,
        precision=precision,
        price_per_device_hour_usd=machine.price_per_device_hour_usd if machine is not None else None,
        price_source=price_source(machine),
        power_per_device_w=power_w if power_w is not None or device is None else device.power_w,
        power_with_host=power_w is not None,
    )
    return with_options(work, given)


def with_options(work: Work, given: Mapping[str, float]) -> Work:
    """With options in place of what is known."""
    for name, value in given.items():
        work = replace(work, **{_FIELDS[name]: value})  # type: ignore[arg-type]
    if "price" in given:
        work = replace(work, price_source="")
    work = replace(work, given=work.given | given.keys())
    return replace(work, flops_note="") if "flops" in given else work


def table_rows(shown: Efficiency | None) -> tuple[list[tuple[str, str]], list[str]]:
    """Names and values of what is known, and reasons for what is not; both empty if nothing is known."""
    if shown is None or all(getattr(shown, key) is None for key in EFFICIENCY_KEYS):
        return [], []
    rows = []
    if shown.tokens_per_second is not None and shown.tokens_per_second_per_device is not None:
        of_device = count_text(shown.tokens_per_second_per_device)
        rows.append(("tokens a second", f"{count_text(shown.tokens_per_second)} ({of_device} a device)"))
    if shown.mfu_pct is not None and shown.flops_per_device is not None:
        rows.append(("MFU", f"{percent_text(shown.mfu_pct)} ({flops_text(shown.flops_per_device)} an iteration and device)"))
    if shown.mfu_doubt is not None:
        rows.append(("doubt about the MFU", shown.mfu_doubt))
    if shown.cost_per_million_tokens is not None:
        rows.append(("price", f"{money_text(shown.cost_per_million_tokens)} a million tokens"))
    if shown.cost_per_iteration_usd is not None:
        rows.append(("price", f"{money_text(shown.cost_per_iteration_usd)} an iteration"))
    if shown.price_assumed is not None:
        rows.append(("assumed price", shown.price_assumed))
    if shown.energy_per_iteration_j is not None:
        energy = energy_text(shown.energy_per_iteration_j)
        rows.append(("energy", f"at most {energy} an iteration ({shown.power_assumed or 'at full power'})"))
    return rows, list(dict.fromkeys(shown.not_known.values()))


def sentences(shown: Efficiency | None) -> list[str]:
    """The same as lines of text."""
    known, unknown = table_rows(shown)
    return [*(f"{name:20} {value}" for name, value in known), *(f"not known: {reason}" for reason in unknown)]


def _usual_precision(trace: Trace, device: Device | None) -> str:
    """The precision in which kernels of products, convolutions and attention run for longest, by their names; empty: unknown."""
    events, time_us_of = trace.events, Counter[str]()
    kernels = np.flatnonzero(events.kind == EventKind.KERNEL)
    sorts, place = np.unique(np.stack((events.name[kernels], events.dtype[kernels])), axis=1, return_inverse=True)
    us = np.bincount(place.reshape(-1), events.end_us[kernels] - events.start_us[kernels])
    for (number, dtype), spent_us in zip(sorts.T.tolist(), us.tolist(), strict=True):
        name, kind = trace.names[number], kernel_class(trace.names[number])
        if kind not in COMPUTE_BOUND:
            continue
        precision = product_precision(name, trace.dtypes[dtype] if dtype >= 0 else "")
        if precision == "fp32" and kind == "convolution" and device is not None and device.peak.tf32 is not None:
            precision = "tf32"  # torch.backends.cudnn.allow_tf32 is on by default
        time_us_of[precision] += spent_us
    return max(time_us_of, key=time_us_of.__getitem__, default="")


def _device(name: str, cluster: Cluster | None) -> Device | None:
    if cluster is not None:
        return cluster.groups[0].host.device
    known = bundled.aliases("device")
    plain = bundled.plain(name)
    return bundled.device(known[plain]) if plain in known else None


def _machine(name: str) -> Cluster | None:
    """The machine that a device usually is part of, for its price and power."""
    known = bundled.aliases("device")
    plain = bundled.plain(name)
    usual = bundled.usual_machine(known[plain]) if plain in known else None
    return None if usual is None else bundled.machine(usual)
