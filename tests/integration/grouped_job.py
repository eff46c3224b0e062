"""A rank of a small training job: two variables of one name, a sparse gradient, a variable without gradient.

    python grouped_job.py HOW OUT      HOW: plain, optimizer or planned

Writes OUT/rank<r>.json: the recorded gradient names and the weights after a few steps.
"""

import json
import os
import sys
import time
from pathlib import Path

how, out = sys.argv[1], Path(sys.argv[2])
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import horovod.tensorflow as hvd
import tensorflow as tf
from dpro_search_gradients import record_gradient_names, recorded

hvd.init()
record_gradient_names()
rank = hvd.rank()
variables = [tf.Variable(tf.fill((40, 8), 0.1), name="embedding")]
variables += [tf.Variable(tf.eye(8) * (1 + i / 10), name="twin" if i < 2 else f"layer{i}") for i in range(6)]
variables.append(tf.Variable(tf.zeros(8), name="unused"))
rows = tf.constant([1, 2, 3 + rank])
labels = tf.fill((3, 8), 0.5 + rank)


def loss_of():
    hidden = tf.nn.embedding_lookup(variables[0], rows)
    for weights in variables[1:7]:
        hidden = tf.matmul(hidden, weights)
    return tf.reduce_mean((hidden - labels) ** 2)


optimizer = tf.keras.optimizers.SGD(0.05)
if how == "optimizer":
    import horovod.tensorflow.keras as keras_hvd

    optimizer = keras_hvd.DistributedOptimizer(optimizer, sparse_as_dense=True)


@tf.function
def step():
    with tf.GradientTape() as tape:
        loss = loss_of()
    if how == "planned":
        from tape import planned_tape

        tape = planned_tape(tape, variables)
    elif how == "plain":
        tape = hvd.DistributedGradientTape(tape, sparse_as_dense=True)
    if how == "optimizer":
        optimizer.minimize(loss, variables, tape=tape)
    else:
        pairs = zip(tape.gradient(loss, variables), variables)
        optimizer.apply_gradients([(gradient, variable) for gradient, variable in pairs if gradient is not None])
    return loss


losses = [float(step()) for _ in range(5)]
weights = [variable.numpy().tolist() for variable in variables]
(out / f"rank{rank}.json").write_text(json.dumps({"gradients": recorded(), "losses": losses, "weights": weights}))
time.sleep(1)  # Horovod ends without writing what its timeline's thread has not written yet
