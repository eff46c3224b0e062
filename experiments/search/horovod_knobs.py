"""Horovod's fusion threshold and cycle time, changed while a job runs: many settings in one process.

Horovod reads both when it starts, and cannot be started twice in a process with a compiled TensorFlow step. Its background thread
asks the object that the autotuner works on (`ParameterManager::BayesianParameter`) for them in every cycle; so that object is told
here, by Horovod's own method, as the autotuner would. Both are to be given in the environment: what is fixed there stays fixed, and
is one number that is overwritten.

Nothing points to the object from outside. It is found by its first word, the address of its class's table of methods.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

_CLASS = "N7horovod6common16ParameterManager17BayesianParameterE"
_SET_VALUE = "_ZN7horovod6common16ParameterManager17BayesianParameter8SetValueENS1_16BayesianVariableEdb"
_BEST_VALUE = "_ZNK7horovod6common16ParameterManager17BayesianParameter9BestValueENS1_16BayesianVariableE"
_THRESHOLD_MIB, _CYCLE_MS = 0, 1  # `BayesianVariable`
_WORD_BYTES = 8
_TABLE_HEAD_BYTES = 2 * _WORD_BYTES  # before the first method (Itanium C++ ABI, 2.5.2)
_CHUNK_BYTES = 2**24


class HorovodKnobs:
    """The knobs of the Horovod that runs in this process.

    Parameters
    ----------
    library
        Horovod's library (``HorovodBasics.MPI_LIB_CTYPES``), started.

    Raises
    ------
    RuntimeError
        The object that holds them is not found, or holds other values than the environment gave.
    """

    def __init__(self, library: ctypes.CDLL, threshold_bytes: int, cycle_time_ms: float) -> None:
        self._set = library[_SET_VALUE]
        self._set.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_double, ctypes.c_bool)
        self._set.restype = None
        self._get = library[_BEST_VALUE]
        self._get.argtypes = (ctypes.c_void_p, ctypes.c_int)
        self._get.restype = ctypes.c_double
        methods = ctypes.addressof(ctypes.c_char.in_dll(library, f"_ZTV{_CLASS}")) + _TABLE_HEAD_BYTES
        found = list(_words(methods, near=methods))
        if len(found) != 1:
            raise RuntimeError(f"Horovod's parameters were found {len(found)} times in its memory, not once")
        self._object = found[0]
        if abs(self.threshold_bytes - threshold_bytes) > 1 or abs(self.cycle_time_ms - cycle_time_ms) > 1e-3:
            held = f"{self.threshold_bytes} bytes and {self.cycle_time_ms} ms"
            raise RuntimeError(f"Horovod's parameters are {held}, not what the environment gave")

    @property
    def threshold_bytes(self) -> int:
        """HOROVOD_FUSION_THRESHOLD as it is."""
        return round(self._get(self._object, _THRESHOLD_MIB) * 2**20)

    @property
    def cycle_time_ms(self) -> float:
        """HOROVOD_CYCLE_TIME as it is."""
        return float(self._get(self._object, _CYCLE_MS))

    def change(self, threshold_bytes: int, cycle_time_ms: float) -> None:
        """Change both, from the next cycle on; to be called between steps, alike on all ranks."""
        self._set(self._object, _THRESHOLD_MIB, threshold_bytes / 2**20, True)
        self._set(self._object, _CYCLE_MS, cycle_time_ms, True)


def _words(value: int, *, near: int) -> Iterator[int]:
    """Addresses of aligned words of a value in the writable memory of the library that `near` lies in."""
    wanted = value.to_bytes(_WORD_BYTES, "little")
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
        for start, end in _writable(near):
            for first in range(start, end, _CHUNK_BYTES):
                memory.seek(first)
                chunk = memory.read(min(_CHUNK_BYTES, end - first))
                at = chunk.find(wanted)
                while at >= 0:
                    if at % _WORD_BYTES == 0:
                        yield first + at
                    at = chunk.find(wanted, at + 1)


def _writable(near: int) -> list[tuple[int, int]]:
    """Writable ranges of the library: those mapped from its file, and what follows the last of them without a gap (its zeroes)."""
    ranges: list[tuple[int, int, str, str]] = []
    with Path("/proc/self/maps").open() as maps:
        for line in maps:
            span, mode, _, _, _, *path = line.split(maxsplit=5)
            start, end = (int(text, 16) for text in span.split("-"))
            ranges.append((start, end, mode, path[0].strip() if path else ""))
    file = next(path for start, end, _, path in ranges if start <= near < end)
    found: list[tuple[int, int]] = []
    for start, end, mode, path in ranges:
        follows = not path and bool(found) and found[-1][1] == start
        if mode.startswith("rw") and (path == file or follows):
            found.append((start, end))
    return found
