"""Steps whose ends are in the wrong order, records that stand twice, and time stamps that cannot be."""

import json

import pytest

from dpro_search.collect.readers.importers import import_trace
from dpro_search.errors import InputError
from dpro_search.space.recorded.step_graph import iterations_us, unmeasured_steps, unmeasured_text
from tests.cli.facts import replayed
from tests.collect.kineto_files import START, Profile, distributed
from tests.in_process import dpro, succeeds


def profile_of(steps=6, *, copy_us=0.0, empty=None):
    """Steps of 1 ms with a kernel of 900 us; step 2 starts a copy that nothing waits for, and one step may have no kernel."""
    profile = Profile()
    for number in range(steps):
        at = START + 1000.0 * number
        profile.step(number, at, 999)
        if number == empty:
            continue
        profile.kernel("gemm", at + 20, 900, launched=at + 2)
        if copy_us and number == 2:
            profile.kernel("Memcpy DtoH", at + 100, copy_us, launched=at + 8, stream=33, cat="gpu_memcpy", call="cudaMemcpyAsync")
        profile.call("cudaStreamSynchronize", at + 15, 909)
    return profile


def trace_of(folder, profile):
    return import_trace([profile.write(folder / "rank0.json", header=distributed(0, 1))])


@pytest.mark.parametrize("copy_us", [1820.0, 2500.0, 3700.0])
def test_a_step_that_ends_with_or_after_the_next_is_left_out_and_named(tmp_path, copy_us):
    trace = trace_of(tmp_path, profile_of(copy_us=copy_us))
    assert set(iterations_us(trace).values()) == {1000.0}
    assert "3" in map(str, unmeasured_steps(trace))
    facts = replayed(trace)
    assert facts["measured_iteration_us"] == facts["measured_mean_us"] == pytest.approx(1000)
    assert facts["predicted_iteration_us"] == pytest.approx(1000, rel=0.01)
    assert any("left out of the measured iterations" in sentence and "step 3" in sentence for sentence in facts["assumed"])


def test_an_empty_step_does_not_make_the_next_one_twice_as_long(tmp_path):
    trace = trace_of(tmp_path, profile_of(empty=3))
    assert set(iterations_us(trace).values()) == {1000.0}
    assert "step 4 follows step 2" in unmeasured_text(trace)


def test_every_verb_answers_where_no_iteration_is_left(tmp_path):
    trace_of(tmp_path, profile_of(steps=4, copy_us=5000.0)).save(tmp_path / "trace")
    said = succeeds("import", tmp_path / "rank0.json", "--out", tmp_path / "again")
    assert "left out of the measured iterations" in said
    for verb in ("replay", "diagnose"):
        facts = json.loads(succeeds(verb, tmp_path / "trace", "--json"))
        assert facts["measured_iteration_us"] is None or facts["measured_iteration_us"] > 0
    assert dpro("report", tmp_path / "trace", "--out", tmp_path / "page.html").returncode == 0


@pytest.mark.parametrize("kinds", [("kernel",), ("cuda_runtime",), ("kernel", "cuda_runtime", "user_annotation")])
def test_records_that_stand_twice_count_once(tmp_path, kinds):
    once, twice = profile_of(), profile_of()
    copies = [record for record in twice.records if record["cat"] in kinds]
    twice.records[7:7] = copies
    expected = replayed(trace_of(tmp_path, once))
    trace = trace_of(tmp_path, twice)
    assert trace.meta.dropped["records that stand twice"] == len(copies)
    assert replayed(trace)["predicted_iteration_us"] == expected["predicted_iteration_us"]


def test_records_that_differ_in_an_id_are_different(tmp_path):
    profile = profile_of()
    assert "records that stand twice" not in trace_of(tmp_path, profile).meta.dropped


def test_a_kernel_that_lasts_for_years_is_left_out(tmp_path):
    profile = profile_of()
    [record for record in profile.records if record["cat"] == "kernel"][-1]["dur"] = 1e18
    trace = trace_of(tmp_path, profile)
    assert trace.meta.dropped["spans with an impossible start or duration"] == 1
    assert replayed(trace)["predicted_iteration_us"] < 2000


def test_an_iteration_of_months_is_refused_in_one_line(tmp_path):
    profile = profile_of(steps=2)
    [record for record in profile.records if record["cat"] == "kernel"][-1]["dur"] = 2e13
    with pytest.raises(InputError, match="time stamps of the recording are damaged"):
        replayed(trace_of(tmp_path, profile))
