"""What a user of an imported GPU trace sees: modules, ranks by the job's numbers, the measured step beside the predicted one."""

import json
from collections import Counter
from pathlib import Path

import pytest
from importer_kit import shared_trace
from kineto_files import AUTOGRAD, START, Profile, distributed

from dpro_search.collect.readers.kineto.importer import read
from dpro_search.errors import InputError
from dpro_search.kinds import job_of
from dpro_search.space.scenario import Scenario
from tests.cli.facts import printed, replayed

RECORDED = Path(__file__).parents[2] / "data" / "kineto_modules" / "net.json.gz"


def in_modules(steps: int = 4) -> Profile:
    """Steps of 600 us that the device decides: 200 us in one module and 100 us of its backward pass, 100 us in another, 200 us."""
    profile = Profile()
    for number in range(steps):
        begin, runs = START + 150 * number, START + 150 + 600 * number
        profile.step(number, begin, 149)
        profile.frame("nn.Module: Net_0", begin + 1, 60)
        for place, (module, dur) in enumerate((("Linear_0", 200), ("Norm_0", 100))):
            at, ids = begin + 5 + 20 * place, {"Sequence number": 10 * number + place, "Fwd thread id": 0}
            profile.frame(f"nn.Module: {module}", at, 15)
            profile.op(f"aten::{module}", at + 1, 12, **ids)
            profile.kernel(f"k_{module}", runs + 200 * place, dur, launched=at + 2)
        backward = {"Sequence number": 10 * number, "Fwd thread id": 1}
        profile.op("LinearBackward0", begin + 90, 8, AUTOGRAD, **backward)
        profile.kernel("k_backward", runs + 300, 100, launched=begin + 91, tid=AUTOGRAD)
        profile.op("aten::add_", begin + 100, 20, AUTOGRAD)
        profile.kernel("k_same", runs + 400, 100, launched=begin + 101, tid=AUTOGRAD)
        profile.kernel("k_same", runs + 500, 100, launched=begin + 107, tid=AUTOGRAD)
    return profile


@pytest.fixture
def trace(tmp_path):
    return read([in_modules().write(tmp_path / "trace.json", header=distributed(5, 8))])


def test_a_module_that_takes_half_the_time_shortens_an_iteration_by_half_of_its_kernels(trace):
    base = replayed(trace)["predicted_iteration_us"]
    for module, kernels_us in (("Net_0.Linear_0", 300), ("Linear_0", 300), ("Net_0.Norm_0", 100), ("Net_0", 400)):
        assert base - replayed(trace, changes=(f"module.{module}=0.5",))["predicted_iteration_us"] == pytest.approx(
            kernels_us / 2, abs=2
        )


def test_a_module_that_is_not_there_is_refused_with_those_that_are(trace):
    with pytest.raises(InputError, match=r"'module\.Conv_0=0\.5': the modules of the trace are Net_0, Net_0\.Linear_0"):
        replayed(trace, changes=("module.Conv_0=0.5",))


def test_gains_of_modules_are_ranked_among_the_others_and_confirmed_by_the_replay(trace):
    facts = printed(trace)
    gains = {row["what_if"]: row for row in facts["gains"]}
    assert list(gains) == [row["what_if"] for row in sorted(facts["gains"], key=lambda row: -row["gain_us"])]
    row = gains["module.Net_0.Linear_0=0.5"]
    assert row["meaning"] == "module Net_0.Linear_0 2x faster"
    again = replayed(trace, changes=(row["what_if"],))["predicted_iteration_us"]
    assert row["predicted_iteration_us"] == pytest.approx(again)


def test_ops_of_one_name_are_one_row_with_their_number_time_and_origin(trace):
    rows = {row["op"]: row for row in printed(trace)["critical_ops"]}
    same = rows["k_same@5"]
    assert (same["count"], same["rank"]) == (2, 5)
    assert same["total_us"] == pytest.approx(200, abs=1)
    assert (same["framework_op"], same["origins"], "module" in same) == ("aten::add_", 1, False)
    assert (rows["k_backward@5"]["framework_op"], rows["k_backward@5"]["module"]) == ("LinearBackward0", "Net_0.Linear_0")
    assert rows["k_Norm_0@5"]["module"] == "Net_0.Norm_0"


def test_a_rank_has_its_number_in_the_job_everywhere(trace):
    facts = printed(trace)
    assert [row["rank"] for row in facts["ranks"]] == [5]
    assert facts["ranks"][0]["host"] is None
    assert {row["rank"] for row in facts["critical_path"]} <= {5, -1}
    assert replayed(trace, changes=("rank5.compute=0.5",))["predicted_iteration_us"] == pytest.approx(
        replayed(trace, changes=("compute=0.5",))["predicted_iteration_us"]
    )
    with pytest.raises(InputError, match=r"'rank0\.compute=0\.5': the trace has rank 5"):
        replayed(trace, changes=("rank0.compute=0.5",))


def test_a_real_rank_has_its_number_in_the_job():
    trace = shared_trace("kineto_single/torchrec_a100_rank3of8.json.gz")
    facts = printed(trace)
    assert {row["rank"] for row in (*facts["ranks"], *facts["critical_ops"])} == {3}
    assert any(row["count"] > 10 and row["framework_op"].startswith("aten::") for row in facts["critical_ops"])


def perfetto(trace):
    job = job_of(trace).job
    return json.loads(job.perfetto(job.lower(Scenario()), recorded=True))["traceEvents"]


def test_the_measured_step_is_beside_the_predicted_one_with_errors_per_op(trace):
    events = perfetto(trace)
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["predicted rank 5", "measured rank 5"]
    (kernel,) = (event for event in events if event["name"] == "k_Linear_0@5" and event["ph"] == "X")
    assert kernel["args"]["module"] == "Net_0.Linear_0"
    assert kernel["args"]["error_pct"] == 0
    measured = [event for event in events if event.get("cat") == "measured" and event["name"] == "k_Linear_0"]
    assert [event["args"]["predicted_us"] for event in measured] == [200.0]
    assert measured[0]["dur"] == 200.0


def test_collectives_of_real_ranks_are_joined_across_ranks_and_counted_by_rate():
    events = perfetto(shared_trace("kineto_dlrm_8ranks"))
    arrows = [event for event in events if event.get("cat") == "collective"]
    assert Counter(event["ph"] for event in arrows) == {"s": 2 * 8 * 7, "f": 2 * 8 * 7}  # 8 collectives of 8 ranks, twice
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert len({names[event["pid"]] for event in arrows}) == 16
    use = [event for event in events if event["ph"] == "C"]
    assert {names[event["pid"]] for event in use} == set(names.values())
    assert all(event["args"]["Gbit/s"] >= 0 for event in use)


def test_recorded_memory_is_a_counter_and_the_peak_of_a_prediction():
    trace = read([RECORDED])
    counted = [event["args"]["bytes"] for event in perfetto(trace) if event["ph"] == "C" and event["name"] == "memory"]
    assert len(counted) > 100
    facts = replayed(trace)
    assert facts["peak_memory_bytes"] == trace.memory.allocated_bytes.max() >= max(counted)
