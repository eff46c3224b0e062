"""`Store`: the model and the desk of a job in MXNet's KVStore of type ``dist_async``, on ps-lite.

The model is one flat array, in as many parts as there are servers. A part is a key; its last number counts the updates
in it. One more key is the desk (``kvstore_desk.py``).
"""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np

from dpro_search.errors import InputError, JobError
from dpro_search.runtime.synchronisation.kvstore.desk import Desk, DeskMessage, Values, desk_size, pushed_value
from dpro_search.runtime.synchronisation.local_model import Flat

_BOUND = "MXNET_KVSTORE_BIGARRAY_BOUND"  # elements from which MXNet divides an array among the servers
_ROLES = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_SERVER", "DMLC_NUM_WORKER")
START_S = 120.0  # the scheduler, the servers and all workers must have started within it
_opened = False


class Store:
    """A worker's connection to the servers; there is one in each process, until the process ends.

    Attributes
    ----------
    rank, workers
        ps-lite's number of this worker, from 0, and that of all.
    updates
        How many updates are in each part of the model that was pulled last.
    """

    def __init__(self) -> None:
        """Connect; returns when all workers and servers of the job have.

        Raises
        ------
        InputError
            The process has joined a job before.
        JobError
            It was not started as a worker, or the scheduler does not let it in within `START_S` seconds.
        """
        global _opened
        if _opened:
            raise InputError(
                "synchronise: an MXNet process takes part in one job, and in that once: ps-lite starts once in a process"
            )
        missing = [name for name in _ROLES if not os.environ.get(name)]
        if missing:
            raise JobError(
                f"synchronise: {missing[0]} is not set; start the job with a scheduler and servers (DMLC_ROLE) as for dist_async"
            )
        os.environ[_BOUND] = str(2**31 - 1)  # the parts are one for each server as they are
        import mxnet as mx

        _opened = True
        self._mx = mx
        self._kv = _connected()
        self.rank, self.workers = int(self._kv.rank), int(self._kv.num_workers)
        self._servers = int(os.environ["DMLC_NUM_SERVER"])
        self.updates: tuple[int, ...] = ()

    def begin(self, flat: Flat, desk: Desk) -> None:
        """Give the servers rank 0's model and desk, once on every worker."""
        parts = max(1, min(self._servers, len(flat)))
        self._sizes = [len(part) for part in np.array_split(flat, parts)]
        self._desk_key = parts
        self._keys = list(range(parts))
        self._kv.init(self._keys, self._as_parts(flat, count=0))
        self._kv.init(self._desk_key, self._mx.nd.zeros(desk_size(self.workers)))
        if self.rank == 0:
            from dpro_search.runtime.synchronisation.kvstore.updates import Updates

            # Servers that cannot import the second one keep the first: the desk's key then shows that no desk is there.
            self._kv.set_optimizer(self._mx.optimizer.SGD(learning_rate=-1.0, wd=0.0))
            self._kv.set_optimizer(Updates(desk, self._desk_key))
        self._kv._barrier()

    def add(self, update: Flat) -> None:
        """Add an update to the model; returns when it is in all parts."""
        self._kv.push(self._keys, self._as_parts(update, count=1))
        self._mx.nd.waitall()

    def pull(self) -> Flat:
        """The model. It has all updates of which the desk knew before."""
        parts = [self._mx.nd.empty(size + 1) for size in self._sizes]
        self._kv.pull(self._keys, out=parts)
        pulled = [part.asnumpy() for part in parts]
        self.updates = tuple(round(float(part[-1])) for part in pulled)
        return np.concatenate([part[:-1] for part in pulled])

    def tell(self, message: DeskMessage) -> None:
        """Push a message to the desk; a later `table` has what the desk wrote then."""
        self._kv.push(self._desk_key, self._mx.nd.array(pushed_value(message, self.workers)))

    def table(self) -> Values:
        """The desk's value."""
        table = self._mx.nd.empty(desk_size(self.workers))
        self._kv.pull(self._desk_key, out=table)
        values: Values = table.asnumpy()
        return values

    def end_without_the_others(self) -> None:
        """Do not wait for them when this process ends: one is lost, and would never come."""
        from mxnet.base import _LIB, check_call

        check_call(_LIB.MXKVStoreSetBarrierBeforeExit(self._kv.handle, 0))

    def _as_parts(self, flat: Flat, *, count: int) -> list[Any]:
        """New arrays: MXNet receives what it pulls later in those that were pushed."""
        ends = np.cumsum(self._sizes)[:-1]
        return [self._mx.nd.array(np.append(part, np.float32(count))) for part in np.split(flat, ends)]


def _connected() -> Any:
    """The KVStore. ps-lite waits for ever where a process is missing, and for one that comes after the others have begun."""
    import mxnet as mx

    stores: list[Any] = []
    thread = threading.Thread(target=lambda: stores.append(mx.kv.create("dist_async")), daemon=True)
    thread.start()
    thread.join(START_S)
    if not stores:
        raise JobError(
            f"synchronise: ps-lite did not let this worker in within {START_S:.0f} s: start the scheduler, all servers and all "
            "workers; a worker that is started again later is not taken back"
        )
    return stores[0]
