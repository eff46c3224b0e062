"""``changing(changes, apply)``: makes the changes of a job's hosts when their time comes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from dpro_search.collect.launch.beside import beside
from dpro_search.collect.launch.host_limits import HostChange
from dpro_search.errors import DproSearchError


@contextlib.contextmanager
def changing(changes: Sequence[HostChange], apply: Callable[[HostChange], None]) -> Iterator[None]:
    """Apply each change at its time, from a thread, while the block runs; a change that fails raises at the block's end."""
    if not changes:
        yield
        return
    failed: list[Exception] = []
    begun = time.monotonic()

    def apply_all(ended: threading.Event) -> None:
        for change in changes:
            if ended.wait(max(begun + change.after_s - time.monotonic(), 0.0)):
                return
            try:
                apply(change)
            except (DproSearchError, OSError) as error:
                failed.append(error)
                return

    with beside(apply_all):
        yield
    if failed:
        raise failed[0]
