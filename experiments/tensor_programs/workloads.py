"""Ops of eight published models, as tasks: an op with its dims, and the models that run it.

Dims are those of the published architectures at batch 1, images of 224 (VGG-16: 112, Inception-v3: 299), sequences of 128 (BERT)
and 64 (GPT-2), and a batch of 128 (DLRM). An image model's layers that differ in nothing are one task.
"""

from __future__ import annotations

from dataclasses import dataclass

Dims = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Task:
    """An op that a schedule is drawn for."""

    op: str  # A key of `programs.BUILDERS`.
    dims: Dims
    models: tuple[str, ...]

    @property
    def name(self) -> str:
        """Tells tasks apart."""
        return f"{self.op}_{'x'.join(map(str, self.dims))}"


# conv2d, depthwise: channels, height, filters (not depthwise), kernel, stride, padding; images are square.
# dense: rows, columns, summed over; batch_matmul: batch, rows, columns, summed over. softmax, layer_norm: rows, columns.
# max_pool: channels, height, kernel, stride, padding; mean_pool: channels, height. add_relu, gelu: elements.
# lookup: rows, width, rows of the table.
MODELS: dict[str, list[tuple[str, Dims]]] = {
    "resnet50": [
        ("conv2d", (3, 224, 64, 7, 2, 3)),
        ("max_pool", (64, 112, 3, 2, 1)),
        *(
            ("conv2d", dims)
            for dims in [(64, 56, 64, 1, 1, 0), (64, 56, 64, 3, 1, 1), (64, 56, 256, 1, 1, 0), (256, 56, 64, 1, 1, 0)]
        ),
        *(
            ("conv2d", dims)
            for dims in [(256, 56, 128, 1, 1, 0), (128, 56, 128, 3, 2, 1), (128, 28, 512, 1, 1, 0), (256, 56, 512, 1, 2, 0)]
        ),
        *(
            ("conv2d", dims)
            for dims in [(512, 28, 128, 1, 1, 0), (128, 28, 128, 3, 1, 1), (512, 28, 256, 1, 1, 0), (256, 28, 256, 3, 2, 1)]
        ),
        *(
            ("conv2d", dims)
            for dims in [(256, 14, 1024, 1, 1, 0), (1024, 14, 256, 1, 1, 0), (256, 14, 256, 3, 1, 1), (512, 7, 512, 3, 1, 1)]
        ),
        *(("conv2d", dims) for dims in [(512, 7, 2048, 1, 1, 0), (2048, 7, 512, 1, 1, 0)]),
        *(("add_relu", (elements,)) for elements in [256 * 56 * 56, 512 * 28 * 28, 1024 * 14 * 14, 2048 * 7 * 7]),
        ("mean_pool", (2048, 7)),
        ("dense", (1, 1000, 2048)),
        ("softmax", (1, 1000)),
    ],
    "mobilenet_v2": [
        ("conv2d", (3, 224, 32, 3, 2, 1)),
        *(("depthwise", dims) for dims in [(32, 112, 3, 1, 1), (96, 112, 3, 2, 1), (144, 56, 3, 1, 1), (144, 56, 3, 2, 1)]),
        *(
            ("depthwise", dims)
            for dims in [(192, 28, 3, 1, 1), (192, 28, 3, 2, 1), (384, 14, 3, 1, 1), (576, 14, 3, 2, 1), (960, 7, 3, 1, 1)]
        ),
        *(
            ("conv2d", dims)
            for dims in [(32, 112, 16, 1, 1, 0), (16, 112, 96, 1, 1, 0), (96, 56, 24, 1, 1, 0), (24, 56, 144, 1, 1, 0)]
        ),
        *(
            ("conv2d", dims)
            for dims in [(144, 28, 32, 1, 1, 0), (32, 28, 192, 1, 1, 0), (192, 14, 64, 1, 1, 0), (64, 14, 384, 1, 1, 0)]
        ),
        *(
            ("conv2d", dims)
            for dims in [(384, 14, 96, 1, 1, 0), (96, 14, 576, 1, 1, 0), (160, 7, 960, 1, 1, 0), (320, 7, 1280, 1, 1, 0)]
        ),
        ("mean_pool", (1280, 7)),
        ("dense", (1, 1000, 1280)),
    ],
    "vgg16": [
        *(
            ("conv2d", dims)
            for dims in [(3, 112, 64, 3, 1, 1), (64, 112, 64, 3, 1, 1), (64, 56, 128, 3, 1, 1), (128, 56, 128, 3, 1, 1)]
        ),
        *(
            ("conv2d", dims)
            for dims in [(128, 28, 256, 3, 1, 1), (256, 28, 256, 3, 1, 1), (256, 14, 512, 3, 1, 1), (512, 14, 512, 3, 1, 1)]
        ),
        *(("max_pool", dims) for dims in [(64, 112, 2, 2, 0), (128, 56, 2, 2, 0), (256, 28, 2, 2, 0), (512, 14, 2, 2, 0)]),
        ("dense", (1, 4096, 4608)),
        ("dense", (1, 4096, 4096)),
    ],
    "inception_v3": [
        *(
            ("conv2d", dims)
            for dims in [(3, 299, 32, 3, 2, 0), (32, 149, 32, 3, 1, 0), (64, 73, 80, 1, 1, 0), (80, 73, 192, 3, 1, 0)]
        ),
        *(
            ("conv2d", dims)
            for dims in [(192, 35, 64, 1, 1, 0), (48, 35, 64, 5, 1, 2), (64, 35, 96, 3, 1, 1), (96, 35, 96, 3, 1, 1)]
        ),
        *(
            ("conv2d", dims)
            for dims in [(288, 35, 384, 3, 2, 0), (768, 17, 192, 1, 1, 0), (768, 17, 128, 1, 1, 0), (1280, 8, 320, 1, 1, 0)]
        ),
        *(("conv2d", dims) for dims in [(448, 8, 384, 3, 1, 1), (2048, 8, 192, 1, 1, 0)]),
        *(("max_pool", dims) for dims in [(64, 147, 3, 2, 0), (192, 71, 3, 2, 0), (288, 35, 3, 2, 0), (768, 17, 3, 2, 0)]),
        ("mean_pool", (2048, 8)),
    ],
    "bert_base": [
        *(("dense", dims) for dims in [(128, 768, 768), (128, 3072, 768), (128, 768, 3072), (128, 2304, 768), (1, 768, 768)]),
        *(("batch_matmul", dims) for dims in [(12, 128, 128, 64), (12, 128, 64, 128)]),
        ("softmax", (12 * 128, 128)),
        ("layer_norm", (128, 768)),
        ("gelu", (128 * 3072,)),
        ("add_relu", (128 * 768,)),
        ("lookup", (128, 768, 30522)),
    ],
    "gpt2": [
        *(("dense", dims) for dims in [(64, 768, 768), (64, 2304, 768), (64, 3072, 768), (64, 768, 3072), (1, 50257, 768)]),
        *(("batch_matmul", dims) for dims in [(12, 64, 64, 64), (12, 1, 512, 64), (12, 1, 64, 512)]),
        *(("softmax", dims) for dims in [(12 * 64, 64), (12, 512)]),
        *(("layer_norm", dims) for dims in [(64, 768), (1, 768)]),
        ("gelu", (64 * 3072,)),
        ("lookup", (64, 768, 50257)),
    ],
    "dlrm": [
        *(
            ("dense", dims)
            for dims in [(128, 512, 13), (128, 256, 512), (128, 64, 256), (128, 512, 415), (128, 256, 512), (128, 1, 256)]
        ),
        ("batch_matmul", (128, 27, 27, 64)),
        *(("lookup", (128, 64, rows)) for rows in [1000, 100_000]),
        ("add_relu", (128 * 512,)),
    ],
    "efficientnet_b0": [
        *(("depthwise", dims) for dims in [(32, 112, 3, 1, 1), (144, 56, 5, 2, 2), (240, 28, 5, 1, 2), (240, 28, 3, 2, 1)]),
        *(("depthwise", dims) for dims in [(480, 14, 5, 1, 2), (672, 14, 5, 2, 2), (1152, 7, 5, 1, 2), (1152, 7, 3, 1, 1)]),
        *(
            ("conv2d", dims)
            for dims in [(144, 56, 24, 1, 1, 0), (240, 28, 40, 1, 1, 0), (40, 28, 240, 1, 1, 0), (80, 14, 480, 1, 1, 0)]
        ),
        *(
            ("conv2d", dims)
            for dims in [(480, 14, 112, 1, 1, 0), (112, 14, 672, 1, 1, 0), (192, 7, 1152, 1, 1, 0), (1152, 7, 320, 1, 1, 0)]
        ),
        *(("mean_pool", dims) for dims in [(96, 56), (240, 28), (672, 14), (1152, 7)]),
        *(("dense", dims) for dims in [(1, 28, 672), (1, 1152, 48)]),
    ],
}


def tasks() -> list[Task]:
    """All tasks; one that several models run stands once."""
    users: dict[tuple[str, Dims], list[str]] = {}
    for model, ops in MODELS.items():
        for key in dict.fromkeys(ops):
            users.setdefault(key, []).append(model)
    return [Task(op=op, dims=dims, models=tuple(models)) for (op, dims), models in users.items()]
