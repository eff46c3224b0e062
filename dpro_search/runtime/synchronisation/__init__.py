"""Synchronisation schemes for a PyTorch or MXNet job, in two lines:

    sync = synchronise(model, optimizer, "adsp")      # from dpro_search.runtime.synchronisation import synchronise
    ...
        sync.step(loss)                               # in place of optimizer.step()

PyTorch needs Ray for the schemes with a parameter server; MXNet has its own servers (KVStore). `README.md` in this folder says how
jobs are started.
"""

from dpro_search.runtime.synchronisation.synchronise import synchronise

__all__ = ["synchronise"]
