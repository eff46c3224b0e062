"""Measured tensor programs as one file, and checks of what it holds.

File (npz): `us` [programs, ISA targets] float32; `leaf_count`, `task`, `seed`, `repeat`, `load` [programs]; `leaves` [leaves, 164]
float16 (log2(1 + x) of most); `positions` [all leaves]; `about`: bytes of JSON, packed by LZMA: tasks, targets, machine, and
the loops of each leaf (`loops.LoopNest`).
"""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search.errors import DproSearchError
from experiments.tensor_programs.workloads import Task

Floats = npt.NDArray[np.float64]
FEATURES = 164
SENTINELS_US = (1e7, 1e10)  # What tables put where a program ran out of memory or failed (Sailor, MetaSchedule).
FASTEST_OPS_PER_S, SLOWEST_OPS_PER_S = 1e12, 1e6  # One core does less than the first and more than the second (medians).
BUNDLED = Path(__file__).parent / "programs.npz"


@dataclass(frozen=True, kw_only=True)
class Programs:
    """Compact ASTs with times."""

    us: Floats  # [programs, targets].
    leaves: list[npt.NDArray[np.float32]]  # Of each program, [its leaves, 164].
    positions: list[npt.NDArray[np.int64]]  # Likewise, [its leaves].
    nests: list[Any]  # Likewise: extents, kinds, unroll, strides, name of each leaf.
    task: npt.NDArray[np.int64]  # Places in `tasks`, [programs].
    tasks: list[Task]
    repeat: npt.NDArray[np.bool_]
    load: Floats  # Of the machine, processes over one minute, [programs].
    hashes: list[str]
    isas: list[str]
    machine: dict[str, Any]

    def __len__(self) -> int:
        return len(self.us)

    def __getitem__(self, places: npt.NDArray[Any]) -> Programs:
        """Some of them."""
        chosen = np.arange(len(self))[places]
        return Programs(
            us=self.us[chosen], leaves=[self.leaves[i] for i in chosen], positions=[self.positions[i] for i in chosen],
            nests=[self.nests[i] for i in chosen], task=self.task[chosen], tasks=self.tasks, repeat=self.repeat[chosen],
            load=self.load[chosen], hashes=[self.hashes[i] for i in chosen], isas=self.isas, machine=self.machine,
        )  # fmt: skip

    @property
    def leaf_counts(self) -> npt.NDArray[np.int64]:
        """Of each program."""
        return np.array([len(one) for one in self.leaves])

    def used_by(self, model: str) -> npt.NDArray[np.bool_]:
        """Programs of tasks that a model runs, whichever other model runs them, too."""
        return np.array([model in self.tasks[one].models for one in self.task], dtype=bool)


def ops_of(leaves: npt.NDArray[np.float32]) -> float:
    """Float operations of a program: the first seven features count them on a scale of log2(1 + x)."""
    return float(np.sum(2.0 ** leaves[:, :7].astype(float) - 1))


def check(programs: Programs, where: str) -> None:
    """Raises `DproSearchError` for times that cannot be, in the words of the person who has the table."""
    us = programs.us
    for sentinel in SENTINELS_US:
        if (us == sentinel).any():
            place = int(np.argwhere(us == sentinel)[0][0])
            raise DproSearchError(
                f"{where}: program {place} took exactly {sentinel:g} us: that stands for out of memory; leave these rows out"
            )
    if not (np.isfinite(us) & (us > 0)).all():
        place = int(np.argwhere(~(np.isfinite(us) & (us > 0)))[0][0])
        raise DproSearchError(f"{where}: program {place} has a time that is no positive number; leave it out")
    ops = np.array([ops_of(one) for one in programs.leaves])
    heavy = ops > 1e6
    if heavy.any():
        rate = float(np.median(ops[heavy, None] / us[heavy] * 1e6))
        if rate > FASTEST_OPS_PER_S:
            raise DproSearchError(
                f"{where}: half of the programs exceed {rate:.0e} operations/s on a core; are these times in ms, not us?"
            )
        if rate < SLOWEST_OPS_PER_S:
            raise DproSearchError(
                f"{where}: half of the programs stay below {rate:.0e} operations/s; are these times in ns, not us?"
            )


def pack(out: Path, file: Path) -> str:
    """Writes the chunks of a folder as one file and says what it holds."""
    from experiments.tensor_programs.collect import ISAS  # Imports no TVM.

    paths = sorted(out.glob("[0-9]*.npz"))
    if not paths:
        raise DproSearchError(f"{out}: no chunk is there; run collect first")
    columns: dict[str, list[Any]] = {
        name: [] for name in ("us", "leaf_count", "leaves", "positions", "task", "seed", "repeat", "load")
    }
    tasks: dict[str, int] = {}
    nests, hashes, machine = [], [], {}
    for path in paths:
        with np.load(path) as chunk:
            count = len(chunk["us"])
            columns["us"].append(chunk["us"])
            columns["leaf_count"].append(chunk["leaf_count"])
            columns["leaves"].append(chunk["leaves"])
            columns["positions"].append(chunk["positions"])
            columns["task"].append(np.full(count, tasks.setdefault(str(chunk["task"]), len(tasks))))
            columns["seed"].append(np.full(count, int(chunk["seed"])))
            columns["repeat"].append(np.full(count, bool(chunk["repeat"])))
            machine = json.loads(str(chunk["machine"]))
            columns["load"].append(np.full(count, machine.pop("load")))
            nests += json.loads(str(chunk["nests"]))
            hashes += [str(one) for one in chunk["hash"]]
    about = {"tasks": [json.loads(one) for one in tasks], "isas": list(ISAS), "machine": machine, "nests": nests, "hashes": hashes}
    packed = lzma.compress(json.dumps(about, separators=(",", ":")).encode())
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    np.savez_compressed(
        file,
        us=joined["us"].astype(np.float32),
        leaf_count=joined["leaf_count"].astype(np.int16),
        leaves=np.asfortranarray(joined["leaves"].astype(np.float16)),
        positions=joined["positions"].astype(np.int16),
        task=joined["task"].astype(np.int16),
        seed=joined["seed"].astype(np.int16),
        repeat=joined["repeat"],
        load=joined["load"].astype(np.float16),
        about=np.frombuffer(packed, dtype=np.uint8),
    )
    count = int((~joined["repeat"]).sum())
    return f"{file}: {count} programs and {len(nests) - count} repeats of {len(tasks)} tasks, {file.stat().st_size / 1e6:.2f} MB"


def load(file: Path = BUNDLED) -> Programs:
    """Reads and checks a file."""
    if not file.is_file():
        raise DproSearchError(f"{file}: no such table; make it with: python -m experiments.tensor_programs table OUT {file}")
    with np.load(file) as table:
        about = json.loads(lzma.decompress(table["about"].tobytes()))
        ends = np.cumsum(table["leaf_count"].astype(int))[:-1]
        programs = Programs(
            us=table["us"].astype(float),
            leaves=np.split(np.ascontiguousarray(table["leaves"]).astype(np.float32), ends),
            positions=np.split(table["positions"].astype(np.int64), ends),
            nests=about["nests"],
            task=table["task"].astype(np.int64),
            tasks=[Task(op=op, dims=tuple(dims), models=tuple(models)) for op, dims, models in about["tasks"]],
            repeat=table["repeat"],
            load=table["load"].astype(float),
            hashes=about["hashes"],
            isas=about["isas"],
            machine=about["machine"],
        )
    check(programs, str(file))
    return programs


def distinct(programs: Programs) -> Programs:
    """Each program once, without repeats."""
    seen: set[tuple[int, str]] = set()
    chosen = []
    for place in range(len(programs)):
        key = (int(programs.task[place]), programs.hashes[place])
        if not programs.repeat[place] and key not in seen:
            seen.add(key)
            chosen.append(place)
    return programs[np.array(chosen, dtype=np.int64)]


def noise_pct(programs: Programs) -> Floats:
    """Distance of two timings of the same program on another occasion in per cent of the first, [pairs, targets]."""
    first = {(int(programs.task[i]), programs.hashes[i]): i for i in range(len(programs)) if not programs.repeat[i]}
    pairs = [(first.get((int(programs.task[i]), programs.hashes[i])), i) for i in np.flatnonzero(programs.repeat)]
    known = np.array([pair for pair in pairs if pair[0] is not None], dtype=np.int64).reshape(-1, 2)
    return np.asarray(100 * np.abs(programs.us[known[:, 1]] / programs.us[known[:, 0]] - 1))
