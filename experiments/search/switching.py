"""Runs a training script whose communication settings change every few steps: many settings in one process.

    python experiments/search/switching.py SETTINGS.json torch_train.py --model bert

SETTINGS.json is ``{"steps": N, "settings": [...]}``: N steps of each setting. A setting is arguments of DistributedDataParallel
(it is made again around its module), or ``{"threshold_bytes": ..., "cycle_time_ms": ...}`` of a TensorFlow job's Horovod
(`horovod_knobs`). The recorder's hook in the job times the steps. Needs the framework, nothing else.
"""

from __future__ import annotations

import itertools
import json
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent


def main() -> None:
    """Prepare the switches, then run the script."""
    told = json.loads(Path(sys.argv[1]).read_text())
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    settings: list[dict[str, Any]] = told["settings"]
    due = _due(settings, told["steps"])
    if "cycle_time_ms" in settings[0]:
        switch_horovod(due)
    else:
        switch_ddp(due)
    runpy.run_path(sys.argv[0], run_name="__main__")


def _due(settings: list[dict[str, Any]], steps: int) -> Iterator[dict[str, Any] | None]:
    """For one step after the other: the setting that begins with it, if one does."""
    for number in itertools.count():
        setting, later = divmod(number, steps)
        yield settings[setting] if later == 0 and setting < len(settings) else None


def switch_ddp(due: Iterator[dict[str, Any] | None]) -> None:
    """Make a module's DistributedDataParallel again before the step that begins a setting."""
    from torch.nn.parallel import DistributedDataParallel

    original = DistributedDataParallel.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        setting = next(due)
        if setting is not None:
            # The same object, for the hook times the steps of one module.
            DistributedDataParallel.__init__(self, self.module, **setting)
        return original(self, *args, **kwargs)

    DistributedDataParallel.forward = forward


def switch_horovod(due: Iterator[dict[str, Any] | None]) -> None:
    """Tell Horovod's background thread before the step that begins a setting; steps are those that the hook in the job counts."""
    from horovod.tensorflow import mpi_ops
    from tensorflow.python.eager import context
    from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

    sys.path.append(str(_HERE))
    from horovod_knobs import HorovodKnobs

    original = Function.__call__
    knobs: list[HorovodKnobs] = []

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "_dpro_search_is_step", None) and context.executing_eagerly():
            setting = next(due)
            if setting is not None:
                if not knobs:
                    threshold_bytes, cycle_time_ms = (os.environ[f"HOROVOD_{name}"] for name in ("FUSION_THRESHOLD", "CYCLE_TIME"))
                    knobs.append(HorovodKnobs(mpi_ops._basics.MPI_LIB_CTYPES, int(threshold_bytes), float(cycle_time_ms)))
                knobs[0].change(**setting)
        return original(self, *args, **kwargs)

    Function.__call__ = call


if __name__ == "__main__":
    main()
