"""`Recorder`: profiles some steps of a training job from inside each rank, and clocks all others.

Between windows a step costs one reading of the clock. A failure (a full disk, a profiler that the script uses itself) costs this
rank's window and one line of warning: the job goes on.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from array import array
from typing import Any

from .files import job_path, profile_path, write_json, write_profile
from .job_facts import clock_pair, job_facts, place_in_job
from .schedule import RecordSchedule

FORMAT = "dpro-search recorder"
OFF = "DPRO_SEARCH_RECORD"  # environment variable that switches recorders off: 0
_ACTIVE = "DPRO_SEARCH_RECORDING"  # environment variable with the process in which a recorder is active
_MOST_STEPS = 100_000  # whose durations a file holds


class Recorder:
    """Context manager of a training loop; call `step` at the end of each training step.

    Parameters
    ----------
    folder
        Folder that all ranks share; it is made if it does not exist.
    model
        The model that trains. A model that DDP or FSDP wrapped is found without it.
    wait, warmup, steps, every, windows
        Which steps are profiled, see `RecordSchedule`.
    record_shapes, memory, modules
        Whether the profile has shapes of inputs, the allocator's calls, and (slower) modules and source lines.
    batch_size
        Samples of a step of one rank, for the description of the job.

    Raises
    ------
    ValueError
        Windows overlap, or a number is out of range. Nothing else is raised, by no method.

    Notes
    -----
    With ``DPRO_SEARCH_RECORD=0`` in the environment, and within a process that already records, it does nothing. The ranks write
    their files while training waits, at the end of each window.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        model: Any = None,
        wait: int = 12,
        warmup: int = 2,
        steps: int = 5,
        every: int = 1000,
        windows: int = 3,
        record_shapes: bool = True,
        memory: bool = True,
        modules: bool = False,
        batch_size: int | None = None,
    ) -> None:
        self.schedule = RecordSchedule.checked(wait=wait, warmup=warmup, steps=steps, every=every, windows=windows)
        self._folder = os.path.abspath(os.fspath(folder))
        self._model = model
        self._batch_size = batch_size
        self._contents = {"record_shapes": record_shapes, "profile_memory": memory, "with_stack": modules}
        self._ends_ns = array("q")  # the clock at the end of each step, and before the first
        self._profiler: Any = None
        self._window = -1  # of the profiler, or the last
        self._description: dict[str, Any] | None = None  # what the last window's job file holds
        self._clocks: list[dict[str, int]] = []
        self._active = False

    def __enter__(self) -> Recorder:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def describe(self, model: Any, batch_size: int | None) -> None:
        """Tell what a trainer knows, where the recorder was not told it before."""
        self._model = model if self._model is None else self._model
        self._batch_size = batch_size if self._batch_size is None else self._batch_size

    def start(self) -> None:
        """Begin to count steps."""
        if self._active or os.environ.get(OFF) == "0" or os.environ.get(_ACTIVE) == str(os.getpid()):
            return
        os.environ[_ACTIVE] = str(os.getpid())
        self._active = True
        atexit.register(self.close)
        self._clocks.append(clock_pair())
        self._ends_ns.append(time.perf_counter_ns())
        self._begin_window(0)

    def step(self) -> None:
        """End a training step."""
        if not self._active:
            return
        self._ends_ns.append(time.perf_counter_ns())
        if self._profiler is not None:
            self._guarded(self._profiler.step)
            if len(self._ends_ns) > self.schedule.profiled(self._window)[1]:
                self._drop_profiler()
        if self._profiler is None:
            self._begin_window(len(self._ends_ns) - 1)

    def close(self) -> None:
        """End the recording; a window that is not whole is dropped."""
        if not self._active:
            return
        self._active = False
        atexit.unregister(self.close)
        os.environ.pop(_ACTIVE, None)
        if self._profiler is not None:
            _warn("the job ended within window %d, which is not written" % self._window)
            self._drop_profiler()
        if self._description is not None:
            self._guarded(self._write_description)  # with the steps behind the window

    def _begin_window(self, step: int) -> None:
        window = self.schedule.window_that_starts_at(step)
        if window is not None:
            self._window = window
            self._guarded(self._start_profiler)

    def _start_profiler(self) -> None:
        import torch
        from torch import profiler

        if torch.autograd._profiler_enabled():
            raise RuntimeError("the script's own profiler is active")
        activities = [profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(profiler.ProfilerActivity.CUDA)
        plan = profiler.schedule(wait=0, warmup=self.schedule.warmup, active=self.schedule.steps, repeat=1)
        self._profiler = profiler.profile(activities=activities, schedule=plan, on_trace_ready=self._window_ended, **self._contents)
        self._profiler.start()

    def _window_ended(self, profiler: Any) -> None:
        """Write a window's files; the profiler calls this, once."""
        self._clocks.append(clock_pair())
        place = place_in_job()
        path = profile_path(self._folder, self._window, place["rank"])
        size = write_profile(path, profiler.export_chrome_trace)
        self._description = {
            "format": FORMAT,
            "version": 1,
            **place,
            "window": self._window,
            "first_step": self.schedule.profiled(self._window)[0],
            "steps": self.schedule.steps,
            "profile_bytes": size,
            "batch_size": self._batch_size,
            **job_facts(self._model),
        }
        self._write_description()

    def _write_description(self) -> None:
        if self._description is None:
            return
        first = max(0, len(self._ends_ns) - 1 - _MOST_STEPS)
        ends_ns = self._ends_ns[first:]
        profiled = [self.schedule.profiled(window) for window in range(self._window + 1)]
        self._description.update(
            clocks=self._clocks,
            first_timed_step=first,
            step_us=[(end - start) // 1000 for start, end in zip(ends_ns, ends_ns[1:])],
            # A window slows the steps of its warm-up, and the one in which its files are written.
            slowed_steps=[[begin - self.schedule.warmup, end + 1] for begin, end in profiled],
        )
        write_json(job_path(self._folder, self._description["window"], self._description["rank"]), self._description)

    def _guarded(self, action: Any) -> None:
        """Do something that may fail; the job goes on without it."""
        try:
            action()
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            _warn("window %d of rank %d is lost: %s" % (self._window, place_in_job()["rank"], reason))
            self._drop_profiler()

    def _drop_profiler(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.on_trace_ready = None
        try:
            profiler.stop()
        except Exception as error:  # it had not started, or has stopped
            del error


def _warn(text: str) -> None:
    sys.stderr.write("dpro-search: recorder: %s\n" % text)  # at once: other ranks write lines of their own
    sys.stderr.flush()
