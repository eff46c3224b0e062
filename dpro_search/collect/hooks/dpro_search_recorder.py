"""Records a TensorFlow + Horovod job from inside each rank's process, without a line added to the training script.

Settings come from the environment:
  DPRO_SEARCH_HOOK_OUT       folder to write to (one per rank)
  DPRO_SEARCH_HOOK_MODE      "time" (step times only) or "record" (profile some steps as well)
  DPRO_SEARCH_HOOK_WARMUP, DPRO_SEARCH_HOOK_UNTRACED, DPRO_SEARCH_HOOK_TRACED
                             steps to skip, then to time, then to profile; steps after that are timed

A training step is a call of a `tf.function` whose graph all-reduces with Horovod; that covers hand-written loops and Keras `fit`.
Written: hook.json (step times, CPU time per group of threads, versions), run_metadata.pb (the executed graph), and the
profiler's xplane.pb. Standard library and the framework only; Python 3.8 and later.
"""

import atexit
import glob
import json
import os
import platform
import shutil
import sys
import time

from dpro_search_horovod import patch_init, watch_threads
from dpro_search_process import AfterImport, ThreadClock, machine

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


class _Recorder:
    def __init__(self):
        env = os.environ
        self.mode = env.get("DPRO_SEARCH_HOOK_MODE", "time")
        self._out = env["DPRO_SEARCH_HOOK_OUT"]
        warmup = int(env.get("DPRO_SEARCH_HOOK_WARMUP", "5"))
        self._first_traced = warmup + int(env.get("DPRO_SEARCH_HOOK_UNTRACED", "10"))
        self._end_traced = self._first_traced + int(env.get("DPRO_SEARCH_HOOK_TRACED", "10"))
        self._graph_at = min(2, self._first_traced)
        self._cpu = ThreadClock()
        self._steps = []  # [start_ns, end_ns, compute_cpu_ns, comm_cpu_ns, traced]
        self._idle = None
        self._tracing = False
        self._graph_on = False
        self._graph_kept = False
        os.makedirs(self._out, exist_ok=True)
        atexit.register(self.write)

    def communication_started(self, tids):
        """Horovod's threads are known."""
        self._idle = watch_threads(self._cpu, tids)

    def before_first_call(self):
        """A graph is kept only of a function that first runs while metadata is on; switching it on starts the framework."""
        if self.mode == "record" and not self._graph_kept and not self._graph_on:
            from tensorflow.python.eager import context

            context.enable_run_metadata()
            self._graph_on = True

    def step(self, run):
        """Run one training step under the clock."""
        index = len(self._steps)
        if self.mode == "record":
            self._switch_tracing(index)
        compute_ns, comm_ns = self._cpu.read()
        start_ns = time.time_ns()
        result = run()
        self._steps.append([start_ns, time.time_ns(), compute_ns, comm_ns, self._tracing])
        return result

    def _switch_tracing(self, index):
        import tensorflow as tf
        from tensorflow.python.eager import context

        if index == self._graph_at:
            with open(os.path.join(self._out, "run_metadata.pb"), "wb") as file:
                file.write(context.export_run_metadata().SerializeToString())
            context.disable_run_metadata()
            self._graph_kept = True
        if index == self._first_traced:
            options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=3, python_tracer_level=0, device_tracer_level=0)
            tf.profiler.experimental.start(os.path.join(self._out, "profile"), options=options)
            self._tracing = True
        elif index == self._end_traced:
            self._stop_tracing()

    def _stop_tracing(self):
        import tensorflow as tf

        self._tracing = False
        tf.profiler.experimental.stop()
        found = glob.glob(os.path.join(self._out, "profile", "**", "*.xplane.pb"), recursive=True)
        if found:
            shutil.move(found[0], os.path.join(self._out, "xplane.pb"))
        shutil.rmtree(os.path.join(self._out, "profile"), ignore_errors=True)

    def write(self):
        """Write hook.json; a job that ends inside the traced steps still leaves what there is.

        Python processes that the job starts beside itself come here too; they never start Horovod and write nothing.
        """
        if self._idle is None:
            return
        if self._tracing:
            self._stop_tracing()
        import resource

        gradients = sys.modules.get("dpro_search_gradients")
        content = {
            "rank": int(os.environ.get("DPRO_SEARCH_HOOK_RANK") or os.environ.get("HOROVOD_RANK", "0")),
            "host": platform.node(),
            "machine": machine(),
            "cores": sorted(os.sched_getaffinity(0)),
            "steps": self._steps,
            "first_traced": self._first_traced,
            "end_traced": self._end_traced,
            "idle_comm": self._idle,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "versions": _versions(),
            "gradients": gradients.recorded() if gradients is not None else [],
        }
        path = os.path.join(self._out, "hook.json")
        with open(path + ".tmp", "w") as file:
            json.dump(content, file)
        os.replace(path + ".tmp", path)


def _versions():
    found = {"python": platform.python_version()}
    for name in ("tensorflow", "horovod", "numpy"):
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "__version__"):
            found[name] = module.__version__
    return found
