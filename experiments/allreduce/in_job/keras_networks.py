"""Networks of keras.applications: `python keras_networks.py shapes OUT.json`, `python keras_networks.py time NETWORK BATCH STEPS`.

`shapes` writes, for each network at its published input, every trainable tensor in the order of the forward pass: its shape and the
multiplications of its use for one image. `time` trains on one thread with a synthetic batch and prints the seconds of each step.
"""

import json
import math
import sys
import time

from tensorflow_waits import set_threads, tf

_BUILDERS = {
    "nasnet-large": (tf.keras.applications.NASNetLarge, 331),
    "resnet-50": (tf.keras.applications.ResNet50, 224),
    "mobilenet": (tf.keras.applications.MobileNet, 224),
}


def shapes():
    networks = {}
    for name, (build, pixels) in _BUILDERS.items():
        model = build(weights=None)
        tensors, seen = [], set()
        for layer in model.layers:
            for weight in layer.trainable_weights:
                if id(weight) in seen:
                    continue
                seen.add(id(weight))
                shape = weight.shape.as_list()
                tensors.append([shape, math.prod(shape) * _places(layer) if len(shape) > 1 else 0])
        assert sum(math.prod(shape) for shape, _ in tensors) == sum(math.prod(each.shape) for each in model.trainable_weights)
        networks[name] = {"pixels": pixels, "tensors": tensors}
    return {"origin": "keras.applications, TensorFlow %s" % tf.__version__, "networks": networks}


def _places(layer):
    """At how many places of an image a kernel is used."""
    shape = layer.output_shape
    return shape[1] * shape[2] if len(shape) == 4 else 1


def timed(name, batch, steps):
    set_threads()
    build, pixels = _BUILDERS[name]
    model = build(weights=None)
    images, labels = tf.random.normal((batch, pixels, pixels, 3)), tf.zeros((batch,), tf.int32)
    loss_of, optimizer = tf.keras.losses.SparseCategoricalCrossentropy(), tf.keras.optimizers.SGD(0.01)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

    step()
    found = []
    for _ in range(steps):
        begun = time.monotonic()
        step().numpy()
        found.append(time.monotonic() - begun)
    return {"seconds": found, "version": "tensorflow " + tf.__version__}


if __name__ == "__main__":
    if sys.argv[1] == "shapes":
        with open(sys.argv[2], "w") as file:
            json.dump(shapes(), file, separators=(",", ":"))
    else:
        print(json.dumps(timed(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
