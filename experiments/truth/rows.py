"""Published runs: CSV files with one run a row."""

from __future__ import annotations

import csv
import gzip
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dpro_search.errors import InputError

PUBLISHERS = (  # pattern of a source's name -> who published it: their runs share hardware, frameworks and the way they are timed
    (r"^mlperf", "MLPerf"),
    (r"^vtrain", "vTrain"),
    (r"^bigscience", "BigScience"),
    (r"^(nemo|megatron-bridge|dgxc|nvidia)", "NVIDIA"),
    (r"^jax-toolbox|^gpu-recipes", "JAX"),
)
NEEDED = ("source", "gpu", "n_gpus", "model", "status", "step_time_s")


def publisher_of(source: str) -> str:
    """Who published a source; of one that stands alone, the source itself."""
    return next((publisher for pattern, publisher in PUBLISHERS if re.search(pattern, source)), source)


@dataclass(frozen=True)
class Row:
    """One run; a blank cell is a value that its source does not give."""

    values: Mapping[str, str]

    def text(self, name: str) -> str:
        """A cell in lower case, without spaces around it."""
        return (self.values.get(name) or "").strip().lower()

    def number(self, name: str) -> float | None:
        """A cell that is a number; None for any other."""
        try:
            found = float(self.values.get(name) or "")
        except ValueError:
            return None
        return found if math.isfinite(found) else None

    def whole(self, name: str, default: int) -> int:
        """A cell that is a whole number."""
        found = self.number(name)
        return default if found is None else round(found)

    @property
    def measured(self) -> bool:
        """Whether the run ended, with a step time, and is well enough described to be counted (tiers A and B)."""
        step = self.number("step_time_s")
        return self.text("status") == "ok" and self.text("tier") in ("a", "b") and step is not None and step > 0

    @property
    def memory_alone(self) -> bool:
        """Whether a run ended whose memory counts and whose time does not: a tiny model (tier M), or a table without times."""
        counts = self.text("tier") == "m" or (self.text("tier") in ("a", "b") and not self.number("step_time_s"))
        return self.text("status") == "ok" and counts and self.number("memory_gb") is not None

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether the run ended for lack of memory; crashes that were not told apart count."""
        return self.text("status").startswith("oom")


def read(folder: Path) -> Iterator[Row]:
    """Rows of all CSV files of a folder (``.csv``, ``.csv.gz``) in the order of their names.

    Raises
    ------
    InputError
        There is no such file, or a column is missing.
    """
    files = sorted(path for path in folder.glob("*.csv*") if path.suffix in (".csv", ".gz"))
    if not files:
        raise InputError(f"{folder}: no CSV files of runs (.csv, .csv.gz)")
    for path in files:
        with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as lines:
            reader = csv.DictReader(lines)
            missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
            if missing:
                raise InputError(f"{path}: no column {', '.join(missing)}")
            yield from map(Row, reader)
