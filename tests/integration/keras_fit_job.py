"""A rank of a Keras job as people write it: model.fit with Horovod's optimizer and callbacks, and no line for the recorder."""

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import horovod.tensorflow.keras as hvd
import tensorflow as tf

hvd.init()
tf.keras.utils.set_random_seed(1)
layers = [tf.keras.layers.Dense(256, activation="relu") for _ in range(4)]
model = tf.keras.Sequential([tf.keras.layers.Input((64,)), *layers, tf.keras.layers.Dense(10)])
model.compile(
    optimizer=hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.01)),
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
inputs, labels = tf.random.normal((32 * 40, 64)), tf.zeros((32 * 40,), tf.int32)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
model.fit(inputs, labels, batch_size=32, epochs=1, verbose=0, callbacks=callbacks)
