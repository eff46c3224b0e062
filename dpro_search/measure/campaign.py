"""`Campaign`: the loop of everything that is timed into a file: ops, collectives, clusters of ops, blocks, a machine's constants.

A workload is a subclass. It reads what its file has when it is made, says which items the file lacks, and writes the file after
each item that it has timed, whole or not at all. So a campaign that ends early, whatever ends it, goes on where it stopped when the
same command is given again.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dpro_search.errors import JobError

Item = TypeVar("Item")


@dataclass(kw_only=True)
class Progress:
    """State of a campaign, for who watches it."""

    rows: int = 0  # In the file.
    limit: int | None = None  # Rows that the file is to have; None: whatever the campaign times.
    new: int = 0  # Timed by this campaign.
    now: str = ""  # The item that is timed.
    failed: Counter[str] = field(default_factory=Counter)  # Items that could not be timed, by reason.


State = TypeVar("State", bound=Progress)


class Campaign(ABC, Generic[Item, State]):
    """Measurements that are timed into one file.

    Parameters
    ----------
    progress
        State of the file; `measure` keeps it up to date.
    on_progress
        Called with the state whenever it has changed.
    """

    def __init__(self, progress: State, on_progress: Callable[[State], None] = lambda _: None) -> None:
        self.progress, self._on_progress = progress, on_progress

    @abstractmethod
    def missing(self) -> Iterator[Item]:
        """Items that the file lacks, each drawn when those before it have been timed."""

    @abstractmethod
    def measure(self, item: Item) -> None:
        """Time an item and write the file with it; raises `JobError` if that fails."""

    def skip(self, item: Item, error: JobError) -> None:
        """Note an item that failed, so that the campaign goes on without it. Unless a workload does that, the error ends it."""
        raise error

    @property
    def full(self) -> bool:
        """Whether the file has as many rows as it is to have."""
        return self.progress.limit is not None and self.progress.rows >= self.progress.limit

    def announce(self, what: str) -> None:
        """Say what is timed from now on."""
        self.progress.now = what
        self._on_progress(self.progress)

    def added(self, rows: int = 1, new: int = 1) -> None:
        """Count rows that the file has from now on, and what was timed for them."""
        self.progress.rows += rows
        self.progress.new += new
        self._on_progress(self.progress)

    def run(self, seconds: float | None = None) -> None:
        """Time what is missing, until the file is full or the seconds are over, after which no item is begun."""
        deadline = time.monotonic() + (float("inf") if seconds is None else seconds)
        for item in self.missing():
            if self.full or time.monotonic() >= deadline:
                return
            try:
                self.measure(item)
            except JobError as error:
                self.skip(item, error)
