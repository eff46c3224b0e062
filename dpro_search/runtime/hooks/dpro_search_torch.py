"""Records a PyTorch job (DistributedDataParallel, or fully_shard) from inside each rank, without a line added to its script.

A training step begins with the first forward of the distributed module after an optimizer's step (or, where no optimizer
of torch.optim steps, after a forward whose backward communicates), and ends with the last optimizer's step before the next.
Written: hook.json (step times, CPU time per group of threads, DDP's buckets and modules or FSDP's units, versions), the profiler's
kineto.json.gz (of a rank with a GPU kineto-gpu.json.gz, with kernels), and execution.json.gz, the execution trace of the last
profiled step: its times are not used, for it adds to every operator. Standard library and the framework only; Python 3.8 and later.
"""

import gzip
import os
import shutil
import sys
import time

import dpro_search_fsdp
import dpro_search_modules
from dpro_search_process import AfterImport, replaces
from dpro_search_profile import StepProfile, patch_process_groups
from dpro_search_steps import StepRecorder, peak_rss_bytes

STEP_MARK = "dpro_search.step"  # an annotation in the profile at the start of each profiled step

_EXECUTION = "execution.json"

_RECORDER = None


def install():
    """Arrange for the patches to be applied when the framework's modules have been imported."""
    global _RECORDER
    _RECORDER = _TorchRecorder()
    callbacks = {
        "torch.distributed.distributed_c10d": lambda module: patch_process_groups(module, _RECORDER.cpu),
        "torch.nn.parallel.distributed": _patch_forward,
        "torch.distributed.fsdp._fully_shard._fsdp_state": lambda module: dpro_search_fsdp.patch(module, _RECORDER),
    }
    sys.meta_path.insert(0, AfterImport(callbacks))


def _patch_forward(module):
    @replaces(module.DistributedDataParallel, "forward")
    def forward(original, self, *args, **kwargs):
        _RECORDER.forward_begins(self, "ddp", _facts, lambda: self.require_backward_grad_sync)
        return original(self, *args, **kwargs)


class _TorchRecorder(StepRecorder):
    def __init__(self):
        super().__init__()
        # DDP has rebuilt its buckets after the first backward, with a static graph later, and reports it some steps after that.
        self._facts_at = (max(self.warmup, 2), self.first_traced, self.end_traced)
        self._marks = []  # [ns before, ns after] each step's mark in the profile
        self._facts = None
        self._model = self._kind = self._facts_of = None  # the module whose forward begins the steps, and its facts
        self._other_models = set()
        self._optimizer_seen = self._optimizer_stepped = self._communicated = False
        self._profile = None
        self._observer = None  # writes the execution trace
        self._module_marks = None  # of the profiled steps
        self._modules = None
        self._unregistered = False

    def forward_begins(self, model, kind, facts_of, communicates):
        """Begin a step if this forward is the first of one.

        `kind` is what hook.json calls the facts that `facts_of` the model returns; `communicates` returns whether its backward pass
        does.
        """
        import torch

        if not torch.is_grad_enabled() or not model.training:
            return
        if self._model is None:
            self._model, self._kind, self._facts_of = model, kind, facts_of
            self._listen_to_optimizers()
        if model is not self._model:
            self._other_models.add(id(model))
            return
        begins = not self.steps or self._optimizer_stepped or (not self._optimizer_seen and self._communicated)
        if not self._optimizer_seen:
            self._communicated = communicates()
        if begins:
            self._optimizer_stepped = False
            self._begin_step()

    def _listen_to_optimizers(self):
        from torch.optim import optimizer

        register = getattr(optimizer, "register_optimizer_step_post_hook", None)
        if register is not None:
            register(self._optimizer_ended)

    def _optimizer_ended(self, optimizer, args, kwargs):
        if self.steps:
            if not self._optimizer_seen and not self.tracing:
                del self.steps[1:]  # micro-batches of the first step, which before an optimizer stepped looked like steps
            self._optimizer_seen = self._optimizer_stepped = True
            self.steps[-1][1] = time.time_ns()

    def _begin_step(self):
        import torch

        index = len(self.steps)
        if index in self._facts_at:
            self._facts = self._facts_of(self._model)
        if self.records and index == self.first_traced:
            # Of a job on CPUs shapes are in the execution trace; of one on GPUs FLOPs and sizes follow from those in the profile.
            self._profile = StepProfile(record_shapes=torch.cuda.is_available())
            self.tracing = True
            if self._kind == "ddp":
                self._modules = dpro_search_modules.facts(self._model.module)
                self._module_marks = dpro_search_modules.ModuleMarks(self._model.module)
        elif self.tracing and index == self.end_traced:
            self._stop_tracing()
        elif self._observer is not None and not self._unregistered:
            self._unregister()
        if self.tracing and index == self.end_traced - 1:
            self._observer = _observed(os.path.join(self.out, _EXECUTION))
        step = self.begun_step()
        if self.tracing:
            with torch.profiler.record_function(STEP_MARK):
                pass
            if self._profile.gpu:
                self._profile.begin_step(index)
            self._marks.append([step[0], time.time_ns()])
        if self.steps and not self._optimizer_seen:
            self.steps[-1][1] = step[0]
        self.steps.append(step)

    def _stop_tracing(self):
        self.tracing = False
        self._profile.end_step()
        if self._module_marks is not None:
            self._module_marks.remove()
        if self._observer is not None:
            self._observer.stop()
        self._profile.stop()

    def _unregister(self):
        """Forget the observer a step after it stopped: a thread of Gloo may still have been ending what it saw begin."""
        self._unregistered = True
        self._observer.unregister_callback()

    def write(self):
        """Write hook.json and the profile; a process that ran no step is none of the job's ranks.

        The profile is written last, when no other rank waits for this one.
        """
        if not self.steps:
            return
        if self.tracing:
            self._stop_tracing()
        if self._profile is not None:
            self._profile.export(os.path.join(self.out, "kineto-gpu.json.gz" if self._profile.gpu else "kineto.json.gz"))
        if self._observer is not None:
            if not self._unregistered:
                self._unregister()
            _compress(os.path.join(self.out, _EXECUTION))
        self.write_hook(
            ("torch", "numpy"),
            marks=self._marks,
            peak_rss_bytes=peak_rss_bytes() if self._profile is None else self._profile.peak_rss_bytes,
            modules=self._modules,
            other_models=len(self._other_models),
            **{"ddp": None, "fsdp": None, self._kind: self._facts},
        )


def _observed(path):
    """An observer that writes the operators that run from now on to a file; None where PyTorch has none (before 2.1)."""
    from torch import profiler

    observer = getattr(profiler, "ExecutionTraceObserver", None)
    if observer is None:
        return None
    started = observer()
    started.register_callback(path)
    started.start()
    return started


def _compress(path):
    with open(path, "rb") as plain, gzip.open(path + ".gz.tmp", "wb", compresslevel=6) as packed:
        shutil.copyfileobj(plain, packed)
    os.replace(path + ".gz.tmp", path + ".gz")
    os.remove(path)


def _facts(model):
    """DDP's buckets in the order in which they are all-reduced, by index of the parameter; its parameters and buffers."""
    parameters, expect_sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    logged = model._get_ddp_logging_data()
    rebuilt = logged.get("rebuilt_per_bucket_param_indices", "")
    return {
        "buckets": _indices(rebuilt) if rebuilt else _initial_buckets(model, parameters, expect_sparse),
        "bucket_cap_bytes": int(logged["bucket_cap_bytes"]),
        "world_size": int(logged["world_size"]),
        "threads": int(logged.get("gloo_num_threads", 2)),
        "backend": str(logged.get("backend_name", "")),
        "parameters": [
            {
                "name": names[index].lstrip("."),
                "dtype": str(parameter.dtype).replace("torch.", ""),
                "shape": list(parameter.shape),
                "size_bytes": parameter.numel() * parameter.element_size(),
            }
            for index, parameter in enumerate(parameters)
        ],
        "buffer_bytes": _buffer_bytes(model),
        "ready_order": _indices(logged.get("prev_iteration_grad_ready_order_indices", "").replace(",", ""))[0],
        "find_unused_parameters": bool(model.find_unused_parameters),
        "static_graph": bool(getattr(model, "static_graph", False)),
        "gradient_as_bucket_view": bool(model.gradient_as_bucket_view),
        "comm_hook": str(logged.get("comm_hook", "")),
    }


def _indices(text):
    """Numbers of a text such as "3 2, 1 0": [[3, 2], [1, 0]]."""
    return [[int(index) for index in bucket.split()] for bucket in text.split(",")]


def _initial_buckets(model, parameters, expect_sparse):
    """The buckets of a module that does not rebuild them: parameters in reverse order, as DDP made them when it was built."""
    from torch import distributed

    limits = [distributed._DEFAULT_FIRST_BUCKET_BYTES, model.bucket_bytes_cap]
    if not getattr(model, "bucket_bytes_cap_default", True):
        limits = [model.bucket_bytes_cap]
    if not model.find_unused_parameters:
        limits = [sys.maxsize]
    buckets, _ = distributed._compute_bucket_assignment_by_size(parameters, limits, expect_sparse)
    return [list(bucket) for bucket in reversed(buckets)]


def _buffer_bytes(model):
    """Sizes of the broadcasts of buffers at each forward: one for each type of element."""
    sizes = {}
    if model.broadcast_buffers:
        for buffer in model.modules_buffers:
            sizes[buffer.dtype] = sizes.get(buffer.dtype, 0) + buffer.numel() * buffer.element_size()
    return list(sizes.values())
