"""Reading HLO text: instructions and their attributes, files, folders of dumps, and texts that are damaged."""

import gzip
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.collect.readers.xla import HloModule, collectives, host_transfers, parse_hlo, read_hlo
from dpro_search.errors import DproSearchError, InputError, TraceFormatError
from dpro_search.graph.hlo import program_work
from tests.collect.xla.known import DATA, module, names

ALIASES = "input_output_alias={ {0}: (1, {}, may-alias), {1}: (0, {2}, must-alias) }"
SMALL = (
    f"HloModule jit_step, is_scheduled=true, {ALIASES}, num_partitions=4"
    + """

FileNames
1 "train.py"
2 "model.py"

FunctionNames
1 "main"
2 "layer"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=4 end_column=9}
2 {file_name_id=2 function_name_id=2 line=25 end_line=26 column=6 end_column=6}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}, execution_thread="host"

ENTRY %main (x: f32[8,4], y: (f32[4], token[])) -> (f32[8], f32[4]) {
  %y = (f32[4]{0:T(4)}, token[]) parameter(1)
  %x = f32[8,4]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}, metadata={op_name="x, y=\\"z\\""}
  %zero = f32[] constant(0)
  %part = f32[4]{0:T(4)} get-tuple-element(%y), index=0, control-predecessors={%x, %zero}
  %rows = f32[8]{0} reduce(%x, %zero), dimensions={1}, to_apply=%add, metadata={op_name="jit(step)/reduce" stack_frame_id=2}
  %call = f32[4]{0} custom-call(%part), custom_call_target="a, \\"b\\"", backend_config={"n":{"k":["1",2]},"text":"}, x={"}
  ROOT %result = (f32[8]{0}, f32[4]{0}) tuple(%rows, /*index=1*/%call)
}
"""
)


def small(text: str = SMALL) -> HloModule:
    (read,) = parse_hlo(text)
    return read


def test_a_module_and_its_first_line():
    read = small()
    assert (read.name, read.is_scheduled, read.num_partitions, read.replica_count, read.devices) == ("jit_step", True, 4, 1, 4)
    assert [(one.output, one.parameter, one.parameter_index, one.must) for one in read.input_output_alias] == [
        ((0,), 1, (), False),
        ((1,), 0, (2,), True),
    ]
    assert str(read) == "jit_step: 10 instructions for 4 devices"


def test_computations_have_roots_parameters_and_threads():
    read = small()
    assert list(read.computations) == ["add", "main"]
    assert read.entry.name == "main"
    assert read.entry.root.name == "result"
    assert [one.name for one in read.entry.parameters] == ["x", "y"]
    assert (read.computation("add").execution_thread, read.entry.execution_thread) == ("host", "main")
    assert [user.name for user in read.entry.users["x"]] == ["rows"]


def test_instructions_keep_the_order_of_the_text():
    assert [one.name for one in small().entry] == ["y", "x", "zero", "part", "rows", "call", "result"]


def test_attributes_are_read_behind_quotes_and_brackets():
    entry = small().entry
    assert entry["x"].op_name == 'x, y="z"'
    assert entry["x"].sharding == "{devices=[4,1]<=[4]}"
    assert entry["call"].custom_call_target == 'a, "b"'
    assert entry["call"].backend_config == {"n": {"k": ["1", 2]}, "text": "}, x={"}
    assert entry["rows"].dims("dimensions") == (1,)
    assert entry["rows"].called == ("add",)
    assert entry["part"].number("index") == 0
    assert entry["part"].control_predecessors == ("x", "zero")
    assert entry["result"].operands == ("rows", "call")
    assert entry["rows"].number("channel_id") is None
    assert entry["rows"].backend_config == {}


def test_a_configuration_that_is_not_json_stays_text():
    call = small(SMALL.replace('{"n":{"k":["1",2]},"text":"}, x={"}', "{eps = 9.9e-07 : f32}")).entry["call"]
    assert call.backend_config == {}
    assert call.attributes["backend_config"] == "{eps = 9.9e-07 : f32}"


def test_source_lines_come_from_the_tables():
    read = small()
    line = read.source(read.entry["rows"])
    assert (line.file, line.line, line.function) == ("model.py", 25, "layer")
    assert read.source(read.entry["x"]) is None


def test_source_lines_of_older_texts_stand_in_the_instruction():
    old = small(SMALL.replace("stack_frame_id=2", 'source_file="old.py" source_line=7'))
    line = old.source(old.entry["rows"])
    assert (line.file, line.line) == ("old.py", 7)


def test_names_may_lack_the_percent_sign_and_operands_may_have_shapes():
    text = SMALL.replace("%", "").replace("reduce(x, zero)", "reduce(f32[8,4]{1,0} x, f32[] zero)")
    entry = small(text).entry
    assert entry["rows"].operands == ("x", "zero")
    assert entry["rows"].called == ("add",)
    assert entry["result"].operands == ("rows", "call")


def test_an_unknown_opcode_is_kept():
    entry = small(SMALL.replace(" reduce(", " fuse-by-magic(")).entry
    assert entry["rows"].opcode == "fuse-by-magic"
    assert entry["rows"].operands == ("x", "zero")


def test_a_literal_may_take_several_lines():
    text = SMALL.replace("constant(0)", "constant({\n { 1, 2 },\n { 3, 4 } })")
    entry = small(text).entry
    assert "3, 4" in entry["zero"].operand_text
    assert entry["part"].opcode == "get-tuple-element"


def test_a_text_before_optimisation_is_not_scheduled():
    read = small(SMALL.replace(" is_scheduled=true,", ""))
    assert not read.is_scheduled
    assert str(read).endswith("not scheduled")


@pytest.mark.parametrize(("program", "target"), names())
def test_real_programs_name_only_what_they_define(program, target):
    read = module(program, target)
    assert read.is_scheduled
    assert read.devices == 8
    for computation in read.computations.values():
        seen: set[str] = set()
        for instruction in computation:
            assert all(name in seen for name in instruction.operands), instruction  # a schedule runs operands first
            assert instruction.shape.bytes >= 0
            read.called_by(instruction)
            seen.add(instruction.name)
        assert not computation.operands(computation.root) or computation.root.name in seen
    lines = [line for computation in read.computations.values() for one in computation if (line := read.source(one))]
    assert bool(lines) == ("StackFrames" in read.tables)
    assert all(line.file == "tests/integration/xla_programs_job.py" and line.line > 60 for line in lines)


def test_files_may_be_compressed(tmp_path):
    (tmp_path / "plain").write_text(SMALL)
    (tmp_path / "packed").write_bytes(gzip.compress(SMALL.encode()))
    assert {read_hlo(tmp_path / name).module.name for name in ("plain", "packed")} == {"jit_step"}


def test_of_several_modules_one_is_named(tmp_path):
    path = tmp_path / "two.txt"
    path.write_text(SMALL + "\n" + SMALL.replace("jit_step", "jit_init"))
    with pytest.raises(InputError, match=re.escape(f"{path}: holds 2 modules; say which one: jit_step, jit_init")):
        read_hlo(path)
    assert read_hlo(path, "jit_init").module.name == "jit_init"
    with pytest.raises(InputError, match="no module 'jit_inti'; it has jit_step, jit_init; did you mean jit_init"):
        read_hlo(path, "jit_inti")


def dump(folder, *names_of_modules):
    """Files as XLA's compilers for CPUs and GPUs name them."""
    for number, name in enumerate(names_of_modules):
        text = SMALL.replace("jit_step", name)
        for stage in (
            "before_optimizations",
            "sm_9.0a_gpu_after_optimizations",
            "sm_9.0a_gpu_after_optimizations-buffer-assignment",
        ):
            (folder / f"module_{number:04}.{name}.{stage}.txt").write_text(text + "\n" * 10 * (name == "jit_step"))


def test_of_a_dump_the_largest_program_after_all_stages_is_read(tmp_path):
    dump(tmp_path, "jit_init", "jit_step", "jit_log")
    program = read_hlo(tmp_path)
    assert program.path.name == "module_0001.jit_step.sm_9.0a_gpu_after_optimizations.txt"
    assert (program.module.name, program.others) == ("jit_step", ("jit_init", "jit_log"))
    assert read_hlo(tmp_path, "jit_log").module.name == "jit_log"
    with pytest.raises(InputError, match="no module 'step'; it has jit_init, jit_step, jit_log"):
        read_hlo(tmp_path, "step")


def test_a_folder_without_a_dump_says_so(tmp_path):
    with pytest.raises(InputError, match="no file of a compiled module"):
        read_hlo(tmp_path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not HLO text: no line begins with 'HloModule'"),
        (b"func.func @main() {\n}\n", "not HLO text"),
        (b"\x0a\x08\xff\xfe\x00HloModule", "binary data"),
        (SMALL.encode().replace(b"ENTRY ", b""), "has no ENTRY computation"),
        (SMALL.encode().replace(b"%add (a", b"%main (a", 1), "line 26: a second computation has the name 'main'"),
        (SMALL.encode().replace(b"ROOT %sum = f32[] add(%a, %b)", b"more"), "line 23: expected an instruction .*'add', got 'more'"),
        (gzip.compress(SMALL.encode())[:-40], "ends in the middle"),
    ],
)
def test_what_is_no_program_is_one_line(tmp_path, content, why):
    path = tmp_path / "step.hlo"
    path.write_bytes(content)
    with pytest.raises(TraceFormatError, match=why) as raised:
        read_hlo(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_cut_text_says_the_line(tmp_path):
    path = tmp_path / "step.hlo"
    path.write_text(SMALL[: SMALL.index("%call = ") + 30])
    with pytest.raises(TraceFormatError, match="line 32: the operands of 'call' in 'main' are not closed: the text is cut off"):
        read_hlo(path)


def test_a_text_that_ends_between_two_instructions_is_cut_off(tmp_path):
    with pytest.raises(TraceFormatError, match="line 31: the text ends in the middle of the computation 'main': it is cut off"):
        parse_hlo(SMALL[: SMALL.index("\n  %call = ")])


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("reduce(%x", "reduce(%w", "line 31: 'rows' reads 'w', which is not defined before it"),
        ("reduce(%x", "reduce(%call", "line 31: 'rows' reads 'call', which is not defined before it"),
        ("to_apply=%add", "to_apply=%main", "line 31: 'rows' calls 'main', which is not defined before it"),
        ("%part = ", "%x = ", "line 30: a second instruction of 'main' has the name 'x'"),
    ],
)
def test_what_an_instruction_names_stands_before_it(old, new, why):
    with pytest.raises(TraceFormatError, match=why):
        small(SMALL.replace(old, new))


@given(st.data())
def test_a_damaged_text_is_read_or_refused_in_one_line(data):
    text = gzip.decompress((DATA / "collectives.v5e_2x4.hlo.gz").read_bytes()).decode()
    start = data.draw(st.integers(0, len(text)))
    length = data.draw(st.integers(1, 400))
    damaged = text[:start] + data.draw(st.sampled_from(["", "(", "{", '"', "}\n", "\n", "%", "\x00"])) + text[start + length :]
    assert "\n" not in refusal(damaged)


def refusal(text: str) -> str:
    """Why a text cannot be read; "" if it can, with all that is in it."""
    try:
        for read in parse_hlo(text):
            for computation in read.computations.values():
                for instruction in computation:
                    _ = instruction.attributes, instruction.backend_config, instruction.metadata, instruction.shape.padded_bytes
                    computation.operands(instruction), read.called_by(instruction), read.source(instruction)
            for collective in collectives(read):
                _ = collective.device_groups, collective.pairs, collective.reduction
            program_work(read), host_transfers(read)
    except DproSearchError as error:
        return str(error)
    return ""


def test_metadata_of_a_kernel_on_lines_of_its_own_belongs_to_the_kernel():
    """JAX's splash attention states its blocks in this form."""
    text = (
        "HloModule m, is_scheduled=true\n\nENTRY %main (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n"
        '  %kernel = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={\n'
        '"xprof_metadata":"{\\"block_q\\": 512}"\n}}, metadata={op_name="jit(step)/splash"}\n'
        "  ROOT %same = f32[8]{0} bitcast(%kernel)\n}\n"
    )
    (module,) = parse_hlo(text)
    assert [each.name for each in module.entry] == ["p", "kernel", "same"]
    assert module.entry["kernel"].op_name == "jit(step)/splash"
