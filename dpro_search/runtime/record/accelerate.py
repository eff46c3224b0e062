"""Recorder as a tracker of Hugging Face Accelerate: ``Accelerator(log_with=[AccelerateTracker("runs/rec")])``.

It begins with the first step of an optimizer, and ends with ``accelerator.end_training``. Scripts log when they like, so that a
step is one of the optimizer.
"""

from __future__ import annotations

from typing import Any

from accelerate.tracking import GeneralTracker

from .optimizer_steps import OptimizerSteps
from .recorder import Recorder


class AccelerateTracker(GeneralTracker):  # type: ignore[misc]
    """Records on all processes what `Recorder` does, whose parameters it takes; it logs nothing."""

    name = "dpro_search"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, folder: str, **settings: Any) -> None:
        super().__init__()
        self.recorder = Recorder(folder, **settings)
        self._steps = OptimizerSteps(self.recorder)  # Accelerate starts trackers on the main process only

    @property
    def tracker(self) -> Recorder:
        """The recorder, for ``accelerator.get_tracker("dpro_search", unwrap=True)``."""
        return self.recorder

    def store_init_configuration(self, values: Any) -> None:
        """The recorder does not keep a script's own configuration, which may hold secrets."""

    def log(self, values: Any, step: Any = None, **kwargs: Any) -> None:
        """The recorder keeps no values."""

    def finish(self) -> None:
        self._steps.remove()
        self.recorder.close()
