"""What the table of KVStore's slices counts."""

from __future__ import annotations

from experiments.costmodel.kvstore_slices import Setting, Used, table


def used(setting: Setting, server_us: float, worker_us: float) -> Used:
    return Used(setting=setting, server_us=server_us, worker_us=worker_us, step_us=1.0)


def test_a_slice_costs_what_more_of_them_cost_where_bytes_are_the_same() -> None:
    whole, halves = Setting(100, 2_000_000, 2_000_000, 1), Setting(100, 2_000_000, 1_000_000, 1)
    assert (whole.slices, halves.slices) == (50, 100), "of each of two servers"
    rounds = [used(whole, 90_000.0, 50_000.0), used(halves, 110_000.0, 53_000.0), used(whole, 100_000.0, 50_000.0)]
    rows = table([*rounds, used(halves, 105_000.0, 52_000.0), used(whole, 101_000.0, 51_000.0), used(halves, 99_000.0, 52_500.0)])
    first, second = rows.splitlines()[2:]
    assert "| 50 | 100 (90-101) |  | 50 (50-51) |  |" in first
    assert "| 100 | 105 (99-110) | 100 | 52 (52-53) | 25 |" in second, (
        "medians: 5 ms more for 50 slices, of which workers have twice"
    )


def test_small_arrays_tell_what_a_slice_costs_by_itself_and_others_are_not_compared() -> None:
    rows = table([used(Setting(160, 1_000, 1_000, 1), 8_000.0, 4_000.0), used(Setting(40, 640_000, 640_000, 1), 1.0, 1.0)])
    small, large = rows.splitlines()[2:]
    assert "| 80 | 8 (8-8) | 100 (all) | 4 (4-4) | 25 (all) |" in small
    assert large.count("|  |") == 2
