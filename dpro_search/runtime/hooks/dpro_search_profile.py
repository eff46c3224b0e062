"""PyTorch's profiler over some steps of a rank, and the threads of its process groups: what all recorders of PyTorch do alike.

Standard library and the framework only; Python 3.8 and later.
"""

from dpro_search_process import replaces
from dpro_search_steps import peak_rss_bytes


class StepProfile:
    """PyTorch's profiler, from now until `stop`: operators, and kernels and NCCL's collectives on a rank that has a GPU.

    Attributes
    ----------
    gpu: Whether this rank has one.
    peak_rss_bytes: The most memory the process had until now: the profile's own is none of the job's.
    """

    def __init__(self, *, record_shapes, profile_memory=False):
        import torch

        self.peak_rss_bytes = peak_rss_bytes()
        self.gpu = torch.cuda.is_available()
        activity = torch.profiler.ProfilerActivity
        activities = [activity.CPU, activity.CUDA] if self.gpu else [activity.CPU]
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=record_shapes, profile_memory=profile_memory)
        self._profiler.start()
        self._step = None

    def begin_step(self, index):
        """Mark a step that lasts until the next one, or until `stop`, as PyTorch's own profiles do."""
        from torch.profiler import record_function

        self.end_step()
        self._step = record_function("ProfilerStep#%d" % index)
        self._step.__enter__()

    def end_step(self):
        """End the step that is marked, if one exists."""
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def stop(self):
        self.end_step()
        self._profiler.stop()

    def export(self, path):
        self._profiler.export_chrome_trace(path)


def patch_process_groups(module, clock):
    """Count the threads that each process group starts as the communication's; `module` is torch.distributed.distributed_c10d."""

    @replaces(module, "_new_process_group_helper")
    def new_process_group(original, *args, **kwargs):
        return clock.communicates(lambda: original(*args, **kwargs))
