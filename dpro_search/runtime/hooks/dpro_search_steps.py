"""`StepRecorder`, the base of all frameworks' recorders: it reads their settings, counts and times steps, writes hook.json.

Settings come from the environment:
  DPRO_SEARCH_HOOK_OUT       folder to write to; "{rank}" in it stands for the number of the rank
  DPRO_SEARCH_HOOK_MODE      "time" (step times only) or "record" (profile some steps as well)
  DPRO_SEARCH_HOOK_WARMUP, DPRO_SEARCH_HOOK_UNTRACED, DPRO_SEARCH_HOOK_TRACED
                             steps to skip, then to time, then to profile; steps after that are timed
  DPRO_SEARCH_HOOK_RANK      number of the rank; where it is missing, what Horovod or torchrun set
Standard library only; Python 3.8 and later.
"""

import atexit
import json
import os
import platform
import resource
import sys
import time

from dpro_search_process import ThreadClock, machine, rank

_PROGRESS_NS = 500 * 10**6


class StepRecorder:
    """The steps of this rank; a framework's recorder decides when they begin and end, and calls `write_hook` in its `write`.

    `write` is called when the process ends. Python processes that the job starts beside itself come there too.
    """

    def __init__(self):
        env = os.environ
        self.records = env.get("DPRO_SEARCH_HOOK_MODE", "time") == "record"
        self.out = env["DPRO_SEARCH_HOOK_OUT"].replace("{rank}", str(rank()))
        self.warmup = int(env.get("DPRO_SEARCH_HOOK_WARMUP", "5"))
        self.first_traced = self.warmup + int(env.get("DPRO_SEARCH_HOOK_UNTRACED", "10"))
        self.end_traced = self.first_traced + int(env.get("DPRO_SEARCH_HOOK_TRACED", "10"))
        self.cpu = ThreadClock()
        self.steps = []  # [start_ns, end_ns, compute_cpu_ns, comm_cpu_ns, traced]
        self.tracing = False
        self._progress_ns = 0  # when the next progress is written
        os.makedirs(self.out, exist_ok=True)
        atexit.register(self.write)

    def begun_step(self):
        """A step that begins now, to be appended to `steps`; its end is its start until it is set."""
        compute_ns, comm_ns = self.cpu.read()
        start_ns = time.time_ns()
        if start_ns >= self._progress_ns:
            self._write_progress(start_ns)
        return [start_ns, start_ns, compute_ns, comm_ns, self.tracing]

    def _write_progress(self, now_ns):
        """Write how many steps have begun, for who waits for the job; twice a second, which no step notices."""
        self._progress_ns = now_ns + _PROGRESS_NS
        try:
            with open(os.path.join(self.out, "progress"), "w") as file:
                file.write(str(len(self.steps) + 1))
        except OSError:  # the job must not fail
            pass

    def write(self):
        """Write what was recorded; a job that ends inside the traced steps still leaves what there is."""
        raise NotImplementedError

    def write_hook(self, packages, **facts):
        """Write hook.json: the steps, versions of the packages that are imported, and what only this framework's recorder knows."""
        content = {
            "rank": rank(),
            "host": platform.node(),
            "machine": machine(),
            "cores": sorted(os.sched_getaffinity(0)),
            "steps": self.steps,
            "peak_rss_bytes": peak_rss_bytes(),
            "versions": _versions(packages),
        }
        content.update(facts)
        self.write_json("hook.json", content)

    def write_json(self, name, content):
        """Write a file of the rank's folder, whole or not at all."""
        path = os.path.join(self.out, name)
        with open(path + ".tmp", "w") as file:
            json.dump(content, file)
        os.replace(path + ".tmp", path)


def peak_rss_bytes():
    """The most memory that this process had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _versions(packages):
    versions = {"python": platform.python_version()}
    for name in packages:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "__version__"):
            versions[name] = str(module.__version__)
    return versions
