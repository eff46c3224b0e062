"""A rank of a TensorFlow + Horovod job under the plan in DPRO_SEARCH_PLAN; each rank has another order of its sets of strings.

Two branches of each block can be computed again in any order, so what a rewrite of the step takes from a set's order shows: ranks
that do not agree on the names of their tensors wait for each other for ever, which this job does not. With GRAPH_TO set to a
folder, a rank leaves the names of the ops of the graph that its step ran, a line each, in `GRAPH_TO/rank<r>`.
"""

import faulthandler
import os
import sys
import time
from pathlib import Path

RANK = os.environ["HOROVOD_RANK"]
if os.environ.get("PYTHONHASHSEED") != str(int(RANK) + 1):
    os.environ["PYTHONHASHSEED"] = str(int(RANK) + 1)
    os.execv(sys.executable, [sys.executable, *sys.argv])

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import horovod.tensorflow as hvd
import tensorflow as tf

PLAN = os.environ.get("DPRO_SEARCH_PLAN", "")
if PLAN:
    sys.path.insert(0, PLAN)
GIVE_UP_S = 150
BLOCKS = 6
STEPS = 20


def main():
    faulthandler.dump_traceback_later(GIVE_UP_S, exit=True)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    hvd.init()
    tf.keras.utils.set_random_seed(1)
    left = [tf.keras.layers.Dense(32, name=f"left_{i}") for i in range(BLOCKS)]
    right = [tf.keras.layers.Dense(32, name=f"right_{i}") for i in range(BLOCKS)]
    last = tf.keras.layers.Dense(10, name="last")
    optimizer = tf.keras.optimizers.Adam(1e-3)
    inputs = tf.random.Generator.from_seed(3 + hvd.rank()).normal((32, 32))
    labels = tf.random.Generator.from_seed(7 + hvd.rank()).uniform((32,), maxval=10, dtype=tf.int32)

    def loss_of(inputs, labels):
        hidden = inputs
        for i in range(BLOCKS):
            with tf.name_scope(f"block_{i}"):
                hidden = tf.tanh(left[i](hidden)) + tf.math.sigmoid(right[i](hidden))
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, last(hidden)))

    def variables():
        return [v for layer in (*left, *right, last) for v in layer.trainable_variables]

    def gradients_of(inputs, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(inputs, labels)
        return loss, tape.gradient(loss, variables())

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = loss_of(inputs, labels)
        if planned("tape.py"):
            from tape import planned_tape

            tape = planned_tape(tape, variables())
        else:
            tape = hvd.DistributedGradientTape(tape)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables()), variables()))
        return loss

    @tf.function
    def step_in_parts():
        from micro_batches import planned_gradients

        loss, gradients = planned_gradients(gradients_of, inputs, labels)
        if planned("tape.py"):
            from tape import planned_averages

            gradients = planned_averages(gradients, variables())
        else:
            gradients = [hvd.allreduce(gradient) for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, variables()))
        return loss

    if planned("micro_batches.py"):
        step = step_in_parts
    if planned("xla.py"):
        from xla import planned_step

        step = planned_step(step)
    for number in range(STEPS):
        print(f"step {number} loss {float(step()).hex()}", flush=True)
    if "GRAPH_TO" in os.environ:
        (ran,) = step._planned.values() if planned("xla.py") else [step]
        names = [node.name for node in ran.get_concrete_function().graph.as_graph_def().node]
        Path(os.environ["GRAPH_TO"], f"rank{RANK}").write_text("\n".join(names))
        time.sleep(1)  # Horovod ends without writing what its timeline's thread has not written yet
    faulthandler.cancel_dump_traceback_later()


def planned(name):
    """Whether the plan has a helper."""
    return bool(PLAN) and Path(PLAN, name).exists()


if __name__ == "__main__":
    main()
