"""What the jobs of TensorFlow share: threads, and waits as ops of a graph, which run on any process of a cluster."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf
from tensorflow.python.data.experimental.ops.testing import sleep


def set_threads():
    """One thread computes; several may wait or exchange."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(4)


def wait(us, after):
    """A tensor that is there so long after others; takes 0.3 ms of a core."""
    with tf.control_dependencies(after):
        options = tf.data.Options()
        options.autotune.enabled = False
        options.experimental_optimization.apply_default_optimizations = False
        # It sleeps whenever an element is asked for, also where there is none left: `take` asks once.
        data = tf.data.Dataset.range(1).apply(sleep(max(int(us), 1))).take(1).with_options(options)
        return data.get_single_element()
