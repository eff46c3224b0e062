"""What bfloat16 autocast changes of a module: types along its tensors, casts, and the recorded times of what changes."""

import numpy as np
import pytest

from dpro_search.collect.assemble.torch.autocast import ModuleRows, lowering
from dpro_search.collect.assemble.torch.execution import ExecutionNode, TensorUse
from dpro_search.collect.assemble.torch.host_spans import HostSpans
from dpro_search.collect.modules import LoweredOp
from tests.recordings import trace_of

BATCH, WIDTH = 16, 64


def tensor(storage: int, *shape: int, dtype: str = "float") -> TensorUse:
    size_bytes = 4 * int(np.prod(shape))
    return TensorUse(storage=storage, begin=0, end=size_bytes, size_bytes=size_bytes, dtype=dtype, shape=shape)


def op(name: str, *inputs: TensorUse, writes: tuple[TensorUse, ...]) -> ExecutionNode:
    return ExecutionNode(
        name=f"aten::{name}", function=1, sequence=-1, is_backward=False, inputs=inputs, outputs=writes, writes=writes
    )


def lowered(*nodes: ExecutionNode, module: slice = slice(None)):
    """Which ops of a module compute in bfloat16, their types, and what is cast."""
    module_nodes = nodes[module]
    rows = np.arange(len(module_nodes))
    spans = HostSpans(
        names=tuple(node.name for node in module_nodes), name=rows, is_op=rows >= 0, thread=rows * 0, start_us=rows * 1.0,
        end_us=rows + 1.0, function=rows + 1, sequence=rows, base_ns=0, dropped={},
    )  # fmt: skip
    none = rows[:0]
    executed = ModuleRows(ops=rows, functions=none, op_of=none, forward_us=1.0, backward_us=1.0)
    return lowering(spans, executed, nodes, module.start or 0)


INPUT, WEIGHT, BIAS = tensor(1, 8, 4), tensor(2, 4, 4), tensor(3, 4)


def test_products_cast_what_they_read_once_for_each_parameter_and_what_is_read_later_is_cast_back():
    cast_ops = lowered(
        op("linear", INPUT, WEIGHT, BIAS, writes=(tensor(10, 8, 4),)),
        op("relu", tensor(10, 8, 4), writes=(tensor(11, 8, 4),)),
        op("linear", tensor(11, 8, 4), WEIGHT, BIAS, writes=(tensor(12, 8, 4),)),
        op("sum", tensor(12, 8, 4), writes=(tensor(13),)),
        module=slice(0, 3),
    )
    assert cast_ops.lowers.tolist() == [True, True, True]
    assert cast_ops.casts == (32, 16, 4, 32)  # input, weight, bias; and the result, which the sum reads


def test_a_sum_with_float32_is_float32_and_so_is_what_reads_it():
    cast_ops = lowered(
        op("linear", INPUT, WEIGHT, writes=(tensor(10, 8, 4),)),
        op("add", tensor(10, 8, 4), INPUT, writes=(tensor(11, 8, 4),)),
        op("layer_norm", tensor(11, 8, 4), tensor(4, 4), tensor(5, 4), writes=(tensor(12, 8, 4),)),
        op("linear", tensor(12, 8, 4), tensor(6, 4, 4), writes=(tensor(13, 8, 4),)),
    )
    assert cast_ops.lowers.tolist() == [True, False, False, True]
    assert cast_ops.casts == (32, 16, 32, 16)


def test_normalisations_follow_their_first_input_and_changes_in_place_what_they_change():
    cast_ops = lowered(
        op("conv2d", tensor(1, 2, 3, 8, 8), tensor(2, 5, 3, 3, 3), writes=(tensor(10, 2, 5, 8, 8),)),
        op("batch_norm", tensor(10, 2, 5, 8, 8), tensor(4, 5), tensor(5, 5), writes=(tensor(11, 2, 5, 8, 8),)),
        op("add_", tensor(11, 2, 5, 8, 8), tensor(7, 2, 5, 8, 8), writes=(tensor(11, 2, 5, 8, 8),)),
        op("nll_loss", tensor(11, 2, 5, 8, 8), tensor(8, 2, dtype="long int"), writes=(tensor(12),)),
    )
    assert cast_ops.lowers.tolist() == [True, True, True, False]
    assert cast_ops.casts == (384, 135, 640)  # the loss reads float32


@pytest.mark.parametrize(
    ("weights", "kind"),
    [((6, 4, 3, 3), ""), ((6, 4, 1, 1), " pointwise"), ((4, 1, 7, 7), " depthwise_7"), ((4, 2, 3, 3), " grouped")],
)
def test_types_of_convolutions_say_what_their_filters_are_like(weights, kind):
    cast_ops = lowered(op("conv2d", tensor(1, 2, 4, 8, 8), tensor(2, *weights), writes=(tensor(10, 2, 6, 8, 8),)))
    assert cast_ops.types == (f"aten::conv2d{kind}",)


def test_a_module_without_products_changes_nothing():
    assert lowered(op("relu", INPUT, writes=(tensor(10, 8, 4),))) is None
    assert lowered(op("linear", tensor(1, 8, 4, dtype="double"), tensor(2, 4, 4, dtype="double"), writes=())) is None


def test_of_a_recorded_block_all_ops_would_change_and_its_parameters_input_and_result_be_cast():
    block = trace_of("ddp_blocks").modules[1]
    ops = block.lowered
    assert ops is not None
    counts = {(one.type, one.calls) for one in ops.ops}
    assert {("aten::linear", 2), ("aten::batch_norm", 1), ("aten::dropout", 1), ("AddmmBackward0", 2)} <= counts
    assert ops.casts == 6
    assert ops.cast_elements == 2 * BATCH * WIDTH + 2 * (WIDTH * WIDTH + WIDTH)
    assert sum(one.us for one in ops.ops if not one.backward) < ops.forward_us
    assert sum(one.us for one in ops.ops if one.backward) < ops.backward_us
    assert all(isinstance(one, LoweredOp) and one.us > 0 for one in ops.ops)
