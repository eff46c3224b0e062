"""Tokens a second, MFU, price and energy of an iteration; what is not known is said, with what would make it known.

Facts that no trace has are given with ``--set``, beside changes: `OPTIONS`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from dpro_search.cluster import Cluster, bundled
from dpro_search.cluster.device import Device
from dpro_search.collect.trace import EventKind, Trace
from dpro_search.costmodel.roofline import COMPUTE_BOUND, product_precision
from dpro_search.errors import InputError
from dpro_search.graph.kernel_class import kernel_class
from dpro_search.graph.op_flops import step_flops
from dpro_search.kinds._job import Job
from dpro_search.kinds._work import Work
from dpro_search.quantities import count_text, energy_text, flops_text, money_text, parse_amount, percent_text, time_text
from dpro_search.space.scenario import Scenario, changes_in

_FIELDS = {
    "tokens": "tokens",
    "flops": "flops",
    "peak": "peak_flops_per_s",
    "price": "price_per_device_hour_usd",
    "power": "power_per_device_w",
}
OPTIONS = tuple(_FIELDS)
KEYS = (
    "tokens_per_second",
    "tokens_per_second_per_device",
    "mfu_pct",
    "cost_per_million_tokens",
    "cost_per_iteration_usd",
    "energy_per_iteration_j",
)
_HOUR_US = 3600e6


def split_options(changes: Iterable[str]) -> tuple[dict[str, float], tuple[str, ...]]:
    """Options among ``name=value`` texts with their values, and the other texts; raises `InputError` for what is no amount."""
    found: dict[str, float] = {}
    rest = []
    for text in (part for each in changes for part in changes_in(each)):
        name, equals, value = (part.strip() for part in text.partition("="))
        if name in OPTIONS and equals:
            try:
                found[name] = parse_amount(value)
            except InputError as error:
                raise InputError(f"{name}={value}: {error}") from error
        else:
            rest.append(text)
    return found, tuple(rest)


def efficiency_facts(job: Job, scenario: Scenario, given: Mapping[str, float], iteration_us: float) -> dict[str, Any]:
    """`efficiency` of a job in a scenario; nothing for a job without accelerators of which nothing was `given`."""
    own = None if job.work is None else job.under(scenario)[0].work
    if own is not None:
        return efficiency(with_options(own, given), iteration_us, what_ifs=bool(scenario.scales))
    trace = job.trace
    if not given and (trace is None or not (trace.events.kind == EventKind.KERNEL).any()):
        return {}
    change = scenario.cluster
    devices = change.ranks or (None if change.machines is None else len(change.machines.devices))
    work = work_of(trace, change.machines, given, devices)
    batch = math.prod(scale.factor for scale in scenario.scales if scale.what == "batch")
    work = replace(
        work,
        tokens=None if work.tokens is None else work.tokens * batch,
        flops=None if work.flops is None else work.flops * batch,
    )
    return efficiency(work, iteration_us, what_ifs=bool(scenario.scales))


def work_of(trace: Trace | None, cluster: Cluster | None, given: Mapping[str, float], devices: int | None = None) -> Work:
    """What is known of a job's iteration.

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
    found = Work(
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
    return with_options(found, given)


def price_source(cluster: Cluster | None) -> str:
    """The source of a cluster's price; empty without one."""
    if cluster is None or cluster.price_per_device_hour_usd is None:
        return ""
    return cluster.provenance.of("price_per_device_hour_usd")


def with_options(work: Work, given: Mapping[str, float]) -> Work:
    """With options in place of what is known."""
    for name, value in given.items():
        work = replace(work, **{_FIELDS[name]: value})  # type: ignore[arg-type]
    if "price" in given:
        work = replace(work, price_source="")
    work = replace(work, given=work.given | given.keys())
    return replace(work, flops_note="") if "flops" in given else work


def efficiency(work: Work, iteration_us: float, *, what_ifs: bool = False) -> dict[str, Any]:
    """`KEYS` with their values, None where one is not known; ``not_known``: why, by key.

    ``mfu_doubt`` says which input must be wrong where the MFU is above 100 %, else it is None. `what_ifs`: whether the iteration is
    one with other speeds, which may ask for more than a device can do.
    """
    seconds = max(iteration_us, 1e-9) / 1e6  # a what-if may leave nothing of an iteration
    found: dict[str, float | None] = dict.fromkeys(KEYS)
    if work.tokens is not None:
        found["tokens_per_second"] = work.tokens / seconds
        found["tokens_per_second_per_device"] = work.tokens / seconds / work.devices
    if work.flops is not None and work.peak_flops_per_s is not None:
        found["mfu_pct"] = work.flops / seconds / work.peak_flops_per_s * 100
    if work.price_per_device_hour_usd is not None:
        cost = work.price_per_device_hour_usd * work.devices * iteration_us / _HOUR_US
        found["cost_per_iteration_usd"] = cost
        if work.tokens is not None:
            found["cost_per_million_tokens"] = cost / work.tokens * 1e6
    if work.power_per_device_w is not None:
        found["energy_per_iteration_j"] = work.power_per_device_w * work.devices * seconds
    return {
        **found,
        "flops_per_device": work.flops,
        "price_assumed": _price_assumed(work),
        "power_assumed": _power_assumed(work),
        "mfu_doubt": _mfu_doubt(work, iteration_us, what_ifs=what_ifs),
        "not_known": _not_known(work, found),
    }


def table_rows(facts: Mapping[str, Any]) -> tuple[list[tuple[str, str]], list[str]]:
    """The facts of `efficiency` for people: what is known, with its value, and what is not; nothing where nothing is known."""
    if "not_known" not in facts or all(facts[key] is None for key in KEYS):
        return [], []
    found = []
    if (tokens := facts["tokens_per_second"]) is not None:
        found.append(("tokens a second", f"{count_text(tokens)} ({count_text(facts['tokens_per_second_per_device'])} a device)"))
    if (mfu_pct := facts["mfu_pct"]) is not None:
        found.append(("MFU", f"{percent_text(mfu_pct)} ({flops_text(facts['flops_per_device'])} an iteration and device)"))
    if (doubt := facts.get("mfu_doubt")) is not None:
        found.append(("doubt about the MFU", doubt))
    if (price := facts["cost_per_million_tokens"]) is not None:
        found.append(("price", f"{money_text(price)} a million tokens"))
    if (price := facts["cost_per_iteration_usd"]) is not None:
        found.append(("price", f"{money_text(price)} an iteration"))
    if (assumed := facts.get("price_assumed")) is not None:
        found.append(("assumed price", assumed))
    if (energy_j := facts["energy_per_iteration_j"]) is not None:
        found.append(("energy", f"at most {energy_text(energy_j)} an iteration ({facts.get('power_assumed') or 'at full power'})"))
    return found, list(dict.fromkeys(facts["not_known"].values()))


def sentences(facts: Mapping[str, Any]) -> list[str]:
    """The same as lines of text."""
    known, unknown = table_rows(facts)
    return [*(f"{name:20} {value}" for name, value in known), *(f"not known: {reason}" for reason in unknown)]


def _price_assumed(work: Work) -> str | None:
    """The assumed price of a device-hour with its source; None where none is known, or it was given."""
    if work.price_per_device_hour_usd is None or not work.price_source:
        return None
    return f"{money_text(work.price_per_device_hour_usd)} a device-hour: {work.price_source} (--set price=USD gives another)"


def _power_assumed(work: Work) -> str | None:
    """The assumed power and whether it includes the host; None where none is known."""
    if work.power_per_device_w is None:
        return None
    if "power" in work.given:
        return f"{work.power_per_device_w:g} W a device, as given"
    of_what = "a device with its share of the host" if work.power_with_host else "a device without its host"
    return f"{work.power_per_device_w:g} W {of_what}, at full power"


def _mfu_doubt(work: Work, iteration_us: float, *, what_ifs: bool) -> str | None:
    """A sentence that says which input must be wrong if the FLOPs take longer at the peak than an iteration; else None."""
    if work.flops is None or work.peak_flops_per_s is None or work.flops <= work.peak_flops_per_s * iteration_us / 1e6:
        return None
    given = [f"{name}= (as given)" for name in ("flops", "peak") if name in work.given]
    wrong = " or ".join(given)
    if not given and what_ifs:
        wrong = "the what-if, which asks for more than the device can compute"
    elif not given:
        wrong = "the recorded shapes, the precision, the name of the device or the time stamps"
    least_us = work.flops / work.peak_flops_per_s * 1e6
    at = f" at {work.precision}" if work.precision else ""
    return (
        f"more than 100 % is not possible: {work.device or 'the device'} needs at least {time_text(least_us)} for these FLOPs at "
        f"its peak{at}, but an iteration takes {time_text(iteration_us)}. Wrong is {wrong}"
    )


def _not_known(work: Work, found: Mapping[str, float | None]) -> dict[str, str]:
    reasons = {}
    tokens = "tokens (give --set tokens=N, of an iteration of all devices)"
    price = "the price (give --set price=USD, of a device-hour)"
    reasons["tokens_per_second"] = reasons["tokens_per_second_per_device"] = tokens
    reasons["cost_per_million_tokens"] = tokens if work.tokens is None else price
    reasons["cost_per_iteration_usd"] = price
    reasons["energy_per_iteration_j"] = "the power of a device (give --set power=W)"
    if work.flops is None:
        reasons["mfu_pct"] = "FLOPs (record with record_shapes=True, or give --set flops=N, of an iteration of one device)"
    else:
        of = f"'{work.device}'" if work.device else "the device"
        at = f" at {work.precision}" if work.precision else ""
        reasons["mfu_pct"] = f"the peak of {of}{at} (give --set peak=FLOP/s)"
    missing = {key: reasons[key] for key in KEYS if found[key] is None}
    return missing | ({"flops_per_device": f"FLOPs leave out {work.flops_note}"} if work.flops_note else {})


def _usual_precision(trace: Trace, device: Device | None) -> str:
    """That in which kernels of products, convolutions and attention compute for longest, by their names; empty: none do."""
    events, found = trace.events, Counter[str]()
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
        found[precision] += spent_us
    return max(found, key=found.__getitem__, default="")


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
