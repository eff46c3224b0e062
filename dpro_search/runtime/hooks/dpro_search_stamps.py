"""Starts the stamps of collectives in a rank whose script knows nothing of them: with its first process group."""

import importlib.util
import os
import sys

from dpro_search_process import AfterImport, replaces


def install(folder):
    """Arrange for the stamps to start when the script calls `init_process_group`."""
    sys.meta_path.insert(0, AfterImport({"torch.distributed.distributed_c10d": lambda module: _patch(module, folder)}))


def _patch(module, folder):
    started = []

    @replaces(module, "init_process_group")
    def init_process_group(original, *args, **kwargs):
        if not started:
            started.append(True)
            _stamps().install(folder)
        return original(*args, **kwargs)


def _stamps():
    path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "record", "collective_stamps.py")
    spec = importlib.util.spec_from_file_location("dpro_search_collective_stamps", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
