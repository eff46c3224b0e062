"""Recorder as a callback of Hugging Face Transformers' Trainer: ``Trainer(..., callbacks=[TransformersCallback("runs/rec")])``."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from .recorder import Recorder


class TransformersCallback(TrainerCallback):  # type: ignore[misc]
    """Calls `Recorder.step` after each step of the optimizer; the parameters are those of `Recorder`."""

    def __init__(self, folder: str, **settings: Any) -> None:
        self.recorder = Recorder(folder, **settings)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.recorder.describe(kwargs.get("model"), args.per_device_train_batch_size * args.gradient_accumulation_steps)
        self.recorder.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.recorder.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.recorder.close()
