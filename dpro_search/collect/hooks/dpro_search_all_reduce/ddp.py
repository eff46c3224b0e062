"""An `AllReduce` under PyTorch's DistributedDataParallel: gradients are summed by MPI, whatever the process group is."""

from concurrent.futures import ThreadPoolExecutor


def hook(all_reduce):
    """A communication hook, for ``model.register_comm_hook(None, hook(all_reduce))``.

    Buckets are averaged one after the other on a thread of their own, while the backward pass goes on: MPI must have been
    initialised for several threads, as mpi4py does.

    Parameters
    ----------
    all_reduce
        An `AllReduce`.
    """
    import torch

    thread = ThreadPoolExecutor(1, "all-reduce")

    def average(_, bucket):
        future = torch.futures.Future()
        tensor = bucket.buffer()

        def run():
            try:
                all_reduce.sum(tensor, average=True)
            except BaseException as error:  # the backward pass raises it
                future.set_exception(error)
            else:
                future.set_result(tensor)

        thread.submit(run)
        return future

    return average
