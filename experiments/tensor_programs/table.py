"""Measured tensor programs as one file, and checks of what it holds.

One file holds one type of machine (processor family and model); `load` joins several.

File (npz): `us` [programs, ISA targets] float32; `rounds` likewise, how many rounds a time is the minimum of (0: one call; older
files have none); `leaf_count`, `task`, `seed`, `repeat`, `load` [programs]; `leaves` [leaves, 164] float16 (log2(1 + x) of most);
`positions` [all leaves]; `about`: bytes of JSON, packed by LZMA: tasks, targets, machine, and the loops of each leaf
(`loops.LoopNest`).
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search.errors import DproSearchError
from experiments.tensor_programs.workloads import Task

Floats = npt.NDArray[np.float64]
FEATURES = 164
SENTINELS_US = (1e7, 1e10)  # Tables have these where a program ran out of memory or failed (Sailor, MetaSchedule).
FASTEST_OPS_PER_S, SLOWEST_OPS_PER_S = 1e12, 1e6  # One core does less than the first and more than the second (medians).
BUNDLED = tuple(sorted((Path(__file__).parent / "tables").glob("*.npz")))  # One for each type of machine.


@dataclass(frozen=True, kw_only=True)
class Programs:
    """Compact ASTs with times."""

    us: Floats  # [programs, targets].
    rounds: npt.NDArray[np.int64]  # Rounds that a time is the minimum of, [programs, targets]; -1: unknown.
    leaves: list[npt.NDArray[np.float32]]  # one array for each program, [its leaves, 164]
    positions: list[npt.NDArray[np.int64]]  # Likewise, [its leaves].
    nests: list[Any]  # Likewise: extents, kinds, unroll, strides, name of each leaf.
    task: npt.NDArray[np.int64]  # Places in `tasks`, [programs].
    tasks: list[Task]
    repeat: npt.NDArray[np.bool_]
    load: Floats  # processes that the machine ran, over one minute, [programs]
    hashes: list[str]
    isas: list[str]
    machine: npt.NDArray[np.int64]  # Places in `machines`, [programs].
    machines: list[dict[str, Any]]

    def __len__(self) -> int:
        return len(self.us)

    def __getitem__(self, places: npt.NDArray[Any]) -> Programs:
        """Some of them."""
        chosen = np.arange(len(self))[places]
        return Programs(
            us=self.us[chosen], rounds=self.rounds[chosen],
            leaves=[self.leaves[i] for i in chosen], positions=[self.positions[i] for i in chosen],
            nests=[self.nests[i] for i in chosen], task=self.task[chosen], tasks=self.tasks, repeat=self.repeat[chosen],
            load=self.load[chosen], hashes=[self.hashes[i] for i in chosen], isas=self.isas, machine=self.machine[chosen],
            machines=self.machines,
        )  # fmt: skip

    @property
    def leaf_counts(self) -> npt.NDArray[np.int64]:
        """Of each program."""
        return np.array([len(one) for one in self.leaves])

    @property
    def timed_often(self) -> npt.NDArray[np.bool_]:
        """Times that are the minimum of as many rounds as `timing.ROUNDS` asks for since a second thread of the core was taken into
        account, [programs, targets]; before, none had more than five."""
        return np.isin(self.rounds, (24, 12, 8, 4)) | ((self.rounds == 2) & (self.us > 40_000))

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
        name: [] for name in ("us", "rounds", "leaf_count", "leaves", "positions", "task", "seed", "repeat", "load")
    }
    tasks: dict[tuple[str, tuple[int, ...]], int] = {}
    models: list[list[str]] = []
    nests, hashes, machines = [], [], []
    for path in paths:
        with np.load(path) as chunk:
            count = len(chunk["us"])
            columns["us"].append(chunk["us"])
            columns["rounds"].append(chunk["rounds"])
            columns["leaf_count"].append(chunk["leaf_count"])
            columns["leaves"].append(chunk["leaves"])
            columns["positions"].append(chunk["positions"])
            op, dims, users = json.loads(str(chunk["task"]))
            place = tasks.setdefault((op, tuple(dims)), len(tasks))
            models[place:] = [sorted({*users, *(models[place] if place < len(models) else ())}), *models[place + 1 :]]
            columns["task"].append(np.full(count, place))
            columns["seed"].append(np.full(count, int(chunk["seed"])))
            columns["repeat"].append(np.full(count, bool(chunk["repeat"])))
            machine = json.loads(str(chunk["machine"]))
            columns["load"].append(np.full(count, machine.pop("load")))
            machine.pop("time")
            machines += [machine] if machine not in machines else []
            nests += json.loads(str(chunk["nests"]))
            hashes += [str(one) for one in chunk["hash"]]
    if len(machines) > 1:
        raise DproSearchError(
            f"{out}: chunks of {len(machines)} machines or versions: {machines}; keep each in a folder of its own"
        )
    listed = [[op, dims, users] for (op, dims), users in zip(tasks, models, strict=True)]
    about = {"tasks": listed, "isas": list(ISAS), "machine": machines[0], "nests": nests, "hashes": hashes}
    packed = lzma.compress(json.dumps(about, separators=(",", ":")).encode())
    whole = {name: np.concatenate(parts) for name, parts in columns.items()}
    np.savez_compressed(
        file,
        us=whole["us"].astype(np.float32),
        rounds=whole["rounds"],
        leaf_count=whole["leaf_count"].astype(np.int16),
        leaves=np.asfortranarray(whole["leaves"].astype(np.float16)),
        positions=whole["positions"].astype(np.int16),
        task=whole["task"].astype(np.int16),
        seed=whole["seed"].astype(np.int16),
        repeat=whole["repeat"],
        load=whole["load"].astype(np.float16),
        about=np.frombuffer(packed, dtype=np.uint8),
    )
    count = int((~whole["repeat"]).sum())
    return f"{file}: {count} programs and {len(nests) - count} repeats of {len(tasks)} tasks, {file.stat().st_size / 1e6:.2f} MB"


def load(*files: Path) -> Programs:
    """Reads, checks and joins files; without one, those that are bundled."""
    return joined([_read(file) for file in files or BUNDLED])


def joined(tables: Sequence[Programs]) -> Programs:
    """Several tables as one; tasks with the same op and dims become one, with the models of all."""
    models: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for table in tables:
        for task in table.tasks:
            known = models.setdefault((task.op, task.dims), [])
            known.extend(model for model in task.models if model not in known)
    places = {key: place for place, key in enumerate(models)}
    task = [places[table.tasks[one].op, table.tasks[one].dims] for table in tables for one in table.task]
    machines = list(range(len(tables)))
    return Programs(
        us=np.concatenate([table.us for table in tables]),
        rounds=np.concatenate([table.rounds for table in tables]),
        leaves=[one for table in tables for one in table.leaves],
        positions=[one for table in tables for one in table.positions],
        nests=[one for table in tables for one in table.nests],
        task=np.array(task, dtype=np.int64),
        tasks=[Task(op=op, dims=dims, models=tuple(users)) for (op, dims), users in models.items()],
        repeat=np.concatenate([table.repeat for table in tables]),
        load=np.concatenate([table.load for table in tables]),
        hashes=[one for table in tables for one in table.hashes],
        isas=tables[0].isas,
        machine=np.repeat(machines, [len(table) for table in tables]),
        machines=[table.machines[0] for table in tables],
    )


def _read(file: Path) -> Programs:
    if not file.is_file():
        raise DproSearchError(f"{file}: no such table; make it with: python -m experiments.tensor_programs table OUT {file}")
    with np.load(file) as table:
        about = json.loads(lzma.decompress(table["about"].tobytes()))
        ends = np.cumsum(table["leaf_count"].astype(int))[:-1]
        programs = Programs(
            us=table["us"].astype(float),
            rounds=table["rounds"].astype(np.int64) if "rounds" in table else np.full(table["us"].shape, -1),
            leaves=np.split(np.ascontiguousarray(table["leaves"]).astype(np.float32), ends),
            positions=np.split(table["positions"].astype(np.int64), ends),
            nests=about["nests"],
            task=table["task"].astype(np.int64),
            tasks=[Task(op=op, dims=tuple(dims), models=tuple(models)) for op, dims, models in about["tasks"]],
            repeat=table["repeat"],
            load=table["load"].astype(float),
            hashes=about["hashes"],
            isas=about["isas"],
            machine=np.zeros(len(table["us"]), dtype=np.int64),
            machines=[about["machine"]],
        )
    check(programs, str(file))
    return programs


def distinct(programs: Programs) -> Programs:
    """Each program once on each machine, without repeats."""
    seen: set[tuple[int, int, str]] = set()
    chosen = []
    for place in range(len(programs)):
        key = (int(programs.machine[place]), int(programs.task[place]), programs.hashes[place])
        if not programs.repeat[place] and key not in seen:
            seen.add(key)
            chosen.append(place)
    return programs[np.array(chosen, dtype=np.int64)]


def noise_pct(programs: Programs) -> Floats:
    """Distance of two timings of the same program on another occasion in per cent of the first, [pairs, targets]."""
    keys = [
        (int(machine), int(task), name)
        for machine, task, name in zip(programs.machine, programs.task, programs.hashes, strict=True)
    ]
    first = {keys[i]: i for i in np.flatnonzero(~programs.repeat)[::-1]}
    pairs = [(first[keys[i]], i) for i in np.flatnonzero(programs.repeat) if keys[i] in first]
    known = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return np.asarray(100 * np.abs(programs.us[known[:, 1]] / programs.us[known[:, 0]] - 1))
