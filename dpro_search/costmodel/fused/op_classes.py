"""Op types by what they do, and how much of it: the vocabulary of the cost models' features.

The names are TensorFlow's; PyTorch's operators and backward functions have a kind only. A type gives an op's kind; with the shapes
of its tensors it has a class, which is finer where a compiler does different things for shapes of one type. A type that is not
listed is "other", which a model has few measurements of.
"""

from __future__ import annotations

import functools
import re
from math import prod, sqrt
from typing import NamedTuple

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
_TORCH_TYPES = {
    "conv": "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d _convolution",
    "conv_filter_grad": "ConvolutionBackward",  # both gradients in one
    "matmul": "linear addmm mm matmul AddmmBackward MmBackward",
    "batch_matmul": "bmm baddbmm scaled_dot_product_attention BmmBackward BaddbmmBackward "
    "ScaledDotProductFlashAttentionForCpuBackward",
    "norm": "batch_norm layer_norm group_norm instance_norm",
    "norm_grad": "NativeBatchNormBackward NativeLayerNormBackward NativeGroupNormBackward",
    "reduction": "sum mean var std amax amin SumBackward MeanBackward",
    "softmax": "softmax log_softmax SoftmaxBackward LogSoftmaxBackward",
    "pool": "max_pool1d max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d",
    "pool_grad": "MaxPool2DWithIndicesBackward AvgPool2DBackward AdaptiveAvgPool2DBackward AdaptiveMaxPool2DBackward",
    "transcendental": "exp log tanh sigmoid gelu silu silu_ erf pow sqrt rsqrt elu softplus mish TanhBackward SigmoidBackward "
    "GeluBackward SiluBackward EluBackward SoftplusBackward ExpBackward PowBackward MishBackward",
    "elementwise": "add add_ sub mul mul_ div div_ neg abs relu relu_ relu6 hardtanh hardtanh_ leaky_relu leaky_relu_ hardswish "
    "hardswish_ hardsigmoid clamp dropout dropout_ where masked_fill ReluBackward HardtanhBackward LeakyReluBackward MulBackward "
    "DivBackward ClampBackward HardswishBackward HardsigmoidBackward NativeDropoutBackward MaskedFillBackward WhereBackward",
    "layout": "contiguous clone CloneBackward",
    "movement": "cat stack pad repeat roll CatBackward StackBackward RepeatBackward RollBackward ConstantPadNdBackward",
    "free": "view reshape transpose permute t flatten unflatten squeeze unsqueeze expand chunk split select slice unbind detach "
    "alias to ViewBackward UnsafeViewBackward ReshapeAliasBackward TransposeBackward PermuteBackward TBackward SqueezeBackward "
    "UnsqueezeBackward ExpandBackward SplitBackward SelectBackward SliceBackward UnbindBackward AddBackward SubBackward "
    "NegBackward",
    "gather": "embedding index_select gather EmbeddingBackward IndexSelectBackward GatherBackward",
}
OTHER = "other"
KINDS = (*_TYPES, OTHER)
# Classes of a kind, by shapes: (as a rule, in the special case). A filter of one pixel is a matrix product; a reduction that keeps
# the innermost axis adds rows up, without order in memory to rely on.
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
_TORCH_KIND_OF = {name: kind for kind, names in _TORCH_TYPES.items() for name in names.split()}
_TORCH = re.compile(r"(aten::(?P<operator>\w+)|(?P<function>\w+Backward)\d*)( (?P<filter>\w+))?")
_ONEDNN = re.compile(r"_(Mkl(Native)?)?")
EPILOGUES = frozenset(["BiasAdd", "Add", "AddV2", "Relu", "Relu6", "Elu", "LeakyRelu", "Tanh", "Sigmoid"])

_SIZE_BYTES = {"float64": 8, "int64": 8, "uint64": 8, "float16": 2, "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
_COSTLY = 10.0  # floating-point operations of a transcendental function

Shape = tuple[int, ...]


class TypedOp(NamedTuple):
    """An op by what decides its work: its type, the shapes of what it reads and makes, and an einsum's equation."""

    type: str
    read: tuple[Shape, ...]
    made: tuple[Shape, ...]
    equation: str = ""


@functools.cache
def kind_of(op_type: str) -> str:
    """Kind of an op type, one of `KINDS`; oneDNN's types and those that TensorFlow fuses count as what they begin with."""
    torch = _TORCH.fullmatch(op_type)
    if torch is not None:
        kind = _TORCH_KIND_OF.get(torch["operator"] or torch["function"], OTHER)
        return kind.replace("conv", "depthwise") if (torch["filter"] or "").startswith("depthwise") else kind
    plain = _ONEDNN.sub("", op_type, count=1) if op_type.startswith("_") else op_type
    return _KIND_OF.get(plain) or _KIND_OF.get(plain.removeprefix("Fused"), OTHER)


def class_of(op: TypedOp) -> str:
    """Class of an op, one of `CLASSES`."""
    kind = kind_of(op.type)
    if kind not in _SPECIAL:
        return kind
    return _SPECIAL[kind][_keeps_innermost(op) if kind == "reduction" else _is_pointwise(op)]


def size_bytes(dtype: str, shape: Shape) -> int:
    """Size of a tensor."""
    return prod(shape) * _SIZE_BYTES.get(dtype, 4)


def is_strided(op: TypedOp) -> bool:
    """Whether an op is the gradient of a convolution that skips pixels: a compiler then sees an input with holes."""
    kind = kind_of(op.type)
    if not kind.endswith(("input_grad", "filter_grad")) or len(op.read) < 3 or not op.made:
        return False
    image = op.made[0] if kind.endswith("input_grad") else op.read[0]
    output = op.read[2]
    return len(image) == len(output) == 4 and image[1] >= 2 * output[1] > 0


def flops(op: TypedOp) -> float:
    """Floating-point operations of an op: two for a multiplication and addition."""
    kind = kind_of(op.type)
    read, written = [float(prod(shape)) for shape in op.read], [float(prod(shape)) for shape in op.made]
    largest = max(read + written, default=0.0)
    if kind in _CONVOLUTIONS and len(op.read) > 1 and op.made:
        return _convolution(op)
    if kind in ("matmul", "batch_matmul") and len(read) > 1 and written and written[0]:
        if op.equation:
            return _contraction(op.equation, op.read)
        # [b, m, k] x [b, k, n]: the product of the sizes is b^3 (m k n)^2, in whatever order the axes are.
        batch = float(prod(_common(op.read[0], op.read[1], op.made[0]))) if kind == "batch_matmul" else 1.0
        return 2 * sqrt(read[0] * read[1] * written[0] / batch)
    if kind in ("free", "layout", "movement", "gather", OTHER):
        return 0.0
    return largest * (_COSTLY if kind in ("transcendental", "softmax", "norm", "norm_grad") else 1.0)


def _is_pointwise(op: TypedOp) -> bool:
    """Whether a convolution's filter has one pixel."""
    shapes = op.made if "Filter" in op.type else op.read[1:]
    return bool(shapes) and len(shapes[0]) == 4 and shapes[0][0] == shapes[0][1] == 1


def _keeps_innermost(op: TypedOp) -> bool:
    if not (op.read and op.made):
        return False
    read, made = op.read[0], op.made[0]
    return len(read) > 1 and len(made) > 0 and read[-1] > 1 and made[-1] == read[-1]


def _convolution(op: TypedOp) -> float:
    """Every position of the forward output multiplies each weight of a filter once for each input channel."""
    if "Filter" in op.type:
        filters, output = op.made[0], op.read[-1]
    elif "Input" in op.type:
        filters, output = op.read[1], op.read[-1]
    else:
        filters, output = op.read[1], op.made[0]
    if len(filters) != 4 or len(output) != 4:
        return 0.0
    if "Depthwise" in op.type:
        return 2.0 * prod(output) * filters[0] * filters[1]
    return 2.0 * prod(output) * filters[0] * filters[1] * filters[2]


def _contraction(equation: str, shapes: tuple[Shape, ...]) -> float:
    """Operations of an einsum: every combination of the indices once; 0 where the equation does not fit the shapes."""
    terms = equation.partition("->")[0].split(",")
    if len(terms) != len(shapes) or any(len(term) != len(shape) for term, shape in zip(terms, shapes, strict=True)):
        return 0.0
    size = {letter: length for term, shape in zip(terms, shapes, strict=True) for letter, length in zip(term, shape, strict=True)}
    return 2.0 * prod(size.values())


def _common(left: Shape, right: Shape, made: Shape) -> Shape:
    """Axes that a batched product keeps in all three: the leading ones, as far as they are equal."""
    shared = []
    for a, b, c in zip(left[:-2], right[:-2], made[:-2], strict=False):
        if not a == b == c:
            break
        shared.append(a)
    return tuple(shared)
