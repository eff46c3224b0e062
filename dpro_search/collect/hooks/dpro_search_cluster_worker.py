"""Measures random clusters of a model's training step, as XLA cluster beside the same ops unfused.

    python dpro_search_cluster_worker.py WORKLOADS.py MODEL BATCH_SCALE SCRATCH

WORKLOADS.py has `BUILDERS`, which maps a model's name to a function of the keyword `batch` that returns (model, (inputs, labels)).
With it alone, prints the models' names. Otherwise speaks lines of JSON on its standard streams: says that it is "ready", and is
answered the first index; then says, for each index, which cluster it drew; answered "measure", "skip" or "stop", it measures, and
says the times or why there are none. One thread. TensorFlow and the standard library only.
"""

import gc
import importlib.util
import inspect
import json
import os
import random
import statistics
import sys
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
# Compile at the first execution and say why it failed, instead of running the ops unfused in silence.
os.environ["TF_XLA_FLAGS"] = "--tf_xla_enable_lazy_compilation=false"
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import tensorflow as tf
from dpro_search_cluster_graph import StepGraph
from dpro_search_cluster_graph import variable_behind as _variable
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.eager import context, execute
from tensorflow.python.profiler.internal import _pywrap_profiler

LARGEST = 200  # ops
TRIES = 200  # draws at one index before the graph is given up
BLOCK_S, FEWEST, MOST = 0.012, 3, 60  # a block of calls: at least so long, or so many
ROUNDS, MOST_ROUNDS = 2, 6  # A B, A B; further rounds while the least times of the last two differ
AGREE = 0.04  # by more than this share
PROFILED = 3  # calls whose ops are timed one by one


class Worker:
    """The measurements of one model at one batch size."""

    def __init__(self, workloads, model, batch_scale):
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        tf.keras.utils.set_random_seed(0)
        build = _builders(workloads)[model]
        batch = inspect.signature(build).parameters["batch"].default
        self.batch = max(1, round(batch * batch_scale))
        self.step = StepGraph(*build(batch=self.batch))
        self.name = "%s/%d" % (model, self.batch)
        self.unsupported = set()
        self.dag = self.step.dag(self.unsupported)

    def draw(self, index):
        """Nodes of the cluster of an index: the same ones each time, but for ops that turned out to be unsupported."""
        source = random.Random("%s/%d" % (self.name, index))
        for _ in range(TRIES):
            members = self.dag.draw(source, LARGEST)
            if members and not self.unsupported & {self.step.nodes[i].op for i in members}:
                return members
        return None

    def measure(self, index, members, scratch):
        """Times of a cluster, us, and its XPlane profiles below `scratch`; raises what TensorFlow raises."""
        definition, fed, wanted, effects = self.step.part(members)
        owned = [_own(self.step.values[tensor]) for tensor in fed]
        arguments = [value for value, _ in owned]
        plain = Part(definition, fed, wanted, effects, arguments, optimized=True)
        marked = tf.compat.v1.GraphDef()
        marked.CopyFrom(definition)
        for node in marked.node:
            if node.op != "Placeholder":
                # Compiled clusters are cached by this name.
                node.attr["_XlaCluster"].s = b"cluster_%d" % index
        fused = Part(marked, fed, wanted, effects, arguments, optimized=False)
        passed = Part(_passing(definition, fed), fed, (), [], arguments, optimized=True, outputs=len(wanted))
        started = time.perf_counter()
        fused.call()
        compile_s = time.perf_counter() - started
        for part in (fused, plain, plain, passed, passed):
            part.call()
        blocks = {"fused": [], "unfused": [], "call": []}
        for number in range(MOST_ROUNDS):
            if number >= ROUNDS and all(_settled(blocks[key]) for key in ("unfused", "fused")):
                break
            for key, part in (("unfused", plain), ("fused", fused), ("call", passed)):
                blocks[key].append(part.block())
        found = {"compile_s": round(compile_s, 3), "nodes": [self.step.nodes[i].name for i in members]}
        plain.profile(os.path.join(scratch, "unfused-%d" % index))
        fused.profile(os.path.join(scratch, "fused-%d" % index))
        for key, rows in blocks.items():
            found[key + "_min_us"] = [round(min(row), 2) for row in rows]
            found[key + "_median_us"] = [round(statistics.median(row), 2) for row in rows]
        return found


class Part:
    """A function of a part of the graph, called with little overhead.

    `optimized`: with TensorFlow's graph optimizer, as ops run without XLA. A forced cluster runs without it, for the optimizer
    would move nodes out of the cluster.
    """

    def __init__(self, definition, fed, wanted, effects, arguments, optimized, outputs=None):
        names = list(fed.values())

        def body(*inputs):
            returned = tf.import_graph_def(
                definition, input_map=dict(zip(names, inputs)), return_elements=list(wanted) + effects, name=""
            )
            with tf.control_dependencies(returned[len(wanted) :]):
                if outputs is not None:
                    return [tf.identity(value) for value in inputs[:outputs]] or [tf.constant(0)]
                return list(returned[: len(wanted)]) or [tf.constant(0)]

        signature = [tf.TensorSpec(value.shape, value.dtype) for value in arguments]
        self.function = tf.compat.v1.wrap_function(body, signature)
        config = config_pb2.ConfigProto()
        config.graph_options.rewrite_options.disable_meta_optimizer = not optimized
        self.inputs = arguments + [outer for outer, _ in self.function.graph.captures]
        self.attributes = ("executor_type", "", "config_proto", config.SerializeToString())
        self.outputs = len(self.function.outputs)

    def call(self):
        return execute.execute(self.function.name, self.outputs, self.inputs, self.attributes, context.context())

    def block(self):
        """Durations of a block of calls, us."""
        taken, began = [], time.perf_counter()
        while len(taken) < FEWEST or (time.perf_counter() - began < BLOCK_S and len(taken) < MOST):
            start = time.perf_counter_ns()
            self.call()
            taken.append((time.perf_counter_ns() - start) / 1e3)
        return taken

    def profile(self, folder):
        """Write an XPlane profile of some calls."""
        session = _pywrap_profiler.ProfilerSession()
        session.start(folder, {"host_tracer_level": 3, "python_tracer_level": 0, "device_tracer_level": 0})
        for _ in range(PROFILED):
            self.call()
        session.export_to_tb()


def _settled(blocks):
    """Whether the two least block minima agree."""
    first, second = sorted(min(block) for block in blocks)[:2]
    return second - first <= AGREE * first


def _builders(path):
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec = importlib.util.spec_from_file_location("dpro_search_workloads", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.BUILDERS


def _own(value):
    """(what to feed, what keeps it alive): for a handle, a variable of the cluster's own; measuring does not train the model."""
    if value.dtype != tf.resource:
        return value, value
    variable = tf.Variable(tf.raw_ops.ReadVariableOp(resource=value, dtype=_variable(value).dtype))
    return variable.handle, variable


def _passing(definition, fed):
    """The placeholders alone: a function that computes nothing."""
    alone = tf.compat.v1.GraphDef()
    alone.node.extend(node for node in definition.node if node.op == "Placeholder")
    return alone


def main():
    if len(sys.argv) == 2:
        print("\n".join(_builders(sys.argv[1])))
        return
    workloads, model, batch_scale, scratch = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4]
    # What libraries print must not mix with the protocol.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**what):
        out.write(json.dumps(what, separators=(",", ":")) + "\n")

    worker = Worker(workloads, model, batch_scale)
    say(ready=worker.batch, versions={"tensorflow": tf.__version__, "python": sys.version.split()[0]})
    index = int(sys.stdin.readline() or "0")
    while True:
        members = worker.draw(index)
        if members is None:
            say(index=index, exhausted=True)
            return
        ops, tensors = worker.step.describe(members)
        say(index=index, ops=ops, tensors=tensors)
        answer = sys.stdin.readline().strip()
        if answer not in ("measure", "skip"):
            return
        if answer == "measure":
            try:
                say(index=index, times=worker.measure(index, members, scratch))
            except Exception as error:
                say(index=index, failed="%s: %s" % (type(error).__name__, str(error)[:2000]))
            gc.collect()
        index += 1


if __name__ == "__main__":
    main()
