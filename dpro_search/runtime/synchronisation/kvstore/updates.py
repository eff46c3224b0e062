"""`Updates`: the optimizer that MXNet's parameter servers run. It adds what is pushed to the model, and keeps the job's desk.

It arrives at each server by pickle, while that imports mxnet: the server must be able to import dpro_search.
"""

from __future__ import annotations

import time
from typing import Any

from mxnet.optimizer import Optimizer

from dpro_search.runtime.synchronisation.kvstore.desk import Desk


class Updates(Optimizer):  # type: ignore[misc]
    """A push to the desk's key is a message; to any other key, an addend."""

    def __init__(self, desk: Desk, desk_key: int) -> None:
        super().__init__()
        self._desk, self._desk_key = desk, desk_key

    def create_state(self, index: int, weight: Any) -> None:
        return None

    def update(self, index: int, weight: Any, grad: Any, state: None) -> None:
        if index == self._desk_key:
            weight[:] = self._desk.answered(grad.asnumpy(), time.monotonic())
        else:
            weight += grad
