"""A rank of a Keras job: model.fit with Horovod's optimizer, which takes the groups of a plan where there is one."""

import os
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import horovod.tensorflow.keras as hvd
import tensorflow as tf

hvd.init()
tf.keras.utils.set_random_seed(1)
layers = [tf.keras.layers.Dense(64, activation="relu") for _ in range(4)]
model = tf.keras.Sequential([tf.keras.layers.Input((64,)), *layers, tf.keras.layers.Dense(10)])
options = {}
plan = os.environ.get("DPRO_SEARCH_PLAN")
if plan and "ignore" not in sys.argv:
    sys.path.insert(0, plan)
    from tape import planned_groups

    options["groups"] = planned_groups(model.trainable_variables)
model.compile(
    optimizer=hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.01), **options),
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
inputs, labels = tf.random.normal((32 * 12, 64)), tf.zeros((32 * 12,), tf.int32)
history = tf.keras.callbacks.LambdaCallback(on_batch_end=lambda batch, logs: print(f"loss {logs['loss']:.6f}", flush=True))
model.fit(
    inputs, labels, batch_size=32, epochs=1, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), history]
)
