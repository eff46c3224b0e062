"""Parts of a cluster: loops are one part, what other ops read and write lies in memory, caches have sets."""

import numpy as np
import pytest
from costmodel.fused.clusters import clusters

from dpro_search.collect.tables.clusters import ClusterOp, ClusterTensor, OpCluster
from dpro_search.costmodel.fused.features import shaped_features
from dpro_search.costmodel.fused.flatten import Product, product_of
from dpro_search.costmodel.fused.op_classes import TypedOp
from dpro_search.costmodel.fused.op_parts import PART_CLASSES, PART_FEATURES, Strided
from tests.every_case import every_case


def cluster_of(*ops, **tensors):
    """A cluster of (type, inputs, outputs, us) over tensors given as name=(shape, role)."""
    number = {name: i for i, name in enumerate(tensors)}
    return OpCluster(
        ops=tuple(ClusterOp(kind, tuple(map(number.get, used)), tuple(map(number.get, made))) for kind, used, made, _ in ops),
        tensors=tuple(ClusterTensor("float32", shape, role) for shape, role in tensors.values()),
        op_us=tuple(us for *_, us in ops),
    )


def parts_of(cluster):
    """Features by name of each part but the call, by class."""
    rows = [dict(zip(PART_FEATURES, row, strict=True)) for row in shaped_features([cluster]).parts.tolist()]
    return {PART_CLASSES[int(row["class"])]: row for row in rows[1:]}


def test_a_loop_that_only_a_reduction_reads_writes_nothing_to_memory():
    cluster = cluster_of(
        ("MatMul", "ab", "m", 9.0), ("BiasAdd", "mc", "d", 1.0), ("Relu", "d", "r", 2.0), ("Sum", "r", "s", 3.0),
        a=((8, 16), "in"), b=((16, 32), "in"), c=((32,), "in"), m=((8, 32), "inner"), d=((8, 32), "inner"),
        r=((8, 32), "inner"), s=((32,), "out"),
    )  # fmt: skip
    parts = parts_of(cluster)
    assert (parts["matmul"]["us"], parts["matmul"]["work"]) == (9.0, 2 * 8 * 16 * 32)
    assert (parts["loop"]["ops"], parts["loop"]["us"], parts["loop"]["sources"]) == (2, 3.0, 2)
    assert (parts["loop"]["read_bytes"], parts["loop"]["written_bytes"]) == (4 * (8 * 32 + 32), 0)
    assert (parts["column_reduction"]["read_bytes"], parts["column_reduction"]["written_bytes"]) == (0, 4 * 32)


def test_a_result_that_is_needed_outside_or_by_a_product_lies_in_memory():
    cluster = cluster_of(
        ("Neg", "a", "b", 1.0), ("Square", "b", "c", 1.0), ("Neg", "b", "d", 1.0), ("MatMul", "de", "f", 1.0),
        a=((8, 8), "in"), b=((8, 8), "out"), c=((8, 8), "out"), d=((8, 8), "inner"), e=((8, 8), "in"), f=((8, 8), "out"),
    )  # fmt: skip
    loops = parts_of(cluster)["loop"]
    assert (loops["kernels"], loops["written_bytes"]) == (3, 3 * 256)


def test_a_tensor_that_several_loops_read_counts_once():
    cluster = cluster_of(
        ("Neg", "a", "b", 1.0), ("Square", "a", "c", 1.0), a=((64,), "in"), b=((64,), "out"), c=((64,), "out")
    )  # fmt: skip
    assert parts_of(cluster)["loop"]["read_bytes"] == 256


def test_updates_of_variables_are_written():
    cluster = cluster_of(
        ("Neg", "g", "n", 1.0), ("AssignVariableOp", "vn", "", 1.0),
        g=((64,), "in"), v=((64,), "variable"), n=((64,), "inner"),
    )  # fmt: skip
    assert parts_of(cluster)["loop"]["written_bytes"] == 256


def test_normalisation_takes_the_loop_before_it_along():
    stats = dict.fromkeys("cdef", ((16,), "in")) | dict.fromkeys("ghijk", ((16,), "inner"))
    cluster = cluster_of(
        ("Relu", "r", "a", 1.0), ("FusedBatchNormV3", "acdef", "bghijk", 6.0),
        r=((2, 8, 8, 16), "in"), a=((2, 8, 8, 16), "inner"), b=((2, 8, 8, 16), "out"), **stats,
    )  # fmt: skip
    parts = parts_of(cluster)
    assert (parts["loop"]["written_bytes"], parts["norm"]["us"], parts["norm"]["strided"]) == (0, 6.0, 2048)


@pytest.mark.parametrize(("rows", "windowed"), [(32, 0), (33, 33 * 64)])
def test_a_long_axis_is_reduced_in_windows(rows, windowed):
    cluster = cluster_of(("BiasAddGrad", "a", "b", 1.0), a=((rows, 64), "in"), b=((64,), "out"))
    assert parts_of(cluster)["column_reduction"]["windowed"] == windowed


def test_rows_a_power_of_two_apart_fall_into_few_sets_of_a_cache():
    ways, sets = 8, 64
    assert Strided(1024.0, 9.0, 4096).misses(ways, sets) == 1024
    assert Strided(1024.0, 9.0, 4096 + 64).misses(ways, sets) == 0
    assert Strided(1024.0, 7.0, 4096).misses(ways, sets) == 0


@every_case(
    ("op_type", "inputs", "output", "expected"),
    [
        ("MatMul", [(8, 16), (16, 32)], (8, 32), Product(1, 8, 16, 32)),
        ("MatMul", [(8, 16), (32, 16)], (8, 32), Product(1, 8, 16, 32, swapped=1, right_swapped=True)),
        ("BatchMatMulV2", [(4, 8, 16), (4, 16, 32)], (4, 8, 32), Product(4, 8, 16, 32)),
        ("Conv2D", [(2, 8, 8, 3), (3, 3, 3, 7)], (2, 8, 8, 7), Product(1, 128, 27, 7, pixels=9)),
        ("Conv2DBackpropInput", [(4,), (3, 3, 3, 7), (2, 4, 4, 7)], (2, 8, 8, 3), Product(1, 128, 63, 3, pixels=9, holes=2)),
        ("Conv2DBackpropFilter", [(2, 8, 8, 3), (4,), (2, 8, 8, 7)], (3, 3, 3, 7), Product(1, 27, 128, 7, pixels=9)),
        ("DepthwiseConv2dNative", [(2, 8, 8, 5), (3, 3, 5, 1)], (2, 8, 8, 5), Product(5, 128, 9, 1, pixels=9)),
        ("Conv2D", [(2, 8), (3, 3, 3, 7)], (2, 7), None),
    ],
)
def test_what_a_convolution_or_product_multiplies(op_type, inputs, output, expected):
    assert product_of(TypedOp(op_type, tuple(inputs), (output,))) == expected


def test_the_gradient_of_a_depthwise_filter_is_computed_for_all_pairs_of_channels():
    cluster = cluster_of(
        ("DepthwiseConv2dNativeBackpropFilter", "asg", "f", 9.0),
        a=((2, 8, 8, 16), "in"), s=((4,), "const"), g=((2, 8, 8, 16), "in"), f=((3, 3, 16, 1), "out"),
    )  # fmt: skip
    row = parts_of(cluster)["depthwise_filter_grad"]
    assert (row["made"], row["work"]) == (9 * 16 * 16, 2 * 9 * 16 * 16 * 128)


def test_parts_of_real_clusters_hold_their_members_times():
    features = shaped_features(clusters())
    for number, cluster in enumerate(clusters()):
        rows = features.parts[features.of == number]
        kernels = rows[:, PART_FEATURES.index("kernels")]
        assert (rows[0, 0], kernels[0]) == (0, kernels[1:].sum())
        assert rows[:, PART_FEATURES.index("us")].sum() == pytest.approx(sum(cluster.op_us))
    assert np.isfinite(features.parts).all()
    assert (features.parts >= 0).all()


def test_clusters_at_once_have_the_features_that_each_has_alone():
    some = clusters()[:60]
    features = shaped_features(some)
    for number, cluster in enumerate(some):
        alone = shaped_features([cluster])
        np.testing.assert_array_equal(alone.parts, features.parts[features.of == number])
        np.testing.assert_array_equal(alone.whole[0], features.whole[number])
