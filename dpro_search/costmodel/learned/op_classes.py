"""Op types by what they do, and how much of it: the vocabulary of the cost models' features.

The names are TensorFlow's. A type says an op's kind; with the shapes of its tensors it has a class, which is finer where a compiler
does different things for shapes of one type. A type that is not listed is "other", which a model has few measurements of.
"""

from __future__ import annotations

import functools
import re
from math import prod, sqrt

from dpro_search.collect.clusters.table import Cluster, ClusterOp

_TYPES = {
    "conv": "Conv2D Conv2DWithBias PadWithConv2D",
    "conv_input_grad": "Conv2DBackpropInput",
    "conv_filter_grad": "Conv2DBackpropFilter Conv2DBackpropFilterWithBias",
    "depthwise": "DepthwiseConv2dNative DepthwiseConv2dNativeWithBias",
    "depthwise_input_grad": "DepthwiseConv2dNativeBackpropInput",
    "depthwise_filter_grad": "DepthwiseConv2dNativeBackpropFilter",
    "matmul": "MatMul MatMulGrad",
    "batch_matmul": "BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum",
    "norm": "FusedBatchNormV3 FusedBatchNorm FusedBatchNormEx LayerNorm",
    "norm_grad": "FusedBatchNormGradV3 FusedBatchNormGrad FusedBatchNormGradEx",
    "reduction": "Sum Mean Max Min Prod BiasAddGrad ArgMax All Any L2Loss",
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
KINDS = (*_TYPES, OTHER)
# What a kind is, by shapes: (as a rule, in the special case). A filter of one pixel is a matrix product; a reduction that keeps the
# innermost axis adds rows up, without order in memory to lean on.
_SPECIAL = {
    "conv": ("spatial_conv", "pointwise_conv"),
    "conv_input_grad": ("spatial_input_grad", "pointwise_input_grad"),
    "conv_filter_grad": ("spatial_filter_grad", "pointwise_filter_grad"),
    "reduction": ("row_reduction", "column_reduction"),
}
CLASSES = tuple(name for kind in KINDS for name in _SPECIAL.get(kind, (kind,)))
REFINED = tuple(name for names in _SPECIAL.values() for name in names)
_CONVOLUTIONS = ("conv", "conv_input_grad", "conv_filter_grad", "depthwise", "depthwise_input_grad", "depthwise_filter_grad")
HEAVY = tuple(name for kind in (*_CONVOLUTIONS, "matmul", "batch_matmul") for name in _SPECIAL.get(kind, (kind,)))
_KIND_OF = {name: kind for kind, names in _TYPES.items() for name in names.split()}
_ONEDNN = re.compile(r"_(Mkl(Native)?)?")
_EPILOGUES = frozenset(["BiasAdd", "Add", "AddV2", "Relu", "Relu6", "Elu", "LeakyRelu", "Tanh", "Sigmoid"])
_LONGEST_EPILOGUE = 3
_SIZE_BYTES = {"float64": 8, "int64": 8, "uint64": 8, "float16": 2, "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
_COSTLY = 10.0  # floating-point operations of a transcendental function


@functools.cache
def kind_of(op_type: str) -> str:
    """Kind of an op type, one of `KINDS`; oneDNN's types and those that TensorFlow fuses count as what they begin with."""
    plain = _ONEDNN.sub("", op_type, count=1) if op_type.startswith("_") else op_type
    return _KIND_OF.get(plain) or _KIND_OF.get(plain.removeprefix("Fused"), OTHER)


def class_of(cluster: Cluster, op: ClusterOp) -> str:
    """Class of an op, one of `CLASSES`."""
    kind = kind_of(op.type)
    if kind not in _SPECIAL:
        return kind
    return _SPECIAL[kind][_keeps_innermost(cluster, op) if kind == "reduction" else _is_pointwise(cluster, op)]


def leaders(cluster: Cluster) -> tuple[int, ...]:
    """For each op, the one that it ran with as one kernel: itself, but for what follows a product that was fused with it.

    A convolution or product that ran fused with its bias and activation has no time of its own; the time stands under the name of
    the last op of the chain. All ops of such a chain are led by its first.
    """
    users: dict[int, list[int]] = {}
    for i, op in enumerate(cluster.ops):
        for number in op.inputs:
            users.setdefault(number, []).append(i)
    found = list(range(len(cluster.ops)))
    for i, op in enumerate(cluster.ops):
        if cluster.op_us[i] > 0 or kind_of(op.type) not in ("conv", "depthwise", "matmul"):
            continue
        chain = [i]
        while len(chain) <= _LONGEST_EPILOGUE and cluster.op_us[chain[-1]] == 0:
            behind = [user for number in cluster.ops[chain[-1]].outputs for user in users.get(number, ())]
            if len(behind) != 1 or cluster.ops[behind[0]].type not in _EPILOGUES:
                break
            chain.append(behind[0])
        if cluster.op_us[chain[-1]] > 0:
            for member in chain:
                found[member] = i
    return tuple(found)


def own_us(cluster: Cluster) -> tuple[float, ...]:
    """Time of each op by itself; of those that were left out there, in the whole step, where that is known."""
    if not cluster.step_op_us:
        return cluster.op_us
    rows = zip(cluster.op_us, cluster.step_op_us, cluster.left_out, strict=True)
    return tuple(in_step if left else own for own, in_step, left in rows)


def tensor_bytes(cluster: Cluster, number: int) -> int:
    """Size of a tensor of a cluster."""
    tensor = cluster.tensors[number]
    return prod(tensor.shape) * _SIZE_BYTES.get(tensor.dtype, 4)


def is_strided(cluster: Cluster, op: ClusterOp) -> bool:
    """Whether an op is the gradient of a convolution that skips pixels: a compiler then sees an input with holes."""
    kind = kind_of(op.type)
    if not kind.endswith(("input_grad", "filter_grad")) or len(op.inputs) < 3 or not op.outputs:
        return False
    image = cluster.tensors[op.outputs[0] if kind.endswith("input_grad") else op.inputs[0]].shape
    output = cluster.tensors[op.inputs[2]].shape
    return len(image) == len(output) == 4 and image[1] >= 2 * output[1] > 0


def flops(cluster: Cluster, op: ClusterOp) -> float:
    """Floating-point operations of an op: two for a multiplication and addition."""
    kind = kind_of(op.type)
    shapes = [cluster.tensors[number].shape for number in op.inputs]
    made = [cluster.tensors[number].shape for number in op.outputs]
    read, written = [float(prod(shape)) for shape in shapes], [float(prod(shape)) for shape in made]
    largest = max(read + written, default=0.0)
    if kind in _CONVOLUTIONS and len(shapes) > 1 and made:
        return _convolution(op.type, shapes, made[0])
    if kind in ("matmul", "batch_matmul") and len(read) > 1 and written and written[0]:
        if "equation" in op.attributes:
            return _contraction(op.attributes["equation"], shapes)
        # [b, m, k] x [b, k, n]: the product of the sizes is b^3 (m k n)^2, in whatever order the axes are.
        batch = float(prod(_common(shapes[0], shapes[1], made[0]))) if kind == "batch_matmul" else 1.0
        return 2 * sqrt(read[0] * read[1] * written[0] / batch)
    if kind in ("free", "layout", "movement", "gather", OTHER):
        return 0.0
    return largest * (_COSTLY if kind in ("transcendental", "softmax", "norm", "norm_grad") else 1.0)


def _is_pointwise(cluster: Cluster, op: ClusterOp) -> bool:
    """Whether a convolution's filter has one pixel."""
    by_filter = "Filter" in op.type
    numbers = op.outputs if by_filter else op.inputs[1:]
    if not numbers:
        return False
    filters = cluster.tensors[numbers[0]].shape
    return len(filters) == 4 and filters[0] == filters[1] == 1


def _keeps_innermost(cluster: Cluster, op: ClusterOp) -> bool:
    if not (op.inputs and op.outputs):
        return False
    read, made = cluster.tensors[op.inputs[0]].shape, cluster.tensors[op.outputs[0]].shape
    return len(read) > 1 and len(made) > 0 and read[-1] > 1 and made[-1] == read[-1]


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


def _contraction(equation: str, shapes: list[tuple[int, ...]]) -> float:
    """Of an einsum: every combination of the indices once; 0 where the equation does not fit the shapes."""
    terms = equation.partition("->")[0].split(",")
    if len(terms) != len(shapes) or any(len(term) != len(shape) for term, shape in zip(terms, shapes, strict=True)):
        return 0.0
    size = {letter: length for term, shape in zip(terms, shapes, strict=True) for letter, length in zip(term, shape, strict=True)}
    return 2.0 * prod(size.values())


def _common(left: tuple[int, ...], right: tuple[int, ...], made: tuple[int, ...]) -> tuple[int, ...]:
    """Axes that a batched product keeps in all three: the leading ones, as far as they are equal."""
    shared = []
    for a, b, c in zip(left[:-2], right[:-2], made[:-2], strict=False):
        if not a == b == c:
            break
        shared.append(a)
    return tuple(shared)
