"""The kernels that XLA makes of a cluster: loops take loops along, reductions and products lie in memory, caches have sets."""

import numpy as np
import pytest
from costmodel.fused.clusters import clusters

from dpro_search.collect.clusters.table import Cluster, ClusterOp, ClusterTensor
from dpro_search.costmodel.fused.features import shaped_features
from dpro_search.costmodel.fused.kernels import PART_FEATURES
from dpro_search.costmodel.fused.lowering import KERNELS, Strided
from dpro_search.costmodel.fused.op_classes import TypedOp
from dpro_search.costmodel.fused.products import Product, product_of


def cluster_of(*ops, **tensors):
    """A cluster of (type, inputs, outputs, us) over tensors given as name=(shape, role)."""
    number = {name: i for i, name in enumerate(tensors)}
    return Cluster(
        ops=tuple(ClusterOp(kind, tuple(map(number.get, used)), tuple(map(number.get, made))) for kind, used, made, _ in ops),
        tensors=tuple(ClusterTensor("float32", shape, role) for shape, role in tensors.values()),
        op_us=tuple(us for *_, us in ops),
    )


def kernels_of(cluster):
    """(class, features by name) of each kernel, without the call."""
    rows = [dict(zip(PART_FEATURES, row, strict=True)) for row in shaped_features([cluster]).parts.tolist()]
    return [(KERNELS[int(row["class"])], row) for row in rows[1:]]


def test_a_loop_takes_along_what_only_loops_need():
    cluster = cluster_of(
        ("MatMul", "ab", "m", 9.0), ("BiasAdd", "mc", "d", 1.0), ("Relu", "d", "r", 2.0), ("Sum", "r", "s", 3.0),
        a=((8, 16), "in"), b=((16, 32), "in"), c=((32,), "in"), m=((8, 32), "inner"), d=((8, 32), "inner"),
        r=((8, 32), "inner"), s=((32,), "out"),
    )  # fmt: skip
    (product, matmul), (reduction, summed) = kernels_of(cluster)
    assert (product, matmul["ops"], matmul["us"], matmul["work"]) == ("matmul", 1, 9.0, 2 * 8 * 16 * 32)
    assert (reduction, summed["ops"], summed["us"], summed["sources"]) == ("column_reduction", 3, 6.0, 2)
    assert summed["read_bytes"] == 4 * (8 * 32 + 32)
    assert summed["written_bytes"] == 4 * 32


def test_what_is_needed_outside_lies_in_memory():
    cluster = cluster_of(
        ("Neg", "a", "b", 1.0), ("Square", "b", "c", 1.0), a=((64,), "in"), b=((64,), "out"), c=((64,), "out")
    )  # fmt: skip
    assert [name for name, _ in kernels_of(cluster)] == ["loop", "loop"]


def test_updates_of_variables_are_written_and_read_back():
    cluster = cluster_of(
        ("Neg", "g", "n", 1.0), ("AssignVariableOp", "vn", "", 1.0), ("ReadVariableOp", "v", "r", 0.1), ("Square", "r", "s", 1.0),
        g=((64,), "in"), v=((64,), "variable"), n=((64,), "inner"), r=((64,), "inner"), s=((64,), "out"),
    )  # fmt: skip
    (_, written), (_, squared) = kernels_of(cluster)
    assert (written["written_bytes"], squared["read_bytes"]) == (256, 256)


def test_normalisation_is_two_reductions_and_a_loop_that_goes_on():
    stats = dict.fromkeys("cdef", ((16,), "in")) | dict.fromkeys("ghijk", ((16,), "inner"))
    cluster = cluster_of(
        ("FusedBatchNormV3", "acdef", "bghijk", 6.0), ("Relu", "b", "r", 1.0),
        a=((2, 8, 8, 16), "in"), b=((2, 8, 8, 16), "inner"), r=((2, 8, 8, 16), "out"), **stats,
    )  # fmt: skip
    found = kernels_of(cluster)
    assert [name for name, _ in found] == ["column_reduction", "column_reduction", "loop"]
    assert sum(row["us"] for _, row in found) == pytest.approx(7.0)


@pytest.mark.parametrize(("rows", "windowed"), [(32, 0), (33, 33 * 64)])
def test_a_long_axis_is_reduced_in_windows(rows, windowed):
    cluster = cluster_of(("BiasAddGrad", "a", "b", 1.0), a=((rows, 64), "in"), b=((64,), "out"))
    assert kernels_of(cluster)[0][1]["windowed"] == windowed


def test_rows_a_power_of_two_apart_fall_into_few_sets_of_a_cache():
    ways, sets = 8, 64
    assert Strided(1024.0, 9.0, 4096).misses(ways, sets) == 1024
    assert Strided(1024.0, 9.0, 4096 + 64).misses(ways, sets) == 0
    assert Strided(1024.0, 7.0, 4096).misses(ways, sets) == 0


@pytest.mark.parametrize(
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
    ((name, row),) = kernels_of(cluster)
    assert (name, row["made"], row["work"]) == ("depthwise_filter_grad", 9 * 16 * 16, 2 * 9 * 16 * 16 * 128)


def test_parts_of_real_clusters_hold_their_members_times():
    found = shaped_features(clusters())
    for number, cluster in enumerate(clusters()):
        rows = found.parts[found.of == number]
        assert (rows[0, 0], rows[0, PART_FEATURES.index("kernels")]) == (0, len(rows) - 1)
        assert rows[:, PART_FEATURES.index("us")].sum() == pytest.approx(sum(cluster.op_us))
    assert np.isfinite(found.parts).all()
    assert (found.parts >= 0).all()


def test_clusters_at_once_have_the_features_that_each_has_alone():
    some = clusters()[:60]
    found = shaped_features(some)
    for number, cluster in enumerate(some):
        alone = shaped_features([cluster])
        np.testing.assert_array_equal(alone.parts, found.parts[found.of == number])
        np.testing.assert_array_equal(alone.whole[0], found.whole[number])
