"""Trip counts of loops: written by the compiler, or computed from the loop's counter."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.collect.readers.xla import HloModule, parse_hlo
from dpro_search.graph.hlo import executions, trip_count
from tests.collect.xla.known import LAYERS, TARGETS, module

LOOP = """HloModule loop, is_scheduled=true

%body (s: (s32[], f32[4], s32[])) -> (s32[], f32[4], s32[]) {{
  %s = (s32[], f32[4]{{0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %step = s32[] constant({step})
  %x = f32[4]{{0}} get-tuple-element(%s), index=1
  %n = s32[] get-tuple-element(%s), index=2
  %next = s32[] add(%i, %step)
  ROOT %r = (s32[], f32[4]{{0}}, s32[]) tuple(%next, %x, %n)
}}

%condition (s.1: (s32[], f32[4], s32[])) -> pred[] {{
  %s.1 = (s32[], f32[4]{{0}}, s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %n.1 = s32[] get-tuple-element(%s.1), index=2
  ROOT %c = pred[] compare({sides}), direction={direction}
}}

ENTRY %main (x.1: f32[4]) -> (s32[], f32[4], s32[]) {{
  %x.1 = f32[4]{{0}} parameter(0)
  %first = s32[] constant({first})
  %bound = s32[] constant({bound})
  %t = (s32[], f32[4]{{0}}, s32[]) tuple(%first, %x.1, %bound)
  ROOT %loop = (s32[], f32[4]{{0}}, s32[]) while(%t), condition=%condition, body=%body
}}
"""
HOLDS = {"LT": int.__lt__, "LE": int.__le__, "GT": int.__gt__, "GE": int.__ge__, "NE": int.__ne__}
MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


def loop(**changes: object) -> HloModule:
    values = {"first": 0, "step": 1, "bound": 8, "direction": "LT", "sides": "%i.1, %n.1", **changes}
    (read,) = parse_hlo(LOOP.format(**values))
    return read


def turns(read: HloModule) -> int | None:
    return trip_count(read, read.entry, read.entry.root)


@given(st.integers(-20, 20), st.integers(-20, 20), st.integers(-4, 4).filter(bool), st.sampled_from(list(HOLDS)), st.booleans())
def test_a_counter_runs_as_often_as_python_counts(first, bound, step, direction, swapped):
    expected, value = 0, first
    while HOLDS[direction](value, bound) and expected <= 100:
        value, expected = value + step, expected + 1
    sides = "%n.1, %i.1" if swapped else "%i.1, %n.1"
    read = loop(first=first, bound=bound, step=step, direction=MIRRORED[direction] if swapped else direction, sides=sides)
    counted = turns(read)
    assert counted == (expected if expected <= 100 else None)  # a loop without end


def test_a_bound_that_the_data_give_is_unknown():
    (read,) = parse_hlo(
        LOOP.format(first=0, step=1, bound=8, direction="LT", sides="%i.1, %n.1").replace("constant(8)", "partition-id()")
    )
    assert turns(read) is None
    assert executions(read) == {"body": None, "condition": None, "main": 1}


def test_a_counter_that_grows_by_data_is_unknown():
    text = LOOP.format(first=0, step=1, bound=8, direction="LT", sides="%i.1, %n.1").replace("add(%i, %step)", "add(%i, %n)")
    assert turns(parse_hlo(text)[0]) is None


def test_what_the_compiler_knows_counts():
    text = LOOP.format(first=0, step=1, bound=8, direction="LT", sides="%i.1, %n.1")
    text = text.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}')
    assert turns(parse_hlo(text)[0]) == 5


def nested(read: HloModule) -> dict[str, int | None]:
    return {name: count for name, count in executions(read).items() if name in ("inner", "outer")}


def test_a_loop_in_a_loop_multiplies_and_may_take_its_bound_from_the_outer_state():
    inner = LOOP.format(first=0, step=1, bound=0, direction="LT", sides="%i.1, %n.1").replace("%body", "%inner").split("ENTRY")[0]
    outer = """
%outer (o: (s32[], f32[4], s32[])) -> (s32[], f32[4], s32[]) {
  %o = (s32[], f32[4]{0}, s32[]) parameter(0)
  %j = s32[] get-tuple-element(%o), index=0
  %y = f32[4]{0} get-tuple-element(%o), index=1
  %m = s32[] get-tuple-element(%o), index=2
  %zero = s32[] constant(0)
  %u = (s32[], f32[4]{0}, s32[]) tuple(%zero, %y, %m)
  %within = (s32[], f32[4]{0}, s32[]) while(%u), condition=%condition, body=%inner
  %z = f32[4]{0} get-tuple-element(%within), index=1
  %one = s32[] constant(1)
  %next.1 = s32[] add(%j, %one)
  ROOT %v = (s32[], f32[4]{0}, s32[]) tuple(%next.1, %z, %m)
}

%until (o.1: (s32[], f32[4], s32[])) -> pred[] {
  %o.1 = (s32[], f32[4]{0}, s32[]) parameter(0)
  %j.1 = s32[] get-tuple-element(%o.1), index=0
  %three = s32[] constant(3)
  ROOT %d = pred[] compare(%j.1, %three), direction=LT
}

ENTRY %main (x.1: f32[4]) -> (s32[], f32[4], s32[]) {
  %x.1 = f32[4]{0} parameter(0)
  %nothing = s32[] constant(0)
  %seven = s32[] constant(7)
  %t = (s32[], f32[4]{0}, s32[]) tuple(%nothing, %x.1, %seven)
  ROOT %loop = (s32[], f32[4]{0}, s32[]) while(%t), condition=%until, body=%outer
}
"""
    (read,) = parse_hlo(inner + outer)
    assert nested(read) == {"inner": 21, "outer": 3}


@pytest.mark.parametrize("target", TARGETS)
def test_scans_over_layers_run_once_a_layer(target):
    read = module("scan", target)
    bodies = [one.computation("body") for computation in read.computations.values() for one in computation if one.opcode == "while"]
    times = executions(read)
    # XLA for GPUs takes the last turn out of the loop of the backward pass.
    assert sorted(times[name] for name in bodies) == ([LAYERS - 1, LAYERS] if target.startswith("h100") else [LAYERS, LAYERS])


@pytest.mark.parametrize("target", ["cpu", "h100_1x1x8"])
def test_what_is_computed_is_what_those_compilers_write(target):
    loops = 0
    read = module("scan", target)
    for computation in read.computations.values():
        for one in computation:
            if one.opcode == "while":
                text = re.sub(r'"known_trip_count":\{"n":"\d+"\}', '"other":1', one.attribute_text)
                bare = type(one)(one.name, one.opcode, one.shape_text, one.operand_text, text, one.is_root, one.line)
                assert bare.known_trip_count is None
                assert trip_count(read, computation, bare) == one.known_trip_count
                loops += 1
    assert loops == 2


@pytest.mark.parametrize("target", TARGETS)
def test_how_often_a_branch_is_taken_is_unknown(target):
    counts = executions(module("branches", target))
    assert sorted(map(str, counts.values())) == ["1", "None", "None"]
