"""``kernel_class(name)``: what a GPU kernel computes, from its name: "gemm", "convolution"...

Libraries do not say what their kernels are; names do, by habits that are stable for years (cuBLAS and hipBLASLt: gemm, Cijk, nvjet;
cuDNN: fprop, dgrad, wgrad, bn; PyTorch: the name of the template). What no pattern fits is "other".
"""

from __future__ import annotations

import re

# The first that fits decides: a convolution's kernel may be called an implicit GEMM, an optimizer's an element-wise one.
_PATTERNS = (
    ("optimizer", r"multi_tensor_apply|adam|adagrad|lamb_|sgd_|optimizer"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("convolution", r"conv(?!ert)|fprop|dgrad|wgrad|winograd|scudnn|fft[12]d|flip_filter"),
    ("layout", r"nchwto|nhwcto|transpose|computeb?offsets"),
    ("normalization", r"batch_?norm|layer_?norm|group_?norm|rms_?norm|cudnn::bn|bn_fw|bn_bw"),
    ("embedding", r"embedding|index_?select|index_put|indexing|indices|gather|scatter|permute"),
    ("gemm", r"gemm|gemv|cutlass|cublas|xmma|splitk|cijk_|nvjet|matmul|dot_kernel"),
    ("softmax", r"soft_?max|nll_loss|cross_entropy|dropout"),
    ("pooling", r"pool"),
    ("elementwise", r"elementwise|catarray|fill|copy|cast|triton_poi"),
    ("reduction", r"reduc|triton_red|triton_per|norm|cub::|sort|scan"),
)
_CLASSES = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _PATTERNS)
OTHER = "other"
KERNEL_CLASSES = (*(name for name, _ in _PATTERNS), OTHER)


def kernel_class(name: str) -> str:
    """One of `KERNEL_CLASSES`."""
    return next((title for title, pattern in _CLASSES if pattern.search(name)), OTHER)
