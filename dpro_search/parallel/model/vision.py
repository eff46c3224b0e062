"""Convolutional networks by name: classifiers, detectors and segmentation networks of the papers and of torchvision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dpro_search.parallel.model.network import Network, NetworkBuilder, Tensor

IMAGE = 224


def resnet(
    name: str,
    depths: Sequence[int] = (3, 4, 6, 3),
    *,
    groups: int = 1,
    width: int = 64,
    squeezed: bool = False,
    classes: int = 1000,
    image: int = IMAGE,
) -> Network:
    """He et al. 2016 with the stride in the 3 x 3 convolution (version 1.5); groups above 1: ResNeXt (Xie et al. 2017)."""
    net = NetworkBuilder(name)
    *_, last = _resnet_stages(net, Tensor("", 3, (image, image)), depths, groups, width, squeezed)
    return _classified(net, last, classes)


def _classified(net: NetworkBuilder, source: Tensor, classes: int) -> Network:
    x = net.pooled(net.open("head", source))
    net.loss(net.linear(x, classes, name="head"))
    return net.network()


def _resnet_stages(
    net: NetworkBuilder,
    source: Tensor,
    depths: Sequence[int],
    groups: int = 1,
    width: int = 64,
    squeezed: bool = False,
    last_stride: int = 2,
    frozen: int = 0,
) -> list[Tensor]:
    """Stem and stages; of `frozen` stages, the stem among them, nothing is trained."""
    net.frozen = frozen > 0
    x = net.open("stem", source)
    x = net.pool(net.conv_norm(x, 64, 7, stride=2), 3, stride=2, padding=1)
    stages = []
    for stage, depth in enumerate(depths):
        net.frozen = stage + 1 < frozen
        stride = 1 if not stage else last_stride if stage == len(depths) - 1 else 2
        for number in range(depth):
            x = net.open(f"stage{stage + 1}.{number + 1}", x)
            x = _bottleneck(net, x, 64 * 2**stage, groups, width, stride if not number else 1, squeezed)
        stages.append(x)
    return stages


def _bottleneck(net: NetworkBuilder, x: Tensor, planes: int, groups: int, width: int, stride: int, squeezed: bool) -> Tensor:
    inner, outer = planes * width // 64 * groups, 4 * planes
    y = net.conv_norm(x, inner, 1)
    y = net.conv_norm(y, inner, 3, stride=stride, groups=groups)
    if stride > 1 or x.channels != outer:
        x = net.norm(net.conv(x, outer, 1, stride=stride))
    y = net.conv(y, outer, 1)
    if squeezed:
        return net.add(x, net.scaled(net.norm(y), outer // 16))
    return net.norm(y, x)


def vgg(name: str, depths: Sequence[int], *, classes: int = 1000, image: int = IMAGE) -> Network:
    """Simonyan and Zisserman 2014: stages of 3 x 3 convolutions with bias and no norm, three fully connected layers."""
    net = NetworkBuilder(name)
    x = Tensor("", 3, (image, image))
    for stage, (depth, channels) in enumerate(zip(depths, (64, 128, 256, 512, 512), strict=True)):
        x = net.open(f"stage{stage + 1}", x)
        for _ in range(depth):
            x = net.activation(net.conv(x, channels, bias=True))
        x = net.pool(x)
    return _three_linear(net, x, classes)


def _three_linear(net: NetworkBuilder, x: Tensor, classes: int) -> Network:
    for number in (1, 2):
        x = net.activation(net.linear(net.open(f"linear{number}", x), 4096))
    net.loss(net.linear(net.open("head", x), classes, name="head"))
    return net.network()


def alexnet(name: str = "alexnet", *, classes: int = 1000, image: int = IMAGE) -> Network:
    """Krizhevsky 2014 ("one weird trick"), as torchvision has it."""
    net = NetworkBuilder(name)
    x = net.open("features", Tensor("", 3, (image, image)))
    x = net.pool(net.activation(net.conv(x, 64, 11, stride=4, padding=2, bias=True)), 3, stride=2)
    x = net.pool(net.activation(net.conv(x, 192, 5, bias=True)), 3, stride=2)
    for channels in (384, 256, 256):
        x = net.activation(net.conv(x, channels, bias=True))
    return _three_linear(net, net.pooled(net.pool(x, 3, stride=2), 6), classes)


def inception_v3(name: str = "inception-v3", *, classes: int = 1000) -> Network:
    """Szegedy et al. 2016 for images of 299 x 299, without the auxiliary classifier."""
    net = NetworkBuilder(name)
    x = net.open("stem", Tensor("", 3, (299, 299)))
    x = net.conv_norm(x, 32, 3, stride=2, padding=0)
    x = net.pool(net.conv_norm(net.conv_norm(x, 32, 3, padding=0), 64), 3, stride=2)
    x = net.pool(net.conv_norm(net.conv_norm(x, 80, 1), 192, 3, padding=0), 3, stride=2)
    for number, pooled in enumerate((32, 64, 64)):
        x = net.open(f"a{number}", x)
        double = net.conv_norm(net.conv_norm(net.conv_norm(x, 64, 1), 96), 96)
        around = net.conv_norm(net.pool(x, 3, stride=1, padding=1), pooled, 1)
        x = net.joined(net.conv_norm(x, 64, 1), net.conv_norm(net.conv_norm(x, 48, 1), 64, 5), double, around)
    x = net.open("b", x)
    double = net.conv_norm(net.conv_norm(net.conv_norm(x, 64, 1), 96), 96, 3, stride=2, padding=0)
    x = net.joined(net.conv_norm(x, 384, 3, stride=2, padding=0), double, net.pool(x, 3, stride=2))
    for number, inner in enumerate((128, 160, 160, 192)):
        x = net.open(f"c{number}", x)
        seven = net.conv_norm(net.conv_norm(net.conv_norm(x, inner, 1), inner, (1, 7)), 192, (7, 1))
        double = net.conv_norm(x, inner, 1)
        for channels, window in ((inner, (7, 1)), (inner, (1, 7)), (inner, (7, 1)), (192, (1, 7))):
            double = net.conv_norm(double, channels, window)
        around = net.conv_norm(net.pool(x, 3, stride=1, padding=1), 192, 1)
        x = net.joined(net.conv_norm(x, 192, 1), seven, double, around)
    x = net.open("d", x)
    three = net.conv_norm(net.conv_norm(x, 192, 1), 320, 3, stride=2, padding=0)
    seven = net.conv_norm(net.conv_norm(net.conv_norm(x, 192, 1), 192, (1, 7)), 192, (7, 1))
    x = net.joined(three, net.conv_norm(seven, 192, 3, stride=2, padding=0), net.pool(x, 3, stride=2))
    for number in range(2):
        x = net.open(f"e{number}", x)
        three, double = net.conv_norm(x, 384, 1), net.conv_norm(net.conv_norm(x, 448, 1), 384)
        wide = [net.conv_norm(each, 384, window) for each in (three, double) for window in ((1, 3), (3, 1))]
        around = net.conv_norm(net.pool(x, 3, stride=1, padding=1), 192, 1)
        x = net.joined(net.conv_norm(x, 320, 1), *wide, around)
    return _classified(net, x, classes)


def efficientnet_b0(name: str = "efficientnet-b0", *, classes: int = 1000, image: int = IMAGE) -> Network:
    """Tan and Le 2019: inverted bottlenecks with depthwise convolutions, squeeze and excitation."""
    net = NetworkBuilder(name)
    x = net.conv_norm(net.open("stem", Tensor("", 3, (image, image))), 32, 3, stride=2)
    stages = (
        (1, 3, 1, 16, 1),
        (6, 3, 2, 24, 2),
        (6, 5, 2, 40, 2),
        (6, 3, 2, 80, 3),
        (6, 5, 1, 112, 3),
        (6, 5, 2, 192, 4),
        (6, 3, 1, 320, 1),
    )
    for stage, (expansion, window, stride, channels, depth) in enumerate(stages):
        for number in range(depth):
            source = x = net.open(f"stage{stage + 1}.{number + 1}", x)
            inner = x.channels * expansion
            if expansion > 1:
                x = net.conv_norm(x, inner, 1)
            x = net.conv_norm(x, inner, window, stride=stride if not number else 1, groups=inner)
            x = net.norm(net.conv(net.scaled(x, source.channels // 4), channels, 1))
            if number:
                x = net.add(source, x)
    return _classified(net, net.conv_norm(net.open("top", x), 1280, 1), classes)


def _pyramid(net: NetworkBuilder, levels: Sequence[Tensor]) -> list[Tensor]:
    """Feature pyramid (Lin et al. 2017): each level with what is above it, 256 channels."""
    net.open("pyramid", levels[-1])
    outputs: list[Tensor] = []
    above: Tensor | None = None
    for level in reversed(levels):
        lateral = net.conv(level, 256, 1, bias=True)
        above = lateral if above is None else net.add(lateral, net.upsampled(above, lateral.extent))
        outputs.append(net.conv(above, 256, bias=True))
    return outputs[::-1]


def retinanet(name: str, *, groups: int = 1, width: int = 64, classes: int = 91, image: Sequence[int] = (800, 800)) -> Network:
    """Lin et al. 2017 on a ResNet-50 or ResNeXt-50 with frozen norms: two towers over five levels, nine anchors a position."""
    net = NetworkBuilder(name, norm_weight=False)
    stages = _resnet_stages(net, Tensor("", 3, tuple(image)), (3, 4, 6, 3), groups, width, frozen=2)
    levels = _pyramid(net, stages[1:])
    levels.append(net.conv(levels[-1], 256, stride=2, bias=True))
    levels.append(net.conv(net.activation(levels[-1]), 256, stride=2, bias=True))
    net.open("towers", levels[0])
    made = []
    for number, level in enumerate(levels):
        for outputs in (9 * classes, 9 * 4):
            x = level
            for _ in range(4):
                x = net.activation(net.conv(x, 256, bias=True, shared=number > 0))
            made.append(net.conv(x, outputs, bias=True, shared=number > 0))
    net.loss(*made)
    return net.network()


def mask_rcnn(
    name: str = "mask-rcnn", *, classes: int = 91, image: Sequence[int] = (800, 1344), boxes: int = 512, masks: int = 128
) -> Network:
    """He et al. 2017 on a ResNet-50 with frozen norms and a pyramid: proposals, and heads over `boxes` and `masks` of them."""
    net = NetworkBuilder(name, norm_weight=False)
    levels = _pyramid(net, _resnet_stages(net, Tensor("", 3, tuple(image)), (3, 4, 6, 3), frozen=2))
    levels.append(net.pool(levels[-1], 1, stride=2))
    net.open("proposals", levels[0])
    proposed = []
    for number, level in enumerate(levels):
        x = net.activation(net.conv(level, 256, bias=True, shared=number > 0))
        proposed += [net.conv(x, outputs, 1, bias=True, shared=number > 0) for outputs in (3, 12)]
    net.loss(*proposed)
    x = net.open("boxes", Tensor("", 256 * 7 * 7, (boxes,)))
    x = net.activation(net.linear(x, 1024, rows=boxes))
    x = net.activation(net.linear(x, 1024, rows=boxes))
    net.loss(net.linear(x, classes, rows=boxes), net.linear(x, 4 * classes, rows=boxes))
    x = net.open("masks", Tensor("", 256, (14 * masks, 14)))
    for _ in range(4):
        x = net.activation(net.conv(x, 256, bias=True))
    x = net.activation(net.transposed(x, 256, bias=True))
    net.loss(net.conv(x, classes, 1, bias=True))
    return net.network()


def ssd300(name: str = "ssd300", *, classes: int = 81) -> Network:
    """Liu et al. 2016 for images of 300 x 300 on a ResNet-50 up to its third stage, whose stride is 1 (Deep Learning Examples)."""
    net = NetworkBuilder(name)
    x = _resnet_stages(net, Tensor("", 3, (300, 300)), (3, 4, 6), last_stride=1)[-1]
    levels = [x]
    for number, (inner, outer, stride, padding) in enumerate(
        ((256, 512, 2, 1), (256, 512, 2, 1), (128, 256, 2, 1), (128, 256, 1, 0), (128, 256, 1, 0))
    ):
        x = net.conv_norm(net.open(f"extra{number + 1}", x), inner, 1)
        x = net.conv_norm(x, outer, 3, stride=stride, padding=padding)
        levels.append(x)
    net.open("heads", levels[0])
    anchors = (4, 6, 6, 6, 4, 4)
    made = [
        net.conv(level, count * outputs, bias=True)
        for level, count in zip(levels, anchors, strict=True)
        for outputs in (4, classes)
    ]
    net.loss(*made)
    return net.network()


def unet(
    name: str,
    extent: Sequence[int],
    channels: Sequence[int],
    *,
    inputs: int = 1,
    classes: int = 2,
    instances: bool = False,
    supervised: int = 0,
) -> Network:
    """Ronneberger et al. 2015, Cicek et al. 2016: two convolutions a level down and up, skips between; `extent` in 2 or 3 dims.

    `supervised` counts further levels whose output has a loss (deep supervision of nnU-Net, Isensee et al. 2021).
    """
    net = NetworkBuilder(name, instances=instances)

    def double(x: Tensor, wide: int, stride: int) -> Tensor:
        for step in (stride, 1):
            x = net.conv_norm(x, wide, stride=step)
        return x

    x = Tensor("", inputs, tuple(extent))
    skips = []
    for level, wide in enumerate(channels):
        x = double(net.open(f"down{level}", x), wide, 1 if not level else 2)
        skips.append(x)
    made = []
    for level in range(len(channels) - 2, -1, -1):
        x = net.open(f"up{level}", x)
        x = double(net.joined(net.transposed(x, channels[level]), skips[level]), channels[level], 1)
        if level and level <= supervised:
            net.loss(net.conv(x, classes, 1, bias=True))
    made.append(net.conv(net.open("head", x), classes, 1, bias=True))
    net.loss(*made)
    return net.network()


def _activated(net: NetworkBuilder, x: Tensor, wide: Sequence[int], *, padding: int | None = None) -> Tensor:
    """Convolutions of 3 x 3 with so many channels, each with a bias and an activation."""
    for channels in wide:
        x = net.activation(net.conv(x, channels, padding=padding, bias=True))
    return x


def medical_unet(name: str) -> Network:
    """Ronneberger et al. 2015 as in NVIDIA/DeepLearningExamples (TensorFlow/Segmentation/UNet_Medical): unpadded, without norms."""
    net = NetworkBuilder(name)

    def activated(x: Tensor, channels: int) -> Tensor:
        return _activated(net, x, (channels, channels), padding=0)

    x = Tensor("", 1, (572, 572))
    skips: list[Tensor] = []
    for level, channels in enumerate((64, 128, 256, 512)):
        skips.append(activated(net.open(f"down{level}", x), channels))
        x = net.pool(skips[-1])
    x = activated(net.open("bottleneck", x), 1024)
    for level in range(len(skips) - 1, -1, -1):
        raised = net.activation(net.transposed(net.open(f"up{level}", x), skips[level].channels, bias=True))
        x = activated(net.joined(raised, replace(skips[level], extent=raised.extent)), raised.channels)  # the skip is cropped
    net.loss(net.conv(net.open("head", x), 2, 1, bias=True))
    return net.network()


def industrial_unet(name: str) -> Network:
    """The small U-Net for industrial defects of NVIDIA/DeepLearningExamples (TensorFlow/Segmentation/UNet_Industrial, "tinyUNet").

    Levels are pooled, and copied to four times the positions before a 2 x 2 convolution on the way up.
    """
    net = NetworkBuilder(name)

    def activated(x: Tensor, *wide: int) -> Tensor:
        return _activated(net, x, wide)

    def raised(x: Tensor, channels: int) -> Tensor:
        wider = net.upsampled(x, tuple(2 * size for size in x.extent))
        return net.activation(net.conv(wider, channels, 2, padding=0, bias=True))

    x = Tensor("", 1, (512, 512))
    skips: list[Tensor] = []
    for level, wide in enumerate((32, 32, 64, 128)):
        skips.append(activated(net.open(f"down{level}", x), wide, wide))
        x = net.pool(skips[-1])
    x = raised(activated(net.open("bottleneck", x), 256, 256), 128)
    for level, wide in ((3, 128), (2, 64), (1, 32)):
        joined = net.joined(skips[level], net.open(f"up{level}", x))
        x = raised(activated(joined, wide, wide // 2), wide // 2)
    x = activated(net.joined(skips[0], net.open("head", x)), 32, 32)
    net.loss(net.conv(x, 1, 1, bias=True))
    return net.network()


def vnet(name: str, *, classes: int = 3, depth: int = 3) -> Network:
    """Milletari et al. 2016 as in NVIDIA/DeepLearningExamples (TensorFlow/Segmentation/VNet): residual blocks, no skip on top."""
    net = NetworkBuilder(name, instances=True)

    def residual(x: Tensor) -> Tensor:
        y = x
        for _ in range(depth):
            y = net.norm(net.conv(y, x.channels, bias=True))
        return net.add(y, x)

    x = net.open("stem", Tensor("", 1, (32, 32, 32)))
    x = net.norm(net.conv(x, 16, bias=True))
    skips = []
    for level in range(3):
        skips.append(x)
        x = net.open(f"down{level}", x)
        x = residual(net.norm(net.conv(x, 2 * x.channels, 2, stride=2, padding=0, bias=True)))
    for level in (2, 1):
        x = net.norm(net.transposed(net.open(f"up{level}", x), skips[level].channels, bias=True))
        x = residual(net.joined(x, skips[level]))
    x = net.norm(net.transposed(net.open("head", x), skips[0].channels, bias=True))
    net.loss(net.conv(x, classes, bias=True))
    return net.network()
