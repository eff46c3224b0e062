"""What a cost model sees of a cluster: classes of ops, work in floating-point operations, bytes, extent."""

import numpy as np
import pytest
from costmodel.learned.clusters import clusters

from dpro_search.collect.clusters.table import Cluster, ClusterOp, ClusterTensor
from dpro_search.costmodel.learned.features import FEATURES, cluster_features, feature_matrix
from dpro_search.costmodel.learned.op_classes import CLASSES, class_of, flops


def one(op_type, inputs, output, role="out"):
    """A cluster of one op that takes tensors of the given shapes."""
    tensors = [ClusterTensor("float32", tuple(shape), "in") for shape in inputs] + [ClusterTensor("float32", tuple(output), role)]
    op = ClusterOp(op_type, tuple(range(len(inputs))), (len(inputs),))
    return Cluster(ops=(op,), tensors=tuple(tensors), op_us=(5.0,))


def features_of(cluster):
    return dict(zip(FEATURES, cluster_features(cluster), strict=True))


@pytest.mark.parametrize(
    ("op_type", "inputs", "output", "expected"),
    [
        ("MatMul", [(8, 16), (16, 32)], (8, 32), 2 * 8 * 16 * 32),
        ("MatMul", [(16, 8), (16, 32)], (8, 32), 2 * 8 * 16 * 32),  # the first operand transposed
        ("BatchMatMulV2", [(4, 6, 8, 16), (4, 6, 16, 32)], (4, 6, 8, 32), 2 * 24 * 8 * 16 * 32),
        ("Conv2D", [(2, 10, 10, 3), (3, 3, 3, 7)], (2, 8, 8, 7), 2 * 2 * 8 * 8 * 7 * 27),
        ("Conv2DBackpropInput", [(4,), (3, 3, 3, 7), (2, 8, 8, 7)], (2, 10, 10, 3), 2 * 2 * 8 * 8 * 7 * 27),
        ("Conv2DBackpropFilter", [(2, 10, 10, 3), (4,), (2, 8, 8, 7)], (3, 3, 3, 7), 2 * 2 * 8 * 8 * 7 * 27),
        ("DepthwiseConv2dNative", [(2, 10, 10, 5), (3, 3, 5, 1)], (2, 8, 8, 5), 2 * 2 * 8 * 8 * 5 * 9),
        ("AddV2", [(4, 5), (5,)], (4, 5), 20),
        ("Reshape", [(4, 5), (2,)], (20,), 0),
    ],
)
def test_work_of_an_op(op_type, inputs, output, expected):
    cluster = one(op_type, inputs, output)
    assert flops(cluster, cluster.ops[0]) == pytest.approx(expected)


def test_a_reduction_that_keeps_the_innermost_axis_is_by_columns():
    by_columns, by_rows = one("Sum", [(64, 10)], (10,)), one("Sum", [(64, 10)], (64,))
    assert class_of(by_columns, by_columns.ops[0]) == "column_reduction"
    assert class_of(by_rows, by_rows.ops[0]) == "row_reduction"


def test_an_unknown_op_type_is_other():
    cluster = one("FancyNewOp", [(3,)], (3,))
    assert class_of(cluster, cluster.ops[0]) == "other"


def test_bytes_are_counted_once_a_tensor_and_by_where_they_are_needed():
    tensors = (
        ClusterTensor("float32", (100,), "in"),
        ClusterTensor("float32", (100,), "inner"),
        ClusterTensor("int64", (100,), "out"),
        ClusterTensor("int32", (1,), "const"),
    )
    ops = (ClusterOp("Square", (0,), (1,)), ClusterOp("Mul", (1, 0), (2,)), ClusterOp("Sum", (1, 3), ()))
    found = features_of(Cluster(ops=ops, tensors=tensors, op_us=(1.0, 2.0, 3.0)))
    assert (found["in_bytes"], found["inner_bytes"], found["out_bytes"]) == (400, 400, 800)
    assert (found["members_us"], found["largest_member_us"], found["ops"]) == (6.0, 3.0, 3)
    assert (found["depth"], found["width"]) == (2, 2)
    assert found["other_dtype_ops"] == 1


def test_features_of_real_clusters_are_finite_and_add_up():
    matrix = feature_matrix(clusters())
    column = {name: matrix[:, i] for i, name in enumerate(FEATURES)}
    assert np.isfinite(matrix).all()
    assert (matrix >= 0).all()
    np.testing.assert_allclose(sum(column[f"{kind}_us"] for kind in CLASSES), column["members_us"])
    np.testing.assert_array_equal(sum(column[f"{kind}_count"] for kind in CLASSES), column["ops"])


def test_few_ops_of_real_training_steps_are_of_an_unknown_type():
    matrix = feature_matrix(clusters())
    assert matrix[:, FEATURES.index("other_us")].sum() < 0.01 * matrix[:, FEATURES.index("members_us")].sum()
