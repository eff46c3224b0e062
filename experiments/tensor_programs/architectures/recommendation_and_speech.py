"""Recommendation models (dense layers on looked-up vectors) and recurrent or convolutional speech models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from experiments.tensor_programs.architectures.image import Op

TABLE_ROWS = (1000, 10_000, 100_000)


def layers(rows: int, widths: Sequence[int]) -> Iterator[Op]:
    """Dense layers with ReLU, from the first width to the last."""
    for inner, columns in pairwise(widths):
        yield "dense_relu" if columns > 1 else "dense", (rows, columns, inner)


def lookups(rows: int, width: int) -> Iterator[Op]:
    """Vectors of categories, one at a time and as sums of several."""
    for table in TABLE_ROWS:
        yield "lookup", (rows, width, table)
    yield "bag", (rows, 10, width, TABLE_ROWS[-1])


def dlrm(rows: int) -> Iterator[Op]:
    """DLRM (Naumov et al. 2019), the setting of its benchmark on Criteo."""
    yield from ((("dense", dims)) for dims in ((rows, 512, 13), (rows, 256, 512), (rows, 64, 256)))
    yield from lookups(rows, 64)
    yield "batch_matmul", (rows, 27, 27, 64)
    yield from ((("dense", dims)) for dims in ((rows, 512, 415), (rows, 256, 512), (rows, 1, 256)))
    yield from [("relu", (rows * 512,)), ("sigmoid", (rows,))]


def dcn_v2(rows: int) -> Iterator[Op]:
    """DCN-v2 (Wang et al. 2021): three cross layers beside a deep part."""
    width = 13 + 26 * 16
    yield from lookups(rows, 16)
    yield "cross", (rows, width)
    yield from layers(rows, (width, 768, 768))
    yield from [("dense", (rows, 64, width)), ("dense", (rows, width, 64)), ("dense", (rows, 1, width + 768))]


def din(rows: int, history: int) -> Iterator[Op]:
    """Deep interest network (Zhou et al. 2018): attention of a candidate over what was clicked."""
    yield from lookups(rows, 18)
    yield "lookup", (rows * history, 36, 63_001)
    yield "multiply", (rows * history * 36,)
    yield from layers(rows * history, (144, 80, 40, 1))
    yield "sigmoid", (rows * history * 80,)
    yield from [("softmax", (rows, history)), ("batch_matmul", (rows, 1, 36, history))]
    yield from layers(rows, (108, 200, 80, 1))


def wide_deep(rows: int) -> Iterator[Op]:
    """Wide & Deep (Cheng et al. 2016)."""
    yield from lookups(rows, 32)
    yield "bag", (rows, 30, 1, TABLE_ROWS[-1])
    yield from layers(rows, (26 * 32 + 13, 1024, 512, 256, 1))
    yield from [("add", (rows,)), ("sigmoid", (rows,))]


def deepfm(rows: int) -> Iterator[Op]:
    """DeepFM (Guo et al. 2017): a factorization machine beside dense layers."""
    yield from lookups(rows, 10)
    yield "factorization", (rows, 39, 10)
    yield from layers(rows, (390, 400, 400, 400, 1))
    yield "bag", (rows, 39, 1, TABLE_ROWS[-1])


def neural_collaborative_filtering(rows: int) -> Iterator[Op]:
    """NCF (He et al. 2017) on MovieLens-1M."""
    yield from [("lookup", (rows, 64, 6040)), ("lookup", (rows, 64, 3706)), ("lookup", (rows, 128, 6040))]
    yield "multiply", (rows * 64,)
    yield from layers(rows, (256, 128, 64, 64))
    yield "dense", (rows, 1, 128)


def autoint(rows: int) -> Iterator[Op]:
    """AutoInt (Song et al. 2019): attention between 39 fields, two heads of 32."""
    yield from lookups(rows, 16)
    for width in (16, 64):
        yield "dense", (rows * 39, 64, width)
    yield from [
        ("batch_matmul", (rows * 2, 39, 39, 32)),
        ("softmax", (rows * 2 * 39, 39)),
        ("batch_matmul", (rows * 2, 39, 32, 39)),
    ]
    yield from [("add_relu", (rows * 39 * 64,)), ("dense", (rows, 1, 39 * 64))]


def deepspeech2(frames: int, batch: int) -> Iterator[Op]:
    """Deep Speech 2 (Amodei et al. 2016): two convolutions over the spectrogram, then GRUs of 800, a frame at a time."""
    more = (batch,) if batch > 1 else ()
    yield "rectangular_conv2d", (1, 161, frames, 32, 41, 11, 2, 2, 20, 5, *more)
    yield "rectangular_conv2d", (32, 81, frames // 2, 32, 21, 11, 2, 1, 10, 5, *more)
    for inner in (32 * 41, 800):
        yield "dense", (batch * frames // 8, 2400, inner)
    yield from [("dense", (batch, 2400, 800)), ("gru_cell", (batch, 800))]
    yield from [("dense", (batch * frames // 2, 29, 800)), ("softmax", (batch * frames // 2, 29))]


def tacotron2(frames: int, batch: int) -> Iterator[Op]:
    """Tacotron 2 (Shen et al. 2018): convolutions over letters, LSTMs, and a post-net over mel frames."""
    more = (batch,) if batch > 1 else ()
    yield from [("lookup", (batch * frames // 4, 512, 148)), ("conv1d", (512, frames // 4, 512, 5, 1, 2, *more))]
    yield from [("dense", (batch, 256, 80)), ("dense", (batch, 256, 256)), ("dense", (batch, 80, 1536))]
    for hidden, inner in ((256, 768), (1024, 1792), (1024, 2560)):
        yield from [("dense", (batch, 4 * hidden, inner)), ("lstm_cell", (batch, hidden))]
    yield from [
        ("conv1d", (2, frames // 4, 32, 31, 1, 15, *more)),
        ("dense", (batch * frames // 4, 128, 32)),
        ("softmax", (batch, frames // 4)),
    ]
    yield from [("tanh", (batch * frames // 4 * 128,)), ("batch_matmul", (batch, 1, 512, frames // 4))]
    for channels, filters in ((80, 512), (512, 512), (512, 80)):
        yield "conv1d", (channels, frames // 2, filters, 5, 1, 2, *more)
    yield "tanh", (batch * 512 * frames // 2,)


def hifigan(frames: int) -> Iterator[Op]:
    """HiFi-GAN V2 (Kong et al. 2020): transposed convolutions up to samples, with residual convolutions between them."""
    yield "conv1d", (80, frames, 128, 7, 1, 3)
    channels, length = 128, frames
    for stride, kernel in ((8, 16), (8, 16), (2, 4), (2, 4)):
        yield "transposed_conv1d", (channels, length, channels // 2, kernel, stride, (kernel - stride) // 2)
        channels, length = channels // 2, length * stride
        for width in (3, 7, 11):
            yield "conv1d", (channels, length, channels, width, 1, width // 2)
        yield from [("leaky_relu", (channels * length,)), ("add", (channels * length,))]
    yield from [("conv1d", (channels, length, 1, 7, 1, 3)), ("tanh", (length,))]


def lstm_language_model(rows: int) -> Iterator[Op]:
    """AWD-LSTM (Merity et al. 2018): 400-wide words, three LSTMs of 1150, a token at a time."""
    yield "lookup", (rows, 400, 33_278)
    for hidden, inner in ((1150, 1550), (1150, 2300), (400, 1550)):
        yield from [("dense", (rows, 4 * hidden, inner)), ("lstm_cell", (rows, hidden))]
    yield from [("dense", (rows, 10_000, 400)), ("softmax", (rows, 10_000))]


def ops() -> dict[str, list[Op]]:
    """Ops of each model at all its sizes."""
    blocks: dict[str, list[Iterator[Op]]] = {
        "dlrm": [dlrm(rows) for rows in (128, 16, 64, 256)],
        "dcn_v2": [dcn_v2(rows) for rows in (128, 8, 32, 80)],
        "din": [din(rows, history) for rows, history in ((32, 50), (8, 50), (16, 100), (64, 20))],
        "wide_deep": [wide_deep(rows) for rows in (64, 8, 32, 1)],
        "deepfm": [deepfm(rows) for rows in (256, 16, 64, 128)],
        "ncf": [neural_collaborative_filtering(rows) for rows in (256, 100, 1024, 32)],
        "autoint": [autoint(rows) for rows in (32, 8, 64, 128)],
        "deepspeech2": [deepspeech2(frames, batch) for frames, batch in ((64, 1), (100, 1), (32, 4), (200, 1))],
        "tacotron2": [tacotron2(frames, batch) for frames, batch in ((200, 1), (400, 1), (100, 4), (600, 1))],
        "hifigan_v2": [hifigan(frames) for frames in (16, 32, 50)],
        "awd_lstm": [lstm_language_model(rows) for rows in (1, 4, 10)],
    }
    return {model: [op for block in listed for op in block] for model, listed in blocks.items()}
