"""A training step in graph mode, as written and under an exported plan: `python graph_mode_job.py OUT [FOLDER]`.

Writes OUT: the nodes of the graph, and the losses of the step as written and, with a FOLDER, under its plan.
"""

import json
import os
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import numpy as np
import tensorflow.compat.v1 as tf

STEPS = 8


def definition():
    """A model, its gradients and updates."""
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(1)
        inputs = tf.placeholder(tf.float32, (32, 48), name="inputs")
        first = tf.get_variable("first", (48, 64), use_resource=True)
        last = tf.get_variable("last", (64, 10), use_resource=True)
        with tf.name_scope("block"):
            hidden = tf.matmul(inputs, first)
            hidden = tf.tanh(hidden) * 1.5 + tf.nn.softplus(hidden)
        loss = tf.reduce_mean(tf.square(tf.matmul(hidden, last) - 1.0), name="loss")
        tf.train.GradientDescentOptimizer(0.05).minimize(loss, name="train")
        tf.global_variables_initializer()
        return graph.as_graph_def()


def trained(graph_def, config):
    with tf.Graph().as_default():
        tf.import_graph_def(graph_def, name="")
        inputs = np.random.default_rng(3).normal(size=(32, 48))
        with tf.Session(config=config) as session:
            session.run("init")
            return [float(session.run(["loss:0", "train"], {"inputs:0": inputs})[0]) for _ in range(STEPS)]


def main():
    tf.disable_eager_execution()
    out, folders = Path(sys.argv[1]), sys.argv[2:]
    graph_def = definition()
    results = {"nodes": [[node.name, node.op] for node in graph_def.node], "plain": trained(graph_def, tf.ConfigProto())}
    for folder in folders:
        sys.path.insert(0, folder)
        from xla import planned_config, planned_graph_def

        results["planned"] = trained(planned_graph_def(graph_def), planned_config(tf.ConfigProto()))
    out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
