"""Time of a device that nothing in a profile explains is unknown: it is shown, and what depends on it covers both answers."""

import json

import pytest
from kineto_files import START, Profile

from dpro_search.collect.readers.kineto.importer import read
from tests.in_process import succeeds
from tests.profiles import iteration_us, profiled, times_of

_IDLE_US = 300


@pytest.fixture
def trace(tmp_path):
    """Steps of 1000 us on one stream: a product of 500 us, 300 us in which nothing runs, and an update of 180 us. Both are launched
    at the beginning, and the host waits for the end."""
    profile = Profile()
    for number in range(5):
        begin = START + 1000 * number
        profile.step(number, begin - 20, 990)
        profile.kernel("gemm", begin, 500, launched=begin - 15)
        profile.kernel("adam", begin + 500 + _IDLE_US, 180, launched=begin - 8)
        profile.call("cudaDeviceSynchronize", begin - 1, 983)
    return read([profile.write(tmp_path / "rank0.json")])


def test_idle_time_that_no_launch_and_no_wait_explains_is_unknown(trace):
    parts = times_of(profiled(trace)).breakdown_us
    assert parts["unknown"] == pytest.approx(_IDLE_US)
    assert parts["compute"] == pytest.approx(680)
    assert sum(parts.values()) == pytest.approx(1000)


def test_a_faster_kernel_leaves_unknown_time_and_its_interval_holds_both_answers(trace):
    faster = times_of(profiled(trace), "compute=0.5")
    assert faster.iteration_us == pytest.approx(1000 - 340)
    low_us, high_us = faster.interval_us
    assert low_us < 510 < 660 < high_us


def test_what_unknown_time_costs_can_be_asked(trace):
    assert iteration_us(profiled(trace), "unknown=0") == pytest.approx(700)


def test_replay_and_diagnose_say_how_much_is_unknown(trace, tmp_path):
    trace.save(tmp_path / "T")
    assert json.loads(succeeds("replay", tmp_path / "T", "--json"))["breakdown_us"]["unknown"] == pytest.approx(_IDLE_US)
    assert "Unknown: for 300.0 us of an iteration (30 %)" in " ".join(succeeds("replay", tmp_path / "T").split())
    assert json.loads(succeeds("diagnose", tmp_path / "T", "--json"))["findings"][0].startswith("Unknown: for 300.0 us")


def test_on_another_device_the_interval_holds_that_unknown_time_changes_like_other_ops(trace, tmp_path):
    trace.save(tmp_path / "T")
    moved = json.loads(succeeds("replay", tmp_path / "T", "--cluster", "h200", "--set", "recorded_on=a100", "--json"))
    assert moved["breakdown_us"]["unknown"] == pytest.approx(_IDLE_US)
    kernels_us = moved["predicted_iteration_us"] - _IDLE_US
    assert moved["interval_us"][0] < 0.9 * kernels_us + 0.6 * _IDLE_US
    assert any("nothing in the recording explains" in text for text in moved["cluster"]["left_out"])


def test_a_start_long_after_its_launch_on_an_idle_stream_is_unknown_and_no_launch_overhead(tmp_path):
    """Two steps are too few to infer that the second stream waits for the first."""
    profile = Profile()
    for number in range(2):
        begin = START + 1000 * number
        profile.step(number, begin - 20, 990)
        for place in range(5):
            profile.kernel("relu", begin + 20 * place, 5, launched=begin + 20 * place - 10)
        profile.kernel("gemm", begin + 100, 400, launched=begin + 85)
        profile.kernel("adam", begin + 500 + _IDLE_US, 180, launched=begin + 92, stream=9)
        profile.call("cudaDeviceSynchronize", begin + 98, 884)
    job = profiled(read([profile.write(tmp_path / "rank0.json")]))
    assert times_of(job).breakdown_us["unknown"] == pytest.approx(_IDLE_US)
    assert times_of(job, "launch=0").breakdown_us["unknown"] > _IDLE_US / 2
