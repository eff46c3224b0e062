"""Moments at which a rank posts each exchange, begins to wait for it and has it, by kind and mesh axis, for the observers.

Exchanges are seen where they are called (methods of ``ProcessGroup``, and functional collectives through `called`), and where they
are waited for (``Work.wait``, ``wait_tensor``): the work that a call returns tells which call a wait is for. Ranks of one machine
read one clock, so that what they write can be compared.

The file, one for each rank, ``spans-RANK`` in a folder: a line of JSON (``rank``, ``stages`` of the pipeline, ``groups`` of
``[axis, ranks]``, ``kinds``, ``steps`` of ``[begin_ns, paced_us]``), then rows of `COLUMNS` as 64-bit integers in the order in
which exchanges were posted. Only the first `MOST_STEPS` steps are kept. PyTorch only.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from array import array
from functools import wraps
from pathlib import Path
from typing import Any

COLUMNS = ("group", "kind", "peer", "bytes", "posted_ns", "waited_ns", "done_ns")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv", "other")
MOST_STEPS = 50

_WAITED, _DONE = COLUMNS.index("waited_ns"), COLUMNS.index("done_ns")
_UNKNOWN = -1  # group of a wait whose call was not seen; peer of a collective
_METHODS = {  # of ``ProcessGroup``: the kind, and which argument has the bytes
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "allgather": ("all_gather", 0),
    "all_gather_single": ("all_gather", 0),
    "_allgather_base": ("all_gather", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "all_to_all_single": ("all_to_all", 0),
    "alltoall_base": ("all_to_all", 0),
    "broadcast": ("broadcast", 0),
    "send": ("send", 0),
    "recv": ("recv", 0),
}
_FUNCTIONS = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_to_all_single": "all_to_all"}


class Spans:
    """The exchanges of a rank.

    Attributes
    ----------
    exchanged_s
        What the rank spent on calls and waits so far.
    """

    def __init__(self, planned: Any, folder: Path) -> None:
        self.exchanged_s = 0.0
        self._rank = int(os.environ["RANK"])
        self._path = folder / f"spans-{self._rank:05d}"
        self._rows = array("q")
        self._steps: list[list[float]] = []
        self._works: dict[int, tuple[int, Any]] = {}  # rows of works that nobody has waited for yet, by the work's id
        self._tensors: dict[int, int] = {}  # of results of functional collectives, by where they are in memory
        self._groups: list[tuple[str, list[int]]] = []
        self._number: dict[str, int] = {}  # of groups, by name
        self._describe(planned.mesh)
        self._stages = planned.mesh["pp"].size()
        self._watch()
        atexit.register(self._write)

    def begins_step(self) -> None:
        """Begin the next step; works of earlier ones are no longer waited for."""
        self._steps.append([time.perf_counter_ns(), 0.0])
        self._works.clear()
        self._tensors.clear()

    def paced(self, us: float) -> None:
        """So much of the step is a rank's own work as it was recorded."""
        if self._steps:
            self._steps[-1][1] += us

    def called(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Carry out an op of ``c10d`` or a functional collective that the dispatcher was asked for."""
        began = time.perf_counter_ns()
        name = function._schema.name.rpartition("::")[2]
        functional = "functional" in function.namespace
        row = self._functional(name, args, kwargs, began) if functional and name != "wait_tensor" else None
        try:
            result = function(*args, **kwargs)
            if row is not None:
                self._tensors[result.data_ptr()] = row
            return result
        finally:
            ended = time.perf_counter_ns()
            self.exchanged_s += (ended - began) / 1e9
            if functional and name == "wait_tensor":
                self._waited(self._tensors.pop(args[0].data_ptr(), None), began, ended)

    def _functional(self, name: str, args: Any, kwargs: Any, posted: int) -> int | None:
        kind = _FUNCTIONS.get(name, name.rstrip("_"))
        group = kwargs.get("group_name", args[-1])
        if kind not in KINDS or not isinstance(group, str):
            return None
        ranks = args[1] if kind == "all_gather" else 1  # what it gives is so many times what it takes
        return self._post(group, kind, _UNKNOWN, ranks * _bytes_of(args[0]), posted)

    def _describe(self, mesh: Any) -> None:
        """Groups by name. An axis over all ranks has the default group: what is called over both is taken to be the axis's.

        But a pipeline has messages only, which its readers tell by their peer.
        """
        import torch.distributed as dist

        world = dist.group.WORLD
        named = {world.group_name: ("world", list(range(dist.get_world_size())))}
        for axis in mesh.mesh_dim_names:
            group = mesh.get_group(axis)
            if mesh[axis].size() > 1 and (axis != "pp" or group.group_name != world.group_name):
                named[group.group_name] = (axis, list(dist.get_process_group_ranks(group)))
        for number, (name, value) in enumerate(named.items()):
            self._number[name] = number
            self._groups.append(value)

    def _watch(self) -> None:
        import torch.distributed as dist

        for name, (kind, argument) in _METHODS.items():
            if hasattr(dist.ProcessGroup, name):
                setattr(dist.ProcessGroup, name, self._watched(getattr(dist.ProcessGroup, name), kind, argument))
        wait = dist.Work.wait

        @wraps(wait)
        def waited(work: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter_ns()
            try:
                return wait(work, *args, **kwargs)
            finally:
                ended = time.perf_counter_ns()
                self.exchanged_s += (ended - began) / 1e9
                row, _ = self._works.pop(id(work), (None, None))
                self._waited(row, began, ended)

        dist.Work.wait = waited

    def _watched(self, method: Any, kind: str, argument: int) -> Any:
        def called(group: Any, *args: Any, **kwargs: Any) -> Any:
            posted = time.perf_counter_ns()
            given = [*args, *kwargs.values()]
            peer = given[1] if kind in ("send", "recv") else _UNKNOWN
            row = self._post(group.group_name, kind, peer, _bytes_of(given[argument]), posted)
            work = method(group, *args, **kwargs)
            if work is not None and row is not None:
                self._works[id(work)] = row, work  # which keeps the id from another work
            return work

        return called

    def _post(self, group: str, kind: str, peer: int, size_bytes: int, posted: int) -> int | None:
        """The row of a call; None where nothing is kept: of other groups than the mesh's, and of late steps."""
        number = self._number.get(group)
        if number is None or not self._keeps:
            return None
        if peer != _UNKNOWN:
            peer = self._groups[number][1][peer]
        return self._add(number, KINDS.index(kind), peer, size_bytes, posted, 0, 0)

    def _add(self, *row: int) -> int:
        self._rows.extend(row)
        return len(self._rows) - len(COLUMNS)

    def _waited(self, row: int | None, began: int, ended: int) -> None:
        if row is None:
            if self._keeps:
                self._add(_UNKNOWN, KINDS.index("other"), _UNKNOWN, 0, began, began, ended)
        else:
            self._rows[row + _WAITED], self._rows[row + _DONE] = began, ended

    @property
    def _keeps(self) -> bool:
        return 0 < len(self._steps) <= MOST_STEPS

    def _write(self) -> None:
        head = {"rank": self._rank, "stages": self._stages, "groups": self._groups, "kinds": KINDS}
        head["steps"] = self._steps[: MOST_STEPS + 1]
        with self._path.open("wb") as file:
            file.write(json.dumps(head).encode() + b"\n")
            file.write(self._rows.tobytes())


def _bytes_of(value: Any) -> int:
    """Bytes of a tensor, or of all in a list."""
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes_of, value))
    return int(value.numel() * value.element_size()) if hasattr(value, "element_size") else 0
