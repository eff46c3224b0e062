"""The garbage collector kept off what a search begins with."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Within the block, full collections pass over the objects that there were at its beginning.

    A trace, a compiled replay and the libraries are a few 100,000 of them. Looking at all takes as long as some hundred trials, and
    writes to each: so it copies every page that a search shares with its workers. Where the caller has frozen objects itself,
    nothing is done.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
