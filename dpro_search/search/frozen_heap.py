"""Exclude the objects that exist at the start of a search from garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Within the block, full collections skip the objects that existed at its beginning (`gc.freeze`).

    A trace, a compiled replay and the libraries are a few 100,000 objects. A full collection takes as long as some hundred
    trials, and writes to every object, which copies every page that a search shares with its workers. If the caller has frozen
    objects already, nothing is done.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
