"""Search over what a script declares in `CHOICES`: the order of compilations, refusals, equal programs, and the exported plan."""

from __future__ import annotations

import ast
import shutil

import msgspec
import pytest

from dpro_search.deploy.parts.part import CompiledStep, JobFacts
from dpro_search.errors import InputError
from dpro_search.kinds import job_of, load_source
from dpro_search.kinds.xla.capture import parse_chosen
from dpro_search.kinds.xla.compilations import kept_folder
from dpro_search.kinds.xla.export import program_part
from dpro_search.kinds.xla.order import CompileOrder, StepParts
from dpro_search.kinds.xla.plans import Point
from dpro_search.kinds.xla.program import FACTS_FILE, ProgramFacts, ProgramMemory
from dpro_search.space.plan import Plan
from tests.kinds.verbs import refusal, verb
from tests.kinds.xla.test_meshes import compiled, parts_us, point
from tests.kinds.xla.test_xla_program import fusion, program, text

CHOICES = {"remat": ("full", "some", "none"), "micro_batches": ("1", "2")}
COMPUTE = {"full": 1.33, "some": 1.1, "none": 1.0}
MEMORY = {"full": 10.0, "some": 30.0, "none": 80.0}
MESH = {"fsdp": 64, "tp": 1}
FIRST = point(MESH, remat="full", micro_batches="1")


def step_of(each: Point) -> StepParts:
    """A step that computes less the more it keeps, and gathers its parameters once for each micro-batch."""
    mesh, chosen = dict(each.mesh), dict(each.chosen)
    parts, parts_of_step = parts_us(mesh), int(chosen["micro_batches"])
    return StepParts(
        parts.alone_us * COMPUTE[chosen["remat"]],
        {"fsdp": parts.axes_us["fsdp"] * parts_of_step, "tp": parts.axes_us["tp"]},
        MEMORY[chosen["remat"]] / mesh["tp"] / parts_of_step,
    )


def all_points():
    return CompileOrder(FIRST, CHOICES).points


def test_every_combination_of_mesh_and_values_is_a_point():
    assert len(set(all_points())) == len(all_points()) == 7 * 3 * 2


def test_the_best_combination_is_among_the_first_ten():
    best = min(all_points(), key=lambda each: step_of(each).total_us)
    assert best in compiled(FIRST, CHOICES, step_of, most=10)


def test_each_value_is_tried_at_the_best_point_of_its_time():
    points = compiled(FIRST, CHOICES, step_of, most=8)
    assert {pair for each in points for pair in each.chosen} == {(name, value) for name in CHOICES for value in CHOICES[name]}


def test_the_estimate_learns_what_a_value_brings_on_another_mesh():
    order = CompileOrder(FIRST, CHOICES)
    without_remat = point(MESH, remat="none", micro_batches="1")
    other = point({"fsdp": 16, "tp": 4}, remat="none", micro_batches="1")
    for each in (FIRST, without_remat):
        order.tell(each, step_of(each))
    compute_us = step_of(other).alone_us
    assert order.estimate_us(other) == pytest.approx(compute_us + step_of(other).axes_us["fsdp"])  # no mesh with tp is known


def test_values_of_unknown_effect_are_estimated_as_none():
    order = CompileOrder(FIRST, CHOICES)
    order.tell(FIRST, step_of(FIRST))
    assert order.estimate_us(point(MESH, remat="none", micro_batches="2")) == pytest.approx(step_of(FIRST).total_us)


def test_a_mesh_without_room_is_compiled_again_with_a_value_that_needs_less():
    def in_room(each: Point) -> StepParts | None:
        parts = step_of(each)
        return parts if parts.memory_bytes <= 25 else None

    first = point(MESH, remat="none", micro_batches="1")
    points = compiled(first, CHOICES, in_room, most=12)
    best = min((each for each in all_points() if in_room(each)), key=lambda each: step_of(each).total_us)
    assert best in points
    assert in_room(first) is None
    assert any(each.mesh == first.mesh and in_room(each) for each in points)


def test_points_that_are_known_to_need_as_much_memory_as_a_refused_one_are_left_out():
    order = CompileOrder(FIRST, {"remat": CHOICES["remat"]})
    small, large = ({"fsdp": 64, "tp": 1}, {"fsdp": 32, "tp": 2})
    for remat in CHOICES["remat"]:
        order.tell(point(small, remat=remat), StepParts(100.0, {}, MEMORY[remat]))
    order.tell(point(large, remat="full"), None)
    assert order.ask() not in [point(large, remat="some"), point(large, remat="none")]


def test_a_value_that_is_always_refused_is_left_alone():
    choices = {"flags": ("default", "unknown")}
    points = compiled(
        point(MESH, flags="default"),
        choices,
        lambda each: None if dict(each.chosen)["flags"] == "unknown" else parts_us(dict(each.mesh)),
        most=100,
    )
    assert sum(dict(each.chosen)["flags"] == "unknown" for each in points) <= 2


def test_the_search_ends_where_no_estimate_is_below_the_best_step():
    points = compiled(FIRST, CHOICES, step_of, most=1000)
    assert len(points) < len(all_points()) / 2


def test_nothing_that_runs_means_that_all_points_are_tried():
    assert len(compiled(FIRST, CHOICES, lambda each: None, most=1000)) == len(all_points())


DECLARED = {"remat": {"full": "full", "none": "none"}, "flags": {"default": {}, "fast": {"xla_tpu_fast": True}}}
CHOSEN = {"remat": "full", "flags": "default"}


def memory(temporaries_bytes):
    return ProgramMemory(arguments_bytes=0, outputs_bytes=0, aliased_bytes=0, temporaries_bytes=temporaries_bytes)


@pytest.fixture
def captured(tmp_path, monkeypatch):
    """A captured program with two choices: without rematerialisation it is faster, and the flags make the same program."""
    monkeypatch.setenv("DPRO_SEARCH_PROGRAMS", str(tmp_path / "kept"))
    (tmp_path / "train.py").write_text("# the script\n")
    facts = {"script_path": str(tmp_path / "train.py"), "python": "python3", "script": "train.py:step", "tokens": 16384}
    facts |= {"mesh": {"data": 8}, "choices": DECLARED, "chosen": CHOSEN, "memory": memory(2 << 30)}
    path = program(tmp_path, text(fusion("a", "p0", 100)), **facts)
    base = msgspec.json.decode((path / FACTS_FILE).read_bytes(), type=ProgramFacts)
    (tmp_path / "made").mkdir()
    for remat, flags in (("none", "default"), ("full", "fast"), ("none", "fast")):
        chosen = {"remat": remat, "flags": flags}
        us, temporaries_bytes = (100, 2 << 30) if remat == "full" else (80, 8 << 30)
        folder = kept_folder(base, point({"data": 8}, **chosen))
        made = program(
            tmp_path / "made", text(fusion("a", "p0", us)), **{**facts, "chosen": chosen, "memory": memory(temporaries_bytes)}
        )
        shutil.move(made, folder)
    return path


def test_run_finds_the_best_values_and_says_which_had_no_effect(captured, tmp_path):
    result = verb("run", captured, "--out", tmp_path / "run")
    assert result["plans"][0]["plan"]["choices"] == "remat=none"
    assert result["plans"][0]["predicted_iteration_us"] == pytest.approx(80, rel=1e-3)
    said = " ".join(result["reasons"])
    assert "3 of 4 combinations of mesh and choices were compiled" in said
    assert result["stopped"] == "exhausted", "estimates prove nothing"
    assert "flags=fast has no effect" in said


def test_combinations_above_the_memory_limit_are_left_out(captured, tmp_path):
    result = verb("run", captured, "--memory-limit", "4GiB", "--out", tmp_path / "run")
    assert result["plans"][0]["plan"] == {}
    assert any("cannot run or do not fit" in sentence for sentence in result["reasons"])


def test_the_number_of_trials_is_the_number_of_programs(captured, tmp_path):
    said = " ".join(verb("run", captured, "--trials", "2", "--out", tmp_path / "run")["reasons"])
    assert "2 of 4 combinations" in said
    assert "The next would be data=8, remat=none, flags=fast" in said
    assert "more --trials" in said


def test_replay_takes_values_of_choices(captured):
    assert verb("replay", captured, "--set", "choices=remat=none")["predicted_iteration_us"] == pytest.approx(80, rel=1e-3)


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ("remat=half", "remat has the values full, none"),
        ("policy=none", "the script's CHOICES has no policy; it has remat, flags"),
        ("remat", "write names and values, like remat=none,micro_batches=2"),
    ],
)
def test_impossible_choices_are_refused_with_what_the_script_has(captured, choices, reason):
    assert reason in refusal("replay", captured, "--set", f"choices={choices}")


def test_plans_that_repeat_what_was_captured_are_simplified(captured):
    space = job_of(load_source(captured)).space
    assert space.simplest(Plan.of(choices="flags=default+remat=none")) == Plan.of(choices="remat=none")
    assert space.simplest(Plan.of(choices="remat=full")) == Plan()


def test_a_choice_is_given_once():
    with pytest.raises(InputError, match="remat is given twice"):
        parse_chosen("remat=full,remat=none")


RULES = {"embed": ["fsdp", "tensor"], "heads": "tensor", "norm": None}
COMPILED = CompiledStep(
    mesh={"fsdp": 2, "tensor": 1},
    declared={
        "rules": {"default": {"embed": "fsdp", "heads": "tensor", "norm": None}, "wide": RULES},
        "remat_policy": {"full": "full", "minimal": "minimal"},
        "policy": {"made": None},
        "flags": {"default": {}, "hidden": {"xla_tpu_hidden": True, "xla_tpu_limit": 3}},
    },
    chosen={"rules": "default", "remat_policy": "full", "policy": "made", "flags": "default"},
    platform="tpu",
)


def test_an_export_has_choices_as_arguments_flags_and_settings_of_maxtext():
    plan = Plan.of(mesh="fsdp=1+tensor=2", choices="rules=wide+remat_policy=minimal+flags=hidden")
    part = program_part(plan, JobFacts(compiled=COMPILED))
    code = part.files["planned_mesh.py"].decode()
    assert "AXES = {'fsdp': 1, 'tensor': 2}" in code
    assert "'embed': ('fsdp', 'tensor',), 'heads': 'tensor', 'norm': None}" in code
    assert part.env == {"LIBTPU_INIT_ARGS": "--xla_tpu_hidden=true --xla_tpu_limit=3"}
    assert part.files["maxtext.yml"].decode().splitlines() == [
        "base_config: base.yml",
        "ici_fsdp_parallelism: 1",
        "ici_tensor_parallelism: 2",
        'remat_policy: "minimal"',
        'logical_axis_rules: [["embed", ["fsdp", "tensor"]], ["heads", ["tensor"]], ["norm", []]]',
    ]
    assert any("CHOICES['policy']['made']" in line for line in part.setup)


def test_the_exported_module_has_python_values():
    plan = Plan.of(choices="rules=wide+flags=hidden")
    module = ast.parse(program_part(plan, JobFacts(compiled=COMPILED)).files["planned_mesh.py"])
    values = {ast.unparse(line.targets[0]): ast.literal_eval(line.value) for line in module.body if isinstance(line, ast.Assign)}
    assert values == {
        "AXES": COMPILED.mesh,
        "ARGUMENTS": {"rules": {**RULES, "embed": ("fsdp", "tensor")}, "remat_policy": "full"},
        "COMPILER_OPTIONS": {"xla_tpu_hidden": True, "xla_tpu_limit": 3},
    }
    assert [line.name for line in module.body if isinstance(line, ast.FunctionDef)] == ["planned_mesh", "rules_spec"]
