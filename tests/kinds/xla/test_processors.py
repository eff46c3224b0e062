"""Compiled programs on processors: the times of the run beside a program, and those of programs that did not run."""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import pytest

from dpro_search.cluster import parse_cluster
from dpro_search.collect.readers.xla import HloModule, parse_hlo
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.kinds.xla.lowering import step_of
from dpro_search.kinds.xla.processors import ProcessorPrices, TimedProgram
from dpro_search.kinds.xla.program import FACTS_FILE, TEXT_FILE, ProgramFacts
from dpro_search.kinds.xla.times import TIMES_FILE, ExchangeTime, ProgramTimes
from tests.kinds.verbs import refusal, verb

CLUSTER = "2xtestbed@1gbit"
BYTES_PER_US = 125.0
MESH = {"data": 2}
GROUPS = "replica_groups={{0,1}}, use_global_device_ids=true, to_apply=%sum"


def text(rows: int = 512, width: int = 256, reduced: str = "f32[256,256]", loss: str = "") -> str:
    """A program of two devices: a product, a sum of its elements with themselves, and an all-reduce."""
    return f"""HloModule jit_step, is_scheduled=true, num_partitions=2

%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}

ENTRY %main (x: f32[{rows},{width}], w: f32[{width},{width}], g: {reduced}) -> {reduced} {{
  %x = f32[{rows},{width}]{{1,0}} parameter(0)
  %w = f32[{width},{width}]{{1,0}} parameter(1)
  %g = {reduced}{{1,0}} parameter(2)
  %product = f32[{rows},{width}]{{1,0}} dot(%x, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %doubled = f32[{rows},{width}]{{1,0}} add(%product, %product)
  {loss}
  ROOT %reduced = {reduced}{{1,0}} all-reduce(%g), channel_id=1, {GROUPS}
}}
"""


def parsed(hlo: str) -> HloModule:
    (module,) = parse_hlo(hlo)
    return module


def exchanges(*times: tuple[int, float], kind: str = "all-reduce") -> tuple[ExchangeTime, ...]:
    return tuple(ExchangeTime(kind=kind, group=2, bytes=size, us=us) for size, us in times)


TIMES = ProgramTimes(
    steps_us=(5_900.0, 6_100.0),
    instructions_us={"product": 1_000.0, "doubled": 200.0, "reduced": 4_000.0},
    unprofiled=1.0,
    exchanges=exchanges((1 << 16, 1_000.0), (1 << 18, 3_500.0), (1 << 20, 10_000.0)),
    rate_bps=1e9,
    ranks=2,
    cores=2,
)


def captured(folder: Path, times: ProgramTimes | None = TIMES, **facts: object) -> Path:
    path = folder / "captured"
    path.mkdir()
    (path / TEXT_FILE).write_bytes(gzip.compress(text().encode()))
    values = {"platform": "cpu", "cluster": CLUSTER, "mesh": MESH, **facts}
    (path / FACTS_FILE).write_bytes(msgspec.json.encode(ProgramFacts(**values)))  # type: ignore[arg-type]
    if times is not None:
        (path / TIMES_FILE).write_bytes(msgspec.json.encode(times))
    return path


def other_us(hlo: str, times: ProgramTimes = TIMES) -> dict[str, float]:
    """The durations of another program's ops, by name."""
    ran = TimedProgram(module=parsed(text()), times=times)
    module = parsed(hlo)
    step = step_of(module, ProcessorPrices(module, parse_cluster(CLUSTER), 1.0, ran), MESH)
    return {
        op.instruction.name: us
        for op, us, kind in zip(step.ops, step.graph.duration_us, step.graph.op_kind, strict=True)
        if us and kind != OpKind.HOST
    }


def test_a_program_takes_what_it_took_and_what_is_left_of_a_step_is_shown(tmp_path):
    answer = verb("replay", captured(tmp_path))
    assert answer["predicted_iteration_us"] == pytest.approx(6_000)
    assert answer["measured_iteration_us"] == pytest.approx(6_000)
    expected = {"compute": 1_200, "exposed_communication": 4_000, "exposed_copies": 0, "between_instructions": 800}
    assert answer["breakdown_us"] == pytest.approx(expected)


def test_a_faster_link_shortens_the_bytes_of_a_collective_alone(tmp_path):
    answer = verb("replay", captured(tmp_path), "--what-if", "bandwidth=2")
    on_the_link_us = 256 * 256 * 4 / BYTES_PER_US
    assert answer["predicted_iteration_us"] == pytest.approx(6_000 - on_the_link_us / 2)


def test_the_same_instruction_of_another_mesh_takes_the_same_time():
    times = other_us(text(reduced="f32[128,256]"))
    assert (times["product"], times["doubled"]) == (1_000, 200)


def test_collectives_of_another_mesh_take_what_those_of_their_size_took_alone():
    a_third_between_us = 1_000 + (3_500 - 1_000) / 3  # 128 KiB lie there between 64 and 256 KiB
    assert other_us(text(reduced="f32[128,256]"))["reduced"] == pytest.approx(a_third_between_us)
    large_us = 10_000 + (10_000 - 3_500) / ((1 << 20) - (1 << 18)) * (1 << 20)
    times = other_us(text(reduced="f32[2048,256]"))
    assert times["reduced"] == pytest.approx(large_us), "beyond the largest size it grows as between the last two"


def test_processes_wait_for_each_other_in_other_meshes_as_long_as_they_did():
    """The all-reduce of 256 KiB took 4,000 us, and 3,500 alone: 500 for 1,200 of computation."""
    ran = TimedProgram(module=parsed(text()), times=TIMES)
    assert ran.waiting_share == pytest.approx(500 / 1_200)
    module = parsed(text(reduced="f32[128,256]"))
    prices = ProcessorPrices(module, parse_cluster(CLUSTER), 1.0, ran)
    assert prices.outside_us(1_200) == pytest.approx(800 + 500)


def test_a_kind_of_collective_that_was_not_timed_is_not_guessed():
    only_permutes = msgspec.structs.replace(TIMES, exchanges=exchanges((1024, 10.0), kind="collective-permute"))
    with pytest.raises(InputError, match="no all-reduce among 2 devices was timed beside the program"):
        other_us(text(reduced="f32[128,256]"), only_permutes)


def test_without_a_real_run_processors_have_no_prices(tmp_path):
    assert "capture it with --timed" in refusal("replay", captured(tmp_path, times=None))


def test_times_of_other_links_are_not_taken(tmp_path):
    path = captured(tmp_path, times=msgspec.structs.replace(TIMES, rate_bps=5e8))
    assert "was timed on other links" in refusal("replay", path)


def test_times_of_another_program_are_refused(tmp_path):
    path = captured(tmp_path, times=msgspec.structs.replace(TIMES, instructions_us={"fusion.1": 10.0}))
    assert "names no instruction of jit_step" in refusal("replay", path)


def test_damaged_times_are_one_line(tmp_path):
    path = captured(tmp_path)
    (path / TIMES_FILE).write_bytes((path / TIMES_FILE).read_bytes()[:50])
    line = refusal("replay", path)
    assert "times.json" in line
    assert "capture the program again" in line


@pytest.mark.parametrize(
    ("on", "why"),
    [("v6e:4x4", "is not here"), ("2xhgx-h100", "is not here"), ("64xtestbed@1gbit", "64 processes share")],
)
def test_only_what_is_here_can_be_timed(tmp_path, on, why):
    script = tmp_path / "train.py"
    script.write_text("def step(mesh): ...\n")
    how = ("--jax", "--on", on, "--timed", "--python", "python3", "--out", tmp_path / "out")
    assert why in refusal("capture", f"{script}:step", *how)
    assert not (tmp_path / "out").exists()
