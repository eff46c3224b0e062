"""The additions of an all-reduce apart from its transport, and the registry of buffers, timed in turn on one thread."""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search.runtime.all_reduce.dpro_search_all_reduce.memory import HostMemory, Registry

Array = npt.NDArray[Any]
Kernel = Callable[[Array, Array], Callable[[], object]]
_SIZES_BYTES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26)
_ROUNDS, _BYTES_A_ROUND, _CALLS = 7, 2e7, 3


def lines() -> list[str]:
    """Markdown: GB/s of sums in place, of float32 and of float16 rounded once; and us of a look-up in the registry."""
    kernels = {"NumPy": _numpy, **_compiled(), **_mpi(), **_torch()}
    found = ["float32 added in place, GB of the result a second:", "", *_table(kernels, np.float32)]
    found += ["", "float16, two arrays summed in 32 bits and rounded once:", "", *_table(_halves(), np.float16)]
    found += _device()
    return [*found, "", *_registry(), "", f"One thread; median of {_ROUNDS} rounds in turn."]


def _table(kernels: Mapping[str, Kernel], dtype: npt.DTypeLike) -> list[str]:
    found = [f"| bytes | {' | '.join(kernels)} |", f"|---|{'---:|' * len(kernels)}"]
    for size_bytes in _SIZES_BYTES:
        count = size_bytes // np.dtype(dtype).itemsize
        a, b = np.zeros(count, dtype), np.ones(count, dtype)
        calls = max(int(_BYTES_A_ROUND / size_bytes), _CALLS)
        taken = _in_turn({name: kernel(a, b) for name, kernel in kernels.items()}, calls)
        found.append(f"| {size_bytes} | {' | '.join(f'{size_bytes / taken[name] / 1e9:.2f}' for name in kernels)} |")
    return found


def _in_turn(calls_of: Mapping[str, Callable[[], object]], calls: int) -> dict[str, float]:
    """Seconds of a call of each."""
    timers = {name: timeit.Timer(one) for name, one in calls_of.items()}
    for timer in timers.values():
        timer.timeit(1)  # what is compiled is compiled now
    rounds = [{name: timer.timeit(calls) / calls for name, timer in timers.items()} for _ in range(_ROUNDS)]
    return {name: float(np.median([one[name] for one in rounds])) for name in timers}


def _numpy(a: Array, b: Array) -> Callable[[], object]:
    return lambda: np.add(a, b, out=a)


def _compiled() -> dict[str, Kernel]:
    from numba import njit

    @njit(fastmath=True)
    def add(a: Array, b: Array) -> None:
        for i in range(a.size):
            a[i] += b[i]

    return {"compiled (LLVM)": lambda a, b: lambda: add(a, b)}


def _mpi() -> dict[str, Kernel]:
    try:
        from mpi4py import MPI
    except ImportError:
        print("mpi4py is not installed: its additions are left out", file=sys.stderr)
        return {}
    return {"MPI_Reduce_local": lambda a, b: lambda: MPI.SUM.Reduce_local(b, a)}


def _torch() -> dict[str, Kernel]:
    try:
        import torch
    except ImportError:
        print("torch is not installed: its additions are left out", file=sys.stderr)
        return {}
    torch.set_num_threads(1)

    def kernel(a: Array, b: Array) -> Callable[[], object]:
        x, y = torch.from_numpy(a), torch.from_numpy(b)
        return lambda: x.add_(y)

    return {"torch": kernel}


def _halves() -> dict[str, Kernel]:
    """What `HostMemory` and `TorchMemory` do with 16-bit floats."""

    def summed(memory: Callable[[Array], Any]) -> Kernel:
        def kernel(a: Array, b: Array) -> Callable[[], object]:
            mine, other = memory(a), memory(b)
            return lambda: mine.put_sum(0, a.size, [(mine, 0), (other, 0)])

        return kernel

    kernels = {"NumPy": summed(HostMemory)}
    try:
        import torch

        from dpro_search.runtime.all_reduce.dpro_search_all_reduce.memory import TorchMemory
    except ImportError:
        return kernels
    return kernels | {"torch": summed(lambda array: TorchMemory(torch.from_numpy(array)))}


def _device() -> list[str]:
    """Sums on the GPU beside what staging adds: the way to the host and back. Nothing where there is no GPU."""
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []

    def waited(run: Callable[[], object]) -> Callable[[], object]:
        def call() -> None:
            run()
            torch.cuda.synchronize()

        return call

    names = "torch", "16 bits, rounded once", "CuPy", "to the host and back", "the same, pinned"
    found = ["", f"On {torch.cuda.get_device_name()}, GB of the result a second, with the wait for its end:", ""]
    found += [f"| bytes | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    for size_bytes in _SIZES_BYTES:
        a, b = (torch.randn(size_bytes // 4, device="cuda") for _ in range(2))
        calls = [waited(lambda a=a, b=b: a.add_(b)), waited(_halves_on_device(size_bytes)), waited(_cupy(a, b))]
        for pinned in (False, True):
            host = torch.empty(size_bytes // 4, pin_memory=pinned)
            calls.append(waited(lambda a=a, host=host: (host.copy_(a), a.copy_(host))))
        taken = _in_turn(dict(zip(names, calls, strict=True)), max(int(2e8 / size_bytes), _CALLS) if size_bytes > 1 << 20 else 300)
        found.append(f"| {size_bytes} | {' | '.join(f'{size_bytes / taken[name] / 1e9:.2f}' for name in names)} |")
    return found


def _halves_on_device(size_bytes: int) -> Callable[[], object]:
    import torch

    from dpro_search.runtime.all_reduce.dpro_search_all_reduce.memory import DeviceMemory

    mine, other = (DeviceMemory(torch.randn(size_bytes // 2, device="cuda", dtype=torch.float16)) for _ in range(2))
    return lambda: mine.put_sum(0, mine.count, [(mine, 0), (other, 0)])


def _cupy(a: Any, b: Any) -> Callable[[], object]:
    try:
        import cupy
    except ImportError:
        return lambda: None
    x, y = cupy.from_dlpack(a), cupy.from_dlpack(b)
    return lambda: (cupy.add(x, y, out=x), cupy.cuda.get_current_stream().synchronize())


def _registry() -> list[str]:
    buffers: dict[str, Any] = {"NumPy array": np.zeros(1024, np.float32)}
    try:
        import torch

        buffers["torch tensor"] = torch.zeros(1024)
        if torch.cuda.is_available():
            buffers["torch tensor on the GPU, staged"] = torch.zeros(1024, device="cuda")
    except ImportError:
        pass
    found = ["| buffer | known to the registry, us | asked at each call, us |", "|---|---:|---:|"]
    for name, buffer in buffers.items():
        known, forgetting = Registry(), Registry()
        known.memory(buffer)

        def asked(registry: Registry = forgetting, buffer: Any = buffer) -> None:
            registry.forget()
            registry.memory(buffer)

        taken = _in_turn({"known": partial(known.memory, buffer), "asked": asked}, 2000)
        found.append(f"| {name} | {taken['known'] * 1e6:.2f} | {taken['asked'] * 1e6:.2f} |")
    return found
