"""Records a PyTorch job that is split by whatever means: tensor, pipeline or context parallel, FSDP, mixtures, the script's own.

A training step lasts from the end of an optimizer's step to the end of the next one; of several optimizers, the last one's counts.
Written: hook.json (step times, the axes of device meshes with the ranks of each), and profile.json.gz, the profiler's records with
shapes and memory, in which an annotation around each collective and message says which ranks it is among.
Standard library and the framework only; Python 3.8 and later.
"""

import os
import sys
import time

from dpro_search_process import AfterImport, replaces
from dpro_search_profile import StepProfile, patch_process_groups
from dpro_search_steps import StepRecorder, peak_rss_bytes

GROUP_MARK = "dpro_search.group "  # and the group's ranks; of a message the sender and the receiver

# Methods of a process group, by which PyTorch's functions enqueue.
_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "allgather_into_tensor_coalesced", "reduce_scatter"),
    *("_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base", "broadcast", "reduce", "gather"),
    *("scatter", "barrier"),
)
# Functions of torch.distributed._functional_collectives, which enqueue without these methods.
_FUNCTIONS = (
    *("all_reduce", "all_gather_tensor", "all_gather_tensor_autograd", "all_gather_single", "reduce_scatter_tensor"),
    *("reduce_scatter_tensor_autograd", "reduce_scatter_single", "all_to_all_single", "all_to_all_single_autograd"),
    *("permute_tensor", "broadcast", "all_reduce_coalesced", "all_gather_into_tensor_coalesced"),
    "reduce_scatter_tensor_coalesced",
)

_RECORDER = None


def install():
    """Arrange for the patches to be applied when the framework's modules have been imported."""
    global _RECORDER
    _RECORDER = _ParallelRecorder()
    callbacks = {
        "torch.optim.optimizer": lambda module: module.register_optimizer_step_post_hook(_RECORDER.optimizer_ended),
        "torch.distributed.distributed_c10d": _patch_groups,
        "torch.distributed._functional_collectives": _patch_functions,
        "torch.distributed.device_mesh": _patch_meshes,
    }
    sys.meta_path.insert(0, AfterImport(callbacks))


def _patch_groups(module):
    patch_process_groups(module, _RECORDER.cpu)
    group = module.ProcessGroup
    for name in _COLLECTIVES:
        if hasattr(group, name):
            _noted(group, name, lambda own, *args, **kwargs: module.get_process_group_ranks(own))
    for name, sends in (("send", True), ("recv", False)):
        _noted(group, name, lambda own, tensors, peer, *rest, sends=sends: _ends(module, own, peer, sends))


def _ends(module, group, peer, sends):
    """Sender and receiver; the peer is numbered within the group."""
    ends = [module.get_rank(), module.get_process_group_ranks(group)[peer]]
    return ends if sends else ends[::-1]


def _noted(owner, name, ranks_of):
    """Put a note around each call while steps are profiled."""

    @replaces(owner, name)
    def call(original, *args, **kwargs):
        if not _RECORDER.tracing:
            return original(*args, **kwargs)
        try:
            note = GROUP_MARK + ",".join(map(str, ranks_of(*args, **kwargs)))
        except Exception:  # the job must not fail
            return original(*args, **kwargs)
        from torch.profiler import record_function

        with record_function(note):
            return original(*args, **kwargs)


def _patch_functions(module):
    import inspect

    for name in _FUNCTIONS:
        function = getattr(module, name, None)
        if function is None:
            continue
        signature = inspect.signature(function)
        if "group" in signature.parameters:
            _noted(module, name, lambda *args, own=signature, **kwargs: _ranks(own.bind(*args, **kwargs).arguments["group"]))


def _ranks(group):
    """Ranks of a group, in any form that functional collectives take."""
    from torch.distributed import distributed_c10d as c10d

    if isinstance(group, str):
        group = c10d._resolve_process_group(group)
    elif isinstance(group, (tuple, list)) and len(group) == 2 and hasattr(group[0], "get_group"):
        group = group[0].get_group(group[1])
    elif hasattr(group, "get_group"):
        group = group.get_group()
    return group if isinstance(group, (tuple, list)) else c10d.get_process_group_ranks(group)


def _patch_meshes(module):
    @replaces(module, "init_device_mesh")
    def init_device_mesh(original, *args, **kwargs):
        mesh = original(*args, **kwargs)
        _RECORDER.meshes.append(mesh)
        return mesh


class _ParallelRecorder(StepRecorder):
    def __init__(self):
        super().__init__()
        self.meshes = []
        self._optimizers = []
        self._profile = None

    def optimizer_ended(self, optimizer, args, kwargs):
        if id(optimizer) not in self._optimizers:
            self._optimizers.append(id(optimizer))
        if id(optimizer) != self._optimizers[-1]:
            return
        if self.steps:
            self.steps[-1][1] = time.time_ns()
        self._begin_step()

    def _begin_step(self):
        index = len(self.steps)
        if self._profile is not None:
            self._profile.end_step()
        if self.records and index == self.first_traced:
            self._profile = StepProfile(record_shapes=True, profile_memory=True)
            self.tracing = True
        elif self.tracing and index == self.end_traced:
            self._stop()
        self.steps.append(self.begun_step())
        if self.tracing:
            self._profile.begin_step(index)

    def _stop(self):
        self.tracing = False
        self._profile.stop()

    def write(self):
        """Write hook.json and the profile; a process whose optimizers did not step is none of the job's ranks."""
        if not self.steps:
            return
        if self.tracing:
            self._stop()
        if self._profile is not None:
            self._profile.export(os.path.join(self.out, "profile.json.gz"))
        peak = peak_rss_bytes() if self._profile is None else self._profile.peak_rss_bytes
        facts = {"axes": _axes(self.meshes), "peak_rss_bytes": peak}
        self.write_hook(("torch", "numpy"), profiled=self._profile is not None, **facts)


def _axes(meshes):
    """[name, ranks] of this rank's group along each named axis of a mesh, where that is of two ranks at least."""
    axes = []
    for mesh in meshes:
        for axis in mesh.mesh_dim_names or ():
            try:
                group = mesh[axis].mesh.flatten().tolist()
            except Exception:  # the rank is in none
                continue
            if len(group) > 1 and [axis, group] not in axes:
                axes.append([axis, group])
    return axes
