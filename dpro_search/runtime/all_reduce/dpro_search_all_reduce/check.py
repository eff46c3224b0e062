"""`CheckedAllReduce`: an `AllReduce` that times its choice in the first steps of a job, and keeps what is the fastest there.

A table of choices was measured earlier, perhaps on other hosts or beside other load. So for each size that a job sums again and
again, the job's own calls go in turn through the chosen algorithm, the MPI library's default and close alternatives, a few calls
each. A call counts with its shortest time over all ranks, which is that of the last rank to begin: the others' times contain the
wait for it. All ranks decide from the same times, which they exchange before anything changes. Sizes are checked one after the
other, and no further call is made by a slower algorithm once the check has cost `_SHARE` of the first `_STEPS` steps. Afterwards
large sums are only timed; if the time of a size has changed by `_DRIFT`, it is checked again.

The algorithms add in different orders, so that the last bits of a sum depend on what is kept. Sums of 16-bit floats, which are made
in the order of ranks, and buffers on devices are not checked.
"""

import sys
from statistics import median
from time import perf_counter

from .choice import NATIVE, joined

_FIRST_CALLS = 5  # of a size, before it is checked: a job of five steps never is
_STEPS, _SHARE = 200, 0.005  # the check may cost this share of so many steps
_MOST_PASSES = 6
_HOPELESS = 1.5  # times the table's choice, after which one call of an alternative is enough
_CLEAR = 1.1  # times the slowest call of the best algorithm, beyond which the others are given up
_TIE = 1.02  # times the best algorithm's duration, up to which the library's default is preferred
_WATCHED_CALLS, _MOST_WATCHED_CALLS = 256, 1 << 14  # between two looks at whether a size's time has changed
_DRIFT = 1.5
_WATCHED_BYTES = 1 << 18  # smaller sums are not watched: their times change with every disturbance, and they cost little
_MOST_SETTLED = 256  # buffers that are held in memory, as many as the registry holds
_ABANDONED_CALLS = 64  # of other sizes, after which a size that does not come back no longer holds them up


class SizeTimes:
    """Times of some algorithms for one size, and which of them is kept.

    The first candidate is the table's choice. In a pass each remaining candidate is called once; every second pass goes backwards,
    so that a steady change of speed favours none of them.

    Attributes
    ----------
    kept
        Index of the candidate that is kept; None: more calls are needed.
    times_s
        Agreed times of each candidate, [candidates][passes].
    """

    def __init__(self, candidates, default):
        """`default`: index of the library's own choice among the candidates."""
        self.candidates, self._default = candidates, default
        self.times_s = [[] for _ in candidates]
        self.kept = 0 if len(candidates) == 1 else None
        self._remaining = list(range(len(candidates)))
        self._passes, self._called = 0, []

    def next(self):
        """Index of the candidate that the next call goes through."""
        order = self._remaining if self._passes % 2 == 0 else self._remaining[::-1]
        return order[len(self._called)]

    def add(self, time_s):
        """Take the time of that call on this rank; returns those of the pass when it is complete, else None."""
        self._called.append(time_s)
        return self._called if len(self._called) == len(self._remaining) else None

    def agree(self, times_s, budget_s):
        """Take the shortest times over all ranks of the pass, in its order; returns what the pass cost, in seconds.

        The cost is the time beyond that of the fastest algorithm of the pass. `budget_s` is what all passes from now on may cost.
        """
        order = self._remaining if self._passes % 2 == 0 else self._remaining[::-1]
        for candidate, time_s in zip(order, times_s):
            self.times_s[candidate].append(time_s)
        self._passes, self._called = self._passes + 1, []
        cost_s = sum(times_s) - len(times_s) * min(times_s)
        self._remaining = [candidate for candidate in self._remaining if not self._is_slow(candidate)]
        if len(self._remaining) == 1 or self._passes == _MOST_PASSES or 2 * cost_s > budget_s:
            self.kept = self._fastest()
        return cost_s

    def typical_s(self, candidate):
        """Median of a candidate's times."""
        return median(self.times_s[candidate])

    def _is_slow(self, candidate):
        if self._passes == 1:  # one call may be disturbed: the table's choice and the default have another
            return candidate not in (0, self._default) and self.typical_s(candidate) > _HOPELESS * self.typical_s(0)
        best = min(self._remaining, key=self.typical_s)
        return candidate != best and min(self.times_s[candidate]) > _CLEAR * max(self.times_s[best])

    def _fastest(self):
        compared = self._remaining if self._passes > 1 else [0, self._default]
        best = min(compared, key=self.typical_s)
        if self._default in compared and self.typical_s(self._default) <= _TIE * self.typical_s(best):
            return self._default
        return best


class CheckedAllReduce:
    """Sums buffers as an `AllReduce` does, by the algorithm that turned out to be the fastest in this job.

    Parameters
    ----------
    all_reduce
        An `AllReduce`; all ranks make such an object, and call it in the same order.
    say
        Called on rank 0 with one line for each size that was checked.
    """

    def __init__(self, all_reduce, say=lambda line: print(line, file=sys.stderr, flush=True)):
        self._all_reduce, self._say = all_reduce, say
        self._sizes, self._active = {}, None
        self._settled = {}  # Small buffers whose check has ended, by identity: (buffer, algorithm, bytes of a segment).
        self._period_s, self.cost_s, self._dearest_s = 0.0, 0.0, 0.0

    def sum(self, buffer, average=False):
        """Replace a buffer by its sum over all ranks; arguments and errors are those of `AllReduce.sum`."""
        settled = self._settled.get(id(buffer))
        if settled is not None and settled[0] is buffer:  # a look at the clock would cost a small sum some per cent
            return self._all_reduce.sum(buffer, average, settled[1], settled[2])
        memory = self._all_reduce.registry.memory(buffer)
        if memory.narrow or memory.on_device or self._all_reduce.ranks == 1:
            return self._all_reduce.sum(buffer, average)
        size_bytes = memory.count * memory.itemsize
        size = self._sizes.get(size_bytes)
        if size is None:
            size = self._sizes[size_bytes] = _Size(size_bytes)
        name, segment_bytes = size.algorithm if size.trial is None else size.trial.candidates[size.trial.next()]
        began = perf_counter()
        self._all_reduce.sum(buffer, average, name, segment_bytes)
        ended = perf_counter()
        size.calls += 1
        if size.trial is not None:
            self._pass(size, ended - began)
        elif size.watched_s is None:
            self._before(size, began)
        elif size_bytes >= _WATCHED_BYTES:
            self._watch(size, ended - began)
        elif len(self._settled) < _MOST_SETTLED:
            self._settled[id(buffer)] = buffer, name, segment_bytes
        return buffer

    def settled(self, size_bytes):
        """Whether the check of a size has ended."""
        size = self._sizes.get(size_bytes)
        return size is not None and size.trial is None and size.watched_s is not None

    def kept(self, size_bytes):
        """(algorithm, bytes of a segment) by which buffers of so many bytes are summed now; (None, None): as without the check."""
        size = self._sizes.get(size_bytes)
        return (None, None) if size is None else size.algorithm

    def _before(self, size, began):
        """Count the calls of a size that is not checked yet, and begin its check if no other one is under way."""
        size.began_s.append(began)
        if self._active is not None:
            self._active.others += 1
            if self._active.others > _ABANDONED_CALLS:  # all ranks count the same calls
                self._active.trial, self._active = None, None
        if size.calls >= _FIRST_CALLS and self._active is None:
            self._begin(size)

    def _begin(self, size):
        began_s = size.began_s[-_FIRST_CALLS:]
        if len(began_s) > 1:
            period_s = median(after - before for before, after in zip(began_s, began_s[1:]))
            self._period_s = max(self._period_s, self._all_reduce.least([period_s])[0])
        candidates = self._all_reduce.candidates(size.size_bytes)
        if self._left_s() <= self._dearest_s:  # another pass might cost as much as the dearest one did
            del candidates[1:]
        default = next((index for index, one in enumerate(candidates) if one[0] == NATIVE), 0)
        size.trial, size.others, self._active = SizeTimes(candidates, default), 0, size
        if size.trial.kept is None:
            self._all_reduce.prepare(candidates)
        else:
            self._keep(size)

    def _pass(self, size, time_s):
        size.others = 0
        times_s = size.trial.add(time_s)
        if times_s is None:
            return
        cost_s = size.trial.agree(self._all_reduce.least(times_s), self._left_s())
        self.cost_s, self._dearest_s = self.cost_s + cost_s, max(self._dearest_s, cost_s)
        if size.trial.kept is not None:
            self._keep(size)

    def _left_s(self):
        """Seconds that the check may still cost; a step takes at least the longest interval between two calls of one size."""
        return _SHARE * _STEPS * self._period_s - self.cost_s

    def _keep(self, size):
        trial, self._active = size.trial, None
        size.algorithm, size.trial, size.watched_s = trial.candidates[trial.kept], None, []
        if not trial.times_s[trial.kept]:
            size.typical_s = None  # nothing to choose from
            return
        size.typical_s = trial.typical_s(trial.kept)
        if self._all_reduce.rank == 0:
            timed = ["%s %.3g ms" % (joined(*one), trial.typical_s(i) * 1e3) for i, one in enumerate(trial.candidates)]
            kept = joined(*size.algorithm)
            self._say("all-reduce of %d bytes by %s (in this job: %s)" % (size.size_bytes, kept, ", ".join(timed)))

    def _watch(self, size, time_s):
        """Look now and then whether a size takes another time than when it was checked."""
        if size.typical_s is None:
            return
        size.watched_s.append(time_s)
        if len(size.watched_s) < size.window:
            return
        typical_s = self._all_reduce.least([median(size.watched_s)])[0]
        size.watched_s = []
        if typical_s > _DRIFT * size.typical_s or size.typical_s > _DRIFT * typical_s:
            size.window = min(2 * size.window, _MOST_WATCHED_CALLS)  # load that comes and goes is not followed for ever
            self.cost_s, self._dearest_s, size.watched_s = 0.0, 0.0, None


class _Size:
    """The state of one size: its calls so far, the check under way, and what is kept after it."""

    def __init__(self, size_bytes):
        self.size_bytes, self.calls, self.began_s, self.others = size_bytes, 0, [], 0
        self.algorithm, self.trial = (None, None), None
        self.window, self.watched_s, self.typical_s = _WATCHED_CALLS, None, None
