"""An `AllReduce` under PyTorch's DistributedDataParallel: gradients are summed by MPI, whatever the process group is."""

from concurrent.futures import ThreadPoolExecutor

from .check import CheckedAllReduce


def hook(all_reduce, check=True):
    """A communication hook, for ``model.register_comm_hook(None, hook(all_reduce))``.

    Buckets are averaged one after the other on a thread of their own, while the backward pass goes on: MPI must have been
    initialised for several threads, as mpi4py does. That thread waits for the kernels that fill a bucket on a device.

    Parameters
    ----------
    all_reduce
        An `AllReduce`.
    check
        Whether the first steps time the choice for each bucket against the MPI library's default, and keep the faster one
        (`CheckedAllReduce`). The last bits of sums then depend on which one that is, so nothing is checked where
        `torch.use_deterministic_algorithms` is set.
    """
    import torch

    summing = CheckedAllReduce(all_reduce) if check and not torch.are_deterministic_algorithms_enabled() else all_reduce
    thread = ThreadPoolExecutor(1, "all-reduce")

    def average(_, bucket):
        tensor = bucket.buffer()
        device = None if tensor.device.type == "cpu" else torch.get_device_module(tensor.device)
        future = torch.futures.Future() if device is None else torch.futures.Future(devices=[tensor.device])
        filled = None if device is None else device.current_stream(tensor.device).record_event()

        def run():
            try:
                if device is not None:
                    filled.synchronize()
                summing.sum(tensor, average=True)
            except BaseException as error:  # the backward pass raises it
                future.set_exception(error)
            else:
                future.set_result(tensor)

        thread.submit(run)
        return future

    return average
