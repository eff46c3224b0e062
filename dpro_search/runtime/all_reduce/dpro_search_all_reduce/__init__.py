"""All-reduces over MPI whose algorithm is chosen by size: for training scripts; needs NumPy and mpi4py, and torch for its tensors.

    from dpro_search_all_reduce import AllReduce             from dpro_search_all_reduce.ddp import hook

    all_reduce = AllReduce(choice="all_reduces.json")        model = DistributedDataParallel(model)
    all_reduce.sum(gradients, average=True)                  model.register_comm_hook(None, hook(AllReduce()))

`rounds` says who sends what, `memory` adds, `transport` sends, `choice` reads which algorithm is used for which size, `check` times
it in the first steps of a job against the MPI library's default.
"""

from .check import CheckedAllReduce
from .choice import NATIVE, Choice
from .rounds import ALGORITHMS

__all__ = ["ALGORITHMS", "NATIVE", "AllReduce", "CheckedAllReduce", "Choice"]


def __getattr__(name):
    if name == "AllReduce":  # needs MPI, which the tables and the rounds do not
        from .transport import AllReduce

        return AllReduce
    raise AttributeError(name)
