"""Records a TensorFlow + Horovod job from inside each rank's process, without a line added to the training script.

A training step is a call of a `tf.function` whose graph all-reduces with Horovod; that covers hand-written loops and Keras `fit`.
Written: hook.json (step times, CPU time per group of threads, versions), run_metadata.pb (the executed graph), and the
profiler's xplane.pb. Standard library and the framework only; Python 3.8 and later.
"""

import glob
import os
import shutil
import sys
import time

from dpro_search_horovod import patch_init, watch_threads
from dpro_search_process import AfterImport
from dpro_search_steps import StepRecorder

_RECORDER = None


def install():
    """Arrange for the patches to be applied when the framework's modules have been imported."""
    global _RECORDER
    _RECORDER = _Recorder()
    sys.meta_path.insert(
        0,
        AfterImport(
            {
                "horovod.common.basics": _patch_init,
                "tensorflow.python.eager.polymorphic_function.polymorphic_function": _patch_function,
                "horovod.tensorflow": _patch_gradients,
            }
        ),
    )


def _patch_init(basics):
    patch_init(basics, _RECORDER.communication_started)


def _patch_gradients(horovod):
    import dpro_search_gradients

    dpro_search_gradients.record_gradient_names()


def _patch_function(module):
    """Time the calls of the step function, wherever it comes from."""
    from tensorflow.python.eager import context

    original = module.Function.__call__

    def call(self, *args, **kwargs):
        is_step = getattr(self, "_dpro_search_is_step", None)
        if is_step is False or not context.executing_eagerly():
            return original(self, *args, **kwargs)
        if is_step is None:
            _RECORDER.before_first_call()
            result = original(self, *args, **kwargs)
            self._dpro_search_is_step = _all_reduces(self)
            return result
        return _RECORDER.step(lambda: original(self, *args, **kwargs))

    module.Function.__call__ = call


def _all_reduces(function):
    for concrete in function._list_all_concrete_functions():
        graph = concrete.graph.as_graph_def()
        bodies = [graph.node] + [body.node_def for body in graph.library.function]
        if any(node.op.startswith("Horovod") and "reduce" in node.op for nodes in bodies for node in nodes):
            return True
    return False


class _Recorder(StepRecorder):
    def __init__(self):
        super().__init__()
        self._graph_at = min(2, self.first_traced)
        self._idle = None
        self._graph_on = False
        self._graph_kept = False

    def communication_started(self, tids):
        """Horovod's threads are known."""
        self._idle = watch_threads(self.cpu, tids)

    def before_first_call(self):
        """A graph is kept only of a function that first runs while metadata is on; switching it on starts the framework."""
        if self.records and not self._graph_kept and not self._graph_on:
            from tensorflow.python.eager import context

            context.enable_run_metadata()
            self._graph_on = True

    def step(self, run):
        """Run one training step under the clock."""
        if self.records:
            self._switch_tracing(len(self.steps))
        step = self.begun_step()
        result = run()
        step[1] = time.time_ns()
        self.steps.append(step)
        return result

    def _switch_tracing(self, index):
        import tensorflow as tf
        from tensorflow.python.eager import context

        if index == self._graph_at:
            with open(os.path.join(self.out, "run_metadata.pb"), "wb") as file:
                file.write(context.export_run_metadata().SerializeToString())
            context.disable_run_metadata()
            self._graph_kept = True
        if index == self.first_traced:
            options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=3, python_tracer_level=0, device_tracer_level=0)
            tf.profiler.experimental.start(os.path.join(self.out, "profile"), options=options)
            self.tracing = True
        elif index == self.end_traced:
            self._stop_tracing()

    def _stop_tracing(self):
        import tensorflow as tf

        self.tracing = False
        tf.profiler.experimental.stop()
        profiles = glob.glob(os.path.join(self.out, "profile", "**", "*.xplane.pb"), recursive=True)
        if profiles:
            shutil.move(profiles[0], os.path.join(self.out, "xplane.pb"))
        shutil.rmtree(os.path.join(self.out, "profile"), ignore_errors=True)

    def write(self):
        """Write hook.json; a process that never started Horovod is none of the job's ranks."""
        if self._idle is None:
            return
        if self.tracing:
            self._stop_tracing()
        gradients = sys.modules.get("dpro_search_gradients")
        self.write_hook(
            ("tensorflow", "horovod", "numpy"),
            idle_comm=self._idle,
            gradients=gradients.recorded() if gradients is not None else [],
        )
