"""``changing(changes, apply)``: makes the changes of a job's hosts when their time comes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from dpro_search.collect.launch.host_limits import HostChange
from dpro_search.errors import DproSearchError


@contextlib.contextmanager
def changing(changes: Sequence[HostChange], apply: Callable[[HostChange], None]) -> Iterator[None]:
    """Apply each change at its time, from a thread, while the block runs; a change that fails raises at the block's end."""
    if not changes:
        yield
        return
    ended, failed = threading.Event(), []
    begun = time.monotonic()

    def apply_all() -> None:
        for change in changes:
            if ended.wait(max(begun + change.after_s - time.monotonic(), 0.0)):
                return
            try:
                apply(change)
            except (DproSearchError, OSError) as error:
                failed.append(error)
                return

    thread = threading.Thread(target=apply_all, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if failed:
        raise failed[0]
