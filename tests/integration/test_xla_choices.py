"""Choices that a script declares: captured, searched beside the mesh for GPUs that are not here, and exported as code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest

from dpro_search.collect.readers.xla import collectives
from dpro_search.errors import InputError
from dpro_search.graph.hlo import executions, program_work
from dpro_search.kinds.xla.capture import capture_program, program_request
from dpro_search.kinds.xla.program import FACTS_FILE, read_program
from tests.integration.test_xla_capture import needs
from tests.kinds.verbs import verb

pytestmark = [pytest.mark.integration, pytest.mark.one_core]

SCRIPT = Path(__file__).parent / "jax_choices_job.py"
READ_PLAN = """
import sys; sys.path.insert(0, sys.argv[1])
from planned_mesh import ARGUMENTS, planned_mesh, rules_spec
mesh = planned_mesh()
print(dict(mesh.shape), mesh.devices.size, tuple(rules_spec("rows", None)), sorted(ARGUMENTS))
sys.path.insert(0, sys.argv[2])
from jax_choices_job import step
train, arguments, tokens = step(mesh, **ARGUMENTS)
print(train.lower(*arguments).as_text().count("dot_general") > 0, tokens)
"""


def captured(jax_python, out, choose="", script=SCRIPT, function="step", on="cpu:8"):
    request = program_request(
        f"{script}:{function}", on=on, mesh="fsdp=4,tp=2", choose=choose, python=str(jax_python), time_limit_s=300.0
    )
    return capture_program(request, out)


def test_chosen_values_reach_the_function_and_the_others_are_the_first(jax_python, tmp_path):
    usual = captured(jax_python, tmp_path / "usual")
    devices = ("--jax", "--on", "cpu:8", "--mesh", "fsdp=4,tp=2", "--python", jax_python)
    choose = ("--choose", "remat=none,micro_batches=2,rules=replicas")
    answer = verb("capture", f"{SCRIPT}:step", *devices, *choose, "--out", tmp_path / "program")
    program = read_program(tmp_path / "program")
    assert usual.facts.chosen == {"remat": "full", "micro_batches": "1", "rules": "weights", "flags": "default"}
    assert program.facts.chosen == {"remat": "none", "micro_batches": "2", "rules": "replicas", "flags": "default"}
    assert answer["choices"] == program.facts.chosen
    assert list(program.facts.choices["micro_batches"]) == ["1", "2"]
    assert program.facts.choices["rules"]["weights"]["rows"] == ["fsdp", "tp"]
    again = program_work(usual.module).matrix_flops / program_work(program.module).matrix_flops
    assert again == pytest.approx(7 / 6)  # beside two products and their four gradients, one product is computed again
    assert 2 in executions(program.module).values()
    assert not any(each.kind == "all-gather" for each in collectives(program.module)), "replicas gather no weights"


@pytest.mark.parametrize(
    ("choose", "error"),
    [
        ("policy=none", "jax_choices_job.py: CHOICES has no 'policy'; it has remat, micro_batches, rules, flags"),
        ("micro_batches=3", "jax_choices_job.py: CHOICES has no micro_batches '3'; it has 1, 2"),
        ("flags=unknown", "xla_no_such_option"),
    ],
)
def test_a_value_that_does_not_exist_is_refused_in_one_line(jax_python, tmp_path, choose, error):
    with pytest.raises(InputError) as refused:
        captured(jax_python, tmp_path / "refused", choose=choose)
    assert error in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("choices", "error"),
    [
        ("['remat']", "CHOICES must be a dictionary"),
        ("{'remat': 'full'}", "CHOICES must be a dictionary whose values are lists"),
        ("{'remat': []}", "CHOICES has for remat the values"),
        ("{'remat': ['a+b']}", "CHOICES has for remat the values"),
        ("{'mesh': ['a']}", "CHOICES has the name 'mesh'"),
        ("{'flags': ['fast']}", "the flags of CHOICES must be dictionaries"),
        ("{'remat': ['full']}", "unexpected keyword argument 'remat'; it gets the mesh, and each name of CHOICES"),
    ],
)
def test_wrong_declarations_are_refused_with_what_is_expected(jax_python, tmp_path, choices, error):
    script = tmp_path / "wrong.py"
    script.write_text(f"CHOICES = {choices}\n\ndef step(mesh):\n    return None\n")
    with pytest.raises(InputError, match=r"^wrong\.py:") as refused:
        captured(jax_python, tmp_path / "out", script=script)
    assert error in str(refused.value)


def test_a_function_without_the_keywords_is_refused(jax_python, tmp_path):
    with pytest.raises(InputError, match=r"jax_choices_job\.py:without_keywords: .*'remat'"):
        captured(jax_python, tmp_path / "out", function="without_keywords")


def test_mesh_and_choices_are_searched_continued_and_exported(jax_python, tmp_path, monkeypatch):
    needs(jax_python, "jax_plugins.xla_cuda12")
    monkeypatch.setenv("DPRO_SEARCH_PROGRAMS", str(tmp_path / "kept"))
    folder = tmp_path / "captured"
    captured(jax_python, folder, on="1xhgx-h100")
    result = verb("run", folder, "--trials", "12", "--out", tmp_path / "run")
    chosen = [plan["plan"].get("choices", "") for plan in result["plans"]]
    assert "remat=none" in chosen[0], "computing nothing again is the fastest where memory is no matter"
    assert any(" of 96 combinations" in sentence for sentence in result["reasons"])
    refused = [path.read_text() for path in (tmp_path / "kept").glob("*.refused")]
    assert refused, "the option that the compiler does not know was tried"
    assert all("xla_no_such_option" in text for text in refused)

    # Without an interpreter nothing can be compiled: a second search has all programs from the first.
    facts = msgspec.json.decode((folder / FACTS_FILE).read_bytes())
    (folder / FACTS_FILE).write_bytes(msgspec.json.encode({**facts, "python": "/no/python"}))
    again = verb("run", folder, "--trials", "12", "--out", tmp_path / "again")
    assert [plan["plan"] for plan in again["plans"]] == [plan["plan"] for plan in result["plans"]]

    verb("export", tmp_path / "run", "--out", tmp_path / "plan")
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
    command = [jax_python, "-c", READ_PLAN, str(tmp_path / "plan"), str(SCRIPT.parent)]
    lines = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.splitlines()
    assert "8 (('fsdp', 'tp'), None) ['micro_batches', 'remat', 'rules']" in lines[0]
    assert lines[1] == "True 2048"
