"""What a recording leaves: one JSON of all times, and profiles packed into few files."""

from __future__ import annotations

import json
import tarfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VOLUME_BYTES = 15 * 2**20
VOLUMES = 5
RESULTS = "results.json"


class Results:
    """Of a folder; written after each case."""

    def __init__(self, folder: Path, seconds: float, name: str = RESULTS) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._path, self._seconds, self._begun = folder, folder / name, seconds, time.perf_counter()
        self.facts: dict[str, Any] = {"times": {}, "errors": {}, "profiles": {}, "skipped": [], "at_s": {}}

    @property
    def left_s(self) -> float:
        return self._seconds - (time.perf_counter() - self._begun)

    def write(self) -> None:
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self.facts, indent=1))
        part.replace(self._path)

    def add_round(self, job: str, variant: str, times: dict[str, Any], **more: Any) -> None:
        """Times of a round of a variant, and what else is known of the variant."""
        found = self.facts["times"].setdefault(job, {}).setdefault(variant, {"rounds": []})
        found["rounds"].append(times)
        found.update(more)

    def add_profile(self, path: Path, **facts: Any) -> None:
        """Pack a profile into the first volume that has room; one that no volume has room for is left out and said to be."""
        size = path.stat().st_size
        for number in range(VOLUMES):
            volume = self._folder / f"profiles-{number}.tar"
            if (volume.stat().st_size if volume.exists() else 0) + size + 20_480 <= VOLUME_BYTES:
                with tarfile.open(volume, "a") as target:
                    target.add(path, path.name)
                self.facts["profiles"][path.name] = facts | {"bytes": size, "volume": volume.name}
                return
        self.facts["profiles"][path.name] = facts | {"bytes": size, "volume": None}

    @contextmanager
    def case(self, name: str, *, needs_s: float = 5.0) -> Iterator[bool]:
        """A case: gives whether there is time for it; an error in it is noted, and the next goes on."""
        there_is_time = self.left_s >= needs_s
        begun = time.perf_counter()
        try:
            yield there_is_time
        except Exception:  # whatever a case meets, the others shall run
            self.facts["errors"][name] = traceback.format_exc(limit=-4)
        if not there_is_time:
            self.facts["skipped"].append(name)
        self.facts["at_s"][name] = [round(begun - self._begun, 1), round(time.perf_counter() - self._begun, 1)]
        print(f"{time.perf_counter() - self._begun:6.1f} s {name}{'' if there_is_time else ' (no time)'}", flush=True)
        if name in self.facts["errors"]:
            print(self.facts["errors"][name], flush=True)
        self.write()
