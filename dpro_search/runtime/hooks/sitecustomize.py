"""Python imports this module at start-up when its folder is on PYTHONPATH: that is how the hook enters a job unasked.

Another `sitecustomize` further down the path still runs. Standard library only; Python 3.8 and later.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _run_shadowed():
    """Run the next module of this name on the path; those before it have run, for one of them came here."""
    here = os.path.dirname(os.path.realpath(__file__))
    places = [os.path.realpath(entry or ".") for entry in sys.path]
    behind = sys.path[places.index(here) + 1 :] if here in places else []
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", behind)
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

if os.environ.get("DPRO_SEARCH_RECORD_TO"):
    import dpro_search_attach

    dpro_search_attach.install()

if os.environ.get("DPRO_SEARCH_STAMPS"):
    import dpro_search_stamps

    dpro_search_stamps.install(os.environ["DPRO_SEARCH_STAMPS"])
