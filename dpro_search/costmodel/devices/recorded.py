"""`RecordedSpecs`: the library ops behind a profile's ops of PyTorch, from the shapes of their inputs; of most ops there is none.

Strides of convolutions are not recorded: they follow from the sizes that the backward pass of the same convolution has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from dpro_search.collect.trace import EventKind, Shapes, Trace
from dpro_search.costmodel.devices.written import OpSpec
from dpro_search.errors import InputError

PRECISIONS = {
    "float32": "fp32", "float": "fp32", "c10::float": "fp32", "float16": "fp16", "half": "fp16", "c10::half": "fp16",
    "bfloat16": "bf16", "c10::bfloat16": "bf16",
}  # fmt: skip
Image = tuple[int, ...]
_Made = Callable[[str, Shapes], OpSpec]


class RecordedSpecs:
    """Specs of the library ops of one trace.

    Parameters
    ----------
    trace
        Imported from a profile with shapes (``record_shapes=True``); without any nothing is known.
    """

    def __init__(self, trace: Trace) -> None:
        self._outputs: dict[tuple[Image, Image], int] = {}  # Rows of a convolution's output, by its image and its filter.
        self._known: dict[tuple[str, int, str], OpSpec | None] = {}
        self._shapes = trace.shapes
        events = trace.events
        rows = np.flatnonzero((events.shapes >= 0) & (events.kind == EventKind.OP))
        for name, shapes in np.unique(np.stack((events.name[rows], events.shapes[rows])), axis=1).T.tolist():
            self._learn(trace.names[name], trace.shapes[shapes])

    def of(self, op: str, shapes: int, dtype: str) -> OpSpec | None:
        """The op behind "aten::mm" with the inputs of a number in the trace; an unknown element type is taken for fp32."""
        key = op, shapes, dtype
        if key not in self._known:
            self._known[key] = self._made(op, self._shapes[shapes], PRECISIONS.get(dtype.lower(), "fp32" if not dtype else ""))
        return self._known[key]

    def _made(self, op: str, shapes: Shapes, precision: str) -> OpSpec | None:
        if not precision:
            return None
        try:
            if op in _OPS:
                return _OPS[op](precision, shapes)
            if op in _CONVOLUTIONS:
                return self._convolution(op, precision, shapes)
        except (IndexError, ValueError, InputError):  # an overload with other inputs, or none
            return None
        return None

    def _learn(self, op: str, shapes: Shapes) -> None:
        places = {"aten::convolution_backward": (0, 1, 2), "aten::cudnn_convolution_backward": (1, 0, 2)}.get(op)
        if places is not None and len(shapes) > 2:
            gradient, image, weight = (shapes[place] for place in places)
            if len(gradient) == 4:
                self._outputs[image, weight] = gradient[2]

    def _convolution(self, op: str, precision: str, shapes: Shapes) -> OpSpec:
        backward = "backward" in op
        if op == "aten::convolution_backward":
            image, weight = shapes[1], shapes[2]
        elif op.endswith("_backward_input"):  # without the image, which is as large as that with this filter
            image, weight = self._image_of(shapes[1], shapes[2]), shapes[2]
        elif op.endswith("_backward_weight"):
            image, weight = shapes[2], self._weight_of(shapes[1], shapes[2])
        else:
            image, weight = shapes[0], shapes[1]
        images, channels, side, width = image
        outputs, inputs, window, window_width = weight
        if side != width or window != window_width or channels != inputs:
            raise ValueError
        made = self._outputs.get((image, weight), side)
        stride = max(round(side / made), 1)
        padding = max(math.ceil(((made - 1) * stride + window - side) / 2), 0)
        return OpSpec.of(
            "convolution", precision, backward=backward, images=images, inputs=inputs, outputs=outputs, side=side, window=window,
            stride=stride, padding=padding,
        )  # fmt: skip

    def _image_of(self, gradient: Image, weight: Image) -> Image:
        for (image, other), made in self._outputs.items():
            if other == weight and made == gradient[2] and image[0] == gradient[0]:
                return image
        raise ValueError

    def _weight_of(self, gradient: Image, image: Image) -> Image:
        for (other, weight), made in self._outputs.items():
            if other == image and made == gradient[2] and weight[0] == gradient[1]:
                return weight
        raise ValueError


def specs_of(trace: Trace) -> list[OpSpec]:
    """The distinct library ops of a trace."""
    recorded, events = RecordedSpecs(trace), trace.events
    rows = np.flatnonzero((events.shapes >= 0) & (events.kind == EventKind.OP))
    columns = np.unique(np.stack((events.name[rows], events.shapes[rows], events.dtype[rows])), axis=1).T.tolist()
    specs = (recorded.of(trace.names[name], shapes, trace.dtypes[dtype] if dtype >= 0 else "") for name, shapes, dtype in columns)
    return sorted({spec for spec in specs if spec is not None})


def _product(left: Image, right: Image, precision: str) -> OpSpec:
    *batch, m, k = left
    *_, inner, n = right
    if inner != k or len(left) != len(right):
        raise ValueError
    return OpSpec.of("gemm", precision, m=m, n=n, k=k, batch=math.prod(batch))


def _rows(name: str, *, at: int = 0, backward: bool = False, both: str = "") -> _Made:
    """Memory-bound ops on the input `at`; `both`: what they are where the next input has the same sizes."""

    def made(precision: str, shapes: Shapes) -> OpSpec:
        x = shapes[at]
        if math.prod(x) < 2 or not x:
            raise ValueError
        two = both and len(shapes) > at + 1 and shapes[at + 1] == x
        return OpSpec.of(both if two else name, precision, backward=backward, rows=math.prod(x[:-1]), length=x[-1])

    return made


def _attention(first: int, backward: bool) -> _Made:
    def made(precision: str, shapes: Shapes) -> OpSpec:
        (batch, heads, queries, head_dim), key = shapes[first], shapes[first + 1]
        sizes = {"batch": batch, "heads": heads, "kv_heads": key[1], "queries": queries, "keys": key[2], "head_dim": head_dim}
        return OpSpec.of("attention", precision, backward=backward, **sizes)

    return made


_CONVOLUTIONS = frozenset(
    f"aten::{name}"
    for name in (
        "convolution", "_convolution", "cudnn_convolution", "convolution_backward", "cudnn_convolution_backward_input",
        "cudnn_convolution_backward_weight",
    )
)  # fmt: skip
_OPS: Mapping[str, _Made] = {
    "aten::mm": lambda precision, shapes: _product(shapes[0], shapes[1], precision),
    "aten::bmm": lambda precision, shapes: _product(shapes[0], shapes[1], precision),
    "aten::addmm": lambda precision, shapes: _product(shapes[1], shapes[2], precision),
    "aten::baddbmm": lambda precision, shapes: _product(shapes[1], shapes[2], precision),
    **{f"aten::{name}": _rows("add_scalar", both="add") for name in ("add", "add_", "sub", "sub_")},
    **{f"aten::{name}": _rows("mul_scalar", both="mul") for name in ("mul", "mul_")},
    **{f"aten::{name}": _rows("div_scalar", both="div") for name in ("div", "div_")},
    **{f"aten::{name}": _rows("relu") for name in ("relu", "relu_", "threshold_", "clamp_min", "clamp_min_")},
    **{f"aten::{name}": _rows("tanh") for name in ("tanh", "sigmoid", "silu")},
    "aten::gelu": _rows("gelu"),
    "aten::threshold_backward": _rows("relu", backward=True),
    **{f"aten::{name}_backward": _rows("tanh", backward=True) for name in ("tanh", "sigmoid", "silu")},
    "aten::gelu_backward": _rows("gelu", backward=True),
    **{f"aten::{name}": _rows("softmax") for name in ("_softmax", "_log_softmax")},
    **{f"aten::{name}_backward_data": _rows("softmax", backward=True) for name in ("_softmax", "_log_softmax")},
    "aten::native_layer_norm": _rows("layer_norm"),
    "aten::native_layer_norm_backward": _rows("layer_norm", backward=True),
    **{
        f"aten::_scaled_dot_product_{kind}_attention{suffix}": _attention(first, bool(first))
        for kind in ("flash", "efficient", "cudnn")
        for suffix, first in (("", 0), ("_backward", 1))
    },
}
