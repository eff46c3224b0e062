"""What a cost model sees of a cluster: kinds and classes of ops, work in floating-point operations, bytes, extent."""

import numpy as np
import pytest
from costmodel.fused.clusters import clusters

from dpro_search.collect.tables.clusters import ClusterOp, ClusterTensor, OpCluster
from dpro_search.costmodel.fused.features import FEATURES, shaped_features, timed_features
from dpro_search.costmodel.fused.flatten import flatten
from dpro_search.costmodel.fused.op_classes import KINDS, TypedOp, class_of, flops, is_strided, kind_of
from dpro_search.costmodel.fused.timed import TIMED_FEATURES, timed_ops
from tests.every_case import every_case


def one(op_type, inputs, output, equation=""):
    """An op that takes tensors of the given shapes."""
    return TypedOp(op_type, tuple(inputs), (output,), equation)


def features_of(cluster):
    return dict(zip(FEATURES, shaped_features([cluster]).whole[0].tolist(), strict=True))


@every_case(
    ("op_type", "inputs", "output", "expected"),
    [
        ("MatMul", [(8, 16), (16, 32)], (8, 32), 2 * 8 * 16 * 32),
        ("MatMul", [(16, 8), (16, 32)], (8, 32), 2 * 8 * 16 * 32),  # the first operand transposed
        ("BatchMatMulV2", [(4, 6, 8, 16), (4, 6, 16, 32)], (4, 6, 8, 32), 2 * 24 * 8 * 16 * 32),
        ("Conv2D", [(2, 10, 10, 3), (3, 3, 3, 7)], (2, 8, 8, 7), 2 * 2 * 8 * 8 * 7 * 27),
        ("_MklNativeFusedConv2D", [(2, 10, 10, 3), (3, 3, 3, 7), (7,)], (2, 8, 8, 7), 2 * 2 * 8 * 8 * 7 * 27),
        ("Conv2DBackpropInput", [(4,), (3, 3, 3, 7), (2, 8, 8, 7)], (2, 10, 10, 3), 2 * 2 * 8 * 8 * 7 * 27),
        ("Conv2DBackpropFilter", [(2, 10, 10, 3), (4,), (2, 8, 8, 7)], (3, 3, 3, 7), 2 * 2 * 8 * 8 * 7 * 27),
        ("DepthwiseConv2dNative", [(2, 10, 10, 5), (3, 3, 5, 1)], (2, 8, 8, 5), 2 * 2 * 8 * 8 * 5 * 9),
        ("AddV2", [(4, 5), (5,)], (4, 5), 20),
        ("Reshape", [(4, 5), (2,)], (20,), 0),
    ],
)
def test_work_of_an_op(op_type, inputs, output, expected):
    assert flops(one(op_type, inputs, output)) == pytest.approx(expected)


def test_work_of_an_einsum_follows_its_equation():
    op = one("Einsum", [(8, 64, 6, 32), (8, 48, 6, 32)], (8, 6, 64, 48), equation="BTNH,BSNH->BNTS")
    assert flops(op) == 2 * 8 * 64 * 48 * 6 * 32


@pytest.mark.parametrize(
    ("op_type", "inputs", "output", "expected"),
    [
        ("Sum", [(64, 10)], (10,), "column_reduction"),  # keeps the innermost axis
        ("Sum", [(64, 10)], (64,), "row_reduction"),
        ("Conv2D", [(2, 8, 8, 3), (1, 1, 3, 7)], (2, 8, 8, 7), "pointwise_conv"),
        ("Conv2D", [(2, 8, 8, 3), (3, 3, 3, 7)], (2, 8, 8, 7), "spatial_conv"),
        ("Conv2DBackpropFilter", [(2, 8, 8, 3), (4,), (2, 8, 8, 7)], (1, 1, 3, 7), "pointwise_filter_grad"),
        ("FancyNewOp", [(3,)], (3,), "other"),
    ],
)
def test_a_class_is_finer_than_a_kind_where_shapes_decide(op_type, inputs, output, expected):
    assert class_of(one(op_type, inputs, output)) == expected


@every_case(
    ("op_type", "kind"),
    [
        ("_FusedMatMul", "matmul"),
        ("_MklNativeFusedMatMul", "matmul"),
        ("_MklNativeConv2DBackpropFilterWithBias", "conv_filter_grad"),
        ("_FusedBatchNormEx", "norm"),
        ("FusedBatchNormGradV3", "norm_grad"),
        ("_MklRelu", "elementwise"),
        ("FancyNewOp", "other"),
    ],
)
def test_an_op_that_the_framework_fused_counts_as_what_it_begins_with(op_type, kind):
    assert kind_of(op_type) == kind


def test_a_gradient_of_a_convolution_that_skips_pixels_is_told_by_its_shapes():
    skipping = one("Conv2DBackpropInput", [(4,), (3, 3, 3, 7), (2, 4, 4, 7)], (2, 8, 8, 3))
    whole = one("Conv2DBackpropInput", [(4,), (3, 3, 3, 7), (2, 8, 8, 7)], (2, 8, 8, 3))
    assert is_strided(skipping)
    assert not is_strided(whole)


def test_the_time_of_a_fused_product_is_the_product_s():
    """The framework ran all three as one kernel, and noted it under the last one's name."""
    tensors = (
        *(ClusterTensor("float32", shape, "in") for shape in ((8, 16), (16, 32), (32,))),
        *(ClusterTensor("float32", (8, 32), role) for role in ("inner", "inner", "out")),
    )
    ops = (ClusterOp("MatMul", (0, 1), (3,)), ClusterOp("BiasAdd", (3, 2), (4,)), ClusterOp("Relu", (4,), (5,)))
    features = features_of(OpCluster(ops=ops, tensors=tensors, op_us=(0.0, 0.0, 9.0)))
    assert (features["matmul_us"], features["matmul_count"], features["elementwise_us"], features["elementwise_count"]) == (
        9,
        1,
        0,
        0,
    )
    apart = features_of(OpCluster(ops=ops, tensors=tensors, op_us=(7.0, 1.0, 1.0)))
    assert (apart["matmul_us"], apart["elementwise_us"], apart["ops"]) == (7, 2, 3)


def test_bytes_are_counted_once_a_tensor_and_by_where_they_are_needed():
    tensors = (
        ClusterTensor("float32", (100,), "in"),
        ClusterTensor("float32", (100,), "inner"),
        ClusterTensor("int64", (100,), "out"),
        ClusterTensor("int32", (1,), "const"),
    )
    ops = (ClusterOp("Square", (0,), (1,)), ClusterOp("Mul", (1, 0), (2,)), ClusterOp("Sum", (1, 3), ()))
    features = features_of(OpCluster(ops=ops, tensors=tensors, op_us=(1.0, 2.0, 3.0)))
    assert (features["in_bytes"], features["inner_bytes"], features["out_bytes"]) == (400, 400, 800)
    assert (features["members_us"], features["largest_member_us"], features["ops"]) == (6.0, 3.0, 3)
    assert (features["depth"], features["width"]) == (2, 2)
    assert features["other_dtype_ops"] == 1


def test_every_feature_has_a_name_of_its_own():
    assert len(set(FEATURES)) == len(FEATURES)


def test_features_of_real_clusters_are_finite_and_add_up():
    matrix = shaped_features(clusters()).whole
    column = {name: matrix[:, i] for i, name in enumerate(FEATURES)}
    assert np.isfinite(matrix).all()
    assert (matrix >= 0).all()
    np.testing.assert_allclose(sum(column[f"{kind}_us"] for kind in KINDS), column["members_us"])
    np.testing.assert_array_equal(sum(column[f"{kind}_count"] for kind in KINDS), column["ops"])


def test_what_a_trace_knows_is_the_first_part_of_what_is_known_with_shapes():
    timed = timed_features(timed_ops(flatten(clusters())))
    np.testing.assert_array_equal(timed.whole, shaped_features(clusters()).whole[:, : len(TIMED_FEATURES)])


def test_few_ops_of_real_training_steps_are_of_an_unknown_type():
    matrix = shaped_features(clusters()).whole
    assert matrix[:, FEATURES.index("other_us")].sum() < 0.01 * matrix[:, FEATURES.index("members_us")].sum()
