"""Operations and bytes of compiled programs, against the shapes of the programs and XLA's own analysis."""

import pytest

from dpro_search.collect.readers.xla import parse_hlo, scheduled_computations
from dpro_search.graph.hlo import HloWork, instruction_work, program_work
from tests.collect.xla.known import LAYERS, TARGETS, WIDTH, facts, module, names

F32 = 4


def work_of(line: str, *parameters: str, before: str = "") -> HloWork:
    """Work of one instruction on parameters %p0, %p1, ... of the given shapes."""
    defined = "\n".join(f"  %p{number} = {shape} parameter({number})" for number, shape in enumerate(parameters))
    (read,) = parse_hlo(
        f"HloModule one, is_scheduled=true\n\n{before}\nENTRY %main (p: f32[]) -> f32[] {{\n{defined}\n  ROOT %r = {line}\n}}\n"
    )
    return instruction_work(read, read.entry, read.entry.root)


def test_a_matrix_product():
    work = work_of("f32[3,5,7]{2,1,0} dot(%p0, %p1), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, "
                   "rhs_contracting_dims={1}", "f32[3,5,4]{2,1,0}", "f32[3,4,7]{2,1,0}")  # fmt: skip
    assert work == HloWork(2 * 3 * 5 * 7 * 4, 0, 0, F32 * 3 * (5 * 4 + 4 * 7), F32 * 3 * 5 * 7)


@pytest.mark.parametrize(
    ("attributes", "shapes", "flops"),
    [
        ("dim_labels=bf_io->bf", ("f32[8,16]", "f32[16,4]", "f32[8,4]"), 2 * 8 * 16 * 4),
        ("window={size=3}, dim_labels=b0f_0io->b0f", ("f32[1,10,2]", "f32[3,2,5]", "f32[1,8,5]"), 2 * 8 * 3 * 2 * 5),
        # of 10 places with padding, the first and the last meet two elements of the input
        ("window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f", ("f32[1,10,2]", "f32[3,2,5]", "f32[1,10,5]"), 2 * 28 * 2 * 5),
        ("window={size=3 stride=2 pad=1_1}, dim_labels=b0f_0io->b0f", ("f32[1,8,1]", "f32[3,1,1]", "f32[1,4,1]"), 2 * 11),
        # every second place of the dilated input is a zero that was put in
        ("window={size=2 lhs_dilate=2}, dim_labels=b0f_0io->b0f", ("f32[1,4,1]", "f32[2,1,1]", "f32[1,6,1]"), 2 * 6),
        ("window={size=2 rhs_dilate=3}, dim_labels=b0f_0io->b0f", ("f32[1,8,1]", "f32[2,1,1]", "f32[1,5,1]"), 2 * 10),
        (
            "window={size=3}, dim_labels=b0f_0io->b0f, feature_group_count=4",
            ("f32[1,5,8]", "f32[3,2,8]", "f32[1,3,8]"),
            2 * 3 * 3 * 2 * 8,
        ),
    ],
)
def test_a_convolution_counts_no_padding(attributes, shapes, flops):
    left, kernel, result = shapes
    assert work_of(f"{result} convolution(%p0, %p1), {attributes}", left, kernel).matrix_flops == flops


@pytest.mark.parametrize(
    ("line", "shapes", "operations"),
    [
        ("f32[8]{0} add(%p0, %p0)", ("f32[8]{0}",), (8, 0)),
        ("f32[8]{0} exponential(%p0)", ("f32[8]{0}",), (0, 8)),
        ("f32[8]{0} copy(%p0)", ("f32[8]{0}",), (0, 0)),
        ("f32[2]{0} reduce(%p0, %p1), dimensions={1}, to_apply=%add", ("f32[2,8]{1,0}", "f32[]"), (14, 0)),
        ("f32[6]{0} reduce-window(%p0, %p1), window={size=3}, to_apply=%add", ("f32[8]{0}", "f32[]"), (12, 0)),
        # of each of two lines one maximum, which all places get
        ("f32[2,4]{1,0} reduce-window(%p0, %p1), window={size=1x7 pad=0_0x3_3}, to_apply=%add", ("f32[2,4]{1,0}", "f32[]"), (6, 0)),
        (
            "f32[2,4]{1,0} reduce-window(%p0, %p1), window={size=1x4 pad=0_0x3_0}, to_apply=%add",
            ("f32[2,4]{1,0}", "f32[]"),
            (24, 0),
        ),
        ("f32[8]{0} sort(%p0), dimensions={0}, to_apply=%add", ("f32[8]{0}",), (24, 0)),
    ],
)
def test_other_arithmetic(line, shapes, operations):
    body = "  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n  ROOT %s = f32[] add(%a, %b)\n"
    add = f"%add (a: f32[], b: f32[]) -> f32[] {{\n{body}}}\n"
    work = work_of(line, *shapes, before=add)
    assert (work.vector_flops, work.transcendentals, work.unknown) == (*operations, 0)


def test_a_fusion_reads_the_slice_and_writes_the_update():
    fused = """%fused (a: f32[100,8], b: s32[], c: f32[100,8], d: f32[8]) -> f32[100,8] {
  %a = f32[100,8]{1,0} parameter(0)
  %b = s32[] parameter(1)
  %z = s32[] constant(0)
  %s = f32[1,8]{1,0} dynamic-slice(%a, %b, %z), dynamic_slice_sizes={1,8}
  %d = f32[8]{0} parameter(3)
  %e = f32[1,8]{1,0} bitcast(%d)
  %f = f32[1,8]{1,0} multiply(%s, %e)
  %c = f32[100,8]{1,0} parameter(2)
  ROOT %u = f32[100,8]{1,0} dynamic-update-slice(%c, %f, %b, %z)
}
"""
    shapes = ("f32[100,8]{1,0}", "s32[]", "f32[100,8]{1,0}", "f32[8]{0}")
    work = work_of("f32[100,8]{1,0} fusion(%p0, %p1, %p2, %p3), kind=kLoop, calls=%fused", *shapes, before=fused)
    assert work == HloWork(0, 8, 0, (8 + 1 + 8) * F32, 8 * F32)


def test_an_operand_that_is_also_used_whole_is_read_whole():
    fused = """%fused (a: f32[100,8]) -> (f32[1,8], f32[100,8]) {
  %a = f32[100,8]{1,0} parameter(0)
  %s = f32[1,8]{1,0} slice(%a), slice={[0:1], [0:8]}
  %n = f32[100,8]{1,0} negate(%a)
  ROOT %t = (f32[1,8]{1,0}, f32[100,8]{1,0}) tuple(%s, %n)
}
"""
    line = "(f32[1,8]{1,0}, f32[100,8]{1,0}) fusion(%p0), kind=kLoop, calls=%fused"
    work = work_of(line, "f32[100,8]{1,0}", before=fused)
    assert (work.read_bytes, work.written_bytes) == (800 * F32, 808 * F32)


def test_a_product_of_cublas():
    line = (
        '(bf16[64,32]{1,0}, s8[4194304]{0}) custom-call(%p0, %p1), custom_call_target="__cublas$lt$matmul", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}'
    )
    work = work_of(line, "bf16[64,128]{1,0}", "bf16[128,32]{1,0}")
    assert work == HloWork(2 * 64 * 32 * 128, 0, 0, 2 * (64 * 128 + 128 * 32), 2 * 64 * 32)  # the workspace is not written


def test_what_is_not_known_is_counted():
    assert work_of('f32[8]{0} custom-call(%p0), custom_call_target="mine"', "f32[8]{0}").unknown == 1
    assert work_of("f32[8]{0} conjure(%p0)", "f32[8]{0}").unknown == 1
    assert work_of('f32[8]{0} custom-call(), custom_call_target="AllocateBuffer"') == HloWork()


@pytest.mark.parametrize(("program", "target"), [one for one in names() if not one[1].startswith("h100")])
def test_operations_are_those_of_xlas_analysis(program, target):
    costs = facts(program, target)["costs"]
    work = program_work(module(program, target), each_loop_once=True)
    assert work.unknown == 0
    assert work.flops == pytest.approx(costs.get("flops", 0), abs=8)  # a few comparisons of counters
    if program != "branches":  # XLA takes the maximum of the branches in each of the two kinds, here one branch counts
        assert work.transcendentals == costs.get("transcendentals", 0)


@pytest.mark.parametrize("program", ["collectives", "branches", "convolution", "scan", "sharded", "sorting"])
def test_bytes_are_those_of_xlas_analysis_where_nothing_is_asynchronous(program):
    work = program_work(module(program, "cpu"), each_loop_once=True)
    assert work.bytes == pytest.approx(facts(program, "cpu")["costs"]["bytes accessed"], rel=1e-3)


@pytest.mark.parametrize(("program", "target"), [one for one in names() if not one[1].startswith("h100")])
def test_bytes_are_never_more(program, target):
    work = program_work(module(program, target), each_loop_once=True)
    assert 0.5 < work.bytes / facts(program, target)["costs"]["bytes accessed"] < 1.001


@pytest.mark.parametrize("target", TARGETS)
def test_a_scan_multiplies_three_times_in_each_layer(target):
    """Once forward, and for both gradients but that of the inputs of the first layer, which no compiler leaves out."""
    product = 2 * 256 * WIDTH * WIDTH
    work = program_work(module("scan", target))
    assert work.matrix_flops == 3 * LAYERS * product
    assert work.unknown == 0


@pytest.mark.parametrize("target", TARGETS)
def test_a_convolution_is_as_much_on_every_target(target):
    work = program_work(module("convolution", target))
    inner, border = 15 * 15 * 9, 2 * 15 * 6 + 4  # places of the result whose window lies within the image, and at two edges
    assert work.matrix_flops == 2 * 8 * 16 * 64 * (inner + border)
    assert work.unknown == 0


@pytest.mark.parametrize("target", ["v5e_2x4", "tpu7x_2x2x1"])
def test_tpu_programs_say_how_long_their_fusions_take(target):
    read = module("scan", target)
    fusions = [one for computation in scheduled_computations(read) for one in computation if one.opcode == "fusion"]
    assert fusions
    assert all(one.estimated_cycles for one in fusions if one.attributes["kind"] != "kCustom")
    assert not any(
        one.estimated_cycles for computation in scheduled_computations(read) for one in computation if "all-" in one.opcode
    )


def test_the_author_of_a_kernel_knows_its_work():
    work = program_work(module("kernel", "v5e_2x4"))
    assert (work.matrix_flops, work.bytes) == (2 * 512**3, 3 * 512 * 512 * 2)
