"""Numba's cache, in one folder for several processes: what one of them compiles, the others read.

Numba names a compiled variant by counting those in its index: two processes that save at once can take each other's. So each
function is compiled by one process at a time; another that needs it waits for what comes of it.
"""

from __future__ import annotations

import fcntl
from pathlib import Path

from numba.core.caching import UserProvidedCacheLocator
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

# Numba imports the class that this variable names: so commands that tests start wait for each other as well.
LOCATOR = {"NUMBA_CACHE_LOCATOR_CLASSES": f"{__name__}.{UserProvidedCacheLocator.__name__}"}

_compile = Dispatcher.compile
_compiling: set[Path] = set()  # by this process; guarded by numba's lock


def _compile_alone(dispatcher: Dispatcher, signature: object) -> object:
    """A function may call others, which are locked after it; none calls one that calls it, so nobody waits for himself."""
    with global_compiler_lock:
        if dispatcher._cache.cache_path is None:  # not cached
            return _compile(dispatcher, signature)
        path = Path(dispatcher._cache.cache_path, f"{dispatcher.__module__}.{dispatcher.__qualname__}.lock")
        if path in _compiling:
            return _compile(dispatcher, signature)
        with path.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _compiling.add(path)
            try:
                return _compile(dispatcher, signature)
            finally:
                _compiling.remove(path)


Dispatcher.compile = _compile_alone
