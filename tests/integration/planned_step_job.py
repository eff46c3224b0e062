"""A TensorFlow training step, as written and under exported plans, in one process: `python planned_step_job.py OUT [FOLDER...]`.

Writes OUT: the nodes of the step's graph, and the losses of the step as written and under each plan, or why it was refused.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import tensorflow as tf

STEPS = 8


def training_step():
    """A fresh model with its optimizer, and its step."""
    tf.keras.utils.set_random_seed(1)
    layers = [tf.keras.layers.Dense(64, name="first"), tf.keras.layers.Dense(10, name="last")]
    norm = tf.keras.layers.BatchNormalization(name="norm")
    optimizer = tf.keras.optimizers.Adam(1e-2)

    @tf.function
    def step(inputs, labels):
        with tf.GradientTape() as tape:
            hidden = norm(layers[0](inputs), training=True)
            with tf.name_scope("block"):
                hidden = tf.tanh(hidden) * 1.5 + tf.nn.softplus(hidden)
            with tf.name_scope("loss"):
                logits = layers[1](hidden)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        variables = [v for layer in (*layers, norm) for v in layer.trainable_variables]
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables))
        return {"loss": loss, "norm": tf.linalg.global_norm(gradients)}

    return step


def trained(step):
    inputs = tf.random.Generator.from_seed(3).normal((32, 48))
    labels = tf.random.Generator.from_seed(4).uniform((32,), maxval=10, dtype=tf.int32)
    returned = [step(inputs, labels=labels) for _ in range(STEPS)]
    return {"losses": [float(one["loss"]) for one in returned], "norms": [float(one["norm"]) for one in returned]}


def planned_step(folder):
    sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location("xla_" + Path(folder).name, Path(folder, "xla.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.planned_step


def main():
    out, folders = Path(sys.argv[1]), sys.argv[2:]
    step = training_step()
    results = {"plain": trained(step)}
    signature = tf.TensorSpec((32, 48)), tf.TensorSpec((32,), tf.int32)
    graph = step.get_concrete_function(signature[0], labels=signature[1]).graph
    results["nodes"] = [[node.name, node.op] for node in graph.as_graph_def().node]
    for folder in folders:
        try:
            results[Path(folder).name] = trained(planned_step(folder)(training_step()))
        except ValueError as error:
            results[Path(folder).name] = {"refused": str(error)}
    out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
