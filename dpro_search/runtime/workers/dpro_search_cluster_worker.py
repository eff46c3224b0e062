"""Measures random clusters of a model's training step, as XLA cluster beside the same ops unfused.

    python dpro_search_cluster_worker.py WORKLOADS.py MODEL BATCH_SCALE SCRATCH

WORKLOADS.py has `BUILDERS`, which maps a model's name to a function of the keyword `batch` that returns (model, (inputs, labels)).
With it alone, prints the models' names. Otherwise speaks lines of JSON on its standard streams: reports that it is "ready", and is
answered the first index; then reports, for each index, which cluster it drew; answered "measure", "skip" or "stop", it measures,
and reports the times or why there are none. One thread. TensorFlow and the standard library only.

Below SCRATCH it leaves XPlane profiles: in "step" of whole training steps, and in "INDEX" of a cluster.
"""

import gc
import importlib.util
import inspect
import json
import os
import random
import re
import statistics
import sys
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
# Compile at the first execution and report why it failed, instead of running the ops unfused without notice.
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
# A block of calls is at least so long, and of at least so many calls, but of fewer where they are long; never of more than MOST.
BLOCK_S, FEWEST, LONG_S, MOST = 0.012, 3, 0.06, 60
# A B, A B; further rounds while the least times of the best two differ by more than AGREE, and no more than MOST_S were spent.
ROUNDS, MOST_ROUNDS, AGREE, MOST_S = 2, 6, 0.04, 1.5
PROFILED, PROFILED_S = 3, 0.1  # calls whose ops are timed one by one, fewer where they take longer together
STEPS = 3  # profiled training steps


class ClusterWorker:
    """The measurements of one model at one batch size."""

    def __init__(self, workloads, model, batch_scale, scratch):
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
        self.scratch = scratch
        self.step.run()
        _profile(os.path.join(scratch, "step"), [self.step.run] * STEPS)

    def draw(self, index):
        """Nodes of the cluster of an index: the same ones each time, but for ops that turned out to be unsupported."""
        source = random.Random("%s/%d" % (self.name, index))
        for _ in range(TRIES):
            members = self.dag.draw(source, LARGEST)
            if members:
                return members
        return None

    def leave_out(self, error):
        """Draw no more clusters with ops that the compiler does not know, as its error states."""
        unknown = set(re.findall(r"No registered '(\w+)' OpKernel", error)) - self.unsupported
        if unknown:
            self.unsupported |= unknown
            self.dag = self.step.dag(self.unsupported)

    def measure(self, index, members):
        """Times of a cluster, us, and what measuring them took, s; raises what TensorFlow raises."""
        marks = [time.perf_counter()]
        definition, fed, results, effects = self.step.part(members)
        owned = [_own(self.step.values[tensor]) for tensor in fed]
        arguments = [value for value, _ in owned]
        plain = ClusterPart(definition, fed, results, effects, arguments, optimized=True)
        marked = tf.compat.v1.GraphDef()
        marked.CopyFrom(definition)
        for node in marked.node:
            if node.op != "Placeholder":
                # Compiled clusters are cached by this name.
                node.attr["_XlaCluster"].s = b"cluster_%d" % index
        fused = ClusterPart(marked, fed, results, effects, arguments, optimized=False)
        passed = ClusterPart(_passing(definition, fed), fed, (), [], arguments, optimized=True, outputs=len(results))
        marks.append(time.perf_counter())
        fused.call()
        marks.append(time.perf_counter())
        for part in (fused, plain, plain, passed, passed):
            part.call()
        blocks = _blocks({"unfused": plain, "fused": fused, "call": passed})
        marks.append(time.perf_counter())
        usual_us = min(blocks["unfused"][0]) + min(blocks["fused"][0])
        calls = max(1, min(PROFILED, int(PROFILED_S * 1e6 / usual_us)))
        _profile(os.path.join(self.scratch, "%d" % index), [plain.call] * calls + [fused.call] * calls)
        marks.append(time.perf_counter())
        spent = [after - before for before, after in zip(marks, marks[1:])]
        measured = {"compile_s": round(spent[1], 3), "nodes": [self.step.nodes[i].name for i in members]}
        for key, rows in blocks.items():
            measured[key + "_min_us"] = [round(min(row), 2) for row in rows]
            measured[key + "_median_us"] = [round(statistics.median(row), 2) for row in rows]
        return measured, dict(zip(("build", "compile", "calls", "profile"), spent))


class ClusterPart:
    """A function of a part of the graph, called with little overhead.

    `optimized`: with TensorFlow's graph optimizer, as ops run without XLA. A forced cluster runs without it, for the optimizer
    would move nodes out of the cluster.
    """

    def __init__(self, definition, fed, results_of, effects, arguments, optimized, outputs=None):
        names = list(fed.values())

        def body(*inputs):
            returned = tf.import_graph_def(
                definition, input_map=dict(zip(names, inputs)), return_elements=list(results_of) + effects, name=""
            )
            with tf.control_dependencies(returned[len(results_of) :]):
                if outputs is not None:
                    return [tf.identity(value) for value in inputs[:outputs]] or [tf.constant(0)]
                results = list(returned[: len(results_of)])
                if effects:
                    # Updates that no result waits for are dead code to the graph optimizer.
                    results = [tf.identity(value) for value in results]
                return results or [tf.constant(0)]

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
        while True:
            start = time.perf_counter_ns()
            self.call()
            taken.append((time.perf_counter_ns() - start) / 1e3)
            spent_s = time.perf_counter() - began
            if spent_s >= LONG_S or len(taken) >= MOST or (spent_s >= BLOCK_S and len(taken) >= FEWEST):
                return taken


def _blocks(parts):
    """Durations of blocks of calls, interleaved over the parts, until the least times of the best two rounds agree."""
    blocks, began = {key: [] for key in parts}, time.perf_counter()
    for number in range(MOST_ROUNDS):
        enough = number >= ROUNDS and all(_settled(blocks[key]) for key in ("unfused", "fused"))
        if enough or (number >= ROUNDS and time.perf_counter() - began > MOST_S):
            break
        for key, part in parts.items():
            blocks[key].append(part.block())
    return blocks


def _settled(blocks):
    """Whether the two least block minima agree."""
    first, second = sorted(min(block) for block in blocks)[:2]
    return second - first <= AGREE * first


def _profile(folder, calls):
    """Write an XPlane profile of some calls."""
    session = _pywrap_profiler.ProfilerSession()
    session.start(folder, {"host_tracer_level": 3, "python_tracer_level": 0, "device_tracer_level": 0})
    for call in calls:
        call()
    session.export_to_tb()


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

    worker = ClusterWorker(workloads, model, batch_scale, scratch)
    # What is there now stays: to look through it again after each cluster would take longer than most clusters.
    gc.collect()
    gc.freeze()
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
                times, spent = worker.measure(index, members)
                say(index=index, times=times, spent=spent)
            except Exception as error:
                worker.leave_out(str(error))
                say(index=index, failed="%s: %s" % (type(error).__name__, str(error)[:2000]))
            gc.collect()
        index += 1


if __name__ == "__main__":
    main()
