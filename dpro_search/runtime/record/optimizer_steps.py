"""Steps of a script that does not call `Recorder.step`: a training step ends with a step of the first optimizer that steps.

Micro-batches whose gradients are accumulated are of one step. Standard library and PyTorch only.
"""

from __future__ import annotations

import weakref
from typing import Any

from .recorder import Recorder


class OptimizerSteps:
    """Calls `Recorder.step` after each step of the process's first optimizer; if that one is gone, of the next that steps."""

    def __init__(self, recorder: Recorder) -> None:
        from torch.optim import optimizer

        self._recorder = recorder
        self._optimizer: Any = None
        self._handle = optimizer.register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        first = None if self._optimizer is None else self._optimizer()
        if first is None:
            self._optimizer = weakref.ref(optimizer)
            self._recorder.start()
        elif first is not optimizer:
            return
        self._recorder.step()

    def remove(self) -> None:
        """Call it no more."""
        self._handle.remove()
