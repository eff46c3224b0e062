"""Functions of ops on tensors, which schedules are drawn for (needs the environment `tvm`).

The dims of a task are the arguments of its builder: images are square unless a width is an argument, a batch comes last and is 1
where it is left out, and numbers are float32.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import te, tirx, topi

Tensors = list[te.Tensor]  # Arguments of a function, the result last.


def _placeholder(*shape: int) -> te.Tensor:
    return te.placeholder(shape, name=f"arg{len(shape)}")


def _with_bias(data: te.Tensor, weight: te.Tensor, out: te.Tensor, filters: int) -> Tensors:
    bias = _placeholder(1, filters, *[1] * (len(out.shape) - 2))
    return [data, weight, bias, topi.nn.relu(topi.add(out, bias))]


def _conv2d(channels: int, height: int, filters: int, kernel: int, stride: int, padding: int, batch: int = 1) -> Tensors:
    data, weight = _placeholder(batch, channels, height, height), _placeholder(filters, channels, kernel, kernel)
    return _with_bias(data, weight, topi.nn.conv2d(data, weight, stride, padding, 1, "NCHW", out_dtype="float32"), filters)


def _grouped_conv2d(
    channels: int, height: int, filters: int, kernel: int, stride: int, padding: int, groups: int, batch: int = 1
) -> Tensors:
    data, weight = _placeholder(batch, channels, height, height), _placeholder(filters, channels // groups, kernel, kernel)
    return _with_bias(data, weight, topi.nn.group_conv2d_nchw(data, weight, stride, padding, 1, groups, "float32"), filters)


def _rectangular_conv2d(
    channels: int, height: int, width: int, filters: int, rows: int, columns: int, down: int, right: int, above: int, left: int,
    batch: int = 1,
) -> Tensors:  # fmt: skip
    """Kernel rows x columns, strides down and right, as many zeros above as below and left as right."""
    data, weight = _placeholder(batch, channels, height, width), _placeholder(filters, channels, rows, columns)
    out = topi.nn.conv2d(data, weight, (down, right), (above, left), 1, "NCHW", out_dtype="float32")
    return _with_bias(data, weight, out, filters)


def _transposed_conv2d(channels: int, height: int, filters: int, kernel: int, stride: int, padding: int, batch: int = 1) -> Tensors:
    data, weight = _placeholder(batch, channels, height, height), _placeholder(channels, filters, kernel, kernel)
    out = topi.nn.conv2d_transpose_nchw(data, weight, (stride, stride), (padding, padding), "float32", (0, 0))
    return _with_bias(data, weight, out, filters)


def _depthwise(channels: int, height: int, kernel: int, stride: int, padding: int, batch: int = 1) -> Tensors:
    data, weight = _placeholder(batch, channels, height, height), _placeholder(channels, 1, kernel, kernel)
    return _with_bias(data, weight, topi.nn.depthwise_conv2d_nchw(data, weight, stride, padding, 1, "float32"), channels)


def _conv1d(channels: int, length: int, filters: int, kernel: int, stride: int, padding: int, batch: int = 1) -> Tensors:
    data, weight = _placeholder(batch, channels, length), _placeholder(filters, channels, kernel)
    return _with_bias(data, weight, topi.nn.conv1d_ncw(data, weight, stride, padding, 1, "float32"), filters)


def _grouped_conv1d(
    channels: int, length: int, filters: int, kernel: int, stride: int, padding: int, groups: int, batch: int = 1
) -> Tensors:
    data, weight = _placeholder(batch, channels, length), _placeholder(filters, channels // groups, kernel)
    return _with_bias(data, weight, topi.nn.group_conv1d_ncw(data, weight, stride, padding, 1, groups, "float32"), filters)


def _transposed_conv1d(channels: int, length: int, filters: int, kernel: int, stride: int, padding: int) -> Tensors:
    data, weight = _placeholder(1, channels, length), _placeholder(channels, filters, kernel)
    return _with_bias(data, weight, topi.nn.conv1d_transpose_ncw(data, weight, stride, padding, "float32", 0), filters)


def _dense(rows: int, columns: int, inner: int) -> Tensors:
    data, weight, bias = _placeholder(rows, inner), _placeholder(columns, inner), _placeholder(columns)
    return [data, weight, bias, topi.add(topi.nn.dense(data, weight), bias)]


def _dense_relu(rows: int, columns: int, inner: int) -> Tensors:
    *arguments, out = _dense(rows, columns, inner)
    return [*arguments, topi.nn.relu(out)]


def _cross(rows: int, width: int) -> Tensors:
    """x0 * (W x + b) + x, the cross layer of DCN-v2."""
    first, data, weight, bias = (
        _placeholder(rows, width),
        _placeholder(rows, width),
        _placeholder(width, width),
        _placeholder(width),
    )
    return [first, data, weight, bias, topi.add(topi.multiply(first, topi.add(topi.nn.dense(data, weight), bias)), data)]


def _batch_matmul(batch: int, rows: int, columns: int, inner: int) -> Tensors:
    left, right = _placeholder(batch, rows, inner), _placeholder(batch, columns, inner)
    return [left, right, topi.nn.batch_matmul(left, right)]


def _masked_batch_matmul(batch: int, rows: int, columns: int, inner: int) -> Tensors:
    """Scores of attention, scaled, with a mask or a bias of positions [rows, columns] added."""
    left, right, out = _batch_matmul(batch, rows, columns, inner)
    mask = _placeholder(rows, columns)
    return [left, right, mask, te.compute((batch, rows, columns), lambda b, i, j: out[b, i, j] * (inner**-0.5) + mask[i, j])]


def _softmax(rows: int, columns: int) -> Tensors:
    data = _placeholder(rows, columns)
    return [data, topi.nn.softmax(data, axis=1)]


def _layer_norm(rows: int, columns: int) -> Tensors:
    data, scale, shift = _placeholder(rows, columns), _placeholder(columns), _placeholder(columns)
    return [data, scale, shift, topi.nn.layer_norm(data, scale, shift, [1])]


def _rms_norm(rows: int, columns: int) -> Tensors:
    data, scale = _placeholder(rows, columns), _placeholder(columns)
    return [data, scale, topi.nn.rms_norm(data, scale, [1])]


def _pool(kind: str) -> Callable[..., Tensors]:
    def build(channels: int, height: int, kernel: int, stride: int, padding: int, batch: int = 1) -> Tensors:
        data = _placeholder(batch, channels, height, height)
        return [data, topi.nn.pool2d(data, [kernel] * 2, [stride] * 2, [1, 1], [padding] * 4, kind)]

    return build


def _mean_pool(channels: int, height: int, batch: int = 1) -> Tensors:
    data = _placeholder(batch, channels, height, height)
    return [data, topi.nn.global_pool(data, "avg")]


def _channel_scale(channels: int, height: int, batch: int = 1) -> Tensors:
    data, scale = _placeholder(batch, channels, height, height), _placeholder(batch, channels, 1, 1)
    return [data, scale, topi.multiply(data, topi.sigmoid(scale))]


def _concat(channels: int, more: int, height: int, batch: int = 1) -> Tensors:
    parts = [_placeholder(batch, count, height, height) for count in (channels, more)]
    return [*parts, topi.concatenate(parts, axis=1)]


def _channel_shuffle(channels: int, height: int, groups: int, batch: int = 1) -> Tensors:
    data, width = _placeholder(batch, channels, height, height), channels // groups
    shape = (batch, channels, height, height)
    return [data, te.compute(shape, lambda n, c, i, j: data[n, tirx.indexmod(c, groups) * width + tirx.indexdiv(c, groups), i, j])]


def _upsample(channels: int, height: int, batch: int = 1) -> Tensors:
    """Each pixel four times."""
    data = _placeholder(batch, channels, height, height)
    shape = (batch, channels, 2 * height, 2 * height)
    return [data, te.compute(shape, lambda n, c, i, j: data[n, c, tirx.indexdiv(i, 2), tirx.indexdiv(j, 2)])]


def _window_partition(height: int, channels: int, window: int) -> Tensors:
    """[height, height, channels] to [windows, window * window, channels]."""
    data, across = _placeholder(height, height, channels), height // window

    def pixel(place: tirx.Var, inside: tirx.Var, channel: tirx.Var) -> te.Tensor:
        row = tirx.indexdiv(place, across) * window + tirx.indexdiv(inside, window)
        return data[row, tirx.indexmod(place, across) * window + tirx.indexmod(inside, window), channel]

    return [data, te.compute((across**2, window**2, channels), pixel)]


def _transpose_heads(tokens: int, heads: int, width: int, batch: int = 1) -> Tensors:
    """[batch, tokens, heads * width] to [batch * heads, tokens, width]; a single head is a transposed matrix."""
    data = _placeholder(batch, tokens, heads * width)
    if heads == 1:
        return [data, te.compute((batch, width, tokens), lambda n, j, i: data[n, i, j])]
    shape = (batch * heads, tokens, width)
    return [data, te.compute(shape, lambda h, i, j: data[tirx.indexdiv(h, heads), i, tirx.indexmod(h, heads) * width + j])]


def _rotary(tokens: int, heads: int, width: int) -> Tensors:
    """Rotary embedding of positions (Su et al. 2021) with tables of cosines and sines, halves rotated."""
    data, cosine, sine = _placeholder(tokens, heads, width), _placeholder(tokens, width), _placeholder(tokens, width)
    half = width // 2

    def turned(i: tirx.Var, h: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
        other = tirx.if_then_else(j < half, -data[i, h, tirx.indexmod(j + half, width)], data[i, h, tirx.indexmod(j + half, width)])
        return data[i, h, j] * cosine[i, j] + other * sine[i, j]

    return [data, cosine, sine, te.compute((tokens, heads, width), turned)]


def _lookup(rows: int, width: int, table: int) -> Tensors:
    weight, index = _placeholder(table, width), te.placeholder((rows,), dtype="int32", name="index")
    return [weight, index, te.compute((rows, width), lambda i, j: weight[index[i], j])]


def _bag(rows: int, count: int, width: int, table: int) -> Tensors:
    """Sums of `count` looked-up rows."""
    weight, index = _placeholder(table, width), te.placeholder((rows, count), dtype="int32", name="index")
    each = te.reduce_axis((0, count), name="k")
    return [weight, index, te.compute((rows, width), lambda i, j: te.sum(weight[index[i, each], j], axis=each))]


def _factorization(rows: int, fields: int, width: int) -> Tensors:
    """Products of all pairs of vectors: half of the square of their sum less the sum of their squares (Rendle 2010)."""
    data = _placeholder(rows, fields, width)
    total, squares = topi.sum(data, axis=1), topi.sum(topi.multiply(data, data), axis=1)
    return [data, topi.sum(te.compute((rows, width), lambda i, j: 0.5 * (total[i, j] * total[i, j] - squares[i, j])), axis=1)]


def _lstm_cell(rows: int, hidden: int) -> Tensors:
    """The new state of a cell from the products of its four gates."""
    gates, state = _placeholder(rows, 4 * hidden), _placeholder(rows, hidden)

    def cell(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
        kept = te.sigmoid(gates[i, hidden + j]) * state[i, j] + te.sigmoid(gates[i, j]) * te.tanh(gates[i, 2 * hidden + j])
        return te.sigmoid(gates[i, 3 * hidden + j]) * te.tanh(kept)

    return [gates, state, te.compute((rows, hidden), cell)]


def _gru_cell(rows: int, hidden: int) -> Tensors:
    """The new state of a cell from the products of its inputs and of its state."""
    inputs, states, state = _placeholder(rows, 3 * hidden), _placeholder(rows, 3 * hidden), _placeholder(rows, hidden)

    def cell(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
        update = te.sigmoid(inputs[i, hidden + j] + states[i, hidden + j])
        reset = te.sigmoid(inputs[i, j] + states[i, j])
        return (1.0 - update) * te.tanh(inputs[i, 2 * hidden + j] + reset * states[i, 2 * hidden + j]) + update * state[i, j]

    return [inputs, states, state, te.compute((rows, hidden), cell)]


def _elementwise(function: Callable[..., tirx.PrimExpr], arguments: int = 1) -> Callable[[int], Tensors]:
    def build(elements: int) -> Tensors:
        parts = [_placeholder(elements) for _ in range(arguments)]
        return [*parts, te.compute((elements,), lambda i: function(*(part[i] for part in parts)))]

    return build


def _tanh_gelu(x: tirx.PrimExpr) -> tirx.PrimExpr:
    return x * (0.5 + 0.5 * te.tanh(0.79788456 * (x + 0.044715 * x * x * x)))


def _relu(x: tirx.PrimExpr) -> tirx.PrimExpr:
    return te.max(x, tirx.const(0.0, "float32"))


def _hard_swish(x: tirx.PrimExpr) -> tirx.PrimExpr:
    return x * te.min(_relu(x + 3.0), tirx.const(6.0, "float32")) * (1.0 / 6.0)


def _add_relu(elements: int) -> Tensors:
    left, right = _placeholder(elements), _placeholder(elements)
    return [left, right, topi.nn.relu(topi.add(left, right))]


BUILDERS: dict[str, Callable[..., Tensors]] = {
    "conv2d": _conv2d,
    "grouped_conv2d": _grouped_conv2d,
    "rectangular_conv2d": _rectangular_conv2d,
    "transposed_conv2d": _transposed_conv2d,
    "depthwise": _depthwise,
    "conv1d": _conv1d,
    "grouped_conv1d": _grouped_conv1d,
    "transposed_conv1d": _transposed_conv1d,
    "dense": _dense,
    "dense_relu": _dense_relu,
    "cross": _cross,
    "batch_matmul": _batch_matmul,
    "masked_batch_matmul": _masked_batch_matmul,
    "softmax": _softmax,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "max_pool": _pool("max"),
    "average_pool": _pool("avg"),
    "mean_pool": _mean_pool,
    "channel_scale": _channel_scale,
    "concat": _concat,
    "channel_shuffle": _channel_shuffle,
    "upsample": _upsample,
    "window_partition": _window_partition,
    "transpose_heads": _transpose_heads,
    "rotary": _rotary,
    "lookup": _lookup,
    "bag": _bag,
    "factorization": _factorization,
    "lstm_cell": _lstm_cell,
    "gru_cell": _gru_cell,
    "add_relu": _add_relu,
    "gelu": _elementwise(_tanh_gelu),
    "add": _elementwise(lambda x, y: x + y, 2),
    "multiply": _elementwise(lambda x, y: x * y, 2),
    "relu": _elementwise(_relu),
    "leaky_relu": _elementwise(lambda x: te.max(x, x * 0.2)),
    "hard_swish": _elementwise(_hard_swish),
    "silu": _elementwise(lambda x: x * te.sigmoid(x)),
    "sigmoid": _elementwise(te.sigmoid),
    "tanh": _elementwise(te.tanh),
    "gated_silu": _elementwise(lambda x, y: x * te.sigmoid(x) * y, 2),
    "gated_gelu": _elementwise(lambda x, y: _tanh_gelu(x) * y, 2),
    "gated_sigmoid": _elementwise(lambda x, y: x * te.sigmoid(y), 2),
}


def tensors(op: str, dims: tuple[int, ...]) -> Tensors:
    """Arguments of a task's function, the result last."""
    return BUILDERS[op](*dims)
