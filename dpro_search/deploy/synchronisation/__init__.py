"""Synchronisation schemes for a PyTorch job, in two lines:

    sync = synchronise(model, optimizer, "adsp")      # from dpro_search.deploy.synchronisation import synchronise
    ...
        sync.step(loss)                               # in place of optimizer.step()

It needs torch, and Ray for the schemes with a parameter server. `README.md` in this folder says how jobs are started.
"""

from dpro_search.deploy.synchronisation.synchronise import synchronise

__all__ = ["synchronise"]
