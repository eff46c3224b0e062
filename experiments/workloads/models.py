"""The workloads: real architectures, at sizes that step in 0.1-1.5 s on one core.

Each builder returns (model, batch) with a synthetic batch from a fixed seed; nothing is downloaded.
"""

import tensorflow as tf

CLASSES = 100


def resnet50(batch=8, pixels=64):
    """ResNet-50 (He et al. 2015), 23.8 M parameters."""
    model = tf.keras.applications.ResNet50(weights=None, input_shape=(pixels, pixels, 3), classes=CLASSES)
    return model, _images(batch, pixels)


def inception_v3(batch=8, pixels=96):
    """Inception-v3 (Szegedy et al. 2015), 22.0 M parameters."""
    model = tf.keras.applications.InceptionV3(weights=None, input_shape=(pixels, pixels, 3), classes=CLASSES)
    return model, _images(batch, pixels)


def vgg16(batch=8, pixels=64):
    """VGG-16 (Simonyan & Zisserman 2014), half the channels, 2,048 hidden units: 10.2 M parameters, most of them in two tensors."""
    layers = tf.keras.layers
    stack = [layers.Input((pixels, pixels, 3))]
    for channels, count in ((32, 2), (64, 2), (128, 3), (256, 3), (256, 3)):
        stack += [layers.Conv2D(channels, 3, padding="same", activation="relu") for _ in range(count)]
        stack.append(layers.MaxPool2D())
    stack += [layers.Flatten(), layers.Dense(2048, activation="relu"), layers.Dense(2048, activation="relu")]
    stack.append(layers.Dense(CLASSES, activation="softmax"))
    return tf.keras.Sequential(stack), _images(batch, pixels)


def bert(batch=8, length=64, blocks=4, width=384, heads=6, vocabulary=4000):
    """A BERT encoder (Devlin et al. 2018), 4 blocks of width 384, with a token classifier: 10.2 M parameters."""
    layers = tf.keras.layers
    tokens = layers.Input((length,), dtype=tf.int32)
    hidden = layers.Embedding(vocabulary, width)(tokens) + layers.Embedding(length, width)(tf.range(length))
    hidden = layers.LayerNormalization(epsilon=1e-12)(hidden)
    for _ in range(blocks):
        attended = layers.MultiHeadAttention(heads, width // heads)(hidden, hidden)
        hidden = layers.LayerNormalization(epsilon=1e-12)(hidden + attended)
        inner = layers.Dense(4 * width, activation="gelu")(hidden)
        hidden = layers.LayerNormalization(epsilon=1e-12)(hidden + layers.Dense(width)(inner))
    model = tf.keras.Model(tokens, layers.Dense(CLASSES, activation="softmax")(hidden[:, 0]))
    generator = tf.random.Generator.from_seed(1)
    ids = generator.uniform((batch, length), maxval=vocabulary, dtype=tf.int32)
    return model, (ids, generator.uniform((batch,), maxval=CLASSES, dtype=tf.int32))


def many_small(batch=16, blocks=120, width=64):
    """A deep, narrow residual network: 242 small tensors, where the overhead of each collective decides."""
    layers = tf.keras.layers
    inputs = layers.Input((width,))
    hidden = inputs
    for _ in range(blocks):
        hidden = hidden + layers.Dense(width, activation="relu")(hidden) * 0.1
    model = tf.keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(hidden))
    generator = tf.random.Generator.from_seed(1)
    return model, (generator.normal((batch, width)), generator.uniform((batch,), maxval=CLASSES, dtype=tf.int32))


def _images(batch, pixels):
    generator = tf.random.Generator.from_seed(1)
    return generator.normal((batch, pixels, pixels, 3)), generator.uniform((batch,), maxval=CLASSES, dtype=tf.int32)


BUILDERS = {"resnet50": resnet50, "inception_v3": inception_v3, "vgg16": vgg16, "bert": bert, "many_small": many_small}
