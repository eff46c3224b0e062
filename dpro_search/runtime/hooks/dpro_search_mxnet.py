"""Records an MXNet job that trains with gluon.Trainer and a KVStore, from inside each worker, without a line added to the script.

A training step begins with the first `autograd.record` after a Trainer's step, and ends when the Trainer's step returns. MXNet runs
ahead of the script: only the distance between steps is a time that the job takes, and only if the script reads a loss now and then.
Written: hook.json (step times, CPU time per group of threads, parameters, versions), the profiler's worker.json, symbol.json (the
network, if it is a HybridBlock) and, by the servers in their own folders, rank<k>_server.json.
Standard library and the framework only; Python 3.8 and later.
"""

import atexit
import gc
import inspect
import json
import os
import sys
import time
import weakref

from dpro_search_process import AfterImport, replaces, threads
from dpro_search_steps import StepRecorder

SERVER_PROFILE = "server.json"  # servers put "rank<k>_" before it

_RECORDER = None


def install():
    """Arrange for the patches to be applied when the framework's modules have been imported."""
    global _RECORDER
    _RECORDER = _MxnetRecorder()
    callbacks = {"mxnet.autograd": _patch_autograd, "mxnet.kvstore.base": _patch_kvstore, "mxnet.gluon.trainer": _patch_trainer}
    callbacks["byteps.common"] = _patch_byteps
    callbacks["horovod.common.basics"] = _patch_horovod
    sys.meta_path.insert(0, AfterImport(callbacks))


def _patch_autograd(module):
    @replaces(module, "record")
    def record(original, *args, **kwargs):
        _RECORDER.recording_begins()
        return original(*args, **kwargs)


def _patch_kvstore(module):
    """Notice which threads a KVStore starts: their CPU time is the communication's."""

    @replaces(module, "create")
    def create(original, *args, **kwargs):
        from mxnet import nd

        nd.zeros(1).wait_to_read()  # the engine's own threads start with its first operator
        return _RECORDER.cpu.communicates(lambda: original(*args, **kwargs))


def _patch_byteps(module):
    """Notice which threads were there before BytePS: it starts its own now and at its first message."""

    @replaces(module.BytePSBasics, "init")
    def init(original, self, *args, **kwargs):
        from mxnet import nd

        nd.zeros(1).wait_to_read()
        _RECORDER.threads_before_byteps = threads()
        return original(self, *args, **kwargs)


def _patch_horovod(module):
    """Horovod's part: which threads it starts, and what they use while nothing is sent."""
    import dpro_search_horovod

    def started(tids):
        _RECORDER.idle_comm = dpro_search_horovod.watch_threads(_RECORDER.cpu, tids)

    dpro_search_horovod.patch_init(module, started)


def _patch_trainer(module):
    @replaces(module.Trainer, "step")
    def step(original, self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        _RECORDER.trainer_stepped(self)
        return result

    atexit.register(_finish)


def _finish():
    """At its end MXNet drops what it has not begun, such as gradients that other workers wait for."""
    import mxnet

    try:
        mxnet.nd.waitall()
    except mxnet.base.MXNetError:
        pass  # of a job that failed: it has reported why, and this would be its last line in place of that


class _MxnetRecorder(StepRecorder):
    def __init__(self):
        super().__init__()
        self._trainer = None  # a weak reference: a store that lives on is not closed, and the other workers would wait for it
        self._stepped = True
        self._server_profiled = False
        self._facts = self._symbol = None
        self.threads_before_byteps = None
        self.idle_comm = None

    def recording_begins(self):
        """Begin a step if this is the first forward pass of one."""
        if not self._stepped:
            return
        self._stepped = False
        index = len(self.steps)
        if self.records and index == self.first_traced:
            self._start_tracing()
        elif self.tracing and index == self.end_traced:
            self._stop_tracing()
        self.steps.append(self.begun_step())

    def trainer_stepped(self, trainer):
        """End the step."""
        if self.steps:
            self._trainer = self._trainer or weakref.ref(trainer)
            self._stepped = True
            self.steps[-1][1] = time.time_ns()
        if self.threads_before_byteps is not None:
            self._find_byteps_threads()

    def _find_byteps_threads(self):
        """After a first step all of BytePS's threads run."""
        from mxnet import nd

        nd.waitall()
        self.cpu.communication |= threads() - self.threads_before_byteps
        self.threads_before_byteps = None

    def _start_tracing(self):
        import mxnet as mx

        trainer = self._trainer()
        if trainer is None:
            return
        self._facts, self._symbol = _facts(trainer), _symbol(trainer)
        mx.nd.waitall()  # so that the profile's first operator is the step's
        # Without aggregate_stats, operators are merged into ImperativeBulk.
        settings = {"profile_all": True, "aggregate_stats": True}
        store = trainer._kvstore
        if store is not None and "dist" in store.type and store.rank == 0:
            mx.profiler.set_kvstore_handle(store.handle)
            mx.profiler.set_config(filename=SERVER_PROFILE, profile_process="server", **settings)
            mx.profiler.set_state("run", profile_process="server")
            self._server_profiled = True
        mx.profiler.set_config(filename=os.path.join(self.out, "worker.json"), **settings)
        mx.profiler.set_state("run")
        self.tracing = True

    def _stop_tracing(self, at_exit=False):
        import mxnet as mx

        if not at_exit:  # then the store is closed, and the engine has stopped
            mx.nd.waitall()
            if self._server_profiled:
                mx.profiler.set_state("stop", profile_process="server")
        self.tracing = False
        mx.profiler.set_state("stop")

    def write(self):
        """Write hook.json and the network; a process that ran no step is none of the job's ranks."""
        if not self.steps:
            return
        if self.tracing:
            self._stop_tracing(at_exit=True)
        if self._symbol is not None:
            self.write_json("symbol.json", self._symbol)
        self.write_hook(("mxnet", "numpy", "byteps", "horovod"), kvstore=self._facts, idle_comm=self.idle_comm)


def _facts(trainer):
    """The store, and the parameters by key."""
    store = trainer._kvstore
    return {
        "type": "" if store is None else store.type,
        "update_on_kvstore": bool(trainer._update_on_kvstore),
        "prefix": getattr(trainer, "_prefix", ""),  # before the keys in the names of Horovod's all-reduces
        "compression": _compression(trainer),
        "parameters": [
            {
                "key": key,
                "name": parameter.name,
                "dtype": _dtype(parameter),
                "shape": [int(extent) for extent in parameter.shape],
                "size_bytes": int(parameter.data().size) * parameter.data().dtype().itemsize,
                "trained": parameter.grad_req != "null",
            }
            for key, parameter in enumerate(trainer._params)
        ],
    }


def _compression(trainer):
    """The compression of gradients by BytePS's trainer: "fp16", or the name of one of BytePS's compressors; "" for none."""
    compressors = [getattr(parameter, "byteps_compressor_type", "") for parameter in trainer._params]
    casts = type(getattr(trainer, "_intra_compressor", None)).__name__ == "FP16Compressor"
    return max(compressors, default="") or ("fp16" if casts else "")


def _dtype(parameter):
    import numpy

    return numpy.dtype(parameter.dtype).name


def _symbol(trainer):
    """The graph of the largest HybridBlock that holds the trained parameters, with their shapes; None if none exists."""
    import mxnet as mx

    names = {parameter.name: parameter for parameter in trainer._params}
    best, most_matches = None, 0
    for block in [item for item in gc.get_objects() if isinstance(item, mx.gluon.HybridBlock)]:
        held = len(set(block.collect_params()) & set(names))
        if held > most_matches:
            best, most_matches = block, held
    if best is None:
        return None
    try:
        content = json.loads(_graph(best).tojson())
    except Exception as error:  # a network that computes outside of F: the trace notes that its operators are known by type only
        print("dpro-search: no graph of %s: %s" % (type(best).__name__, error), file=sys.stderr)
        return None
    for node in content["nodes"]:
        if node["op"] == "null" and node["name"] in names:
            shape = ", ".join(str(extent) for extent in names[node["name"]].shape)
            node.setdefault("attrs", {})["__shape__"] = "(%s,)" % shape
    return content


def _graph(block):
    """A block's symbol: the one that runs if it is hybridized, else one traced with as many inputs as its forward pass takes."""
    import mxnet as mx

    if block._cached_graph:
        graph = block._cached_graph[1]
    else:
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        input_names = [
            parameter.name
            for parameter in list(inspect.signature(block.hybrid_forward).parameters.values())[1:]  # after F
            if parameter.kind in positional and parameter.default is parameter.empty and parameter.name not in block._reg_params
        ]
        graph = block(*[mx.sym.var("data" if len(input_names) == 1 else "data%d" % i) for i in range(len(input_names))])
    return mx.sym.Group(list(graph)) if isinstance(graph, (list, tuple)) else graph
