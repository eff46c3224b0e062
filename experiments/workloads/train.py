"""Trains one of the workloads with TensorFlow and Horovod, as a user's script would.

    dpro-search collect --framework tensorflow --comm horovod --out T -- python experiments/workloads/train.py --model bert

With DPRO_SEARCH_PLAN set to a folder that `dpro-search export` wrote, the job follows that plan: its tensor groups, op clusters,
precision, recomputation and accumulation.
"""

import argparse
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import horovod.tensorflow as hvd
import tensorflow as tf
from models import BUILDERS

PLAN = os.environ.get("DPRO_SEARCH_PLAN", "")
if PLAN:
    sys.path.insert(0, PLAN)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(BUILDERS), required=True)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--batch", type=int, help="samples per rank (default: the workload's own)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    hvd.init()
    tf.keras.utils.set_random_seed(options.seed)
    model, (inputs, labels) = BUILDERS[options.model](**({"batch": options.batch} if options.batch else {}))
    optimizer = tf.keras.optimizers.Adam(1e-4) if options.model == "bert" else tf.keras.optimizers.SGD(0.01, momentum=0.9)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def train_step():
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(inputs, training=True))
        tape = distributed(tape, model.trainable_variables)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    def gradients_of(inputs, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(inputs, training=True))
        return loss, tape.gradient(loss, model.trainable_variables)

    @tf.function
    def accumulated_step():
        from micro_batches import planned_gradients

        loss, gradients = planned_gradients(gradients_of, inputs, labels)
        optimizer.apply_gradients(zip(averaged(gradients, model.trainable_variables), model.trainable_variables))
        return loss

    if planned("micro_batches.py"):
        train_step = accumulated_step
    if planned("xla.py"):
        from xla import planned_step

        train_step = planned_step(train_step)
    for step in range(options.steps):
        loss = train_step()
        if step == 0:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        if hvd.rank() == 0 and (step < 20 or step % 10 == 0):
            print(f"step {step} loss {float(loss):.6f}", flush=True)


def planned(name):
    """Whether the plan has a helper."""
    return bool(PLAN) and os.path.exists(os.path.join(PLAN, name))


def distributed(tape, variables):
    if not planned("tape.py"):
        return hvd.DistributedGradientTape(tape, sparse_as_dense=True)
    from tape import planned_tape

    return planned_tape(tape, variables)


def averaged(gradients, variables):
    if not planned("tape.py"):
        return [hvd.allreduce(gradient) for gradient in gradients]
    from tape import planned_averages

    return planned_averages(gradients, variables)


if __name__ == "__main__":
    main()
