"""Op types by what they do, and how much of it: the vocabulary of the cost models' features.

The names are TensorFlow's. A type that is not listed is of the class "other", which a model has few measurements of.
"""

from __future__ import annotations

from math import prod, sqrt

from dpro_search.collect.clusters.table import Cluster, ClusterOp

_TYPES = {
    "conv": "Conv2D _FusedConv2D _MklNativeFusedConv2D _MklNativeConv2D",
    "conv_input_grad": "Conv2DBackpropInput _MklNativeConv2DBackpropInput",
    "conv_filter_grad": "Conv2DBackpropFilter _MklNativeConv2DBackpropFilter",
    "depthwise": "DepthwiseConv2dNative DepthwiseConv2dNativeBackpropInput DepthwiseConv2dNativeBackpropFilter",
    "matmul": "MatMul _FusedMatMul _MklNativeFusedMatMul _MklMatMul",
    "batch_matmul": "BatchMatMul BatchMatMulV2 Einsum _MklBatchMatMulV2",
    "norm": "FusedBatchNormV3 FusedBatchNorm _FusedBatchNormEx",
    "norm_grad": "FusedBatchNormGradV3 FusedBatchNormGrad",
    "row_reduction": "Sum Mean Max Min Prod BiasAddGrad ArgMax All Any L2Loss",
    "column_reduction": "",
    "softmax": "Softmax LogSoftmax SparseSoftmaxCrossEntropyWithLogits SoftmaxCrossEntropyWithLogits",
    "pool": "MaxPool AvgPool",
    "pool_grad": "MaxPoolGrad AvgPoolGrad",
    "transcendental": "Exp Log Log1p Expm1 Tanh TanhGrad Sigmoid SigmoidGrad Erf Erfc Pow Sqrt Rsqrt SqrtGrad RsqrtGrad Sin Cos "
    "Elu EluGrad Softplus",
    "elementwise": "Add AddV2 AddN Sub Mul RealDiv Div DivNoNan Maximum Minimum Neg Square Abs Sign Relu ReluGrad Relu6 Relu6Grad "
    "LeakyRelu BiasAdd Cast Select SelectV2 Greater GreaterEqual Less LessEqual Equal NotEqual LogicalAnd LogicalOr LogicalNot "
    "ClipByValue Inv Reciprocal InvGrad FloorDiv FloorMod Floor ZerosLike OnesLike SquaredDifference",
    "layout": "Transpose ConjugateTranspose",
    "movement": "ConcatV2 Concat Slice StridedSlice StridedSliceGrad Pad PadV2 Tile Split SplitV Pack Unpack Fill BroadcastTo "
    "MirrorPad Range OneHot",
    "free": "Reshape ExpandDims Squeeze Identity Shape ShapeN Size Rank StopGradient",
    "gather": "Gather GatherV2 GatherNd ResourceGather ScatterNd ResourceScatterAdd UnsortedSegmentSum Unique",
    "variable": "ReadVariableOp AssignVariableOp AssignAddVariableOp AssignSubVariableOp ResourceApplyAdam ResourceApplyMomentum "
    "ResourceApplyKerasMomentum ResourceApplyGradientDescent",
}
OTHER = "other"
CLASSES = (*_TYPES, OTHER)
HEAVY = ("conv", "conv_input_grad", "conv_filter_grad", "depthwise", "matmul", "batch_matmul")
_CLASS_OF = {name: kind for kind, names in _TYPES.items() for name in names.split()}
_SIZE_BYTES = {"float64": 8, "int64": 8, "uint64": 8, "float16": 2, "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
_COSTLY = 10.0  # floating-point operations of a transcendental function


def class_of(cluster: Cluster, op: ClusterOp) -> str:
    """Class of an op, one of `CLASSES`. A reduction that keeps the innermost axis (by columns) is another thing for a compiler."""
    kind = _CLASS_OF.get(op.type, OTHER)
    if kind != "row_reduction" or not (op.inputs and op.outputs):
        return kind
    read, made = cluster.tensors[op.inputs[0]].shape, cluster.tensors[op.outputs[0]].shape
    keeps = len(read) > 1 and len(made) > 0 and read[-1] > 1 and made[-1] == read[-1]
    return "column_reduction" if keeps else kind


def tensor_bytes(cluster: Cluster, number: int) -> int:
    """Size of a tensor of a cluster."""
    tensor = cluster.tensors[number]
    return prod(tensor.shape) * _SIZE_BYTES.get(tensor.dtype, 4)


def flops(cluster: Cluster, op: ClusterOp) -> float:
    """Floating-point operations of an op: two for a multiplication and addition."""
    kind = class_of(cluster, op)
    shapes = [cluster.tensors[number].shape for number in op.inputs]
    made = [cluster.tensors[number].shape for number in op.outputs]
    read, written = [float(prod(shape)) for shape in shapes], [float(prod(shape)) for shape in made]
    largest = max(read + written, default=0.0)
    if kind in ("conv", "depthwise", "conv_input_grad", "conv_filter_grad") and len(shapes) > 1 and made:
        return _convolution(op.type, shapes, made[0])
    if kind in ("matmul", "batch_matmul") and len(read) > 1 and written and written[0]:
        # [b, m, k] x [b, k, n]: the product of the sizes is b^3 (m k n)^2, in whatever order the axes are.
        batch = float(prod(_common(shapes[0], shapes[1], made[0]))) if kind == "batch_matmul" else 1.0
        return 2 * sqrt(read[0] * read[1] * written[0] / batch)
    if kind in ("free", "layout", "movement", "gather", OTHER):
        return 0.0
    return largest * (_COSTLY if kind in ("transcendental", "softmax", "norm", "norm_grad") else 1.0)


def _convolution(op_type: str, shapes: list[tuple[int, ...]], made: tuple[int, ...]) -> float:
    """Every position of the forward output multiplies each weight of a filter once for each input channel."""
    if "Filter" in op_type:
        filters, output = made, shapes[-1]
    elif "Input" in op_type:
        filters, output = shapes[1], shapes[-1]
    else:
        filters, output = shapes[1], made
    if len(filters) != 4 or len(output) != 4:
        return 0.0
    if "Depthwise" in op_type:
        return 2.0 * prod(output) * filters[0] * filters[1]
    return 2.0 * prod(output) * filters[0] * filters[1] * filters[2]


def _common(left: tuple[int, ...], right: tuple[int, ...], made: tuple[int, ...]) -> tuple[int, ...]:
    """Axes that a batched product keeps in all three: the leading ones, as far as they are equal."""
    shared = []
    for a, b, c in zip(left[:-2], right[:-2], made[:-2], strict=False):
        if not a == b == c:
            break
        shared.append(a)
    return tuple(shared)
