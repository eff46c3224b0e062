"""`Quantity`: what can be predicted and measured of a job; `KEYS`: the numbers that people give, and how each becomes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from dpro_search.errors import InputError
from dpro_search.kinds._work import Work
from dpro_search.quantities import (
    flops_text,
    parse_amount,
    parse_bytes,
    parse_flops_per_s,
    parse_percent,
    parse_rate_bps,
    parse_us,
    parse_watts,
    size_text,
    time_text,
)


class Quantity(StrEnum):
    """A number that a job has, whoever measures it."""

    STEP = "step_us"  # Mean over the steps.
    MEDIAN_STEP = "median_step_us"  # Median over the steps: a few long ones do not move it.
    MEMORY = "memory_bytes"  # The most that a device holds.
    ONE_HOST = "one_host_step_us"  # A step on one host, where each device has as many sequences as in the job.
    ALL_REDUCE = "all_reduce_bytes_per_s"  # Bus bandwidth of an all-reduce of 1 GiB over all devices, as nccl-tests defines it.
    GEMM = "gemm_flops_per_s"  # A product of three square matrices of 8192 rows on one device.
    UTILISATION = "utilisation"  # Share of the time in which a device runs any kernel (nvidia-smi), 0 to 1.
    POWER = "power_w"  # Mean power of a device.


@dataclass(frozen=True, kw_only=True)
class About:
    """Facts on a quantity.

    Attributes
    ----------
    words
        Its name in sentences.
    text
        Its value for people.
    noise
        Standard deviation of the logarithm of one measurement.
    spread
        The same of a prediction, beside what errors of efficiencies make of it; 0: those are all.
    """

    words: str
    text: Callable[[float], str]
    noise: float
    spread: float = 0.0


# Noise: most published runs that were repeated differ by 1 to 3 % (experiments/truth); all others are estimates.
ABOUT: Mapping[Quantity, About] = {
    Quantity.STEP: About(words="step time", text=time_text, noise=0.02),
    Quantity.MEDIAN_STEP: About(words="median step time", text=time_text, noise=0.02),
    Quantity.MEMORY: About(words="memory of a device", text=size_text, noise=0.01),
    Quantity.ONE_HOST: About(words="step time on one host", text=time_text, noise=0.02),
    Quantity.ALL_REDUCE: About(
        words="bus bandwidth of a 1 GiB all-reduce", text=lambda value: f"{value / 1e9:.3g} GB/s", noise=0.05, spread=0.1
    ),
    Quantity.GEMM: About(
        words="rate of a large matrix product", text=lambda value: f"{flops_text(value)}/s", noise=0.02, spread=0.04
    ),
    Quantity.UTILISATION: About(words="utilisation", text=lambda value: f"{value:.0%}", noise=0.03, spread=0.08),
    Quantity.POWER: About(words="power of a device", text=lambda value: f"{value:.0f} W", noise=0.03, spread=0.15),
}
"""Spreads of utilisation and power are estimates: no published run that is at hand has them."""


def _percent(text: str) -> float:
    share = parse_percent(text) / 100
    if not 0 < share <= 1:
        raise InputError(f"'{text}' is no share of a whole: write it like 38%")
    return share


def _bytes_per_s(text: str) -> float:
    """Bytes a second of "180GB/s" or, as nccl-tests prints it, "180"."""
    try:
        return parse_amount(text) * 1e9 if text.strip().replace(".", "").isdigit() else (parse_rate_bps(text) or 0.0) / 8
    except InputError as error:
        raise InputError(f"'{text}' is no bus bandwidth: write it like 180GB/s") from error


def _flops(text: str) -> float:
    return parse_amount(text) * 1e12 if text.strip().replace(".", "").isdigit() else parse_flops_per_s(text)


def _tokens_us(rate: float, work: Work) -> float | None:
    return None if work.tokens is None else work.tokens / rate * 1e6


@dataclass(frozen=True, kw_only=True)
class Key:
    """A number that people give.

    Attributes
    ----------
    quantity
        What it says something about.
    parse
        Reads its text.
    value
        The quantity, of the number, the work of a step and the sequences of a step; None: the work is not known.
    derived
        Whether it counts tokens, samples or FLOPs, so that it may count otherwise than the job does.
    per_device
        Whether it is of one device.
    form
        An example.
    """

    quantity: Quantity
    parse: Callable[[str], float]
    form: str
    value: Callable[[float, Work, float], float | None] = lambda number, work, samples: number
    derived: bool = False
    per_device: bool = False


def _rate(form: str, value: Callable[[float, Work, float], float | None], quantity: Quantity, *, per_device: bool = False) -> Key:
    return Key(quantity=quantity, parse=parse_amount, form=form, value=value, derived=True, per_device=per_device)


def _step_keys(quantity: Quantity, prefix: str) -> dict[str, Key]:
    """The numbers that say how long a step takes."""

    def by_flops(flops_per_s: Callable[[float, Work], float | None]) -> Callable[[float, Work, float], float | None]:
        def value(number: float, work: Work, samples: float) -> float | None:
            rate = flops_per_s(number, work)
            return None if rate is None or work.flops is None else work.flops / rate * 1e6

        return value

    peak = by_flops(lambda share, work: None if work.peak_flops_per_s is None else share * work.peak_flops_per_s)
    return {
        f"{prefix}step_time": Key(quantity=quantity, parse=parse_us, form="12.4s"),
        f"{prefix}tokens_per_second": _rate("9000", lambda rate, work, _: _tokens_us(rate, work), quantity),
        f"{prefix}tokens_per_second_per_device": _rate(
            "3400", lambda rate, work, _: _tokens_us(rate * work.devices, work), quantity, per_device=True
        ),
        f"{prefix}samples_per_second": _rate("120", lambda rate, work, samples: samples / rate * 1e6, quantity),
        f"{prefix}mfu": Key(quantity=quantity, parse=_percent, form="38%", value=peak, derived=True, per_device=True),
        f"{prefix}flops_per_device": Key(
            quantity=quantity,
            parse=_flops,
            form="410TFLOP/s",
            value=by_flops(lambda rate, work: rate),
            derived=True,
            per_device=True,
        ),
    }


KEYS: Mapping[str, Key] = {
    **_step_keys(Quantity.STEP, ""),
    **_step_keys(Quantity.ONE_HOST, "one_host_"),
    "median_step_time": Key(quantity=Quantity.MEDIAN_STEP, parse=parse_us, form="12.1s"),
    "memory": Key(quantity=Quantity.MEMORY, parse=lambda text: float(parse_bytes(text)), form="71GiB"),
    "all_reduce": Key(quantity=Quantity.ALL_REDUCE, parse=_bytes_per_s, form="180GB/s"),
    "gemm": Key(quantity=Quantity.GEMM, parse=_flops, form="610TFLOP/s"),
    "utilisation": Key(quantity=Quantity.UTILISATION, parse=_percent, form="93%"),
    "power": Key(quantity=Quantity.POWER, parse=parse_watts, form="520W"),
}
"""Numbers that ``--measured`` takes, by name."""
