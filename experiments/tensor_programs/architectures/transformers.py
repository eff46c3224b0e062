"""Transformers for text, images and speech: widths, heads and layers are those of the papers and of the released configurations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from experiments.tensor_programs.architectures.image import Image, Op


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer of a transformer."""

    width: int
    heads: int
    inner: int  # Width of the feed-forward part.
    head_width: int = 0  # 0: width / heads.
    kv_heads: int = 0  # 0: as many as heads.
    norm: str = "layer_norm"  # Or rms_norm.
    activation: str = "gelu"  # A gated one has two products before it.
    joined: bool = False  # Queries, keys and values are one product.
    masked: bool = False  # Scores are scaled and a mask or a bias of positions is added.
    rotary: bool = False

    def ops(self, batch: int, queries: int, keys: int) -> Iterator[Op]:
        """Ops of the layer for `queries` tokens that attend to `keys` tokens of each of `batch` sequences."""
        rows = batch * queries
        head = self.head_width or self.width // self.heads
        kv_heads = self.kv_heads or self.heads
        yield self.norm, (rows, self.width)
        if self.joined:
            yield "dense", (rows, (self.heads + 2 * kv_heads) * head, self.width)
        else:
            yield "dense", (rows, self.heads * head, self.width)
            yield "dense", (rows, kv_heads * head, self.width)
        if self.rotary:
            yield "rotary", (rows, self.heads, head)
        if queries > 1:
            yield "transpose_heads", (queries, self.heads, head, *((batch,) if batch > 1 else ()))
        yield "masked_batch_matmul" if self.masked else "batch_matmul", (batch * self.heads, queries, keys, head)
        yield "softmax", (batch * self.heads * queries, keys)
        yield "batch_matmul", (batch * self.heads, queries, head, keys)
        yield "dense", (rows, self.width, self.heads * head)
        yield "dense", (rows, self.inner, self.width)
        yield self.activation, (rows * self.inner,)
        yield "dense", (rows, self.width, self.inner)
        yield "add", (rows * self.width,)


BERT_BASE = Layer(width=768, heads=12, inner=3072)
SIZES = ((1, 128), (1, 64), (2, 64), (1, 384), (8, 32))
DECODING = ((1, 1, 128), (1, 1, 512), (4, 1, 256))  # Batch, queries, keys: a token at a time.

# Models with a layer, batch x queries x keys at which it runs, and rows of the table of words.
TEXT: dict[str, tuple[Layer, tuple[tuple[int, int, int], ...], int]] = {
    "bert_base": (BERT_BASE, ((1, 128, 128), (1, 64, 64), (4, 16, 16), (1, 256, 256)), 30522),
    "bert_large": (Layer(width=1024, heads=16, inner=4096), ((1, 64, 64), (1, 32, 32), (2, 48, 48), (1, 128, 128)), 30522),
    "distilbert": (BERT_BASE, ((1, 128, 128), (2, 32, 32), (1, 48, 48), (1, 96, 96)), 30522),
    "albert_base": (Layer(width=768, heads=12, inner=3072, masked=True), ((1, 96, 96), (2, 40, 40), (1, 160, 160)), 30000),
    "electra_small": (Layer(width=256, heads=4, inner=1024), ((1, 128, 128), (4, 64, 64), (1, 384, 384), (2, 512, 512)), 30522),
    "minilm": (Layer(width=384, heads=12, inner=1536), ((1, 128, 128), (2, 64, 64), (1, 256, 256), (8, 32, 32)), 30522),
    "gpt2": (
        Layer(width=768, heads=12, inner=3072, joined=True, masked=True), ((1, 64, 64), (1, 128, 128), *DECODING), 50257
    ),
    "gpt2_medium": (
        Layer(width=1024, heads=16, inner=4096, joined=True, masked=True), ((1, 32, 32), (1, 64, 64), (8, 1, 384), *DECODING), 50257
    ),
    "opt_125m": (
        Layer(width=768, heads=12, inner=3072, activation="relu", masked=True), ((1, 80, 80), (2, 24, 24), (2, 1, 192)), 50272
    ),
    "t5_small": (
        Layer(width=512, heads=8, inner=2048, activation="relu", norm="rms_norm", masked=True),
        ((1, 128, 128), (4, 32, 32), (1, 256, 256), (1, 1, 384), (1, 64, 128)), 32128,
    ),
    "flan_t5_base": (
        Layer(width=768, heads=12, inner=2048, activation="gated_gelu", norm="rms_norm", masked=True),
        ((1, 64, 64), (1, 96, 96), (2, 1, 128), (1, 32, 200)), 32128,
    ),
    "tinyllama": (
        Layer(
            width=2048, heads=32, kv_heads=4, inner=5632, activation="gated_silu", norm="rms_norm", masked=True, rotary=True
        ), ((1, 16, 16), (1, 4, 64), (1, 1, 256), (2, 1, 512), (1, 8, 128)), 32000,
    ),
    "smollm_135m": (
        Layer(width=576, heads=9, kv_heads=3, inner=1536, activation="gated_silu", norm="rms_norm", masked=True, rotary=True),
        ((1, 128, 128), (1, 64, 64), (2, 48, 48), (1, 1, 256), (8, 1, 512), (1, 1, 1024)), 49152,
    ),
    "qwen2_0_5b": (
        Layer(width=896, heads=14, kv_heads=2, inner=4864, activation="gated_silu", norm="rms_norm", masked=True, rotary=True),
        ((1, 32, 32), (1, 16, 64), (1, 1, 384), (4, 1, 128), (1, 8, 8)), 151936,
    ),
    "vit_small": (Layer(width=384, heads=6, inner=1536, joined=True), ((1, 197, 197), (1, 101, 101), (4, 37, 37)), 0),
    "vit_base": (Layer(width=768, heads=12, inner=3072, joined=True), ((1, 197, 197), (1, 50, 50), (2, 50, 50)), 0),
    "bert4rec": (Layer(width=64, heads=2, inner=256), ((8, 200, 200), (32, 50, 50), (1, 200, 200), (16, 100, 100)), 3706),
    "whisper_tiny": (Layer(width=384, heads=6, inner=1536), ((1, 500, 500), (1, 250, 250), (1, 1, 448), (1, 1, 1500)), 51865),
    "whisper_base": (Layer(width=512, heads=8, inner=2048), ((1, 375, 375), (1, 150, 150), (1, 1, 448), (1, 4, 1500)), 51865),
    "wav2vec2_base": (Layer(width=768, heads=12, inner=3072), ((1, 49, 49), (1, 99, 99), (1, 149, 149)), 0),
}  # fmt: skip


def _speech(model: str) -> Iterator[Op]:
    """Convolutions over frames or samples, which come before the layers."""
    if model.startswith("whisper"):
        width = TEXT[model][0].width
        for frames in (500, 1000, 3000):
            yield from [
                ("conv1d", (80, frames, width, 3, 1, 1)),
                ("conv1d", (width, frames, width, 3, 2, 1)),
                ("gelu", (width * frames,)),
            ]
    if model == "wav2vec2_base":
        for samples in (8000, 16000):
            length, channels = samples, 1
            for kernel, stride in ((10, 5), (3, 2), (3, 2), (3, 2), (3, 2), (2, 2), (2, 2)):
                yield "conv1d", (channels, length, 512, kernel, stride, 0)
                length, channels = (length - kernel) // stride + 1, 512
                yield "gelu", (512 * length,)
            yield "grouped_conv1d", (768, length, 768, 128, 1, 64, 16)
            yield "dense", (length, 768, 512)


def conformer(width: int, heads: int, frames: int, batch: int) -> Iterator[Op]:
    """A block of Conformer (Gulati et al. 2020): half-step feed-forwards, attention, and a gated convolution of 31 frames."""
    rows = batch * frames
    layer = Layer(width=width, heads=heads, inner=4 * width, activation="silu", masked=True)
    yield from layer.ops(batch, frames, frames)
    yield from [("dense", (rows, 2 * width, width)), ("gated_sigmoid", (rows * width,)), ("silu", (rows * width,))]
    yield "grouped_conv1d", (width, frames, width, 31, 1, 15, width, *((batch,) if batch > 1 else ()))
    for channels, height in ((1, 4 * frames), (width, 2 * frames)):  # Subsampling of 80 mel bands, four to one.
        bands = 80 if channels == 1 else 40
        yield "rectangular_conv2d", (channels, height, bands, width, 3, 3, 2, 2, 1, 1)


def swin(height: int) -> Iterator[Op]:
    """Swin-T (Liu et al. 2021): windows of 7 x 7, with a bias of positions, over maps that shrink."""
    yield "conv2d", (3, height, 96, 4, 4, 0)
    side = height // 4
    for stage, (width, heads) in enumerate(((96, 3), (192, 6), (384, 12), (768, 24))):
        windows = (-(-side // 7)) ** 2
        rows = windows * 49
        if stage:
            yield from [("layer_norm", (rows, 2 * width)), ("dense", (rows, width, 2 * width))]
        yield from [("layer_norm", (rows, width)), ("window_partition", (-(-side // 7) * 7, width, 7))]
        yield from [("dense", (rows, 3 * width, width)), ("masked_batch_matmul", (windows * heads, 49, 49, 32))]
        yield from [("softmax", (windows * heads * 49, 49)), ("batch_matmul", (windows * heads, 49, 32, 49))]
        yield from [("dense", (rows, width, width)), ("dense", (rows, 4 * width, width)), ("gelu", (rows * 4 * width,))]
        yield from [("dense", (rows, width, 4 * width)), ("add", (rows * width,))]
        side //= 2


def mixer(patches: int, width: int, batch: int) -> Iterator[Op]:
    """MLP-Mixer (Tolstikhin et al. 2021): dense layers over patches, then over channels."""
    rows, token_width = batch * patches, width // 2
    yield from [("layer_norm", (rows, width)), ("transpose_heads", (patches, 1, width, batch))]
    yield from [("dense", (batch * width, token_width, patches)), ("gelu", (batch * width * token_width,))]
    yield from [("dense", (batch * width, patches, token_width)), ("dense", (rows, 4 * width, width))]
    yield from [("gelu", (rows * 4 * width,)), ("dense", (rows, width, 4 * width)), ("add", (rows * width,))]


def ops() -> dict[str, list[Op]]:
    """Ops of each model at all its sizes."""
    recorded: dict[str, list[Op]] = {}
    for model, (layer, sizes, words) in TEXT.items():
        listed = recorded.setdefault(model, [])
        for batch, queries, keys in sizes:
            listed.extend(layer.ops(batch, queries, keys))
            if words:
                listed.append(("lookup", (batch * queries, layer.width, words)))
        listed.extend(_speech(model))
    for model, width in (("vit_small", 384), ("vit_base", 768)):
        for height in (224, 160, 112):
            image = Image(height)
            image.conv(width, 16, 16, 0)
            recorded[model].extend([*image.ops, ("dense", (1, 1000, width))])
    blocks: dict[str, Iterable[Iterator[Op]]] = {
        "conformer_s": [conformer(144, 4, frames, batch) for frames, batch in ((100, 1), (200, 1), (75, 4), (350, 1))],
        "conformer_m": [conformer(256, 4, frames, batch) for frames, batch in ((100, 1), (150, 1), (50, 2), (250, 1))],
        "swin_tiny": [swin(height) for height in (224, 112)],
        "mixer_s16": [mixer(196, 512, 1), mixer(100, 512, 1), mixer(49, 512, 4), mixer(196, 256, 1)],
    }
    for model, listed_blocks in blocks.items():
        recorded[model] = [op for block in listed_blocks for op in block]
    return recorded
