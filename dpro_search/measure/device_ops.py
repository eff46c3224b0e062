"""`OpTimer`: times library ops on this machine's GPU, or on one core of its CPU, with PyTorch in a process of its own.

with OpTimer(python) as timer:
    timer.device.gpu, timer.versions
    timer.time(name="gemm", precision="bf16", backward=False, sizes={"m": 4096, ...})
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import msgspec

from dpro_search.collect._files import scratch_folder
from dpro_search.collect.launch.ranks import require_framework, require_tools
from dpro_search.errors import JobError, MissingCapabilityError
from dpro_search.measure.json_worker import JsonWorker
from dpro_search.runtime import WORKERS

_WORKER = WORKERS / "dpro_search_device_worker.py"
_READY_S, _OP_S = 300.0, 120.0


class FoundDevice(msgspec.Struct, frozen=True, kw_only=True):
    """PyTorch's description of the first GPU. If `gpu` is None, there is no GPU and ops are timed on a core."""

    gpu: str | None
    amd: bool = False
    memory_bytes: int | None = None
    cores: int | None = None
    l2_bytes: int | None = None
    clock_hz: float | None = None
    memory_bytes_per_s: float | None = None


class TimedOp(msgspec.Struct, frozen=True, kw_only=True):
    """Duration of an op, or the reason why it could not be timed."""

    us: float | None = None
    spread_pct: float = 0.0  # Half the distance of the quartiles of seven rounds, of the median.
    failed: str = ""


class OpTimer:
    """The measuring process; one that ends is started again for the next op.

    Raises
    ------
    MissingCapabilityError
        The interpreter is missing or has no PyTorch.
    JobError
        The process does not begin.
    """

    device: FoundDevice
    versions: Mapping[str, Any]

    def __init__(self, python: str) -> None:
        require_tools()
        try:
            require_framework(python, ("torch",), "torch")
        except OSError as error:
            raise MissingCapabilityError(f"{python}: no such interpreter; name one that has PyTorch by --python") from error
        self._python, self._stack = python, ExitStack()
        self._worker: JsonWorker | None = None

    def __enter__(self) -> OpTimer:
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._stack.close()

    def time(self, **spec: Any) -> TimedOp:
        """Time an op: its ``name``, ``precision``, whether ``backward``, and ``sizes``."""
        if self._worker is None:
            self._start()
        assert self._worker is not None
        self._worker.send(msgspec.json.encode(spec).decode())
        answer = self._worker.receive(_OP_S)
        if "ended" in answer or answer.get("ends"):
            self._stack.close()
            self._worker = None
        if "ended" in answer:
            return TimedOp(failed=str(answer["ended"]))
        try:
            return msgspec.convert(answer, TimedOp)
        except msgspec.ValidationError:
            return TimedOp(failed="the measuring process answered something else")

    def _start(self) -> None:
        folder = self._stack.enter_context(scratch_folder("device"))
        self._worker = JsonWorker([self._python, str(_WORKER)], folder, "PyTorch")
        self._stack.callback(self._worker.end)
        first = self._worker.receive(_READY_S)
        if "ready" not in first:
            self._stack.close()
            raise JobError(f"{self._python}: ops could not be timed: {first.get('ended', 'no answer')}")
        self.device = msgspec.convert(first["ready"], FoundDevice)
        self.versions = {name: version for name, version in first.get("versions", {}).items() if version}
