"""Tools of the recorders of all frameworks: calls after an import, patches, threads' CPU times, this machine's clock.

Standard library only; Python 3.8 and later.
"""

import functools
import os
import sys
import time

_SPINS = 0.05  # of a core at least


class AfterImport:
    """Finder that lets the others find a module, and calls back once the module has run."""

    def __init__(self, callbacks):
        self._callbacks = callbacks

    def find_spec(self, name, path=None, target=None):
        callback = self._callbacks.pop(name, None)
        if callback is None:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self else None
            if spec is not None:
                spec.loader.exec_module = _followed(spec.loader.exec_module, callback)
                return spec
        return None


def _followed(run, callback):
    def exec_module(module):
        run(module)
        callback(module)

    return exec_module


def replaces(owner, name):
    """Decorator of a function that takes the place of ``owner.name``: its first argument is what was there."""
    original = getattr(owner, name)

    def put(function):
        @functools.wraps(original)
        def call(*args, **kwargs):
            return function(original, *args, **kwargs)

        setattr(owner, name, call)
        return call

    return put


class ThreadClock:
    """CPU time of this process's threads, in two groups. Files stay open: a reading costs microseconds a thread."""

    def __init__(self):
        self.communication = set()
        self.ignored = set()
        self._files = {}
        self._ended = [0, 0]
        self._last = {}

    def read(self):
        """CPU time so far in ns: (all other threads, the communication's threads)."""
        total = list(self._ended)
        tids = threads() - self.ignored
        for tid in tids | set(self._files):
            group = 1 if tid in self.communication else 0
            used = self.of(tid) if tid in tids else None
            if used is None:  # ended: what it had used stays counted
                used = self._last.pop(tid, 0)
                self._ended[group] += used
                if tid in self._files:
                    os.close(self._files.pop(tid))
            else:
                self._last[tid] = used
            total[group] += used
        return total

    def communicates(self, start):
        """Call `start`, count the threads that it starts as the communication's, and return what it returns."""
        before = threads()
        result = start()
        self.communication |= threads() - before
        return result

    def spinning(self, tids, over_s):
        """The last one started of the threads that never sleep while nothing happens: a set of one or none.

        A thread that alternates between polling and sleeping, as MPI's do, is none; but while it waits for another rank it does not
        sleep either, and leaves little of the core to one that yields at each turn. So which was started last decides.
        """
        before = {tid: (self.of(tid) or 0, _sleeps(tid)) for tid in tids}
        time.sleep(over_s)
        threads = [
            tid
            for tid, (used, sleeps) in before.items()
            if (self.of(tid) or 0) - used > over_s * 1e9 * _SPINS and sleeps is not None and _sleeps(tid) == sleeps
        ]
        return set(sorted(threads, key=int)[-1:])

    def of(self, tid):
        """CPU time of a thread so far in ns; None if it has ended."""
        try:
            if tid not in self._files:
                self._files[tid] = os.open("/proc/self/task/%s/schedstat" % tid, os.O_RDONLY)
            return int(os.pread(self._files[tid], 64, 0).split()[0])
        except (OSError, IndexError):
            return None


def _sleeps(tid):
    """Number of times that a thread has given up its core of its own accord; None if it has ended."""
    try:
        with open("/proc/self/task/%s/status" % tid) as file:
            return next((int(line.split()[1]) for line in file if line.startswith("voluntary_ctxt_switches")), None)
    except OSError:
        return None


def threads():
    """Ids of this process's threads."""
    return set(os.listdir("/proc/self/task"))


def rank():
    """Number of this process's rank: the launcher's, else what Horovod or torchrun set, else 0."""
    names = ("DPRO_SEARCH_HOOK_RANK", "HOROVOD_RANK", "RANK")
    return int(next((os.environ[name] for name in names if os.environ.get(name)), "0"))


def machine():
    """Equal for all processes that share a kernel, and so a clock, however many hosts they pretend to be."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
