"""Python imports this module at start-up when its folder is on PYTHONPATH: that is how the hook enters a job unasked.

Another `sitecustomize` further down the path still runs. Standard library only; Python 3.8 and later.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_shadowed():
    others = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_run_shadowed()

if os.environ.get("DPRO_SEARCH_HOOK_OUT"):
    if os.environ.get("DPRO_SEARCH_HOOK_FRAMEWORK") == "pytorch":
        import dpro_search_torch as recorder
    elif os.environ.get("DPRO_SEARCH_HOOK_FRAMEWORK") == "pytorch-mesh":
        import dpro_search_parallel as recorder
    elif os.environ.get("DPRO_SEARCH_HOOK_FRAMEWORK") == "mxnet":
        import dpro_search_mxnet as recorder
    else:
        import dpro_search_recorder as recorder

    recorder.install()
