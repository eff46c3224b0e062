"""Work of an iteration (`Work`), and the tokens a second, MFU, price and energy that follow from it (`efficiency`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from dpro_search.cluster import Cluster
from dpro_search.quantities import money_text, time_text

EFFICIENCY_KEYS = (
    "tokens_per_second",
    "tokens_per_second_per_device",
    "mfu_pct",
    "cost_per_million_tokens",
    "cost_per_iteration_usd",
    "energy_per_iteration_j",
)
_HOUR_US = 3600e6


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of an iteration and the devices that do it; None where it is not known."""

    devices: int = 1
    device: str = ""  # Name of the devices; empty: not known.
    tokens: float | None = None  # Of an iteration of all devices.
    flops: float | None = None  # Of an iteration of one device.
    flops_note: str = ""  # What they leave out.
    peak_flops_per_s: float | None = None  # Of a device, at the precision of most FLOPs.
    precision: str = ""
    price_per_device_hour_usd: float | None = None
    price_source: str = ""  # The source of the price; empty: it was given.
    given: frozenset[str] = frozenset()  # Options that were given in place of what is known: "flops", "peak"...
    power_per_device_w: float | None = None  # The most that a device takes, with `power_with_host` its share of the host included.
    power_with_host: bool = False


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """Yield and cost of an iteration; None where they are not known.

    Attributes
    ----------
    energy_per_iteration_j
        An upper bound: all devices at full power.
    flops_per_device
        FLOPs of one device in an iteration.
    price_assumed, power_assumed
        The price of a device-hour with its source, and the power with what it includes; None: given, or not known.
    mfu_doubt
        Which input must be wrong, where the MFU is above 100 %.
    not_known
        Why a value is None, and what would make it known, by key.
    """

    tokens_per_second: float | None
    tokens_per_second_per_device: float | None
    mfu_pct: float | None
    cost_per_million_tokens: float | None
    cost_per_iteration_usd: float | None
    energy_per_iteration_j: float | None
    flops_per_device: float | None
    price_assumed: str | None
    power_assumed: str | None
    mfu_doubt: str | None
    not_known: Mapping[str, str]


def efficiency(work: Work, iteration_us: float, *, what_ifs: bool = False) -> Efficiency:
    """The efficiency of an iteration; `what_ifs`: its speeds may be more than a device can do."""
    seconds = max(iteration_us, 1e-9) / 1e6  # a what-if may leave nothing of an iteration
    values: dict[str, float | None] = dict.fromkeys(EFFICIENCY_KEYS)
    if work.tokens is not None:
        values["tokens_per_second"] = work.tokens / seconds
        values["tokens_per_second_per_device"] = work.tokens / seconds / work.devices
    if work.flops is not None and work.peak_flops_per_s is not None:
        values["mfu_pct"] = work.flops / seconds / work.peak_flops_per_s * 100
    if work.price_per_device_hour_usd is not None:
        cost = work.price_per_device_hour_usd * work.devices * iteration_us / _HOUR_US
        values["cost_per_iteration_usd"] = cost
        if work.tokens is not None:
            values["cost_per_million_tokens"] = cost / work.tokens * 1e6
    if work.power_per_device_w is not None:
        values["energy_per_iteration_j"] = work.power_per_device_w * work.devices * seconds
    return Efficiency(
        **values,
        flops_per_device=work.flops,
        price_assumed=_price_assumed(work),
        power_assumed=_power_assumed(work),
        mfu_doubt=_mfu_doubt(work, iteration_us, what_ifs=what_ifs),
        not_known=_not_known(work, values),
    )


def price_source(cluster: Cluster | None) -> str:
    """The source of a cluster's price; empty without one."""
    if cluster is None or cluster.price_per_device_hour_usd is None:
        return ""
    return cluster.provenance.of("price_per_device_hour_usd")


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


def _not_known(work: Work, values: Mapping[str, float | None]) -> dict[str, str]:
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
    missing = {key: reasons[key] for key in EFFICIENCY_KEYS if values[key] is None}
    return missing | ({"flops_per_device": f"FLOPs leave out {work.flops_note}"} if work.flops_note else {})
