"""Quantities as people write them."""

from collections.abc import Callable

import pytest

from dpro_search.errors import InputError
from dpro_search.quantities import (
    count_text,
    energy_text,
    flops_text,
    interval_text,
    money_text,
    parse_bytes,
    parse_count,
    parse_flops_per_s,
    parse_hz,
    parse_rate_bps,
    parse_size_setting,
    parse_switch,
    parse_time_setting,
    parse_us,
    parse_watts,
    time_text,
)
from dpro_search.space.scenario import readers
from tests.every_case import every_case

_READERS = [parse_bytes, parse_rate_bps, parse_us, parse_switch, parse_count, parse_flops_per_s, parse_hz, parse_watts]


@every_case(
    ("text", "size_bytes"),
    [("64MB", 64_000_000), ("25 MiB", 25 * 2**20), ("25M", 25 * 2**20), ("1048576", 2**20), ("0", 0), ("1.5KiB", 1536), ("3b", 3)],
)
def test_sizes_have_decimal_and_binary_units(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@every_case(
    ("text", "rate_bps"),
    [("500mbit", 5e8), ("200gbit", 2e11), ("200 Gbit/s", 2e11), ("2g", 2e9), ("25GB/s", 2e11), ("1e9", 1e9), ("unlimited", None)],
)
def test_rates_are_bits_a_second_unless_they_name_bytes(text: str, rate_bps: float | None) -> None:
    assert parse_rate_bps(text) == rate_bps


@pytest.mark.parametrize(("text", "time_us"), [("10ms", 1e4), ("500 us", 500.0), ("2s", 2e6), ("1000", 1000.0), ("5ns", 0.005)])
def test_times_have_units_and_are_microseconds_without(text: str, time_us: float) -> None:
    assert parse_us(text) == pytest.approx(time_us)


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (parse_flops_per_s, "989.4 TFLOP/s", 989.4e12),
        (parse_flops_per_s, "2.25PFLOPS", 2.25e15),
        (parse_flops_per_s, "62 TOP/s", 62e12),
        (parse_hz, "1980 MHz", 1.98e9),
        (parse_watts, "1.2kW", 1200.0),
    ],
)
def test_data_sheets_units(read: Callable[[str], float], text: str, value: float) -> None:
    assert read(text) == pytest.approx(value)


@pytest.mark.parametrize(("text", "value"), [("1", True), ("on", True), ("False", False), ("0", False)])
def test_switches(text: str, value: bool) -> None:
    assert parse_switch(text) is value


@every_case("read", _READERS)
@every_case("text", ["", "fast", "1.2.3", "64 parsecs", "-3MB", "1e999", "nan"])
def test_anything_else_is_refused_with_the_text(read: object, text: str) -> None:
    with pytest.raises(InputError, match=f"'{text}'"):
        read(text)  # type: ignore[operator]


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="not a rate"):
        parse_rate_bps("0gbit")


@pytest.mark.parametrize(("text", "nearest"), [("50", "write 50MB, or 50B"), ("0.5", "write 0.5MB"), ("3PiB", "any device holds")])
def test_sizes_that_are_hardly_meant_are_refused_with_the_nearest_plausible_one(text, nearest):
    with pytest.raises(InputError, match=nearest):
        parse_size_setting(text)


def test_sizes_with_a_unit_and_those_of_a_usual_order_are_taken_as_they_are():
    assert [parse_size_setting(text) for text in ("50B", "0", "1048576", "25MiB")] == [50, 0, 2**20, 25 * 2**20]


@pytest.mark.parametrize(("text", "nearest"), [("5", "write 5ms, or 5us"), ("40h", "more than a day")])
def test_times_that_are_hardly_meant_are_refused_with_the_nearest_plausible_one(text, nearest):
    with pytest.raises(InputError, match=nearest):
        parse_time_setting(text)


def test_every_setting_of_bytes_or_time_is_checked():
    of_bytes = [name for name in readers() if name.endswith("_bytes")]
    of_time = [name for name in readers() if name.endswith("_us")]
    assert {"bucket_cap_bytes", "fusion_threshold_bytes", "partition_bytes"} <= set(of_bytes)
    for name in (*of_bytes, *of_time):
        with pytest.raises(InputError, match="hardly meant"):
            readers()[name]("50")


@every_case(
    ("text", "expected"),
    [
        (time_text(431_200.0), "431.2 ms"),
        (time_text(1_276_000.0), "1.28 s"),
        (time_text(23_150_700.0), "23.2 s"),
        (time_text(750e6), "12.5 min"),
        (time_text(11_520e6), "3.2 h"),
        (time_text(999_990.0), "1.00 s"),
        (interval_text(3.7e6, 7.72e6), "3.70 - 7.72 s"),
        (interval_text(833_200.0, 1.73e6), "833.2 ms - 1.73 s"),
        (flops_text(2.84e16), "28.4 PFLOP"),
        (flops_text(294e14), "29.4 PFLOP"),
        (energy_text(2.844e8), "79.0 kWh"),
        (energy_text(740.0), "740 J"),
        (money_text(0.03131), "$0.0313"),
        (money_text(12.4), "$12.40"),
        (money_text(12_345.0), "$12,345"),
        (money_text(0.0), "$0"),
        (count_text(2_338_714.0), "2,339,000"),
        (count_text(150.24), "150"),
        (count_text(3.14159), "3.14"),
    ],
)
def test_quantities_are_printed_as_people_write_them(text: str, expected: str) -> None:
    assert text == expected
