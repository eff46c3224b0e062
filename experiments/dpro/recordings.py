"""Recordings with the plain runs that lie beside them, in the folders that `experiments.validation` writes.

`measure` writes WORKLOAD/trace-LINK and WORKLOAD/truth-LINK/base*.json, of TensorFlow with Horovod; `frameworks` writes
SCHEME/WORKLOAD/LINK/trace and base.N.json beside it, of the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from scipy.stats import trim_mean

from dpro_search.collect.trace import Trace
from experiments.validation.frameworks_report import TRIMMED
from experiments.validation.measure import RATES, WORKLOADS, Measured

SYSTEMS = {  # by the folder's name
    "tensorflow": "TensorFlow, Horovod",
    "horovod": "MXNet, Horovod",
    "ps": "MXNet KVStore",
    "byteps": "MXNet BytePS",
    "ddp": "PyTorch DDP",
}
_OF_MEASURE = "tensorflow"


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A recorded job, and plain runs of the same: without profiler and timeline, no prediction uses them."""

    system: str
    workload: str
    link: str
    folder: Path
    runs: tuple[Path, ...]

    @property
    def name(self) -> str:
        """System, workload and link."""
        return f"{self.system}/{self.workload}/{self.link}"

    def load(self) -> Trace:
        """The trace."""
        return Trace.load(self.folder)

    def plain_us(self) -> list[float]:
        """Iteration of each plain run: the mean without the lowest and highest fifth of its steps."""
        runs = [msgspec.json.decode(path.read_bytes(), type=Measured) for path in self.runs]
        return [float(trim_mean(run.iteration_us, TRIMMED)) for run in runs]


def recordings(
    folders: Iterable[Path],
    *,
    systems: Collection[str] = tuple(SYSTEMS),
    workloads: Collection[str] = WORKLOADS,
    links: Collection[str] = RATES,
) -> list[Recording]:
    """The recordings below some folders that have plain runs, in the order of systems, workloads and links."""
    found = {}
    for folder in folders:
        for system in systems:
            for workload in workloads:
                for link in links:
                    trace, runs = _paths(folder, system, workload, link)
                    if (trace / "meta.json").is_file() and runs:
                        found[system, workload, link] = Recording(
                            system=system, workload=workload, link=link, folder=trace, runs=runs
                        )
    order = [(system, workload, link) for system in systems for workload in workloads for link in links]
    return [found[key] for key in order if key in found]


def mean_us(plain_us: Iterable[float]) -> float:
    """What a recording's plain runs took, together."""
    return float(np.mean(list(plain_us)))


def _paths(folder: Path, system: str, workload: str, link: str) -> tuple[Path, tuple[Path, ...]]:
    if system == _OF_MEASURE:
        runs, trace = folder / workload / f"truth-{link}", folder / workload / f"trace-{link}"
    else:
        runs = folder / system / workload / link
        trace = runs / "trace"
    names = ("base", "base-again")  # the latter of `measure` only: the recorded setting again
    return trace, tuple(path for name in names for path in sorted(runs.glob(f"{name}.[0-9]*.json")))
