"""Models whose training steps clusters are drawn from: the workloads, and ten more kinds of architecture.

Each builder returns (model, batch) with a synthetic batch from a fixed seed; nothing is downloaded.
"""

import sys
from pathlib import Path

import tensorflow as tf

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workloads"))

from models import BUILDERS as WORKLOADS
from models import CLASSES


def mobilenet(batch=8, pixels=96):
    """MobileNet v2 (Sandler et al. 2018): depthwise convolutions and inverted bottlenecks."""
    model = tf.keras.applications.MobileNetV2(weights=None, input_shape=(pixels, pixels, 3), classes=CLASSES)
    return model, _images(batch, pixels)


def densenet(batch=4, pixels=64):
    """DenseNet-121 (Huang et al. 2017): concatenations."""
    model = tf.keras.applications.DenseNet121(weights=None, input_shape=(pixels, pixels, 3), classes=CLASSES)
    return model, _images(batch, pixels)


def efficientnet(batch=4, pixels=96):
    """EfficientNet-B0 (Tan & Le 2019): depthwise convolutions, squeeze and excitation, swish."""
    model = tf.keras.applications.EfficientNetB0(weights=None, input_shape=(pixels, pixels, 3), classes=CLASSES)
    return model, _images(batch, pixels)


def gpt(batch=8, length=64, blocks=4, width=320, heads=5, vocabulary=4000):
    """A decoder of masked attention, normalised before each block (Radford et al. 2019), with a token classifier."""
    layers = tf.keras.layers
    tokens = layers.Input((length,), dtype=tf.int32)
    hidden = layers.Embedding(vocabulary, width)(tokens) + layers.Embedding(length, width)(tf.range(length))
    for _ in range(blocks):
        inner = layers.LayerNormalization()(hidden)
        hidden = hidden + layers.MultiHeadAttention(heads, width // heads)(inner, inner, use_causal_mask=True)
        inner = layers.Dense(4 * width, activation=lambda x: tf.nn.gelu(x, approximate=True))(layers.LayerNormalization()(hidden))
        hidden = hidden + layers.Dense(width)(inner)
    hidden = layers.LayerNormalization()(hidden)
    model = tf.keras.Model(tokens, layers.Dense(CLASSES, activation="softmax")(hidden[:, -1]))
    generator = tf.random.Generator.from_seed(1)
    ids = generator.uniform((batch, length), maxval=vocabulary, dtype=tf.int32)
    return model, (ids, generator.uniform((batch,), maxval=CLASSES, dtype=tf.int32))


def lstm(batch=16, length=24, width=256, vocabulary=4000):
    """A word-level language model of two LSTM layers (Hochreiter & Schmidhuber 1997), unrolled."""
    layers = tf.keras.layers
    tokens = layers.Input((length,), dtype=tf.int32)
    hidden = layers.Embedding(vocabulary, width)(tokens)
    for last in (False, True):
        hidden = layers.RNN(layers.LSTMCell(width), return_sequences=not last, unroll=True)(hidden)
    model = tf.keras.Model(tokens, layers.Dense(CLASSES, activation="softmax")(hidden))
    generator = tf.random.Generator.from_seed(1)
    ids = generator.uniform((batch, length), maxval=vocabulary, dtype=tf.int32)
    return model, (ids, generator.uniform((batch,), maxval=CLASSES, dtype=tf.int32))


def mlp_mixer(batch=8, pixels=64, patch=8, width=256, blocks=6):
    """MLP-Mixer (Tolstikhin et al. 2021): matrix products over patches, then over channels."""
    layers = tf.keras.layers
    images = layers.Input((pixels, pixels, 3))
    hidden = layers.Conv2D(width, patch, strides=patch)(images)
    count = (pixels // patch) ** 2
    hidden = layers.Reshape((count, width))(hidden)
    for _ in range(blocks):
        mixed = layers.Permute((2, 1))(layers.LayerNormalization()(hidden))
        mixed = layers.Dense(count)(layers.Dense(2 * count, activation="gelu")(mixed))
        hidden = hidden + layers.Permute((2, 1))(mixed)
        inner = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(hidden))
        hidden = hidden + layers.Dense(width)(inner)
    hidden = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(hidden))
    return tf.keras.Model(images, layers.Dense(CLASSES, activation="softmax")(hidden)), _images(batch, pixels)


def mobilenet_v3(batch=8, pixels=96):
    """MobileNet v3 (Howard et al. 2019): depthwise convolutions of 5 x 5, squeeze and excitation, hard swish."""
    model = tf.keras.applications.MobileNetV3Large(
        weights=None, input_shape=(pixels, pixels, 3), classes=CLASSES, include_preprocessing=False, dropout_rate=0.0
    )
    return model, _images(batch, pixels)


def xception(batch=4, pixels=96):
    """Xception (Chollet 2017): separable convolutions of many channels."""
    model = tf.keras.applications.Xception(weights=None, input_shape=(pixels, pixels, 3), classes=CLASSES)
    return model, _images(batch, pixels)


def convnext(batch=4, pixels=64, widths=(64, 128, 256, 512), depths=(2, 2, 4, 2)):
    """ConvNeXt (Liu et al. 2022): depthwise convolutions of 7 x 7, layer normalisation, products over channels."""
    layers = tf.keras.layers
    images = layers.Input((pixels, pixels, 3))
    hidden = layers.LayerNormalization()(layers.Conv2D(widths[0], 4, strides=4)(images))
    for stage, width in enumerate(widths):
        if stage:
            hidden = layers.Conv2D(width, 2, strides=2)(layers.LayerNormalization()(hidden))
        for _ in range(depths[stage]):
            inner = layers.LayerNormalization()(layers.DepthwiseConv2D(7, padding="same")(hidden))
            hidden = hidden + layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(inner))
    hidden = layers.LayerNormalization()(layers.GlobalAveragePooling2D()(hidden))
    return tf.keras.Model(images, layers.Dense(CLASSES, activation="softmax")(hidden)), _images(batch, pixels)


def unet(batch=2, pixels=128, widths=(16, 32, 64, 128)):
    """U-Net (Ronneberger et al. 2015): convolutions of large images, upwards by transposed ones; a class for each pixel."""
    layers = tf.keras.layers
    images = layers.Input((pixels, pixels, 3))
    hidden, skipped = images, []
    for width in widths:
        skipped.append(_two_convolutions(hidden, width))
        hidden = layers.MaxPool2D()(skipped[-1])
    hidden = _two_convolutions(hidden, 2 * widths[-1])
    for width in reversed(widths):
        hidden = layers.Concatenate()([skipped.pop(), layers.Conv2DTranspose(width, 2, strides=2)(hidden)])
        hidden = _two_convolutions(hidden, width)
    model = tf.keras.Model(images, layers.Conv2D(CLASSES // 10, 1, activation="softmax")(hidden))
    generator = tf.random.Generator.from_seed(1)
    labels = generator.uniform((batch, pixels, pixels), maxval=CLASSES // 10, dtype=tf.int32)
    return model, (generator.normal((batch, pixels, pixels, 3)), labels)


def _two_convolutions(hidden, width):
    layers = tf.keras.layers
    for _ in range(2):
        hidden = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same")(hidden)))
    return hidden


def _images(batch, pixels):
    generator = tf.random.Generator.from_seed(1)
    return generator.normal((batch, pixels, pixels, 3)), generator.uniform((batch,), maxval=CLASSES, dtype=tf.int32)


BUILDERS = {name: WORKLOADS[name] for name in ("resnet50", "vgg16", "inception_v3", "bert")}
BUILDERS.update(mobilenet=mobilenet, densenet=densenet, efficientnet=efficientnet, gpt=gpt, lstm=lstm, mlp_mixer=mlp_mixer)
BUILDERS.update(mobilenet_v3=mobilenet_v3, xception=xception, convnext=convnext, unet=unet)
