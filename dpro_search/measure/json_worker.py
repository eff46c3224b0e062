"""`JsonWorker`: a measuring process in a framework's environment, which answers lines of JSON; pinned to a core, killed with us."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec


class JsonWorker:
    """A process and the conversation with it.

    Parameters
    ----------
    command
        Interpreter, script and arguments.
    folder
        For its log.
    what
        What may crash in it, for messages: "the compiler".
    """

    def __init__(self, command: Sequence[str], folder: Path, what: str) -> None:
        self._what, self._log_path = what, folder / "log"
        core = str(max(os.sched_getaffinity(0)))
        self._log = self._log_path.open("wb")
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "taskset", "-c", core, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
            start_new_session=True,
        )
        self._buffer = b""

    def send(self, line: str) -> None:
        """Give it a line."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the next answer reports
            self._process.stdin.write(line.encode() + b"\n")

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next message; {"ended": reason} where the process crashed, hung or answered something else."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._process.stdout], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                return {"ended": f"took longer than {timeout_s:.0f} s"}
            data = self._process.stdout.read(1 << 16)
            if not data:
                return {"ended": self._why()}
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = msgspec.json.decode(line)
        except msgspec.MsgspecError:
            return {"ended": "the measuring process answered something else"}
        return message if isinstance(message, dict) else {"ended": "the measuring process answered something else"}

    def end(self) -> None:
        """End it."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            assert stream is not None
            stream.close()

    def _why(self) -> str:
        code = self._process.wait()
        lines = [line for line in self._log_path.read_text(errors="replace").splitlines() if line.strip()]
        fatal = next((line for line in lines if line.startswith("F")), lines[-1] if lines else "no output")
        crash = f"{self._what} crashed (signal {-code})" if code < 0 else f"the measuring process ended with code {code}"
        return f"{crash}: {' '.join(fatal.split())[-200:]}"
