"""Types in which PyTorch's autocast computes ops on GPUs: ``policy(op, kernel)``; what it casts; and kernels by what decides it.

The lists are those of ``aten/src/ATen/autocast_mode.h`` (PyTorch 2.13; in the documentation "Autocast Op Reference"):
`AT_FORALL_LOWER_PRECISION_FP` for products, `AT_FORALL_FP32` and `AT_FORALL_FP32_SET_OPT_DTYPE` for what stays in single precision.
What is in none of them, batch norm and most element-wise ops among it, computes in the widest type that it reads. Autocast keeps
the cast of a parameter until the forward pass ends; each cast has one of the gradient in the backward pass.

`AT_FORALL_FP32_SET_OPT_DTYPE` converts within the op's kernel, so no cast is launched. ``sum`` is such an op, but counts as one of
any type here: most sums of a profile are gradients of biases, and the backward pass runs outside of autocast.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from dpro_search.collect.trace import Shapes
from dpro_search.costmodel.devices import OpSpec
from dpro_search.costmodel.roofline import element_precision, product_precisions
from dpro_search.graph.event_names import kernel_class

PRODUCT_CLASSES = ("gemm", "convolution", "attention")
FP8_MULTIPLE = 16  # of each side of a product in fp8
_PRODUCTS = re.compile(
    r"(?:cudnn_|miopen_|slow_)?conv(?:olution|_|\d|$)|(?:add|badd|addb|b)?b?mm$|(?:add)?mv$|addr$|matmul|linear$|einsum|prelu"
    r"|.*attention|(?:thnn_fused_)?(?:lstm|gru)_cell|rnn_\w+_cell|chain_matmul|linalg_(?:vecdot|multi_dot)"
)
_SINGLE = re.compile(
    "(?:acos|asin|cosh|cosine_similarity|cdist|dist|erfinv|exp|expm1|group_norm|layer_norm|log|log10|log1p|log2|logsumexp|pdist|pow"
    "|reciprocal|renorm|rms_norm|rsqrt|sinh|softplus|tan|.*loss.*)$"
)
_SINGLE_WITHIN = re.compile("(?:cumprod|cumsum|linalg_matrix_norm|linalg_vector_norm|log_softmax|norm|prod|softmax)$")
_SINGLE_KERNELS = re.compile(r"(?:layer|group|rms)_?norm|soft_?max|nll_loss|cross_entropy", re.IGNORECASE)
_BASE = re.compile(r"^aten::_*(?:native_|fused_)*|(?:_forward|_backward(?:_data|_input|_weight)?)?_?$")


class AutocastPolicy(StrEnum):
    """How autocast chooses the type of an op."""

    PRODUCT = "product"  # in the lower type
    SINGLE = "single"  # in single precision
    WIDEST = "widest"  # in the widest type that it reads


def policy(op: str, kernel: str) -> AutocastPolicy:
    """How autocast chooses the type of a kernel, by the framework's op that launched it (empty: not recorded) and by its name."""
    base = base_name(op)
    if _PRODUCTS.match(base):
        return AutocastPolicy.PRODUCT
    if _SINGLE.match(base) or _SINGLE_WITHIN.match(base):
        return AutocastPolicy.SINGLE
    if op.startswith("aten::"):
        return AutocastPolicy.WIDEST
    if kernel_class(kernel) in PRODUCT_CLASSES:
        return AutocastPolicy.PRODUCT
    return AutocastPolicy.SINGLE if _SINGLE_KERNELS.search(kernel) else AutocastPolicy.WIDEST


def base_name(op: str) -> str:
    """Name of an op of either pass without what tells its variants apart: "layer_norm" of "aten::native_layer_norm_backward"."""
    return _BASE.sub("", op) if op.startswith("aten::") else ""


@dataclass(frozen=True, kw_only=True)
class KernelKind:
    """Properties that kernels of one name, op and shapes have in common."""

    name: str
    op: str  # The framework's op that launched it; empty: not recorded.
    shapes: Shapes | None  # Shapes of the op's inputs; None: not recorded.
    policy: AutocastPolicy
    is_product: bool  # Whether it is a product's own kernel, and not a copy or sum beside it.
    precisions: tuple[str, ...]  # A product's own kernel may be in one of these; empty: it is not known.
    element: str  # Type of the elements that it reads (`roofline.element_precision`).
    is_fixed: bool  # Whether it belongs to the optimizer.
    spec: OpSpec | None = None  # The product; None: its sizes are not known.

    @staticmethod
    def of(name: str, dtype: str, op: str, shapes: Shapes | None) -> KernelKind:
        """The kind of a kernel by its name, its first tensor's type, its op and the shapes of that."""
        computes, what = policy(op, name), kernel_class(name)
        is_product = computes is AutocastPolicy.PRODUCT and what in PRODUCT_CLASSES
        return KernelKind(
            name=name,
            op=op,
            shapes=shapes,
            policy=computes,
            is_product=is_product,
            precisions=product_precisions(name, dtype) if is_product else (),
            element=element_precision(name, dtype),
            is_fixed=what == "optimizer",
        )

    @property
    def fits_fp8(self) -> bool:
        """Whether it is a single product whose sides are multiples of 16, as `torch._scaled_mm` needs, and wider than fp8."""
        if self.spec is None or self.spec.name != "gemm" or self.precisions == ("fp8",):
            return False
        sizes = self.spec.all_sizes
        return sizes["batch"] == 1 and all(sizes[side] % FP8_MULTIPLE == 0 for side in ("m", "n", "k"))

    @property
    def is_batch_norm_nchw(self) -> bool:
        """Whether it is a batch norm of images that are not channels-last."""
        is_norm = "batch_norm" in base_name(self.op) or "cudnn::bn_" in self.name
        return is_norm and "nhwc" not in self.name.lower()


class Operands(NamedTuple):
    """Elements that an op of the forward pass reads: what other ops made, and parameters; None: the shapes are not known."""

    activations: int | None
    weights: int | None


def operands(op: str, shapes: Shapes | None) -> Operands:
    """Operands of a product, or the input of another op, that autocast would cast where they have another type."""
    base = base_name(op)
    has_weights = not base.startswith(("bmm", "baddbmm")) and "attention" not in base
    if shapes is None:
        return Operands(None, None if has_weights else 0)
    first = 1 if base in ("addmm", "baddbmm", "addmv") else 0
    sizes = [math.prod(shape) for shape in shapes[first : first + 2]]
    if not _PRODUCTS.match(base):
        return Operands(sizes[0] if sizes else None, 0)
    if len(sizes) < 2:
        return Operands(None, None if has_weights else 0)
    return Operands(sizes[0], sizes[1]) if has_weights else Operands(sum(sizes), 0)


def casts_input(op: str) -> bool:
    """Whether an op in single precision has its input cast by a kernel before it, and not within its own."""
    return not _SINGLE_WITHIN.match(base_name(op))
