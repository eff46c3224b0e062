"""Stamps of every collective of this rank: when it was enqueued, when it ended, and when the host waited for it.

::

    with CollectiveStamps("stamps"):
        train()

or, without a line added, ``DPRO_SEARCH_STAMPS=stamps`` with the folder of the hooks on PYTHONPATH. `dpro-search ranks stamps` reads
the files of all ranks, also while the job runs, and names the rank that makes the others wait.

PyTorch sends each collective through an operator of its dispatcher (``c10d::allreduce_``, ``c10d::send``, ...), whether Python or
C++ issued it: DDP's reducer, FSDP, messages of pipelines. Each of these operators gets a kernel at its autograd key here that notes
the time and calls PyTorch's own. Functional collectives (tensor parallelism of DTensor) pass below that key: their functions in
Python are replaced, so that those of compiled code are not seen. The end comes from the future of the work, or, where there is none
(Gloo's messages, functional collectives), from the return of the wait. On CUDA, events on the streams stand for the arrival and the
end; they are read once they have passed, and nothing is synchronised.

Beside them stand three marks a step: the end of the optimizer's step (a step ends there), its begin, and the first forward pass
after it. A job without `torch.optim` calls `CollectiveStamps.step` instead.

A rank writes one file of records of 48 bytes (`RECORD`) through a shared mapping, so that a killed process loses nothing; space is
reserved before it is used, so that a full disk ends the stamps and not the job. Standard library and PyTorch only.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import mmap
import os
import socket
import struct
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

VERSION = 1
HEADER_BYTES = 4096  # JSON, padded with spaces; the records follow

# enqueue_ns (monotonic clock; 0: no record); us from it on, NaN where unknown: arrival on the device's stream, end, begin of the
# host's wait, end of the host's wait; sequence number within the group, or within the pair of ranks of a message; step; bytes;
# number of the group; operation (place in OPERATIONS); unused; the other rank of a message within its group, or -1.
RECORD = struct.Struct("<qffffIiqHBBhxx")
OPERATIONS = (
    "none", "step", "forward", "update", "allreduce_", "allreduce_coalesced_", "reduce_", "broadcast_", "allgather_",
    "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_", "gather_", "scatter_", "alltoall_", "alltoall_base_", "barrier", "send", "recv_",
    "recv_any_source_",
)  # fmt: skip
_FUNCTIONAL = {  # functions of torch.distributed._functional_collectives, by their names of several versions, and their operators
    "all_reduce": "allreduce_",
    "all_gather_single": "_allgather_base_",
    "all_gather_tensor": "_allgather_base_",
    "reduce_scatter_single": "_reduce_scatter_base_",
    "reduce_scatter_tensor": "_reduce_scatter_base_",
    "all_to_all_single": "alltoall_base_",
    "broadcast": "broadcast_",
}
_STEP, _FORWARD, _UPDATE, _FIRST_COLLECTIVE = 1, 2, 3, 4
_ARRIVED, _ENDED, _WAITING, _RESUMED = 8, 12, 16, 20  # offsets in a record
_MESSAGES = ("send", "recv_", "recv_any_source_")
_CHUNK_RECORDS = 16_384  # 768 KiB: a multiple of the page
_MOST_PENDING = 4096  # works that are kept until somebody waits for them
_US = struct.Struct("<f")


class CollectiveStamps:
    """Writes the stamps of this process into a folder that all ranks share, or that is gathered later; a context manager.

    Parameters
    ----------
    folder
        Created if absent. Each rank writes ``rank-NNNNN.stamps`` and ``rank-NNNNN.groups``; an older file is kept as ``.previous``.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._file: _StampFile | None = None
        self._lock = threading.Lock()
        self._step = 0
        self._sequence: dict[tuple[int, int, int], int] = {}
        self._groups: dict[Any, int] = {}
        # By the identity of the work, or the address of a functional collective's result: what keeps that alive, and the record.
        self._pending: dict[int, tuple[Any, mmap.mmap, int, int]] = {}
        self._order: deque[int] = deque()
        self._device: _DeviceClock | None = None
        self._undo = contextlib.ExitStack()
        self._leading_optimizer: int | None = None
        self._forward_hook: Any = None
        self._thread = threading.local()  # Whether a thread is inside of a functional collective: one calls another.

    def __enter__(self) -> CollectiveStamps:
        self._replace_kernels()
        self._replace_wait()
        self._replace_functional()
        self._listen_to_steps()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()
        if self._file is not None:
            self._read_device()
            self._file.close()

    def step(self) -> None:
        """Mark the end of a step, in a job whose optimizer is none of torch.optim."""
        self._leading_optimizer = -1
        self._mark_step()

    # Hooks.

    def _replace_kernels(self) -> None:
        import torch

        library = torch.library.Library("c10d", "IMPL")
        self._undo.callback(library._destroy)
        keys = ["AutogradCPU", *(["AutogradCUDA"] if torch.cuda.is_available() else [])]
        for name in OPERATIONS[_FIRST_COLLECTIVE:]:
            operator = getattr(getattr(torch.ops.c10d, name, None), "default", None)
            for key in keys if operator is not None else ():
                excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
                kernel = functools.partial(self._called, operator, excluded, OPERATIONS.index(name), key == "AutogradCUDA")
                library.impl(name, kernel, key)

    def _replace_wait(self) -> None:
        from torch._C._distributed_c10d import Work

        original = Work.wait

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            pending = self._pending.pop(id(work), None)
            if pending is None:
                return original(work, *args, **kwargs)
            _, where, offset, enqueue_ns = pending
            _US.pack_into(where, offset + _WAITING, (time.monotonic_ns() - enqueue_ns) / 1e3)
            try:
                return original(work, *args, **kwargs)
            finally:
                us = (time.monotonic_ns() - enqueue_ns) / 1e3
                _US.pack_into(where, offset + _RESUMED, us)
                if self._device is None and math.isnan(_US.unpack_from(where, offset + _ENDED)[0]):
                    _US.pack_into(where, offset + _ENDED, us)

        Work.wait = wait
        self._undo.callback(setattr, Work, "wait", original)

    def _replace_functional(self) -> None:
        import torch.distributed._functional_collectives as functional

        for name, operation in _FUNCTIONAL.items():
            if hasattr(functional, name):
                self._replace_function(functional, name, self._called_functional, OPERATIONS.index(operation))
        self._replace_function(functional, "wait_tensor", self._waited_functional)

    def _replace_function(self, module: Any, name: str, called: Any, *before: Any) -> None:
        import torch

        original = getattr(module, name)

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # a graph has no stamps
                return original(*args, **kwargs)
            return called(original, *before, *args, **kwargs)

        setattr(module, name, replaced)
        self._undo.callback(setattr, module, name, original)

    def _called_functional(self, original: Any, operation: int, *args: Any, **kwargs: Any) -> Any:
        if getattr(self._thread, "inside", False):
            return original(*args, **kwargs)
        named = _signature(original).bind(*args, **kwargs).arguments
        tensor = named["self"]
        arrival = self._arrival() if tensor.is_cuda else None
        enqueue_ns = time.monotonic_ns()
        self._thread.inside = True
        try:
            result = original(*args, **kwargs)
        finally:
            self._thread.inside = False
        result_tensor = getattr(result, "elem", result)  # of the tensor that waits when it is used
        if _is_real(result_tensor):
            with self._until_the_disk_is_full():
                group = self._number(_resolved(named["group"], named.get("tag", "")))
                where, offset = self._append(operation, enqueue_ns, group, -1, _bytes(tensor))
                self._keep(result_tensor.data_ptr(), (arrival, result_tensor), where, offset, enqueue_ns)
        return result

    def _waited_functional(self, original: Any, tensor: Any) -> Any:
        pending = self._pending.pop(tensor.data_ptr(), None) if _is_real(tensor) else None
        if pending is None:
            return original(tensor)
        (arrival, _), where, offset, enqueue_ns = pending
        _US.pack_into(where, offset + _WAITING, (time.monotonic_ns() - enqueue_ns) / 1e3)
        result = original(tensor)
        us = (time.monotonic_ns() - enqueue_ns) / 1e3
        _US.pack_into(where, offset + _RESUMED, us)
        if arrival is not None and self._device is not None:
            self._device.ended(arrival, where, offset, enqueue_ns)
        else:
            _US.pack_into(where, offset + _ENDED, us)
        return result

    def _listen_to_steps(self) -> None:
        from torch.optim import optimizer

        for handle in (
            optimizer.register_optimizer_step_pre_hook(self._update_begins),
            optimizer.register_optimizer_step_post_hook(self._update_ends),
        ):
            self._undo.callback(handle.remove)
        self._await_forward()
        self._undo.callback(self._forward_begins)

    def _update_begins(self, optimizer: Any, *_: Any) -> None:
        if self._leading_optimizer is None:
            self._leading_optimizer = id(optimizer)
        if self._leading_optimizer == id(optimizer):
            self._mark(_UPDATE)

    def _update_ends(self, optimizer: Any, *_: Any) -> None:
        if self._leading_optimizer == id(optimizer):
            self._mark_step()

    def _mark_step(self) -> None:
        self._mark(_STEP)
        self._step += 1
        self._read_device()
        if self._forward_hook is None:
            self._await_forward()

    def _await_forward(self) -> None:
        """Listen to the first forward pass of any module; the hook is gone before the module's own modules are called."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        self._forward_hook = register_module_forward_pre_hook(lambda *_: self._forward_begins(marks=True))

    def _forward_begins(self, marks: bool = False) -> None:
        if self._forward_hook is not None:
            self._forward_hook.remove()
            self._forward_hook = None
        if marks:
            self._mark(_FORWARD)

    # Records.

    def _mark(self, operation: int) -> None:
        if self._file is not None:
            nan = math.nan
            self._file.append(time.monotonic_ns(), nan, nan, nan, nan, 0, self._step, 0, 0, operation, 0, -1)

    def _called(self, operator: Any, excluded: Any, operation: int, on_device: bool, *args: Any, **kwargs: Any) -> Any:
        import torch

        arrival = self._arrival() if on_device else None
        enqueue_ns = time.monotonic_ns()
        # An ordinary call, without the key of this kernel: unlike `redispatch` it releases the interpreter's lock, which Gloo's
        # threads take while they hold a mutex that the call needs.
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            result = operator(*args, **kwargs)
        with self._until_the_disk_is_full():
            self._stamp(operation, enqueue_ns, arrival, args, result[-1] if isinstance(result, (tuple, list)) else result)
        return result

    @contextlib.contextmanager
    def _until_the_disk_is_full(self) -> Any:
        """The job goes on without stamps where they cannot be written."""
        try:
            yield
        except OSError as error:
            print(f"dpro-search: stamps of collectives end here: {error}", file=sys.stderr)
            self._undo.close()

    def _stamp(self, operation: int, enqueue_ns: int, arrival: Any, args: tuple[Any, ...], boxed: Any) -> None:
        from torch._C._distributed_c10d import ProcessGroup, Work

        place = next(place for place, value in enumerate(args) if type(value).__name__ == "ScriptObject")
        size_bytes = max(map(_bytes, args[:place]))
        peer = args[place + 1] if OPERATIONS[operation] in _MESSAGES[:2] else -1
        where, offset = self._append(operation, enqueue_ns, self._number(ProcessGroup.unbox(args[place])), peer, size_bytes)
        work = Work.unbox(boxed)
        self._keep(id(work), work, where, offset, enqueue_ns)
        with contextlib.suppress(RuntimeError):  # a work without a future ends when somebody has waited for it
            work.get_future().add_done_callback(functools.partial(self._ended, where, offset, enqueue_ns, arrival))

    def _append(self, operation: int, enqueue_ns: int, group: int, peer: int, size_bytes: int) -> tuple[mmap.mmap, int]:
        """Write the record of a collective; returns where it stands."""
        with self._lock:
            key = (group, peer, operation if peer >= 0 else 0)
            sequence = self._sequence[key] = self._sequence.get(key, -1) + 1
        assert self._file is not None
        unknown = (math.nan,) * 4
        return self._file.append(enqueue_ns, *unknown, sequence, self._step, size_bytes, group, operation, 0, min(peer, 32_767))

    def _keep(self, key: int, alive: Any, where: mmap.mmap, offset: int, enqueue_ns: int) -> None:
        """Keep a record for the wait that follows."""
        self._pending[key] = alive, where, offset, enqueue_ns
        self._order.append(key)
        if len(self._order) > _MOST_PENDING:
            self._pending.pop(self._order.popleft(), None)

    def _ended(self, where: mmap.mmap, offset: int, enqueue_ns: int, arrival: Any, _: Any) -> None:
        if arrival is not None and self._device is not None:
            self._device.ended(arrival, where, offset, enqueue_ns)
            return
        _US.pack_into(where, offset + _ENDED, (time.monotonic_ns() - enqueue_ns) / 1e3)

    def _number(self, group: Any) -> int:
        """Number of a process group in this rank's file; the first call of all opens the file."""
        number = self._groups.get(group)
        if number is None:
            import torch.distributed as dist

            with self._lock:
                if self._file is None:
                    self._file = _StampFile(self._folder, dist.get_rank(), dist.get_world_size())
                number = self._groups[group] = len(self._groups)
            try:
                ranks = dist.get_process_group_ranks(group)
            except (ValueError, KeyError, RuntimeError):  # a group that another library made
                ranks = list(range(group.size()))
            self._file.describe_group(number, group.group_name, ranks, group._get_backend_name())
        return number

    # CUDA.

    def _arrival(self) -> Any:
        import torch

        if torch.cuda.is_current_stream_capturing():
            return None
        if self._device is None:
            self._device = _DeviceClock()
        return self._device.event()

    def _read_device(self) -> None:
        if self._device is not None:
            self._device.read()
        while self._order and self._order[0] not in self._pending:
            self._order.popleft()


class _DeviceClock:
    """Times of CUDA events on the host's clock: the distance to an event on a stream that was idle when the host read its clock."""

    def __init__(self) -> None:
        import torch

        self._base = torch.cuda.Event(enable_timing=True)
        self._base.record(torch.cuda.Stream())
        self._base_ns = time.monotonic_ns()
        self._waiting: deque[tuple[Any, Any, mmap.mmap, int, int]] = deque()

    def event(self) -> Any:
        """An event on the current stream, which the device reaches when it has done what was enqueued before."""
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ended(self, arrival: Any, where: mmap.mmap, offset: int, enqueue_ns: int) -> None:
        """Note the end; PyTorch calls this with a current stream that waits for the collective."""
        self._waiting.append((arrival, self.event(), where, offset, enqueue_ns))

    def read(self) -> None:
        """Write the times of all events that have passed."""
        while self._waiting and self._waiting[0][1].query():
            arrival, end, where, offset, enqueue_ns = self._waiting.popleft()
            for event, place in ((arrival, _ARRIVED), (end, _ENDED)):
                ns = self._base_ns + self._base.elapsed_time(event) * 1e6
                _US.pack_into(where, offset + place, (ns - enqueue_ns) / 1e3)


class _StampFile:
    """The file of one rank, which grows by chunks that are mapped into memory."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{rank:05d}.stamps"
        self._groups_path = path.with_suffix(".groups")
        for old in (path, self._groups_path):
            if old.exists():
                old.replace(f"{old}.previous")
        header = {
            "dpro_search_stamps": VERSION,
            "rank": rank,
            "world": world,
            "host": socket.gethostname(),
            "boot": _boot(),
            "pid": os.getpid(),
            "wall_ns": time.time_ns(),
            "monotonic_ns": time.monotonic_ns(),
            "record_bytes": RECORD.size,
            "operations": OPERATIONS,
        }
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.write(self._descriptor, json.dumps(header).encode().ljust(HEADER_BYTES - 1) + b"\n")
        self._lock = threading.Lock()
        self._chunk: mmap.mmap | None = None
        self._records = 0

    def append(self, *values: Any) -> tuple[mmap.mmap, int]:
        """Write one record; returns the chunk and the offset at which it stands."""
        with self._lock:
            place = self._records % _CHUNK_RECORDS
            if place == 0:
                self._grow()
            assert self._chunk is not None
            offset = place * RECORD.size
            RECORD.pack_into(self._chunk, offset, *values)
            self._records += 1
            return self._chunk, offset

    def _grow(self) -> None:
        start, length = HEADER_BYTES + self._records * RECORD.size, _CHUNK_RECORDS * RECORD.size
        os.posix_fallocate(self._descriptor, start, length)
        self._chunk = mmap.mmap(self._descriptor, length, offset=start)

    def describe_group(self, number: int, name: str, ranks: list[int], backend: str) -> None:
        with self._groups_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"group": number, "name": name, "ranks": ranks, "backend": backend}) + "\n")

    def close(self) -> None:
        with self._lock:
            os.ftruncate(self._descriptor, HEADER_BYTES + self._records * RECORD.size)
            os.close(self._descriptor)


def _boot() -> str:
    """Identity of the machine's start: processes of one share the monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _bytes(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes, value))
    return value.numel() * value.element_size() if hasattr(value, "numel") else 0


@functools.lru_cache(maxsize=None)
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def _is_real(tensor: Any) -> bool:
    """Whether a tensor has memory: graphs are traced with tensors that have none."""
    return hasattr(tensor, "data_ptr") and type(tensor).__name__ not in ("FakeTensor", "FunctionalTensor")


def _resolved(group: Any, tag: str) -> Any:
    """The process group that a functional collective was called with, in one of the ways that PyTorch takes."""
    import torch.distributed._functional_collectives as functional
    from torch.distributed.distributed_c10d import ProcessGroup, _resolve_process_group

    return group if isinstance(group, ProcessGroup) else _resolve_process_group(functional._resolve_group_name(group, tag))


def install(folder: str) -> None:
    """Stamp the collectives of this process from its first process group on, until it ends; for the hooks' sitecustomize."""
    import atexit

    stamps = CollectiveStamps(folder)
    stamps.__enter__()
    atexit.register(stamps.__exit__)
