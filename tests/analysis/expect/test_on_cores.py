"""Jobs on cores whose blocks and exchanges were timed: which numbers are expected of them, and which causes these tell apart."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from dpro_search.analysis.expect import expect
from dpro_search.collect.tables.parallel_times import BlockTime, CollectiveTime, ParallelTimes, UpdateTime
from dpro_search.errors import InputError
from dpro_search.kinds import JobInScenario, job_of, load_source

_CONFIG = {"model_type": "gpt2", "n_embd": 256, "n_layer": 4, "n_head": 8, "n_positions": 128, "vocab_size": 1024}
_CLUSTER = """\
name = "2 hosts"
hosts = 2
devices = 1
[device]
name = "one CPU core"
vendor = "any"
kind = "cpu"
source = "this machine"
[nic]
count = 2
rate = "250mbit"
latency = "25us"
[source]
all = "this machine"
"""
_FLOPS_PER_S = 1e11
_BYTES_PER_US = 62.5  # 500 Mbit/s


@pytest.fixture
def job(tmp_path: Path) -> JobInScenario:
    """Two ranks, two micro-batches of four sequences each: blocks of 60 ms, sums at the rate of the links."""
    blocks = [
        BlockTime(block=name, micro_batch=size, sequence=128, forward_us=us * size / 4, backward_us=2 * us * size / 4)
        for name, us in (("embedding", 1_000.0), ("layer", 20_000.0), ("head", 10_000.0))
        for size in (1, 2, 4)
    ]
    sums = [
        CollectiveTime(
            collective=name, ranks_per_host=1, hosts=2, world=2, rate_bps=5e8, size_bytes=size, us=1_000 + size / _BYTES_PER_US
        )
        for name in ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
        for size in (1 << 10, 1 << 22)
    ]
    ParallelTimes(
        flops_per_s=_FLOPS_PER_S,
        memory_bytes_per_s=1e10,
        updates=(UpdateTime(elements=1e6, us=10_000.0),),
        blocks=tuple(blocks),
        collectives=tuple(sums),
    ).save(tmp_path / "times.json")
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    (tmp_path / "cluster.toml").write_text(_CLUSTER)
    lines = ['model = "config.json"', 'cluster = "cluster.toml"', "global_batch = 16", "sequence = 128", 'precision = "fp32"']
    lines += ['framework = "pytorch-gloo"', 'times = "times.json"', "[runs]", "micro_batch = 4", "zero_stage = 0"]
    (tmp_path / "job.toml").write_text("\n".join(lines))
    return job_of(load_source(tmp_path / "job.toml"))


def numbers(job: JobInScenario, **ratios: float) -> list[str]:
    """The expected numbers, times some ratios, as ``--measured`` takes them."""
    values = expect(job).values
    step_us = values["step_us"].expected
    made = {"step_time": step_us, "median_step_time": step_us, "one_host_step_time": values["one_host_step_us"].expected}
    texts = [f"{name}={us * ratios.get(name, 1.0) / 1e6}s" for name, us in made.items()]
    all_reduce = values["all_reduce_bytes_per_s"].expected * ratios.get("all_reduce", 1.0)
    return [*texts, f"all_reduce={all_reduce / 1e9}GB/s", f"gemm={_FLOPS_PER_S * ratios.get('gemm', 1.0) / 1e12}TFLOP/s"]


def test_a_step_on_one_host_a_sum_and_a_product_follow_from_the_recorded_times(job: JobInScenario) -> None:
    values = expect(job).values
    assert values["gemm_flops_per_s"].expected == _FLOPS_PER_S
    assert values["all_reduce_bytes_per_s"].expected == pytest.approx(_BYTES_PER_US * 1e6, rel=0.02)
    blocks_us = 2 * 3 * (1_000 + 4 * 20_000 + 10_000)
    assert values["one_host_step_us"].expected == pytest.approx(blocks_us, rel=0.2)  # and the update
    assert values["step_us"].expected > values["one_host_step_us"].expected
    assert not {"utilisation", "power_w", "median_step_us"} & values.keys()  # of GPUs; only where it was measured
    low, high = values["step_us"].interval
    assert math.log(high / low) < 0.5


def test_a_share_of_kernels_is_refused_of_cores(job: JobInScenario) -> None:
    with pytest.raises(InputError, match="utilisation: it is not known what to expect"):
        expect(job, ["utilisation=90%"])


def test_a_healthy_job_is_as_expected_and_a_faster_core_than_recorded_is_possible(job: JobInScenario) -> None:
    answer = expect(job, numbers(job, gemm=1.05))
    assert answer.verdict == "as expected"
    assert answer.causes[0].name == "none"


@pytest.mark.parametrize(
    ("ratios", "cause"),
    [
        ({"step_time": 1.9, "one_host_step_time": 2.0}, "checkpoint-in-window"),
        ({"step_time": 1.9, "median_step_time": 1.9, "one_host_step_time": 2.1}, "input-stalls"),
        ({"step_time": 1.8, "median_step_time": 1.8, "one_host_step_time": 2.0, "gemm": 0.5}, "power-or-thermal-cap"),
        ({"step_time": 1.8, "median_step_time": 1.8}, "slow-device-or-host"),
        ({"step_time": 1.7, "median_step_time": 1.7, "all_reduce": 0.33}, "network-contention"),
    ],
)
def test_causes_are_told_apart(job: JobInScenario, ratios: dict[str, float], cause: str) -> None:
    names = [each.name for each in expect(job, numbers(job, **ratios)).causes[:3]]
    assert cause in names[: 1 if cause != "power-or-thermal-cap" else 2]  # other programs slow cores in the same way


def test_checks_of_collectives_take_the_recorded_time_of_small_exchanges(job: JobInScenario) -> None:
    causes = expect(job, numbers(job, step_time=1.15, median_step_time=1.15)).causes
    checks = next(each for each in causes if each.name == "debug-checks")
    sums = 4 + 2 + 2  # of four layers, embedding and head, and what clips and counts
    added_us = checks.would_be["step_us"] - expect(job).values["step_us"].expected
    assert added_us == pytest.approx(3 * 1_016 * sums, rel=0.4)  # a barrier and two gathers before each, of 1 ms


def test_causes_of_gpus_are_no_causes_here(job: JobInScenario) -> None:
    names = {
        name for each in expect(job, numbers(job, step_time=3.0, median_step_time=3.0)).causes for name in each.name.split("+")
    }
    assert not names & {"no-gpudirect", "memory-fragments", "host-bound", "eager-instead-of-compiled"}


def test_the_next_measurement_has_a_command_for_cores(job: JobInScenario) -> None:
    commands = [each.command for each in expect(job, ["step_time=3s"], with_next=True).next]
    assert commands
    assert not any("cuda" in command or "nvidia" in command for command in commands)
