"""Quantities as people read and write them: sizes ("64MB", "25 MiB"), rates ("200gbit"), times ("10ms"), switches ("on"), and what
data sheets of devices give: "989 TFLOP/s", "1980 MHz", "700 W".

The functions `..._text` print them. All messages, tables and pages use these, so that one quantity looks the same everywhere.

A bare number is taken in the unit of the field that it is for: bytes, bits a second, microseconds, operations a second, hertz,
watts.
"""

from __future__ import annotations

import math
import re

from dpro_search.errors import InputError

_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-zA-Zµ/]*)\s*", re.IGNORECASE)
_SIZES: dict[str, int] = {"": 1, "b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgtp", start=1)
    for unit, base in ((letter + "b", 1000), (letter + "ib", 1024), (letter, 1024))
}
_RATES = {"": 1.0, "bit": 1.0, "bit/s": 1.0, "bps": 1.0} | {
    letter + unit: 1000.0**power for power, letter in enumerate("kmgt", start=1) for unit in ("", "bit", "bit/s", "bps")
}
_BYTE_RATES = {f"{letter}b/s": 8 * 1000.0**power for power, letter in enumerate("kmgt", start=1)} | {"b/s": 8.0}
_TIMES_US = {"": 1.0, "ns": 1e-3, "us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6, "min": 6e7, "h": 3.6e9}
_FLOPS = {"": 1.0} | {
    letter + unit: 1000.0**power for power, letter in enumerate("kmgtp", start=1) for unit in ("flop/s", "flops", "op/s", "ops")
}
_AMOUNTS = {"": 1.0, "w": 1.0, "usd": 1.0} | {
    letter + unit: 1000.0**power for power, letter in enumerate("kmgtp", start=1) for unit in ("", "flop", "flops", "flop/s")
}
_HERTZ = {"": 1.0, "hz": 1.0, "khz": 1e3, "mhz": 1e6, "ghz": 1e9}
_WATTS = {"": 1.0, "w": 1.0, "kw": 1e3}
_LEAST_BYTES, _MOST_BYTES = 1024, 2**50  # of a setting
_LEAST_US, _MOST_US = 100.0, 86_400e6
_SWITCHES = {"1": True, "on": True, "yes": True, "true": True, "0": False, "off": False, "no": False, "false": False}


def parse_bytes(text: str) -> int:
    """Bytes of "64MB" (10^6), "25 MiB" or "25M" (2^20), "1048576"; raises `InputError` for anything else."""
    number, unit = _split(text, "a size", "64MB, 25 MiB or 1048576")
    if unit.lower() not in _SIZES:
        raise InputError(f"'{text}' is not a size: write it like 64MB, 25 MiB or 1048576")
    return round(number * _SIZES[unit.lower()])


def parse_size_setting(text: str) -> int:
    """As `parse_bytes`, for the value of a setting; raises `InputError` also for a size that is hardly meant.

    No setting of a training job is below 1 KiB (a page is 4 KiB, a packet 1.5 kB) or above 1 PiB. A small number without a unit
    usually means megabytes, the unit of PyTorch's ``bucket_cap_mb``. A size with its unit, "50B", is taken as it is.
    """
    value = parse_bytes(text)
    if 0 < _without_unit(text) < _LEAST_BYTES:
        raise InputError(f"{text.strip()} bytes is hardly meant; write {text.strip()}MB, or {text.strip()}B if it is")
    if value > _MOST_BYTES:
        raise InputError(f"{size_text(value)} is more than any device holds; write a size like 64MB or 25MiB")
    return value


def parse_time_setting(text: str) -> float:
    """As `parse_us`, for the value of a setting; raises `InputError` also for a time that is hardly meant.

    A number below 100 without a unit usually means milliseconds, the unit of Horovod's ``HOROVOD_CYCLE_TIME``. A time with its
    unit, "50us", is taken as it is.
    """
    value = parse_us(text)
    if 0 < _without_unit(text) < _LEAST_US:
        raise InputError(f"{text.strip()} microseconds is hardly meant; write {text.strip()}ms, or {text.strip()}us if it is")
    if value > _MOST_US:
        raise InputError(f"'{text}' is more than a day; write a time like 5ms or 2s")
    return value


def _without_unit(text: str) -> float:
    """The number of a text without a unit; 0 for others."""
    match = _NUMBER.fullmatch(text)
    return 0.0 if match is None or match[2] else float(match[1])


def parse_rate_bps(text: str) -> float | None:
    """Bits a second of "500mbit", "200gbit", "25GB/s" (bytes), "1e9"; None for "unlimited".

    Raises `InputError` for anything else, and for a rate of 0.
    """
    if text.strip().lower() == "unlimited":
        return None
    form = "500mbit, 200gbit, 25GB/s or unlimited"
    number, unit = _split(text, "a rate", form)
    in_bytes = unit.endswith(("B/s", "b/s")) and unit.lower() in _BYTE_RATES
    factor = _BYTE_RATES[unit.lower()] if in_bytes else _RATES.get(unit.lower())
    if factor is None or number <= 0:
        raise InputError(f"'{text}' is not a rate: write it like {form}")
    return number * factor


def parse_us(text: str) -> float:
    """Microseconds of "10ms", "500 us", "2s", "1000"; raises `InputError` for anything else."""
    number, unit = _split(text, "a time", "10ms, 500us or 2s")
    if unit.lower() not in _TIMES_US:
        raise InputError(f"'{text}' is not a time: write it like 10ms, 500us or 2s")
    return number * _TIMES_US[unit.lower()]


def parse_flops_per_s(text: str) -> float:
    """Operations a second of "989 TFLOP/s", "2.25 PFLOPS", "62 TOPS"; raises `InputError` for anything else, and for 0."""
    return _scaled(text, _FLOPS, "a speed of computation", "989 TFLOP/s or 2.25 PFLOP/s")


def parse_hz(text: str) -> float:
    """Hertz of "1980 MHz", "2.1GHz"; raises `InputError` for anything else, and for 0."""
    return _scaled(text, _HERTZ, "a frequency", "1980 MHz or 2.1 GHz")


def parse_watts(text: str) -> float:
    """Watts of "700 W", "1.2kW"; raises `InputError` for anything else, and for 0."""
    return _scaled(text, _WATTS, "a power", "700 W or 1.2 kW")


def parse_amount(text: str) -> float:
    """A number above 0, perhaps in thousands, millions...: "8192", "4M", "312 TFLOP/s"; raises `InputError` for anything else."""
    form = "8192, 4M or 312 TFLOP/s"
    number = _scaled(text, _AMOUNTS, "an amount", form)
    if not 0 < number < math.inf:
        raise InputError(f"'{text}' must be above 0; write it like {form}")
    return number


def parse_switch(text: str) -> bool:
    """True of "1", "on", "yes", "true"; False of their opposites; raises `InputError` for anything else."""
    switch = _SWITCHES.get(text.strip().lower())
    if switch is None:
        raise InputError(f"'{text}' is neither on nor off: write 1 or 0")
    return switch


def parse_percent(text: str) -> float:
    """Percent of "3%", "3 %" or "3"; raises `InputError` for anything else, and for less than 0."""
    try:
        percent = float(text.strip().removesuffix("%"))
    except ValueError:
        percent = math.nan
    if not percent >= 0:
        raise InputError(f"'{text}' is not a share: write it like 3%")
    return percent


def parse_count(text: str) -> int:
    """A whole number; raises `InputError` for anything else."""
    try:
        return int(text)
    except ValueError as error:
        raise InputError(f"'{text}' is not a whole number") from error


def parse_counts(text: str) -> tuple[int, ...]:
    """Whole numbers: "7,8,8,7", with "8x2" for two of 8; "even": none. Raises `InputError` for anything else."""
    if text.strip() == "even":
        return ()
    counts: list[int] = []
    for part in text.split(","):
        value, _, times = part.partition("x")
        counts += [parse_count(value)] * (parse_count(times) if times else 1)
    return tuple(counts)


def parse_number(text: str) -> float:
    """A finite number; raises `InputError` for anything else."""
    try:
        value = float(text)
    except ValueError as error:
        raise InputError(f"'{text}' is not a number") from error
    if not math.isfinite(value):
        raise InputError(f"'{text}' is not a finite number")
    return value


def _scaled(text: str, units: dict[str, float], what: str, form: str) -> float:
    number, unit = _split(text, what, form)
    if unit.lower() not in units or number <= 0:
        raise InputError(f"'{text}' is not {what}: write it like {form}")
    return number * units[unit.lower()]


def _split(text: str, what: str, form: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    if match is None or not math.isfinite(float(match[1])):
        raise InputError(f"'{text}' is not {what}: write it like {form}")
    return float(match[1]), match[2]


def time_text(value_us: float) -> str:
    """A duration with the unit that suits it: "431.2 ms", "1.28 s", "23.2 s", "12.5 min", "3.2 h"."""
    size_us = abs(value_us)
    if size_us < 999.95:
        return f"{value_us:z.1f} us"
    if size_us < 999.95e3:
        return f"{value_us / 1e3:.1f} ms"
    if size_us < 9.995e6:
        return f"{value_us / 1e6:.2f} s"
    if size_us < 599.95e6:
        return f"{value_us / 1e6:.1f} s"
    return f"{value_us / 60e6:.1f} min" if size_us < 7200e6 else f"{value_us / 3600e6:,.1f} h"


def typeset_time_text(value_us: float) -> str:
    """The same as pages write it: "80.0 µs"."""
    return time_text(value_us).replace("us", "\N{MICRO SIGN}s")


def interval_text(low_us: float, high_us: float) -> str:
    """Two durations with one unit where it suits both: "3.7 - 7.7 s", and with two where it does not: "833.2 ms - 1.73 s"."""
    low, high = time_text(low_us), time_text(high_us)
    return f"{low.removesuffix(high[high.index(' ') :])} - {high}"


def size_text(value_bytes: float) -> str:
    """A size in binary units: "24.0 MiB"."""
    if abs(value_bytes) < 1024:
        return f"{value_bytes:z.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        value_bytes /= 1024
        if abs(value_bytes) < 1024:
            return f"{value_bytes:.1f} {unit}"
    return f"{value_bytes / 1024:.1f} TiB"


def memory_shortage_text(needed_bytes: int | None, limit_bytes: int) -> str:
    """Why a plan does not fit: "needs 24.0 GiB, and may have 16.0 GiB"; sizes that would print alike are given in MiB."""
    limit = size_text(limit_bytes)
    if needed_bytes is None:
        return f"needs an amount of memory that is not known, and may have {limit}"
    needed = size_text(needed_bytes)
    if needed == limit:
        needed, limit = (f"{size_bytes / 2**20:,.1f} MiB" for size_bytes in (needed_bytes, limit_bytes))
    return f"needs {needed}, and may have {limit}"


def percent_text(value_pct: float) -> str:
    """A share: "3.2 %"; what rounds to zero has no sign."""
    return f"{value_pct:z.1f} %"


def flops_text(value_flops: float) -> str:
    """A number of operations: "28.4 PFLOP"."""
    return _decimal_text(value_flops, "FLOP")


def energy_text(value_j: float) -> str:
    """An energy as it is billed: "79.0 kWh"; in joules below a watt-hour."""
    return _decimal_text(value_j / 3600, "Wh") if abs(value_j) >= 3600 else _decimal_text(value_j, "J")


def money_text(value_usd: float) -> str:
    """An amount of US dollars: "$1,240", "$12.40", "$0.0313"; never in powers of ten."""
    size = abs(value_usd)
    if size >= 1000 or value_usd == 0:
        return f"${value_usd:,.0f}"
    return f"${value_usd:.{2 if size >= 1 else 2 - math.floor(math.log10(size))}f}"


def count_text(value: float) -> str:
    """A number of things, of which a few digits are known: "2,339,000" for 2,338,714; below 100 with up to two decimals."""
    if abs(value) < 100:
        return f"{value:.3g}"
    return f"{round(value, 3 - math.floor(math.log10(abs(value)))):,.0f}"


def _decimal_text(value: float, unit: str) -> str:
    """Three digits, with a prefix of a thousand, a million ... where that is shorter."""
    prefixes = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
    place = 0
    while abs(value) >= 999.5 and place < len(prefixes) - 1:
        value /= 1000
        place += 1
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if abs(value) >= 0.001 else 0
    return f"{value:.{digits}f} {prefixes[place]}{unit}"
