"""Recorder as a callback of Lightning: ``Trainer(..., callbacks=[LightningCallback("runs/rec")])``."""

from __future__ import annotations

import sys
from typing import Any

if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:  # the older package of two that do not mix
    from pytorch_lightning import Callback
else:
    from lightning import Callback

from .recorder import Recorder


class LightningCallback(Callback):  # type: ignore[misc]
    """Calls `Recorder.step` after each batch in which the optimizer stepped; the parameters are those of `Recorder`."""

    def __init__(self, folder: str, **settings: Any) -> None:
        self.recorder = Recorder(folder, **settings)
        self._global_step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.recorder.describe(pl_module, getattr(trainer.train_dataloader, "batch_size", None))
        self._global_step = trainer.global_step
        self.recorder.start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self.recorder.step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.recorder.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.recorder.close()
