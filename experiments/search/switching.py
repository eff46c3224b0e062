"""Runs a training script whose DistributedDataParallel changes every few steps: many settings in one process.

    python experiments/search/switching.py SETTINGS.json train.py --model bert

SETTINGS.json is ``{"steps": N, "settings": [...]}``: N steps of each setting, which is some arguments of DistributedDataParallel.
It is made again around its module; the recorder's hook in the job times the steps. Needs PyTorch, nothing else. (Horovod cannot
change like this: with TensorFlow's compiled step, shutting it down and starting it again ends the process.)
"""

from __future__ import annotations

import itertools
import json
import runpy
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Prepare the switches, then run the script."""
    told = json.loads(Path(sys.argv[1]).read_text())
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    switch(told["settings"], told["steps"])
    runpy.run_path(sys.argv[0], run_name="__main__")


def switch(settings: list[dict[str, Any]], steps: int) -> None:
    """Make a module's DistributedDataParallel again before the step that begins a setting."""
    from torch.nn.parallel import DistributedDataParallel

    original = DistributedDataParallel.forward
    numbers = itertools.count()

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        setting, later = divmod(next(numbers), steps)
        if later == 0 and setting < len(settings):
            # The same object, for the hook times the steps of one module.
            DistributedDataParallel.__init__(self, self.module, **settings[setting])
        return original(self, *args, **kwargs)

    DistributedDataParallel.forward = forward


if __name__ == "__main__":
    main()
