"""Search over the meshes of a compiled program: which meshes exist, in which order they are compiled, and what is refused."""

from __future__ import annotations

import math

import msgspec
import pytest

from dpro_search.deploy.parts.part import JobFacts
from dpro_search.kinds import job_of, load_source
from dpro_search.kinds.xla.compilations import kept_folder
from dpro_search.kinds.xla.export import program_part
from dpro_search.kinds.xla.order import MOST_COMPILED, CompileOrder, StepParts, estimated_us
from dpro_search.kinds.xla.plans import Point, meshes, pairs_text
from dpro_search.kinds.xla.program import FACTS_FILE, ProgramFacts
from dpro_search.space.plan import Plan
from tests.kinds.verbs import refusal, verb
from tests.kinds.xla.test_xla_program import MESH, fusion, program, text

COMPUTE_US, PARAMETERS_US, ACTIVATIONS_US = 1000.0, 6400.0, 25.0


def parts_us(mesh):
    """A step whose fsdp axis gathers parameters that tp has split, and whose tp axis sums activations that fsdp has split."""
    fsdp, tp = mesh["fsdp"], mesh["tp"]
    axes_us = {"fsdp": PARAMETERS_US / tp * (1 - 1 / fsdp), "tp": 256 * ACTIVATIONS_US / fsdp * (1 - 1 / tp)}
    return StepParts(COMPUTE_US, axes_us)


def total_us(mesh):
    return parts_us(mesh).total_us


def point(mesh, **chosen):
    return Point(tuple(mesh.items()), tuple(chosen.items()))


def compiled(captured, choices, parts_of, most=MOST_COMPILED):
    """The points that a search of so many compilations compiles, in order."""
    order = CompileOrder(captured, choices)
    following = captured
    while following is not None and len(order.known) < most:
        order.tell(following, parts_of(following))
        following = order.ask()
    return list(order.known)


def test_meshes_have_the_same_axes_and_devices():
    assert meshes({"fsdp": 4, "tp": 2}) == [{"fsdp": 1, "tp": 8}, {"fsdp": 2, "tp": 4}, {"fsdp": 4, "tp": 2}, {"fsdp": 8, "tp": 1}]
    assert len(meshes({"data": 4, "fsdp": 2, "tp": 2})) == 15
    assert all(math.prod(mesh.values()) == 12 for mesh in meshes({"fsdp": 6, "tp": 2}))


def test_the_estimate_is_exact_where_bytes_are_what_other_axes_have_not_split():
    known = {"fsdp": 16, "tp": 16}
    for mesh in meshes(known):
        assert estimated_us(mesh, [(known, parts_us(known))]) == pytest.approx(total_us(mesh))


def test_the_best_mesh_is_among_the_first_that_are_compiled():
    first = {"fsdp": 256, "tp": 1}
    points = compiled(point(first), {}, lambda each: parts_us(dict(each.mesh)))
    assert point(min(meshes(first), key=total_us)) in points


def test_meshes_that_do_not_run_are_no_base_of_estimates():
    first = {"fsdp": 8, "tp": 1}
    points = compiled(point(first), {}, lambda each: None if each == point(first) else parts_us(dict(each.mesh)))
    assert points.count(point(first)) == 1
    assert points[1] == point({"fsdp": 4, "tp": 2})


@pytest.fixture
def captured(tmp_path, monkeypatch):
    """A captured program of 16,384 tokens, and what was made for three other meshes: faster, of other tokens, without room."""
    monkeypatch.setenv("DPRO_SEARCH_PROGRAMS", str(tmp_path / "kept"))
    (tmp_path / "train.py").write_text("# the script\n")
    facts = {"script_path": str(tmp_path / "train.py"), "python": "python3", "script": "train.py:step", "tokens": 16384}
    path = program(tmp_path, text(fusion("a", "p0", 100)), **facts)
    base = msgspec.json.decode((path / FACTS_FILE).read_bytes(), type=ProgramFacts)
    for mesh, us, tokens in (({"fsdp": 2, "tp": 4}, 80, 16384), ({"fsdp": 8, "tp": 1}, 10, 8192)):
        folder = kept_folder(base, point(mesh))
        folder.mkdir(parents=True)
        program(folder, text(fusion("a", "p0", us)), **{**facts, "mesh": mesh, "tokens": tokens}).rename(folder / "made")
        for file in (folder / "made").iterdir():
            file.rename(folder / file.name)
        (folder / "made").rmdir()
    refused = kept_folder(base, point({"fsdp": 1, "tp": 8})).with_suffix(".refused")
    refused.write_text("the program does not fit: RESOURCE_EXHAUSTED: 20.1G of 15.7G hbm")
    return path


def test_run_finds_the_fastest_mesh_of_the_same_step(captured, tmp_path):
    result = verb("run", captured, "--out", tmp_path / "run")
    assert result["plans"][0]["plan"]["mesh"] == "fsdp=2+tp=4"
    assert result["plans"][0]["predicted_iteration_us"] == pytest.approx(80, rel=1e-3)


def test_a_mesh_that_does_not_fit_has_the_compilers_reason(captured):
    here = job_of(load_source(captured))
    assert "20.1G of 15.7G" in here.predict(Plan.of(mesh="fsdp=1+tp=8")).infeasible


def test_a_step_of_other_tokens_is_not_compared(captured):
    here = job_of(load_source(captured))
    assert "8,192 tokens for this plan" in here.predict(Plan.of(mesh="fsdp=8+tp=1")).infeasible


def test_impossible_meshes_are_refused_with_the_programs_axes(captured):
    assert "axes are fsdp, tp" in refusal("replay", captured, "--set", "mesh=tp=4+fsdp=2")
    assert pairs_text(MESH) == "fsdp=4+tp=2"


def test_an_export_has_the_mesh_as_code(captured, tmp_path):
    verb("run", captured, "--out", tmp_path / "run")
    verb("export", tmp_path / "run", "--out", tmp_path / "plan")
    assert "AXES = {'fsdp': 2, 'tp': 4}" in (tmp_path / "plan" / "planned_mesh.py").read_text()
    assert "mesh = planned_mesh()" in (tmp_path / "plan" / "README.md").read_text()


def test_axes_that_maxtext_has_become_its_overrides():
    part = program_part(Plan.of(mesh="fsdp=64+tensor=4"), JobFacts())
    assert part.files["maxtext.txt"] == b"ici_fsdp_parallelism=64 ici_tensor_parallelism=4\n"
