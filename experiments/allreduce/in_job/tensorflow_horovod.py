"""TensorFlow with Horovod, on MPI or Gloo: an all-reduce of each gradient, which Horovod fuses."""

import horovod
import horovod.tensorflow as hvd
from tensorflow_waits import set_threads, tf, wait


class Job:
    """Attributes: `reports`, whether this process writes results; `version`."""

    def __init__(self, scheme, folder):
        set_threads()
        hvd.init()
        self.reports = hvd.rank() == 0
        self.version = "tensorflow %s, horovod %s" % (tf.__version__, horovod.__version__)

    def training(self, waits_us, moments):
        gradients = [[tf.Variable(tf.zeros([size])) for size in sizes] for sizes in moments]

        @tf.function
        def step():
            token, sums = wait(waits_us[0], []), []
            for some, wait_us in zip(gradients, waits_us[1:]):
                token = wait(wait_us, [token])
                with tf.control_dependencies([token]):
                    sums += [hvd.allreduce(each.read_value(), op=hvd.Average) for each in some]
            return tf.stack([each[0] for each in sums])  # an all-reduce whose result nobody reads is left out

        return lambda: step().numpy()

    def exchange(self, elements):
        tensor = tf.Variable(tf.zeros([elements]))
        name = "exchange_%d" % elements

        @tf.function
        def run():
            return hvd.allreduce(tensor.read_value(), op=hvd.Sum, name=name)[0]

        return lambda: run().numpy()

    def stop(self):
        hvd.shutdown()
