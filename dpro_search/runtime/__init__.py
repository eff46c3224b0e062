"""Code that runs in somebody else's process: a training job, or a worker that measures for us. This module has its folders' paths.

A process finds most of these modules by flat names, because their folder is on its PYTHONPATH or holds the script that it runs.
They import nothing of the package, need nothing but their framework, and can be imported by Python 3.8. A job with a
synchronisation scheme imports `schemes` and `synchronisation` as parts of the package, whose errors they raise.
"""

from pathlib import Path

_RUNTIME = Path(__file__).resolve().parent

HOOKS = _RUNTIME / "hooks"
CAPTURE = _RUNTIME / "capture"
WORKERS = _RUNTIME / "workers"
ALL_REDUCE = _RUNTIME / "all_reduce"
FOLLOW = _RUNTIME / "follow"
TIMED = _RUNTIME / "timed"
