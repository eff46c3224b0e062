"""A compiled XLA program, replayed: what its core computes, what moves beside it, loops, memory and what is not known."""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import pytest

from dpro_search.cluster import parse_cluster
from dpro_search.collect.readers.xla import collectives, parse_hlo
from dpro_search.errors import InputError
from dpro_search.kinds import job_of, kind_of, load_source
from dpro_search.kinds.xla import KIND
from dpro_search.kinds.xla.lowering import axes_of
from dpro_search.kinds.xla.program import FACTS_FILE, TEXT_FILE, ProgramFacts, ProgramMemory
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scenario
from tests.kinds.verbs import refusal, verb

CLUSTER, MESH = "v5e:2x4", {"fsdp": 4, "tp": 2}
CLOCK_HZ = parse_cluster(CLUSTER).groups[0].host.device.clock_hz
TURNS = 3


def fusion(name: str, operand: str, us: float, line: int = 0) -> str:
    """A fusion for which the compiler expects so many microseconds."""
    cycles = round(us * CLOCK_HZ / 1e6)
    where = f', metadata={{op_name="jit(step)/dot" source_file="train.py" source_line={line}}}' if line else ""
    return (
        f"%{name} = bf16[1024,1024]{{1,0}} fusion(%{operand}), kind=kLoop, calls=%work{where}, "
        f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
    )


GATHER = (
    "%gather = (bf16[1024,1024]{1,0}, bf16[4096,1024]{1,0}) all-gather-start(%p0), channel_id=1, "
    'replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}, use_global_device_ids=true, metadata={op_name="jit(step)/gather" '
    'source_file="train.py" source_line=41}'
)
GATHERED = "%gathered = bf16[4096,1024]{1,0} all-gather-done(%gather)"


def text(*lines: str, body: tuple[str, ...] = ()) -> str:
    """A scheduled module of eight devices whose entry has these instructions; a `body` runs `TURNS` times before them."""
    loop, computations = "", ""
    if body:
        loop = (
            '%loop = bf16[1024,1024]{1,0} while(%p0), condition=%again, body=%turn, backend_config={"known_trip_count":{"n":"3"}}'
        )
        steps = "\n  ".join(body)
        computations = (
            f"%turn (p: bf16[1024,1024]) -> bf16[1024,1024] {{\n  %p0 = bf16[1024,1024]{{1,0}} parameter(0)\n  {steps}\n}}\n\n"
            "%again (p: bf16[1024,1024]) -> pred[] {\n  %p1 = bf16[1024,1024]{1,0} parameter(0)\n"
            "  ROOT %yes = pred[] constant(true)\n}\n\n"
        )
    entry = "\n  ".join(filter(None, ["%p0 = bf16[1024,1024]{1,0} parameter(0)", loop, *lines]))
    return (
        "HloModule jit_step, is_scheduled=true, num_partitions=8\n\n"
        "%work (p: bf16[1024,1024]) -> bf16[1024,1024] {\n  %p2 = bf16[1024,1024]{1,0} parameter(0)\n"
        "  ROOT %negated = bf16[1024,1024]{1,0} negate(%p2)\n}\n\n"
        f"{computations}ENTRY %main (p0: bf16[1024,1024]) -> bf16[1024,1024] {{\n  {entry}\n}}\n"
    )


def program(folder: Path, hlo: str, **facts: object) -> Path:
    """A captured folder."""
    path = folder / "captured"
    path.mkdir()
    (path / TEXT_FILE).write_bytes(gzip.compress(hlo.encode()))
    values = {"platform": "tpu", "cluster": CLUSTER, "mesh": MESH, "device_ids": tuple(range(8)), **facts}
    (path / FACTS_FILE).write_bytes(msgspec.json.encode(ProgramFacts(**values)))  # type: ignore[arg-type]
    return path


def step_us(path: Path, *changes: str) -> float:
    here = job_of(load_source(path))
    moved, plan = here.under(here.job.scenario(changes))
    return moved.predict(plan).iteration_us


def test_a_captured_folder_is_recognised(tmp_path):
    assert kind_of(load_source(program(tmp_path, text(fusion("a", "p0", 10))))) is KIND


def test_fusions_take_the_compilers_cycles_one_after_the_other(tmp_path):
    path = program(tmp_path, text(fusion("a", "p0", 10), fusion("b", "a", 20)))
    assert step_us(path) == pytest.approx(30, rel=1e-3)


def test_a_loop_takes_as_long_as_all_its_turns(tmp_path):
    once = program(tmp_path, text(fusion("a", "p0", 10), GATHER, fusion("b", "a", 2), GATHERED))
    (tmp_path / "loop").mkdir()
    body = (fusion("a", "p0", 10), GATHER, fusion("b", "a", 2), GATHERED, "ROOT %same = bf16[1024,1024]{1,0} bitcast(%b)")
    often = program(tmp_path / "loop", text("ROOT %out = bf16[1024,1024]{1,0} bitcast(%loop)", body=body))
    assert step_us(often) == pytest.approx(TURNS * step_us(once), rel=1e-6)


def test_an_asynchronous_collective_is_hidden_by_what_runs_beside_it(tmp_path):
    (tmp_path / "long").mkdir()
    short = program(tmp_path, text(GATHER, fusion("a", "p0", 1), GATHERED))
    long = program(tmp_path / "long", text(GATHER, fusion("a", "p0", 5000), GATHERED))
    alone_us = step_us(short, "compute=0")
    assert alone_us > 10
    assert step_us(short) == pytest.approx(alone_us)
    assert step_us(long) == pytest.approx(5000, rel=1e-3)


def test_permutes_in_both_directions_of_an_axis_run_at_the_same_time(tmp_path):
    def both(folder: str, second: str) -> float:
        (tmp_path / folder).mkdir()
        lines = []
        for name, pairs in (("on", "{{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}"), ("back", second)):
            shape = "bf16[1024,1024]{1,0}"
            lines.append(f"%{name} = ({shape}, {shape}) collective-permute-start(%p0), channel_id=2, source_target_pairs={pairs}")
        done = [f"%{name}_done = bf16[1024,1024]{{1,0}} collective-permute-done(%{name})" for name in ("on", "back")]
        return step_us(program(tmp_path / folder, text(*lines, *done)))

    opposite_us = both("opposite", "{{2,0},{4,2},{6,4},{0,6},{3,1},{5,3},{7,5},{1,7}}")
    same_us = both("same", "{{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}")
    assert same_us == pytest.approx(2 * opposite_us, rel=1e-6)


def test_the_exposed_collective_is_named_with_its_line_and_axis(tmp_path):
    here = job_of(load_source(program(tmp_path, text(GATHER, fusion("a", "p0", 1), GATHERED))))
    diagnosis = here.diagnose()
    (row,) = diagnosis.collectives
    assert (row.kind, row.axes, row.source, row.size_bytes) == ("all-gather", "fsdp", "train.py:41", 4096 * 1024 * 2)
    assert row.exposed_us == pytest.approx(row.total_us - 1, rel=1e-3)
    assert any("all-gather of 8.0 MiB over fsdp (train.py:41)" in sentence for sentence in diagnosis.findings)
    parts_us = here.replayed(Plan()).breakdown_us
    assert sum(parts_us.values()) == pytest.approx(diagnosis.iteration_us)
    assert parts_us["exposed_communication"] == pytest.approx(row.exposed_us)


def test_faster_links_shorten_collectives(tmp_path):
    path = program(tmp_path, text(GATHER, fusion("a", "p0", 1), GATHERED))
    assert step_us(path, "bandwidth=2") < 0.6 * step_us(path)
    assert step_us(path, "communication=0") == pytest.approx(1, rel=1e-2)


def test_collectives_of_one_kind_can_be_asked_about(tmp_path):
    path = program(tmp_path, text(GATHER, fusion("a", "p0", 1), GATHERED))
    assert step_us(path, "collectives.all_gather=0") == pytest.approx(1, rel=1e-2)
    assert "it has all_gather" in refusal("replay", path, "--what-if", "collectives.all_reduce=0")
    assert "all devices run the same program" in refusal("replay", path, "--what-if", "rank1.compute=0.5")


def test_the_order_of_devices_decides_which_links_a_collective_uses(tmp_path):
    (tmp_path / "shuffled").mkdir()
    near = program(tmp_path, text(GATHER, GATHERED), device_ids=(0, 4, 1, 5, 2, 6, 3, 7))
    far = program(tmp_path / "shuffled", text(GATHER, GATHERED), device_ids=(0, 1, 7, 6, 2, 3, 5, 4))
    assert step_us(far) != pytest.approx(step_us(near))


def test_on_gpus_groups_within_a_host_are_faster_than_between_hosts(tmp_path):
    (tmp_path / "far").mkdir()
    gpus = {"platform": "cuda", "cluster": "2xdgx-1-v100", "mesh": {"fsdp": 8, "tp": 2}}
    hlo = text(GATHER, GATHERED).replace("num_partitions=8", "num_partitions=16")
    groups = "replica_groups={{0,2,4,6,8,10,12,14},{1,3,5,7,9,11,13,15}}"
    hlo = hlo.replace("replica_groups={{0,2,4,6},{1,3,5,7}}", groups).replace("bf16[4096,1024]", "bf16[8192,1024]")
    near = program(tmp_path, hlo, **gpus, device_ids=(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15))
    far = program(tmp_path / "far", hlo, **gpus, device_ids=tuple(range(16)))
    assert step_us(near) < 0.7 * step_us(far)


def test_axes_follow_from_groups_and_pairs():
    permute = (
        "%sent = bf16[1024,1024]{1,0} collective-permute(%p0), channel_id=2, "
        "source_target_pairs={{0,1},{1,0},{2,3},{3,2},{4,5},{5,4},{6,7},{7,6}}"
    )
    odd = "%sum = bf16[1024,1024]{1,0} all-reduce(%sent), channel_id=3, replica_groups={{0,3},{1,2},{4,7},{5,6}}, to_apply=%work"
    (module,) = parse_hlo(text(GATHER, GATHERED, permute, odd))
    assert [axes_of(each, MESH) for each in collectives(module)] == [("fsdp",), ("tp",), ()]


def test_a_gpus_program_that_needs_more_memory_than_the_device_has_does_not_run(tmp_path):
    gib = 1 << 30
    memory = ProgramMemory(arguments_bytes=60 * gib, outputs_bytes=60 * gib, aliased_bytes=60 * gib, temporaries_bytes=25 * gib)
    gpus = {"platform": "cuda", "cluster": "1xhgx-h100"}
    prediction = job_of(load_source(program(tmp_path, text(fusion("a", "p0", 10)), memory=memory, **gpus))).predict(Plan())
    assert prediction.peak_memory_bytes == 85 * gib
    assert prediction.infeasible is not None


def test_a_program_that_a_tpus_compiler_made_fits(tmp_path):
    memory = ProgramMemory(arguments_bytes=12 << 30, outputs_bytes=12 << 30, aliased_bytes=12 << 30, temporaries_bytes=5 << 30)
    prediction = job_of(load_source(program(tmp_path, text(fusion("a", "p0", 10)), memory=memory))).predict(Plan())
    assert prediction.peak_memory_bytes == 17 << 30
    assert prediction.infeasible is None


def test_a_text_alone_needs_the_devices(tmp_path):
    path = tmp_path / "step.hlo"
    path.write_text(text(fusion("a", "p0", 10)).replace("{1,0}", "{1,0:T(8,128)}"))
    assert "name them, like --cluster v6e:4x4" in refusal("replay", path)
    assert "has 16 devices, and the program was compiled for 8" in refusal("replay", path, "--cluster", "v5e:4x4")
    assert "compiled for TPUs" in refusal("replay", path, "--cluster", "1xhgx-h100")
    here = job_of(load_source(path))
    moved, plan = here.under(Scenario().on(CLUSTER))
    prediction = moved.predict(plan)
    assert prediction.iteration_us == pytest.approx(10, rel=1e-3)
    assert any("order" in sentence for sentence in moved.assumptions)


def test_cycles_of_one_tpu_are_not_taken_for_another(tmp_path):
    path = program(tmp_path, text(fusion("a", "p0", 10)))
    assert "compile it for Google TPU v6e" in refusal("replay", path, "--cluster", "v6e:2x4")


def test_an_unscheduled_program_is_read_and_says_so(tmp_path):
    path = program(tmp_path, text(fusion("a", "p0", 10)).replace("is_scheduled=true, ", ""))
    here = job_of(load_source(path))
    assert here.predict(Plan()).iteration_us == pytest.approx(10, rel=1e-3)
    assert any("not scheduled" in sentence for sentence in here.assumptions)


def test_unknown_instructions_are_priced_by_bytes_and_counted(tmp_path):
    call = '%mystery = bf16[4096,4096]{1,0} custom-call(%p0), custom_call_target="tpu_custom_call"'
    here = job_of(load_source(program(tmp_path, text(call))))
    rate = parse_cluster(CLUSTER).groups[0].host.device.memory_bytes_per_s
    moved_bytes = 2 * (4096 * 4096 + 1024 * 1024)
    assert here.predict(Plan()).iteration_us == pytest.approx(moved_bytes / rate * 1e6, rel=1e-3)
    assert any("1 custom call" in sentence for sentence in here.assumptions)


def test_a_folder_whose_facts_are_damaged_is_refused_in_one_line(tmp_path):
    path = program(tmp_path, text(fusion("a", "p0", 10)), device_ids=(0, 1))
    with pytest.raises(InputError, match="device_ids has 2 entries, and the program runs on 8 devices"):
        load_source(path)
    (path / FACTS_FILE).write_text("{")
    with pytest.raises(InputError, match="capture the program again"):
        load_source(path)


def test_a_device_of_which_no_run_was_compared_has_a_wider_interval(tmp_path):
    widths = {}
    for number, cluster in enumerate(("v4:2x2x2", "v5e:2x4")):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = program(folder, text(fusion("a", "p0", 10)), cluster=cluster)
        answer = verb("replay", path)
        widths[cluster] = answer["interval_us"][1] / answer["predicted_iteration_us"]
        assert any("of which no run was compared" in sentence for sentence in answer["assumed"])
    assert widths["v5e:2x4"] > 1.1 * widths["v4:2x2x2"]
