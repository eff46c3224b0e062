"""TensorFlow's ParameterServerStrategy over gRPC: workers read variables from servers and send them gradients, round by round.

The coordinator gives every worker one step and waits for all, so that training is synchronous. Workers and servers serve until the
coordinator has left the file ``FOLDER/done``.
"""

import os
import time

from tensorflow_waits import set_threads, tf, wait

_THREADS = 32  # a server answers each worker on one of its own; with fewer they wait for each other without end


class Job:
    """Attributes: `reports`, whether this process writes results; `version`."""

    def __init__(self, scheme, folder):
        set_threads()
        self._done = os.path.join(folder, "done")
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        if resolver.task_type != "chief":
            self._serve(resolver)
        self._workers = resolver.cluster_spec().num_tasks("worker")
        self._strategy = tf.distribute.ParameterServerStrategy(resolver)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self._strategy)
        self.reports = True
        self.version = "tensorflow " + tf.__version__

    def _serve(self, resolver):
        threads = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=_THREADS)
        server = tf.distribute.Server(
            resolver.cluster_spec(),
            job_name=resolver.task_type,
            task_index=resolver.task_id,
            protocol="grpc",
            config=threads,
            start=True,
        )
        assert server.target
        while not os.path.exists(self._done):
            time.sleep(0.2)
        os._exit(0)

    def training(self, waits_us, moments):
        variables = [self._variables(sizes) for sizes in moments]
        rate = [self._variables([1])[0]]
        forward = [waits_us[0] * us / sum(waits_us[1:]) for us in waits_us[1:]]

        def replica():
            zero = rate[0].read_value()[0]
            token, read = None, {}
            for number in reversed(range(len(moments))):  # the forward pass needs variables in the order of layers
                read[number] = [each.read_value() for each in variables[number]]
                token = wait(forward[number], read[number] + ([] if token is None else [token]))
            updates = []
            for number, some in enumerate(variables):
                token = wait(waits_us[1 + number], [token])
                with tf.control_dependencies([token]):
                    gradients = [value * zero for value in read[number]]
                updates += [each.assign_sub(gradient, read_value=False) for each, gradient in zip(some, gradients)]
            with tf.control_dependencies(updates):
                return tf.constant(0)

        return self._step(replica)

    def exchange(self, elements):
        variable, rate = self._variables([elements])[0], self._variables([1])[0]

        def replica():
            gradient = variable.read_value() * rate.read_value()[0]
            with tf.control_dependencies([variable.assign_sub(gradient, read_value=False)]):
                return tf.constant(0)

        return self._step(replica)

    def stop(self):
        with open(self._done, "w"):
            pass
        os._exit(0)  # what follows the workers' end is no concern of ours

    def _variables(self, sizes):
        with self._strategy.scope():
            return [tf.Variable(tf.zeros([size]), trainable=False) for size in sizes]

    def _step(self, replica):
        function = tf.function(replica)

        def step():
            for _ in range(self._workers):
                self._coordinator.schedule(function)
            self._coordinator.join()

        return step
