"""`expect`: expected values, percentiles, causes and the next measurement, on described jobs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest

import dpro_search
from dpro_search.analysis.expect import Expectation, expect
from dpro_search.analysis.expect.causes import CAUSES, Situation, cause_texts, effects_of
from dpro_search.analysis.expect.quantities import Quantity
from dpro_search.analysis.expect.signals import signals
from dpro_search.collect.sample import sample_trace_path
from dpro_search.errors import InputError
from dpro_search.kinds import JobInScenario, job_of, load_source
from dpro_search.space.scenario import Scenario
from tests.kinds.verbs import refusal, verb

JOB = """
model = "llama2-7b"
cluster = "4xdgx-a100-80"
global_batch = 256
sequence = 4096
framework = "fsdp"
compiled = true
[runs]
zero_stage = 3
micro_batch = 2
"""


@pytest.fixture(scope="module")
def job_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("expect") / "job.toml"
    path.write_text(JOB)
    return path


@pytest.fixture(scope="module")
def job(job_file) -> JobInScenario:
    return job_of(load_source(job_file))


@pytest.fixture(scope="module")
def healthy(job) -> Expectation:
    return expect(job)


@pytest.fixture(scope="module")
def situation(job) -> Situation:
    prepared = job.job.prepared(Scenario())
    return Situation(workload=prepared.prices.workload, framework="fsdp", step_ratio=(0.9, 1.3))


def given(values: dict[str, float], *names: Quantity) -> list[str]:
    """Numbers as the option takes them."""
    texts = {
        Quantity.STEP: lambda value: f"step_time={value}us",
        Quantity.ONE_HOST: lambda value: f"one_host_step_time={value}us",
        Quantity.MEMORY: lambda value: f"memory={value:.0f}",
        Quantity.ALL_REDUCE: lambda value: f"all_reduce={value / 1e9}",
        Quantity.GEMM: lambda value: f"gemm={value / 1e12}",
        Quantity.UTILISATION: lambda value: f"utilisation={value * 100}%",
        Quantity.POWER: lambda value: f"power={value}W",
    }
    return [texts[name](values[name]) for name in names]


def test_without_a_number_everything_is_expected_and_nothing_is_judged(healthy):
    assert healthy.verdict == "not measured"
    assert healthy.causes == ()
    assert {*healthy.values} == {*Quantity} - {Quantity.MEDIAN_STEP}  # equal to the mean until somebody measured it
    assert healthy.values[Quantity.MEMORY].interval[1] <= 80 * 2**30, "no device holds more than it has"
    for value in healthy.values.values():
        assert value.interval[0] < value.expected <= value.interval[1]


def test_a_job_that_is_as_predicted_is_as_expected(job, healthy):
    values = {name: value.expected for name, value in healthy.values.items()}
    answer = expect(job, given(values, Quantity.STEP, Quantity.MEMORY, Quantity.ONE_HOST))
    assert answer.verdict == "as expected"
    assert answer.causes[0].name == "none"
    assert answer.percentile == pytest.approx(50, abs=1)


def test_rates_are_compared_as_rates(job, healthy):
    step_us = healthy.values[Quantity.STEP].expected
    tokens = 256 * 4096 / step_us * 1e6
    answer = expect(job, [f"tokens_per_second={tokens / 1.1}"])
    assert answer.quantity == "tokens_per_second"
    assert answer.expected == pytest.approx(tokens)
    assert answer.measured == pytest.approx(tokens / 1.1)
    assert answer.percentile < 50 < answer.values[Quantity.STEP].percentile
    assert answer.interval[0] < tokens < answer.interval[1]


@pytest.mark.parametrize("name", sorted(set(CAUSES) - {"memory-fragments", "counted-otherwise", "wrong-precision"}))
def test_a_cause_never_makes_a_step_faster(situation, name):
    expected = signals(situation.workload, [Quantity.STEP])[Quantity.STEP]
    for effect in effects_of(name, situation):
        replayed = expected if effect.replay is None else signals(effect.replay, [Quantity.STEP])[Quantity.STEP]
        assert replayed * effect.factors.get(Quantity.STEP, 1.0) >= expected * 0.995


TOLD = (Quantity.STEP, Quantity.ONE_HOST, Quantity.MEMORY, Quantity.ALL_REDUCE, Quantity.GEMM, Quantity.UTILISATION, Quantity.POWER)


@pytest.mark.parametrize(
    "name",
    [
        "tcp-instead-of-rdma",
        "pcie-instead-of-nvlink",
        "input-stalls",
        "power-or-thermal-cap",
        "slow-device-or-host",
        "shared-devices",
        "recomputation-on",
    ],
)
def test_a_cause_that_shows_in_the_numbers_is_among_the_first_three(job, situation, name):
    expected = signals(situation.workload, TOLD)
    effect = effects_of(name, situation)[-1]
    seen = dict(expected)
    if effect.replay is not None:
        replayed = signals(effect.replay, TOLD)
        seen |= {key: value for key, value in replayed.items() if effect.on_one_host or key is not Quantity.ONE_HOST}
    seen = {key: value * effect.factors.get(key, 1.0) for key, value in seen.items()}
    answer = expect(job, given(seen, *TOLD))
    assert name in [cause.name for cause in answer.causes[:3]]


def test_a_slow_network_is_told_from_a_slow_device_by_an_all_reduce(job, healthy):
    slow = [f"step_time={healthy.values[Quantity.STEP].expected * 3}us"]
    one_host = given({name: value.expected for name, value in healthy.values.items()}, Quantity.ONE_HOST)
    answer = expect(job, [*slow, *one_host], with_next=True)
    names = {cause.name for cause in answer.causes[:3]}
    assert {"tcp-instead-of-rdma", "slow-device-or-host"} <= names
    assert answer.next[0].name == "all_reduce"
    assert 0 < answer.next[0].information_bits <= answer.next[0].entropy_bits
    told = expect(job, [*slow, *one_host, f"all_reduce={healthy.values[Quantity.ALL_REDUCE].expected / 1e9}"])
    assert told.causes[0].name == "slow-device-or-host"


def test_a_product_is_timed_in_the_type_of_the_job(tmp_path, job):
    def command(one: JobInScenario) -> str:
        return next(each.command for each in expect(one, ["mfu=15%"], with_next=True).next if each.name == "gemm")

    assert "dtype=torch.bfloat16" in command(job)
    half = described(tmp_path, JOB.replace("framework", 'precision = "fp16"\nframework'))
    assert "dtype=torch.float16" in command(half)


def test_numbers_that_were_given_are_not_asked_for_again(job):
    answer = expect(job, ["step_time=20s", "gemm=250TFLOP/s"], with_next=True)
    assert not {"step_time", "gemm"} & {each.name for each in answer.next}


def test_causes_that_no_given_number_tells_apart_are_named_with_what_would(job):
    answer = expect(job, ["step_time=12s", "utilisation=60%"])
    assert any("input-stalls from checkpoint-in-window" in sentence for sentence in answer.not_told_apart)


def test_causes_have_words_and_probabilities_that_sum_to_one_at_most(job):
    answer = expect(job, ["mfu=15%"])
    assert 0 < sum(cause.probability for cause in answer.causes) <= 1
    assert {*cause_texts()} == {*CAUSES, "none"}


def test_a_cause_that_would_not_fit_in_memory_is_none(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace("4096", "32768").replace("256", "32").replace("micro_batch = 2", "micro_batch = 1"))
    answer = expect(job_of(load_source(path)), ["mfu=10%"])
    assert "no-flash-attention" not in {cause.name for cause in answer.causes}


def described(folder: Path, text: str) -> JobInScenario:
    (folder / "job.toml").write_text(text)
    return job_of(load_source(folder / "job.toml"))


def test_the_interval_holds_what_the_file_does_not_say(tmp_path, healthy):
    stated = expect(described(tmp_path, JOB + 'recompute = "none"\n'))
    value, wider = stated.values[Quantity.STEP], healthy.values[Quantity.STEP]
    assert value.expected == wider.expected
    assert value.interval[1] < wider.interval[1]
    assert any("whether activations are computed again is not said" in sentence for sentence in healthy.assumptions)
    assert not any("computed again" in sentence for sentence in stated.assumptions)


def test_a_job_that_ran_is_taken_to_fit_in_memory(tmp_path):
    text = JOB.replace("micro_batch = 2", "micro_batch = 8").replace("dgx-a100-80", "dgx-a100-40")
    answer = expect(described(tmp_path, text))
    assert any("would not fit in memory" in sentence for sentence in answer.assumptions)
    assert answer.values[Quantity.MEMORY].expected < 40 * 2**30
    stated = expect(described(tmp_path, text + 'recompute = "none"\n'))
    assert any("does not fit in memory" in sentence for sentence in stated.assumptions)


def test_the_tokens_of_an_mfu_are_those_of_a_rate(job, healthy):
    by_mfu = expect(job, ["mfu=30%"]).values[Quantity.STEP].measured
    flops = expect(job, ["flops_per_device=93.6TFLOP/s"]).values[Quantity.STEP].measured  # 30 % of 312
    assert math.isclose(by_mfu, flops, rel_tol=1e-6)


def test_published_runs_on_the_same_device_are_named(healthy):
    assert healthy.comparable
    assert all(low <= middle <= high for low, middle, high in (each.mfu_pct for each in healthy.comparable))


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (["tokens_per_second_per_device=60000"], "probably the rate of the whole job was meant"),
        (["memory=600GiB"], "that of all 32 devices together"),
        (["gemm=400TFLOP/s"], "the peak in bf16 is 312 TFLOP/s"),
        (["step_time=9s", "tokens_per_second=2000"], "contradict each other"),
        (["mfu=15%", "tokens_per_second_per_device=3000"], "counted otherwise"),
        (["steptime=9s"], "did you mean step_time"),
        (["step_time"], "write NAME=VALUE"),
    ],
)
def test_numbers_that_cannot_be_are_refused_with_what_was_probably_meant(job, numbers, words):
    with pytest.raises(InputError, match=words):
        expect(job, numbers)


def test_the_verb_prints_the_keys_that_others_rely_on(job_file, tmp_path):
    also = tmp_path / "also.txt"
    also.write_text("some output of a script\ngemm=250TFLOP/s\n")
    answer = verb("expect", job_file, "--measured", "mfu=20%", "--also", also, "--next")
    assert {"expected", "interval", "percentile", "causes", "next"} <= set(answer)
    assert {"name", "probability", "would_also_see"} <= set(answer["causes"][0])
    assert answer["values"]["gemm_flops_per_s"]["measured"] == pytest.approx(250e12)


def test_options_describe_a_job_and_settings_change_it(job_file):
    named = verb("expect", "--model", "llama2-7b", "--cluster", "1xdgx-a100-80", "--framework", "fsdp", "--measured", "mfu=40%")
    assert named["quantity"] == "mfu"
    assert any("how the job runs was not given" in sentence for sentence in named["assumptions"])
    assert "global_batch was not given: 32 is taken" in named["assumptions"], "4 a device"
    assert not any("framework was not given" in sentence for sentence in named["assumptions"])
    full = verb("expect", job_file, "--set", "recompute=full")
    assert full["values"]["step_us"]["expected"] > verb("expect", job_file)["values"]["step_us"]["expected"] * 1.1


def test_python_gives_the_same_answer(job_file):
    answer = dpro_search.load(job_file).expect({"mfu": "20%", "memory": "50GiB"}, changes={"micro_batch": 1}, with_next=True)
    printed = verb("expect", job_file, "--measured", "mfu=20%", "--measured", "memory=50GiB", "--set", "micro_batch=1", "--next")
    assert json.loads(msgspec.json.encode(answer)) == printed


def test_a_recorded_job_is_not_compared():
    assert "write it down as a job.toml" in refusal("expect", sample_trace_path(), "--measured", "step_time=1s")


def test_a_job_must_be_described_once(job_file):
    assert "leave it out" in refusal("expect", job_file, "--model", "llama2-7b")
    assert "--model and --cluster" in refusal("expect", "--measured", "mfu=40%")
