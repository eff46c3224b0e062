"""`Kernels`: which kernels a framework computes memory-bound ops, attention and losses with, and what each reads and writes.

Counts follow from the sources of the kernels: a *pass* is one read or one write of a tensor. What an op reads
forward it reads again backward beside the gradient of its output, unless its kernel keeps something smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from dpro_search.parallel.model import Op, OpType
from dpro_search.parallel.model.op import OpRole, dims_of


class AttentionKernels(StrEnum):
    """How attention is computed."""

    NEWEST = "newest"  # the fastest fused kernels of the device: flash-attention 3 on Hopper, cuDNN on Blackwell
    FLASH_2 = "flash-attention 2"  # also on devices that have faster ones
    FLASH_TRITON = "flash-attention in Triton"
    SCORES = "scores"  # two batched matmuls with a fused softmax between them (Megatron-LM before 2023)
    EAGER = "eager"  # the same with PyTorch's own ops: scale, mask, softmax, dropout


class LossKernels(StrEnum):
    """How the cross-entropy over the vocabulary is computed."""

    FUSED = "fused"  # one kernel that writes the gradients over 16-bit logits (Transformer Engine, Liger)
    LOG_SOFTMAX = "log softmax"  # of PyTorch, on a copy of the logits in fp32
    VOCAB_PARALLEL = "vocab parallel"  # Megatron-LM's, on a copy in fp32: maximum, difference, exponential, sum, quotient


class NormKernels(StrEnum):
    """How norms are computed."""

    FUSED = "fused"  # what is read once is kept (Transformer Engine, Triton, XLA)
    TWICE = "twice"  # layer norms of PyTorch 2.1: statistics first, and gradients of scale and shift on their own
    COMPILED = "compiled"  # of ops that XLA fuses, but for reductions of which one needs the other
    COMPOSED = "composed"  # of TensorFlow's ops, a kernel each: moments, batch_normalization and their gradients
    APART = "apart"  # of images, by cuDNN; the sum and the activation behind them are kernels of their own, as in PyTorch's modules


class ImageLayout(StrEnum):
    """The order of the dims of images in memory."""

    CHANNELS_LAST = "channels last"  # which convolutions on matrix units read and write (NHWC)
    HALF_LAST = "channels last in 16 bits"  # TensorFlow 2 with cuDNN 8 (tensorflow/tensorflow, pull request 56744; conv_ops_3d.cc)
    HALF_IMAGES_LAST = "images channels last in 16 bits"  # TensorFlow 1: volumes not
    CHANNELS_FIRST = "channels first"  # PyTorch's, where nothing else is said (NCHW)


class AdapterKernels(StrEnum):
    """How what adapters give is scaled and added."""

    APART = "apart"  # a product and a sum
    COMPILED = "compiled"  # by torch.compile, in one kernel
    IN_MATMULS = "in matmuls"  # XLA: both are the alpha and beta of cuBLAS (gemm_rewriter.cc)


class Passes(NamedTuple):
    """Bytes that the kernels of an op move, in a forward or a backward pass."""

    reads: float  # Passes over what the op reads.
    output: float  # Passes over its output.
    kernels: int


class ScorePasses(NamedTuple):
    """Bytes that the kernels between the two matmuls of an unfused attention move, in passes over the scores."""

    passes: float
    kernels: int


class LossBytes(NamedTuple):
    """Bytes that the kernels of a loss move for each logit (16-bit logits)."""

    forward: float
    backward: float
    kernels: tuple[int, int]  # Forward, backward.


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The kernels of a framework. Defaults: Megatron-Core's with Transformer Engine."""

    fused: bool = True  # Hand-written or compiled kernels for activations, rotations, and residual sums with dropout.
    attention: AttentionKernels = AttentionKernels.NEWEST
    attention_dropout: bool = False  # Of unfused attention, on the scores.
    wheels: bool = False  # CUDA libraries of PyTorch's wheels, in place of NVIDIA's containers.
    norm: NormKernels = NormKernels.FUSED  # Of layer norms.
    batch_norm: NormKernels = NormKernels.FUSED  # Norms of batches of images, with the sum and activation behind.
    instance_norm: NormKernels = NormKernels.FUSED  # Of norms of each image alone and of volumes, with the activation behind them.
    layout: ImageLayout = ImageLayout.CHANNELS_LAST
    loss: LossKernels = LossKernels.FUSED
    # Of training in 16 bits: parameters are in fp32 and are cast for each product, as its gradient is back; norms, residual sums,
    # softmaxes and tables stay in fp32, and what they give is cast for the next product (PyTorch's autocast, TensorFlow's
    # auto_mixed_precision_lists.h). False: all is in 16 bits beside a copy of the parameters in fp32 that only the optimizer sees.
    autocast: bool = False

    adapters: AdapterKernels = AdapterKernels.APART

    @property
    def stores_scores(self) -> bool:
        """Whether the scores of attention are written to memory."""
        return self.attention in (AttentionKernels.SCORES, AttentionKernels.EAGER)

    def passes(self, op: Op, *, backward: bool) -> Passes:
        """The traffic of a memory-bound op."""
        if op.type in _MOVES:
            return _MOVES[op.type]
        if op.role is OpRole.ADAPTER:
            return _ADAPTERS[self.adapters][backward]
        table = _FUSED if self.fused else _EAGER
        passes = table.get(op.role, _ANY)[backward]
        if self.fused and backward and op.role is OpRole.GATED_ACTIVATION and "capacity" in dims_of(op.output):
            more = _TOKEN_WEIGHTS
            passes = Passes(passes.reads + more.reads, passes.output + more.output, passes.kernels + more.kernels)
        if op.role is OpRole.NORM and self.norm is NormKernels.TWICE and "hidden" in dims_of(op.output):
            passes = _NORM_TWICE[backward]
        if op.role is OpRole.NORM and "hidden" not in dims_of(op.output):
            passes = _BATCH_NORM.get(self.batch_norm, table[OpRole.NORM])[backward]
        if op.role is OpRole.INSTANCE_NORM:
            passes = _INSTANCE_NORM.get(self.instance_norm, table[OpRole.NORM])[backward]
        if op.saves_bytes:  # dropout: a mask of bytes, and a kernel of its own where nothing is fused
            mask = Passes(0.0, 0.5, 0) if self.fused else Passes(0.0, 2.5, 1)
            passes = Passes(passes.reads, passes.output + mask.output, passes.kernels + mask.kernels)
        return passes

    def stays_wide(self, op: Op) -> bool:
        """Whether a memory-bound op is in fp32 though products are in 16 bits; batch norms of images are not."""
        stream = op.role in (OpRole.NORM, OpRole.RESIDUAL) and "hidden" in dims_of(op.output)
        return self.autocast and (op.type is OpType.GATHER or stream)

    def image_transposes(self, precision: str, *, volume: bool) -> int:
        """Times that a convolution's input and output are brought into another order, and back.

        Matrix units compute with channels last. TensorFlow keeps images in fp32 with channels first; volumes it keeps with channels
        last and brings them into the other order, in which it calls cuDNN (conv_ops_3d.cc).
        """
        if self.layout is ImageLayout.CHANNELS_LAST:
            return 0
        computed_last = precision != "fp32"  # fp32 is on vector units, which take either order
        if self.layout is ImageLayout.CHANNELS_FIRST:
            return int(computed_last)
        is_half_last = not volume or self.layout is ImageLayout.HALF_LAST
        if is_half_last and precision not in ("fp32", "tf32"):
            return 0
        return int(volume) + int(computed_last)

    def score_passes(self, *, backward: bool, wide: bool = False) -> ScorePasses:
        """The traffic of an unfused attention in addition to its matmuls, in passes over scores of the products' type.

        A causal softmax in one kernel reads only what is not masked. `wide`: products are in 16 bits, the softmax in fp32.
        """
        if wide and self.autocast and self.attention is AttentionKernels.EAGER:
            dropout = 4.5 if self.attention_dropout else 0.0
            return ScorePasses(14 + dropout, 5 + bool(dropout))
        softmax = {AttentionKernels.SCORES: (1.5, 2, 1), AttentionKernels.EAGER: (6, 7, 3)}[self.attention]
        dropout = 2.5 if self.attention_dropout else 0.0
        return ScorePasses(softmax[backward] + dropout, softmax[2] + bool(dropout))

    def loss_bytes(self) -> LossBytes:
        """The traffic of the loss."""
        return _LOSS[self.loss]


# Forward and backward passes by role. Residual sums: the gradient goes to both branches as it is, and where they meet again their
# gradients are added. Fused gates read gate and value once; eager ones compute the activation and the product in two kernels, and
# backward three products and the concatenation of the two gradients. Rotations rotate a copy of queries, keys and values.
# Expert biases: each expert's bias times the weights of its tokens, which are in fp32, is a tensor (4 bytes an element), added
# (2 + 4 + 4), concatenated over experts (4 + 4) and cast (4 + 2). Backward cast back (2 + 4), of the sum (4 + 2), concatenated
# (2 + 2), and gradients of bias and weight, each a product and its sum (4 + 4 + 4) (Megatron-Core 0.16, experts.py, _apply_bias).
_ANY = (Passes(1, 1, 1), Passes(1, 1, 1))
_FUSED = {
    OpRole.NORM: (Passes(1, 1, 1), Passes(1, 2, 2)),
    OpRole.INSTANCE_NORM: (Passes(1, 1, 1), Passes(1, 2, 2)),
    OpRole.ROTATION: (Passes(1, 1, 1), Passes(1, 1, 1)),
    OpRole.ACTIVATION: (Passes(1, 1, 1), Passes(2, 1, 1)),
    OpRole.GATED_ACTIVATION: (Passes(1, 1, 1), Passes(2, 1, 1)),
    OpRole.RESIDUAL: (Passes(1, 1, 1), Passes(1, 1, 1)),
    OpRole.EXPERT_BIAS: (Passes(7, 7, 4), Passes(10, 10, 8)),
}
# An expert's activations are multiplied by the weights of their tokens; the gradients of those, a kernel of their own, read gate,
# value and gradient again (Megatron-Core, fused_bias_swiglu.py, weighted_swiglu_back).
_TOKEN_WEIGHTS = Passes(1, 1, 1)
_EAGER = {
    **_FUSED,
    OpRole.ROTATION: (Passes(2, 2, 3), Passes(2, 2, 3)),
    OpRole.GATED_ACTIVATION: (Passes(1.5, 2, 2), Passes(4, 5, 4)),
}
# What layer norms take, in passes at the rate of sums of the same size: forward 2.9 to 3.2 (NeuSight's tables on A100, V100, P100;
# Sailor's op profiles on A100, V100), backward 9.3 to 10.9 (Sailor's, fp16 and fp32; 5 would be enough for two reads each).
_NORM_TWICE = (Passes(2, 1, 1), Passes(5, 5, 3))
# TensorFlow has a kernel for batch norm of images only. COMPOSED (nn_impl.py, math_grad.py): mean, squared difference from it and
# its mean; product and sum; the convolution's bias before and ReLU behind are kernels, too. Backward: gradients of ReLU, sum and
# product with their sums over positions; of both means, spread over positions, and of the squared difference; the sum of three; the
# bias's sum. COMPILED: mean, variance, result; backward both sums over positions, then the result from what they give.
# APART: cuDNN reads the input for the statistics and again for the result (bn_fw_tr_1C11), backward input and gradient twice
# (bn_bw_1C11); ReLU reads and writes, backward reads two tensors. A sum with another tensor reads both, and its gradient is added
# to that of the branch where the two part. PyTorch's profiles of ResNet-50 in batches of 32 have these kernels: norms reach 0.67 to
# 0.81 of the memory's rate on A100 and V100, sums and ReLU about 0.9.
# Batch norms, COMPILED: the input is read for the statistics; result, sum and ReLU are one kernel. Backward input, gradient and the
# activation's output are read for the sums over positions, and again for the result, which is written.
_APART = (Passes(3, 2, 2), Passes(3, 5, 2))
_BATCH_NORM = {NormKernels.COMPILED: (Passes(1, 2, 2), Passes(1, 6, 2)), NormKernels.APART: _APART}
_INSTANCE_NORM = {
    NormKernels.APART: _APART,
    NormKernels.COMPILED: (Passes(3, 1, 3), Passes(2, 3, 2)),
    NormKernels.COMPOSED: (Passes(7, 5, 13), Passes(8, 18, 24)),
}
# Autocast, EAGER: scale (2 + 2) and mask (2 + 2) in 16 bits, cast (2 + 4), softmax (4 + 4), dropout in fp32 (4 + 4 + 1), cast back
# (4 + 2); backward cast (2 + 4), dropout (4 + 4 + 1), softmax (4 + 4 + 4), cast back (4 + 2), scale (2 + 2).
# Product (1 + 1) and sum (2 + 1), of two tensors that are read; backward the product, and the sum of both gradients of the input.
_ADAPTERS = {
    AdapterKernels.APART: (Passes(1.5, 2, 2), Passes(1.5, 2, 2)),
    AdapterKernels.COMPILED: (Passes(1, 1, 1), Passes(1.5, 2, 2)),
    AdapterKernels.IN_MATMULS: (Passes(0.5, 0, 0), Passes(0.5, 0, 0)),
}
# Tokens are sorted by the rank of their expert, and there by expert, before the experts and back behind them (Megatron-Core's
# permutation and chunk sort). The kernels that choose experts count as those of the dispatch: softmax, top-k, counts, losses.
_MOVES = {OpType.DISPATCH: Passes(1, 3, 16), OpType.COMBINE: Passes(3, 1, 3)}
# LOG_SOFTMAX: cast (2 + 4), log-softmax (4 + 4 + 4), its gradient (zeros 4, 8 + 4), cast back (4 + 2).
# VOCAB_PARALLEL: cast (2 + 4), maximum (4), difference (4 + 4), exponential (4 + 4), sum (4), quotient (4 + 4); product with the
# loss's gradient (4 + 4), cast back (4 + 2).
_LOSS = {
    LossKernels.FUSED: LossBytes(6.0, 4.0, (1, 1)),
    LossKernels.LOG_SOFTMAX: LossBytes(18.0, 22.0, (3, 3)),
    LossKernels.VOCAB_PARALLEL: LossBytes(38.0, 14.0, (12, 4)),
}
