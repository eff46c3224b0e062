"""The workloads in Gluon: the architectures of `models.py`, at the same sizes.

Each builder returns (network, inputs, labels) with a synthetic batch from a fixed seed; nothing is downloaded.
"""

import mxnet as mx
from mxnet import gluon
from mxnet.gluon import nn
from mxnet.gluon.model_zoo import vision

CLASSES = 100


def resnet50(batch=8, pixels=64):
    """ResNet-50 (He et al. 2015), 23.7 M parameters."""
    return vision.resnet50_v1(classes=CLASSES), *_images(batch, pixels)


class _Branches(gluon.HybridBlock):
    """Branches side by side, joined along the channels."""

    def __init__(self, *branches):
        super().__init__()
        self.branches = branches
        for branch in branches:
            self.register_child(branch)

    def hybrid_forward(self, ops, hidden):
        return ops.concat(*[branch(hidden) for branch in self.branches], dim=1)


def _conv(channels, size, stride=1):
    """Convolution, batch normalisation and ReLU; `size` is a side or (height, width)."""
    padding = tuple(side // 2 for side in size) if isinstance(size, tuple) else size // 2
    return _chain(nn.Conv2D(channels, size, stride, padding, use_bias=False), nn.BatchNorm(), nn.Activation("relu"))


def _chain(*blocks):
    chain = nn.HybridSequential()
    chain.add(*blocks)
    return chain


def _pooled(channels):
    return _chain(nn.AvgPool2D(3, 1, 1), _conv(channels, 1))


def _inception_a(pooled):
    five = _chain(_conv(48, 1), _conv(64, 5))
    three = _chain(_conv(64, 1), _conv(96, 3), _conv(96, 3))
    return _Branches(_conv(64, 1), five, three, _pooled(pooled))


def _reduction_a():
    three = _chain(_conv(64, 1), _conv(96, 3), _conv(96, 3, stride=2))
    return _Branches(_conv(384, 3, stride=2), three, nn.MaxPool2D(3, 2, 1))


def _inception_b(width):
    once = _chain(_conv(width, 1), _conv(width, (1, 7)), _conv(192, (7, 1)))
    twice = _chain(_conv(width, 1), _conv(width, (7, 1)), _conv(width, (1, 7)), _conv(width, (7, 1)), _conv(192, (1, 7)))
    return _Branches(_conv(192, 1), once, twice, _pooled(192))


def _reduction_b():
    three = _chain(_conv(192, 1), _conv(320, 3, stride=2))
    seven = _chain(_conv(192, 1), _conv(192, (1, 7)), _conv(192, (7, 1)), _conv(192, 3, stride=2))
    return _Branches(three, seven, nn.MaxPool2D(3, 2, 1))


def _inception_c():
    def split():
        return _Branches(_conv(384, (1, 3)), _conv(384, (3, 1)))

    return _Branches(_conv(320, 1), _chain(_conv(384, 1), split()), _chain(_conv(448, 1), _conv(384, 3), split()), _pooled(192))


def inception_v3(batch=8, pixels=96):
    """Inception-v3 (Szegedy et al. 2015) without its auxiliary classifier, 22.0 M parameters in 284 tensors."""
    net = nn.HybridSequential()
    net.add(_conv(32, 3, stride=2), _conv(32, 3), _conv(64, 3), nn.MaxPool2D(3, 2))
    net.add(_conv(80, 1), _conv(192, 3), nn.MaxPool2D(3, 2))
    net.add(*(_inception_a(pooled) for pooled in (32, 64, 64)), _reduction_a())
    net.add(*(_inception_b(width) for width in (128, 160, 160, 192)), _reduction_b(), _inception_c(), _inception_c())
    net.add(nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(CLASSES))
    return net, *_images(batch, pixels)


def vgg16(batch=8, pixels=64):
    """VGG-16 (Simonyan & Zisserman 2014), half the channels, 2,048 hidden units: 10.2 M parameters, most of them in two tensors."""
    net = nn.HybridSequential()
    for width, count in ((32, 2), (64, 2), (128, 3), (256, 3), (256, 3)):
        for _ in range(count):
            net.add(nn.Conv2D(width, 3, padding=1, activation="relu"))
        net.add(nn.MaxPool2D())
    net.add(nn.Flatten(), nn.Dense(2048, activation="relu"), nn.Dense(2048, activation="relu"), nn.Dense(CLASSES))
    return net, *_images(batch, pixels)


class _Attention(gluon.HybridBlock):
    """Self-attention of several heads."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        with self.name_scope():
            self.projected = nn.Dense(3 * width, flatten=False)
            self.joined = nn.Dense(width, flatten=False)

    def hybrid_forward(self, ops, hidden):
        parts = ops.reshape(self.projected(hidden), (0, 0, 3 * self.heads, -1)).transpose((0, 2, 1, 3))
        query, key, value = (ops.reshape(part, (-3, 0, 0)) for part in ops.split(parts, num_outputs=3, axis=1))
        weights = ops.softmax(ops.batch_dot(query, key, transpose_b=True) * self.scale)
        read = ops.reshape(ops.batch_dot(weights, value), (-4, -1, self.heads, 0, 0))
        return self.joined(ops.reshape(read.transpose((0, 2, 1, 3)), (0, 0, -3)))


class _Encoder(gluon.HybridBlock):
    """A block of the encoder, normalised after each of its two sums."""

    def __init__(self, width, heads):
        super().__init__()
        with self.name_scope():
            self.attention, self.attended = _Attention(width, heads), nn.LayerNorm()
            self.inner, self.gelu = nn.Dense(4 * width, flatten=False), nn.GELU()
            self.outer, self.norm = nn.Dense(width, flatten=False), nn.LayerNorm()

    def hybrid_forward(self, ops, hidden):
        hidden = self.attended(hidden + self.attention(hidden))
        return self.norm(hidden + self.outer(self.gelu(self.inner(hidden))))


class _Bert(gluon.HybridBlock):
    def __init__(self, length, blocks, width, heads, vocabulary):
        super().__init__()
        with self.name_scope():
            self.tokens = nn.Embedding(vocabulary, width)
            self.positions = self.params.get("positions", shape=(1, length, width))
            self.norm = nn.LayerNorm(epsilon=1e-12)
            self.encoder = _chain(*(_Encoder(width, heads) for _ in range(blocks)))
            self.classifier = nn.Dense(CLASSES)

    def hybrid_forward(self, ops, ids, positions):
        hidden = self.encoder(self.norm(ops.broadcast_add(self.tokens(ids), positions)))
        return self.classifier(ops.slice_axis(hidden, axis=1, begin=0, end=1))


def bert(batch=8, length=64, blocks=4, width=384, heads=6, vocabulary=4000):
    """A BERT encoder (Devlin et al. 2018), 4 blocks of width 384, with a token classifier: 8.7 M parameters."""
    mx.random.seed(1)
    ids, labels = mx.nd.random.randint(0, vocabulary, (batch, length)), mx.nd.random.randint(0, CLASSES, (batch,))
    return _Bert(length, blocks, width, heads, vocabulary), ids, labels.astype("float32")


def _images(batch, pixels):
    mx.random.seed(1)
    return mx.nd.random.normal(shape=(batch, 3, pixels, pixels)), mx.nd.random.randint(0, CLASSES, (batch,)).astype("float32")


BUILDERS = {"resnet50": resnet50, "inception_v3": inception_v3, "vgg16": vgg16, "bert": bert}
