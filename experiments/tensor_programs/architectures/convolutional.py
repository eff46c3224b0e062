"""Convolutional networks: stages, widths and kernels are those of the papers and of torchvision's reference code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from experiments.tensor_programs.architectures.image import Image, Op

Network = Callable[[Image], None]


def resnet(blocks: Sequence[int], bottleneck: bool, groups: int = 1, group_width: int = 64) -> Network:
    """ResNet (He et al. 2016) and, with groups, ResNeXt (Xie et al. 2017)."""

    def run(image: Image) -> None:
        image.conv(64, 7, 2)
        image.pool(3, 2, 1)
        for stage, count in enumerate(blocks):
            width = 64 * 2**stage
            out = width * 4 if bottleneck else width
            for block in range(count):
                stride = 2 if stage and not block else 1
                if not block and (image.channels != out or stride > 1):
                    image.record("conv2d", image.channels, image.height, out, 1, stride, 0)
                if bottleneck:
                    inner = width * group_width // 64 * groups
                    image.conv(inner, 1)
                    image.conv(inner, 3, stride, groups=groups)
                    image.conv(out, 1)
                else:
                    image.conv(out, 3, stride)
                    image.conv(out, 3)
                image.elementwise("add_relu")
        image.classify()

    return run


def vgg16(image: Image) -> None:
    """VGG-16 (Simonyan and Zisserman 2015)."""
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            image.conv(width, 3)
        image.pool(2, 2)
    image.ops += [
        ("dense", (image.batch, 4096, image.elements // image.batch)),
        ("dense", (image.batch, 4096, 4096)),
        ("dense", (image.batch, 1000, 4096)),
    ]


def alexnet(image: Image) -> None:
    """AlexNet in the widths of "One weird trick" (Krizhevsky 2014)."""
    image.conv(64, 11, 4, 2)
    image.pool(3, 2)
    image.conv(192, 5)
    image.pool(3, 2)
    for width in (384, 256, 256):
        image.conv(width, 3)
    image.pool(3, 2)
    image.ops += [("dense", (image.batch, 4096, 4096)), ("dense", (image.batch, 1000, 4096))]


def googlenet(image: Image) -> None:
    """GoogLeNet (Szegedy et al. 2015): nine modules of four branches."""
    image.conv(64, 7, 2)
    image.pool(3, 2, 1)
    image.conv(64, 1)
    image.conv(192, 3)
    image.pool(3, 2, 1)
    modules = [
        (64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64), (192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64), (112, 144, 288, 32, 64, 64), (256, 160, 320, 32, 128, 128), (256, 160, 320, 32, 128, 128),
        (384, 192, 384, 48, 128, 128),
    ]  # fmt: skip
    for place, (one, three_in, three, five_in, five, pooled) in enumerate(modules):
        if place in (2, 7):
            image.pool(3, 2, 1)
        channels = image.channels
        for branch in (((one, 1),), ((three_in, 1), (three, 3)), ((five_in, 1), (five, 5)), ((pooled, 1),)):
            image.channels = channels
            for width, kernel in branch:
                image.conv(width, kernel)
        image.channels = channels
        image.pool(3, 1, 1)
        image.channels = one + three + five
        image.concatenate(pooled)
    image.classify()


def inception_v3(image: Image) -> None:
    """Inception v3 (Szegedy et al. 2016), one module of each kind at each width."""
    for filters, kernel, stride, padding in ((32, 3, 2, 0), (32, 3, 1, 0), (64, 3, 1, 1)):
        image.conv(filters, kernel, stride, padding)
    image.pool(3, 2)
    image.conv(80, 1)
    image.conv(192, 3, padding=0)
    image.pool(3, 2)
    for channels in (192, 256, 288):
        for branch in (((64, 1),), ((48, 1), (64, 5)), ((64, 1), (96, 3), (96, 3))):
            image.channels = channels
            for width, kernel in branch:
                image.conv(width, kernel)
    image.channels, height = 288, image.height
    image.pool(3, 2)
    smaller, image.height = image.height, height
    image.conv(384, 3, 2, 0)
    image.height = smaller
    for inner in (128, 160, 192):
        image.channels = 768
        image.conv(192, 1)
        image.channels = 768
        image.conv(inner, 1)
        image.rectangular(inner, 1, 7)
        image.rectangular(192, 7, 1)
    image.channels = 768
    image.pool(3, 2)
    for channels in (1280, 2048):
        for branch in (((320, 1),), ((384, 1),), ((448, 1), (384, 3))):
            image.channels = channels
            for width, kernel in branch:
                image.conv(width, kernel)
        image.rectangular(384, 1, 3)
        image.channels = 384
        image.rectangular(384, 3, 1)
    image.channels = 2048
    image.classify()


def densenet(image: Image) -> None:
    """DenseNet-121 (Huang et al. 2017): growth 32, bottlenecks of 128."""
    image.conv(64, 7, 2)
    image.pool(3, 2, 1)
    for stage, layers in enumerate((6, 12, 24, 16)):
        if stage:
            image.conv(image.channels // 2, 1)
            image.pool(2, 2, op="average_pool")
        for _ in range(layers):
            channels = image.channels
            image.conv(128, 1)
            image.conv(32, 3)
            image.channels = channels
            image.concatenate(32)
    image.classify()


def squeezenet(image: Image) -> None:
    """SqueezeNet 1.1 (Iandola et al. 2016)."""
    image.conv(64, 3, 2, 0)
    image.pool(3, 2)
    for place, (squeezed, expanded) in enumerate(
        ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256))
    ):
        if place in (2, 4):
            image.pool(3, 2)
        image.conv(squeezed, 1)
        image.record("conv2d", squeezed, image.height, expanded, 1, 1, 0)
        image.conv(expanded, 3)
        image.concatenate(expanded)
    image.conv(1000, 1)
    image.record("mean_pool", 1000, image.height)


def mobilenet_v1(image: Image) -> None:
    """MobileNet (Howard et al. 2017)."""
    image.conv(32, 3, 2)
    for width, stride in ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1)):
        image.depthwise(3, stride)
        image.conv(width, 1)
    image.classify()


def inverted_residual(image: Image, expanded: int, out: int, kernel: int, stride: int, squeezed: int, activation: str) -> None:
    """The block of MobileNet v2 and v3, MnasNet and EfficientNet: wide inside, thin outside."""
    same = stride == 1 and image.channels == out
    if expanded != image.channels:
        image.conv(expanded, 1)
        if activation:
            image.elementwise(activation)
    image.depthwise(kernel, stride)
    if squeezed:
        image.squeeze_excite(squeezed)
    image.conv(out, 1)
    if same:
        image.elementwise("add")


def mobilenet_v2(image: Image) -> None:
    """MobileNet v2 (Sandler et al. 2018)."""
    image.conv(32, 3, 2)
    for expansion, out, count, stride in (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    ):  # fmt: skip
        for block in range(count):
            inverted_residual(image, image.channels * expansion, out, 3, 1 if block else stride, 0, "")
    image.conv(1280, 1)
    image.classify()


def mobilenet_v3(image: Image) -> None:
    """MobileNet v3 large (Howard et al. 2019)."""
    image.conv(16, 3, 2)
    image.elementwise("hard_swish")
    for kernel, expanded, out, squeezed, activation, stride in (
        (3, 16, 16, 0, "", 1), (3, 64, 24, 0, "", 2), (3, 72, 24, 0, "", 1), (5, 72, 40, 24, "", 2), (5, 120, 40, 32, "", 1),
        (3, 240, 80, 0, "hard_swish", 2), (3, 200, 80, 0, "hard_swish", 1), (3, 184, 80, 0, "hard_swish", 1),
        (3, 480, 112, 120, "hard_swish", 1), (3, 672, 112, 168, "hard_swish", 1), (5, 672, 160, 168, "hard_swish", 2),
        (5, 960, 160, 240, "hard_swish", 1),
    ):  # fmt: skip
        inverted_residual(image, expanded, out, kernel, stride, squeezed, activation)
    image.conv(960, 1)
    image.record("mean_pool", 960, image.height)
    image.ops += [("dense", (image.batch, 1280, 960)), ("dense", (image.batch, 1000, 1280))]


def mnasnet(image: Image) -> None:
    """MnasNet-B1 (Tan et al. 2019)."""
    image.conv(32, 3, 2)
    image.depthwise(3)
    image.conv(16, 1)
    for expansion, out, count, stride, kernel in (
        (3, 24, 3, 2, 3), (3, 40, 3, 2, 5), (6, 80, 3, 2, 5), (6, 96, 2, 1, 3), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3),
    ):  # fmt: skip
        for block in range(count):
            inverted_residual(image, image.channels * expansion, out, kernel, 1 if block else stride, 0, "")
    image.conv(1280, 1)
    image.classify()


def efficientnet(widths: Sequence[int], depths: Sequence[int], stem: int, head: int) -> Network:
    """EfficientNet (Tan and Le 2019), with the widths and depths of a member of the family."""

    def run(image: Image) -> None:
        image.conv(stem, 3, 2)
        image.elementwise("silu")
        for width, depth, (expansion, stride, kernel) in zip(
            widths, depths, ((1, 1, 3), (6, 2, 3), (6, 2, 5), (6, 2, 3), (6, 1, 5), (6, 2, 5), (6, 1, 3)), strict=True
        ):
            for block in range(depth):
                squeezed = max(1, image.channels // 4)
                inverted_residual(image, image.channels * expansion, width, kernel, 1 if block else stride, squeezed, "silu")
        image.conv(head, 1)
        image.classify()

    return run


def shufflenet(image: Image) -> None:
    """ShuffleNet v2 x1.0 (Ma et al. 2018)."""
    image.conv(24, 3, 2)
    image.pool(3, 2, 1)
    for width, count in ((116, 4), (232, 8), (464, 4)):
        half = width // 2
        image.record("depthwise", image.channels, image.height, 3, 2, 1)
        image.conv(half, 1)
        image.depthwise(3, 2)
        for _ in range(count - 1):
            image.channels = half
            image.conv(half, 1)
            image.depthwise(3)
            image.conv(half, 1)
            image.concatenate(half)
            image.record("channel_shuffle", width, image.height, 2)
        image.channels = width
    image.conv(1024, 1)
    image.classify()


def regnet(image: Image) -> None:
    """RegNetX-400MF (Radosavovic et al. 2020): groups of 16."""
    image.conv(32, 3, 2)
    for width, count in ((32, 1), (64, 2), (160, 7), (400, 12)):
        for block in range(count):
            image.conv(width, 1)
            image.conv(width, 3, 1 if block else 2, groups=width // 16)
            image.conv(width, 1)
            image.elementwise("add_relu")
    image.classify(400)


def convnext(image: Image) -> None:
    """ConvNeXt-T (Liu et al. 2022); its 1 x 1 convolutions are dense layers over pixels."""
    image.conv(96, 4, 4, 0)
    for stage, width in enumerate((96, 192, 384, 768)):
        if stage:
            image.conv(width, 2, 2, 0)
        rows = image.batch * image.height * image.height
        image.depthwise(7)
        image.ops += [
            ("layer_norm", (rows, width)),
            ("dense", (rows, 4 * width, width)),
            ("gelu", (rows * 4 * width,)),
            ("dense", (rows, width, 4 * width)),
        ]
        image.elementwise("add")
    image.classify()


def unet(base: int) -> Network:
    """U-Net (Ronneberger et al. 2015) with `base` channels at full height."""

    def run(image: Image) -> None:
        widths = [base * 2**level for level in range(5)]
        for width in widths[:-1]:
            image.conv(width, 3)
            image.conv(width, 3)
            image.pool(2, 2)
        image.conv(widths[-1], 3)
        for width in reversed(widths[:-1]):
            image.transposed(width, 2, 2, 0)
            image.concatenate(width)
            image.conv(width, 3)
            image.conv(width, 3)
        image.conv(2, 1)

    return run


def yolo_v3_tiny(image: Image) -> None:
    """YOLOv3-tiny (Redmon and Farhadi 2018)."""
    for width in (16, 32, 64, 128, 256, 512):
        image.conv(width, 3)
        image.pool(2, 2)
    for width, kernel in ((1024, 3), (256, 1), (512, 3), (255, 1)):
        image.conv(width, kernel)
    image.channels = 256
    image.conv(128, 1)
    image.record("upsample", 128, image.height)
    image.height *= 2
    image.concatenate(256)
    image.conv(256, 3)
    image.conv(255, 1)


def dcgan(image: Image) -> None:
    """Generator of DCGAN (Radford et al. 2016), from 1 x 1 to 64 x 64; and its discriminator."""
    image.channels, image.height = 100, 1
    image.transposed(512, 4, 1, 0)
    for width in (256, 128, 64, 3):
        image.transposed(width, 4, 2, 1)
    image.elementwise("tanh")
    for width in (64, 128, 256, 512):
        image.conv(width, 4, 2, 1)
        image.elementwise("leaky_relu")


B0 = efficientnet((16, 24, 40, 80, 112, 192, 320), (1, 2, 2, 3, 3, 4, 1), 32, 1280)
B3 = efficientnet((24, 32, 48, 96, 136, 232, 384), (2, 3, 3, 5, 5, 6, 2), 40, 1536)

# Networks with the heights of images and the batches at which they run.
NETWORKS: dict[str, tuple[Network, tuple[tuple[int, int], ...]]] = {
    "resnet18": (resnet((2, 2, 2, 2), False), ((224, 1), (160, 1), (128, 2), (96, 4))),
    "resnet50": (resnet((3, 4, 6, 3), True), ((224, 1), (160, 1), (128, 2))),
    "resnext50": (resnet((3, 4, 6, 3), True, 32, 4), ((224, 1), (160, 2), (288, 1))),
    "vgg16": (vgg16, ((112, 1), (64, 1), (32, 4))),
    "alexnet": (alexnet, ((224, 1), (224, 4))),
    "googlenet": (googlenet, ((224, 1),)),
    "inception_v3": (inception_v3, ((299, 1), (203, 1))),
    "densenet121": (densenet, ((224, 1),)),
    "squeezenet": (squeezenet, ((224, 1), (160, 2), (288, 1))),
    "mobilenet_v1": (mobilenet_v1, ((224, 1), (160, 2), (128, 4))),
    "mobilenet_v2": (mobilenet_v2, ((224, 1), (160, 2), (288, 1))),
    "mobilenet_v3": (mobilenet_v3, ((224, 1), (160, 2))),
    "mnasnet": (mnasnet, ((224, 1), (160, 2))),
    "efficientnet_b0": (B0, ((224, 1), (160, 2))),
    "efficientnet_b3": (B3, ((300, 1),)),
    "shufflenet_v2": (shufflenet, ((224, 1), (224, 4), (160, 8))),
    "regnetx_400mf": (regnet, ((224, 1), (160, 4))),
    "convnext_tiny": (convnext, ((224, 1), (160, 1), (96, 1))),
    "unet": (unet(32), ((128, 1), (64, 2), (96, 1))),
    "yolo_v3_tiny": (yolo_v3_tiny, ((224, 1), (416, 1), (160, 1))),
    "dcgan": (dcgan, ((64, 1), (64, 8))),
}


def ops() -> dict[str, list[Op]]:
    """Ops of each network at all its sizes."""
    recorded: dict[str, list[Op]] = {}
    for model, (network, sizes) in NETWORKS.items():
        for height, batch in sizes:
            image = Image(height, batch)
            network(image)
            recorded.setdefault(model, []).extend(image.ops)
    return recorded
