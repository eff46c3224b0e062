"""Programs that JAX compiles here, for forced CPU devices and for TPUs and GPUs that are only described, read from their text.

One process compiles for one target; a target whose compiler the environment lacks is skipped.
"""

import json
import subprocess
from pathlib import Path

import pytest

from dpro_search.collect.readers.xla import read_hlo
from dpro_search.graph.hlo import program_work
from tests.collect.xla.known import LAYERS, WIDTH, known_collectives, read_collectives

pytestmark = [pytest.mark.integration, pytest.mark.one_core]

JOB = Path(__file__).parent / "xla_programs_job.py"
COMPILERS = {"cpu": "jaxlib", "v6e:2x4": "libtpu", "h100:1x1x8": "jax_plugins.xla_cuda12"}
PROGRAMS = ("collectives", "scan")


@pytest.fixture(scope="module", params=COMPILERS)
def compiled(request, jax_python, tmp_path_factory) -> tuple[str, Path]:
    """A target, and the folder with what was compiled for it."""
    target, folder = request.param, tmp_path_factory.mktemp("xla")
    has_compiler = subprocess.run([jax_python, "-c", f"import {COMPILERS[target]}"], capture_output=True, check=False)
    if has_compiler.returncode != 0:
        pytest.skip(f"{jax_python} cannot import {COMPILERS[target]}; scripts/make_env.sh jax+tpu+cuda installs it")
    done = subprocess.run([jax_python, str(JOB), target, str(folder), *PROGRAMS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return target.replace(":", "_"), folder


@pytest.mark.parametrize("program", PROGRAMS)
def test_collectives_are_those_that_the_program_asks_for(compiled, program):
    target, folder = compiled
    assert read_collectives(read_hlo(folder / f"{program}.{target}.hlo.gz").module) == known_collectives(program, target)


def test_operations_are_those_of_the_program_and_of_xlas_analysis(compiled):
    target, folder = compiled
    read = read_hlo(folder / f"scan.{target}.hlo.gz").module
    assert program_work(read).matrix_flops == 3 * LAYERS * 2 * 256 * WIDTH * WIDTH
    costs = json.loads((folder / f"scan.{target}.json").read_text())["costs"]
    if costs:  # none for a GPU that is only described
        assert program_work(read, each_loop_once=True).flops == pytest.approx(costs["flops"], abs=8)


def test_a_dumped_program_is_the_compiled_one(jax_python, tmp_path):
    script = (
        "import os; os.environ['XLA_FLAGS'] = '--xla_dump_to=' + os.environ['FOLDER']\n"
        "import jax, jax.numpy as jnp\n"
        "def step(x): return jnp.tanh(x @ x) @ x\n"
        "jax.jit(step)(jnp.ones((64, 64)))\n"
    )
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "JAX_PLATFORMS": "cpu", "FOLDER": str(tmp_path / "dump")}
    subprocess.run([jax_python, "-c", script], env=environment, capture_output=True, check=True)
    program = read_hlo(tmp_path / "dump")
    assert program.module.name == "jit_step"
    assert program.module.is_scheduled
    assert program_work(program.module).matrix_flops == 2 * 2 * 64**3
    assert len(program.others) > 0
    before = next((tmp_path / "dump").glob("*jit_step.before_optimizations.txt"))
    assert not read_hlo(before).module.is_scheduled
