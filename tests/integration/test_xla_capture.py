"""`capture --jax`: a step compiled in JAX's environment for devices that need not be here, and what the verbs say of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dpro_search.collect.readers.xla import collectives
from dpro_search.errors import InputError, JobError
from dpro_search.graph.hlo import executions, program_work
from dpro_search.kinds.xla.capture import capture_program, program_request
from tests.kinds.verbs import verb

pytestmark = [pytest.mark.integration, pytest.mark.one_core]

SCRIPT = Path(__file__).parent / "jax_step_job.py"
LAYERS, WIDTH, ROWS = 3, 256, 512  # as in the script
PRODUCTS = 2 * 3  # up and down, forward and for both gradients


def captured(jax_python, out, function="step", on="cpu:8", mesh="fsdp=4,tp=2", time_limit_s=300.0):
    request = program_request(f"{SCRIPT}:{function}", on=on, mesh=mesh, python=str(jax_python), time_limit_s=time_limit_s)
    return capture_program(request, out)


def needs(jax_python, module):
    if subprocess.run([jax_python, "-c", f"import {module}"], capture_output=True, check=False).returncode:
        pytest.skip(f"{jax_python} cannot import {module}; scripts/make_env.sh jax+tpu+cuda installs it")


def test_the_program_has_the_steps_work_mesh_and_memory(jax_python, tmp_path):
    program = captured(jax_python, tmp_path / "captured")
    assert program.facts.mesh == {"fsdp": 4, "tp": 2}
    assert program.facts.tokens == ROWS
    assert sorted(program.facts.device_ids) == list(range(8))
    assert program_work(program.module).matrix_flops == pytest.approx(PRODUCTS * LAYERS * 2 * ROWS * WIDTH * 4 * WIDTH / 8)
    weights_bytes = LAYERS * 2 * WIDTH * 4 * WIDTH * 4 / 8
    assert program.facts.memory.arguments_bytes == pytest.approx(weights_bytes + ROWS * WIDTH * 4 / 4, rel=0.01)
    assert program.facts.memory.aliased_bytes == pytest.approx(weights_bytes, rel=0.01)
    turns = executions(program.module)
    assert any(turns[each.computation.name] == LAYERS for each in collectives(program.module))


def test_errors_are_one_line_with_the_scripts_place(jax_python, tmp_path):
    with pytest.raises(InputError, match=r"jax_step_job\.py:\d+: .*dot"):
        captured(jax_python, tmp_path / "wrong", function="wrong")
    with pytest.raises(InputError, match="must return the jitted step and a tuple of its arguments"):
        captured(jax_python, tmp_path / "nothing", function="nothing")
    with pytest.raises(InputError, match="is 16 devices, and there are 8"):
        captured(jax_python, tmp_path / "many", mesh="fsdp=16")
    with pytest.raises(InputError, match="no function 'missing'"):
        captured(jax_python, tmp_path / "missing", function="missing")
    assert not any(tmp_path.iterdir()), "nothing half-written stays"


def test_a_capture_that_takes_too_long_is_ended(jax_python, tmp_path):
    with pytest.raises(JobError, match=r"took longer than 0\.3 s"):
        captured(jax_python, tmp_path / "late", time_limit_s=0.3)


@pytest.mark.parametrize(("on", "compiler"), [("v5e:2x4", "libtpu"), ("1xhgx-h100", "jax_plugins.xla_cuda12")])
def test_programs_for_devices_that_are_not_here_are_replayed_and_searched(jax_python, tmp_path, monkeypatch, on, compiler):
    needs(jax_python, compiler)
    monkeypatch.setenv("DPRO_SEARCH_PROGRAMS", str(tmp_path / "kept"))
    captured(jax_python, tmp_path / "captured", on=on)
    prediction = verb("replay", tmp_path / "captured")
    assert sum(prediction["breakdown_us"].values()) == pytest.approx(prediction["predicted_iteration_us"])
    rows = verb("diagnose", tmp_path / "captured")["collectives"]
    assert {axis for row in rows for axis in row["axes"].split(",") if axis} == {"fsdp", "tp"}
    plans = verb("run", tmp_path / "captured", "--trials", "3", "--out", tmp_path / "run")["plans"]
    assert any(plan["plan"].get("mesh") for plan in plans)
