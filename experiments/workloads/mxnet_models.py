"""The workloads in Gluon: the architectures of `models.py`, at the same sizes.

Each builder returns (network, inputs, labels) with a synthetic batch from a fixed seed; nothing is downloaded.
"""

import mxnet as mx
from mxnet.gluon import nn
from mxnet.gluon.model_zoo import vision

CLASSES = 100


def resnet50(batch=8, pixels=64):
    """ResNet-50 (He et al. 2015), 23.7 M parameters."""
    return vision.resnet50_v1(classes=CLASSES), *_images(batch, pixels)


def vgg16(batch=8, pixels=64):
    """VGG-16 (Simonyan & Zisserman 2014), half the channels, 2,048 hidden units: 10.2 M parameters, most of them in two tensors."""
    net = nn.HybridSequential()
    for width, count in ((32, 2), (64, 2), (128, 3), (256, 3), (256, 3)):
        for _ in range(count):
            net.add(nn.Conv2D(width, 3, padding=1, activation="relu"))
        net.add(nn.MaxPool2D())
    net.add(nn.Flatten(), nn.Dense(2048, activation="relu"), nn.Dense(2048, activation="relu"), nn.Dense(CLASSES))
    return net, *_images(batch, pixels)


def _images(batch, pixels):
    mx.random.seed(1)
    return mx.nd.random.normal(shape=(batch, 3, pixels, pixels)), mx.nd.random.randint(0, CLASSES, (batch,)).astype("float32")


BUILDERS = {"resnet50": resnet50, "vgg16": vgg16}
