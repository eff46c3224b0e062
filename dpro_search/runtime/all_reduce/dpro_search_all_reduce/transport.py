"""`AllReduce`: sums arrays and tensors over the ranks of an MPI job."""

import os
import time
import warnings
import zlib
from collections import namedtuple

import numpy as np

from .choice import NATIVE, OF_LIBRARY, Choice, of_size
from .library import OPEN_MPI_OBEYS, MpichAlgorithms, OpenMpiAlgorithms

os.environ.setdefault(OPEN_MPI_OBEYS, "1")  # before MPI is initialised, which importing it does
from mpi4py import MPI

from .memory import Registry
from .rounds import ADD, COPY, IN_RANK_ORDER, SUM_BY_RANK, receives_from, stages

_LOOKS_AROUND_S = 1.0  # a message that is late for so long may be of another tensor
_SPINS = 200  # tests of a request before the core is offered to others, where each rank has one
_DEVICE_SEGMENT_BYTES = 1 << 22  # each costs a kernel and the wait for it
_GATHERED_BYTES = 1 << 15  # of all ranks together: up to that, what matters is the number of messages

_IN_PLACE, _SUM = MPI.IN_PLACE, MPI.SUM
_LIBRARIES = {"Open MPI": OpenMpiAlgorithms, "MPICH": MpichAlgorithms}

_Call = namedtuple("_Call", "memory tag segment")


class _Sent:
    """A message under way, in segments of one length; `requests` has one for each that was sent, None once it has left."""

    __slots__ = "length", "peer", "requests", "start", "stop"

    def __init__(self, message, length):
        self.peer, self.start, self.stop = message
        self.length, self.requests = length, [None] * -(-(self.stop - self.start) // length)

    def segments(self):
        """(start, stop) of each segment."""
        return [(start, min(start + self.length, self.stop)) for start in range(self.start, self.stop, self.length)]

    def overlapping(self, start, stop):
        """Indices of the segments that hold some of these elements: computed, for a large tensor has thousands of segments."""
        first, last = max(start, self.start), min(stop, self.stop)
        return range((first - self.start) // self.length, -(-(last - self.start) // self.length)) if first < last else ()


class AllReduce:
    """Sums buffers in place over all ranks, by an algorithm that is chosen by size.

    All ranks make one such object, and call it in the same order with buffers of the same count and type.

    Parameters
    ----------
    communicator
        Of mpi4py; None: all ranks of the job. It is duplicated.
    choice
        Which algorithm for which size: a `Choice`, or the path of a file of one; None: the MPI library's own for small buffers, a
        ring for large ones.
    time_limit_s
        How long a rank waits for a message of another before it raises `TimeoutError` with that rank's number. The MPI library's
        own all-reduce (the algorithm "native") has no limit, except with `check`.
    check
        Whether ranks compare counts and types before each call, for one more short message each way.
    device_aware
        Whether the MPI library sends from and receives into the memory of devices; otherwise tensors on a device are summed on
        the host.
    """

    def __init__(self, communicator=None, choice=None, time_limit_s=300.0, check=False, device_aware=False):
        world = MPI.COMM_WORLD if communicator is None else communicator
        self._comm = world.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.ranks = self._comm.rank, self._comm.size
        self.hosts = _hosts(self._comm)
        if not isinstance(choice, Choice):
            choice = Choice() if choice is None else Choice.load(choice)
        self._vendor = MPI.get_vendor()[0]
        self._choice, self._layout = choice, (self.ranks, max(map(len, self.hosts)))
        self._ranges = choice.ranges(*self._layout, self._vendor)
        self._even = len(set(map(len, self.hosts))) == 1
        self._library = _LIBRARIES[self._vendor](self._comm) if self._vendor in _LIBRARIES else None
        self._limit_s, self._check = time_limit_s, check
        self.registry = Registry(device_aware)
        self._plans, self._scratch, self._native = {}, {}, {}
        self._spins = _SPINS if _a_core_each(self.hosts, self.rank) else 1

    def sum(self, buffer, average=False, algorithm=None, segment_bytes=None, by_rank=False):
        """Replace a buffer by its sum over all ranks.

        Parameters
        ----------
        buffer
            A contiguous NumPy array or torch tensor of numbers, of any shape. 16-bit floats are added up in 32 bits and rounded
            once.
        average
            Whether the sum is divided by the number of ranks; integers are divided down.
        algorithm
            One of `rounds.ALGORITHMS`; "native", the MPI library's choice, or one of its own by name, like "native ring"; None: by
            size.
        segment_bytes
            In which larger messages are sent, so that one is added up while the next is under way; 0: whole; None: by size.
        by_rank
            Whether additions are made in the order of ranks, so that the result has the same bits for every number of parts.

        Raises
        ------
        ValueError
            Another rank's buffer has another count or type; the message has its number. Or a buffer is not contiguous.
        TimeoutError
            A rank sent nothing within the limit; likewise.
        """
        memory = self.registry.memory(buffer)
        native = memory.native.get(algorithm)
        if native is not None and not by_rank and not self._check:
            native[0](_IN_PLACE, native[1], _SUM)
            if average:
                memory.divide(self.ranks)
            return buffer
        if self._check and self.ranks > 1:
            self._compare(memory)
        if self.ranks > 1:
            begin = getattr(memory, "begin", None)
            if begin is not None:
                begin()
            self._sum(memory, algorithm, segment_bytes, by_rank)
        if average:
            memory.divide(self.ranks)
        finish = getattr(memory, "finish", None)
        if finish is not None:
            finish()
        return buffer

    def algorithm(self, size_bytes, narrow=False, by_rank=False, on_device=False):
        """(algorithm, bytes of a segment; 0: whole messages) of a buffer of so many bytes.

        What is on a device is added up there: libraries that send a device's memory may add on the host only, or not at all.
        """
        name, segment = of_size(self._ranges, size_bytes)
        if on_device:
            name = "recursive-doubling" if name.startswith(NATIVE) else name
            segment = max(segment, _DEVICE_SEGMENT_BYTES)
        if name == "hierarchy" and not self._even:
            name = "ring"
        if (narrow or by_rank) and name not in IN_RANK_ORDER:
            name = "gather" if size_bytes * self.ranks <= _GATHERED_BYTES else "direct"
        return name, segment

    def candidates(self, size_bytes):
        """(algorithm, bytes of a segment) of the choice, of the library's default, and of what may be as fast; each once."""
        others = self._choice.alternatives(*self._layout, size_bytes, self._vendor)
        listed = [self.algorithm(size_bytes), (NATIVE, 0), *others]
        return [one for one in dict.fromkeys(listed) if self._even or one[0] != "hierarchy"]

    def prepare(self, candidates):
        """Make what the first call of each algorithm makes, its connections and communicators; all ranks together."""
        buffer = np.zeros(1 << 12)
        for name, segment_bytes in candidates:
            self.sum(buffer, algorithm=name, segment_bytes=segment_bytes)

    def least(self, values):
        """The smallest of each value over all ranks, a list of as many."""
        smallest = np.array(values, np.float64)
        self._comm.Allreduce(_IN_PLACE, smallest, MPI.MIN)
        return smallest.tolist()

    def close(self):
        """Free the communicators; all ranks together."""
        self.registry.forget()
        if self._library is not None:
            self._library.close()
        self._comm.Free()

    def _sum(self, memory, algorithm, segment_bytes, by_rank):
        size_bytes = memory.count * memory.itemsize
        by_size_name, by_size = self.algorithm(size_bytes, memory.narrow, by_rank, memory.on_device)
        name = by_size_name if algorithm is None else algorithm
        segment_bytes = by_size if segment_bytes is None else segment_bytes
        if name.startswith(NATIVE):
            if memory.narrow or by_rank:
                raise ValueError("the MPI library adds neither 16-bit floats nor by rank; use 'gather' or 'direct'")
            kind = MPI.Datatype.fromcode(np.dtype(memory.dtype).char)
            message = [memory.buffer(0, memory.count), memory.count, kind]
            all_reduce = self._native.get(name) or self._native_by(name)
            memory.ready()
            all_reduce(_IN_PLACE, message, _SUM)
            if not hasattr(memory, "begin"):
                memory.native[algorithm] = all_reduce, message  # the next call is no more than the library's
            return
        plan = self._plan(name, memory.count)
        tag = zlib.crc32(("%s %d" % (memory.dtype, memory.count)).encode()) & 0x7FFF
        self._run(_Call(memory, tag, segment_bytes // memory.itemsize or max(memory.count, 1)), plan)

    def _native_by(self, name):
        """The MPI library's all-reduce by one of its algorithms; by its own choice, with a warning, where it cannot be told."""
        library, algorithm = self._library, name[len(OF_LIBRARY) :] or "default"
        refusal = "%s is not known here" % self._vendor if library is None else library.refusal()
        if refusal is None and algorithm not in library.names:
            refusal = "%s has no algorithm %r (it has %s)" % (self._vendor, algorithm, ", ".join(library.names))
        if refusal is not None and name != NATIVE and self.rank == 0:
            warnings.warn("all-reduces by %r are by the library's own choice: %s" % (name, refusal), stacklevel=4)
        self._native[name] = self._comm.Allreduce if refusal is not None else library.all_reduce(algorithm)
        return self._native[name]

    def _plan(self, name, count):
        """The stages, and the most elements that one of them receives into scratch memory."""
        planned = self._plans.get((name, count))
        if planned is None:
            made = stages(name, self.rank, self.hosts, count)
            planned = self._plans[name, count] = made, receives_from(made) or 0
            if len(self._plans) > 1024:
                self._plans.pop(next(iter(self._plans)))
        return planned

    def _run(self, call, plan):
        made, most = plan
        # Two halves: a stage's receives are posted while the one before is added up.
        halves = [self._scratch_of(call.memory, most, half) for half in (0, 1)] if most else [None, None]
        sent = []
        posted = None
        for number, stage in enumerate(made):
            follows = made[number + 1] if number + 1 < len(made) else None
            if posted is None:
                posted = self._receive(call, stage, halves[number % 2], sent)
                for message in stage.sends:
                    self._send(call, message, stage.combine, sent)
            chained = follows is not None and _forwards(stage, follows)
            ahead = self._receive(call, follows, halves[(number + 1) % 2], sent) if chained else None
            forwarded = self._message(call, follows.sends[0], follows.combine, sent) if chained else None
            for start, stop, request, peer, at in posted:
                self._wait(call, request, peer, stop - start)
                if stage.combine == ADD:
                    self._settle(call, sent, start, stop)
                    call.memory.add(start, stop, halves[number % 2], at)
                if chained:
                    self._send_segment(call, forwarded, start, stop)
            if stage.combine == SUM_BY_RANK and posted:
                self._sum_by_rank(call, stage, halves[number % 2], sent)
            posted = ahead
        for message in sent:
            self._leave(call, message, range(len(message.requests)))

    def _receive(self, call, stage, scratch, sent):
        """Post the receives of a stage: (start, stop, request, peer, place in the scratch memory) of each segment."""
        call.memory.ready()
        requests, place = [], 0
        for message in stage.receives:
            for start, stop in _Sent(message, _segment_length(message, call.segment, stage.combine)).segments():
                if stage.combine == COPY:
                    self._settle(call, sent, start, stop)
                    into = call.memory.buffer(start, stop)
                else:
                    into = scratch.buffer(place, place + stop - start)
                request = self._comm.Irecv([into, MPI.BYTE], message.peer, call.tag)
                requests.append((start, stop, request, message.peer, place))
                place += stop - start
        return requests

    def _send(self, call, message, combine, sent):
        in_segments = self._message(call, message, combine, sent)
        for start, stop in in_segments.segments():
            self._send_segment(call, in_segments, start, stop)

    def _message(self, call, message, combine, sent):
        """A message that is about to be sent, put into `sent`."""
        sent.append(_Sent(message, _segment_length(message, call.segment, combine)))
        return sent[-1]

    def _send_segment(self, call, message, start, stop):
        call.memory.ready()
        request = self._comm.Isend([call.memory.buffer(start, stop), MPI.BYTE], message.peer, call.tag)
        message.requests[(start - message.start) // message.length] = request

    def _settle(self, call, sent, start, stop):
        """Wait until elements that are about to change have left."""
        for message in sent:
            self._leave(call, message, message.overlapping(start, stop))

    def _leave(self, call, message, segments):
        """Wait for segments of a message; those that are still to be sent are not waited for."""
        for i in segments:
            request, message.requests[i] = message.requests[i], None
            if request is not None:
                self._wait(call, request, message.peer, 0)

    def _sum_by_rank(self, call, stage, scratch, sent):
        start, stop = stage.receives[0][1:]
        self._settle(call, sent, start, stop)
        places = {message.peer: (scratch, i * (stop - start)) for i, message in enumerate(stage.receives)}
        places[self.rank] = call.memory, start
        call.memory.put_sum(start, stop, [places[rank] for rank in sorted(places)])

    def _scratch_of(self, memory, count, half):
        key = memory.dtype, type(memory), half
        scratch = self._scratch.get(key)
        if scratch is None or scratch.count < count:
            scratch = self._scratch[key] = memory.scratch(count)
        return scratch

    def _wait(self, call, request, peer, received):
        """Wait for a message; `received`: elements that must have come with it, 0 for one that was sent."""
        status = MPI.Status()
        begun, tests = None, 0
        while True:
            try:
                done = request.Test(status)
            except MPI.Exception as error:
                if error.Get_error_class() == MPI.ERR_TRUNCATE:
                    raise ValueError(self._differs(call, peer, "more")) from None
                raise
            if done:
                break
            tests += 1
            if tests % self._spins == 0:
                os.sched_yield()
                now = time.monotonic()
                begun = now if begun is None else begun
                if now - begun > min(_LOOKS_AROUND_S, self._limit_s):
                    self._look_around(call, peer, now - begun)
        if received and status.Get_count(MPI.BYTE) != received * call.memory.itemsize:
            raise ValueError(self._differs(call, peer, "other"))

    def _look_around(self, call, peer, waited_s):
        status = MPI.Status()
        if self._comm.Iprobe(peer, MPI.ANY_TAG, status) and status.Get_tag() != call.tag:
            raise ValueError(self._differs(call, peer, "other"))
        if waited_s > self._limit_s:
            raise TimeoutError(
                "rank %d waited %.0f s for rank %d in an all-reduce of %d elements of %s: that rank has ended, hangs, or sums"
                " less often" % (self.rank, waited_s, peer, call.memory.count, call.memory.dtype)
            )

    def _differs(self, call, peer, what):
        return (
            "rank %d sums another buffer than rank %d, which has %d elements of %s: %s bytes came from it; all ranks must sum the"
            " same counts and types in the same order" % (peer, self.rank, call.memory.count, call.memory.dtype, what)
        )

    def _compare(self, memory):
        """Raise `ValueError` naming the first rank whose buffer differs from rank 0's."""
        facts = np.zeros((self.ranks, 2), np.int64)
        facts[self.rank] = memory.count, zlib.crc32(memory.dtype.encode())
        shared = self.registry.memory(facts)
        self._run(_Call(shared, 0x7FFF, shared.count), self._plan("gather", shared.count))
        for rank, (count, kind) in enumerate(facts.tolist()):
            if (count, kind) != tuple(facts[0].tolist()):
                of = "of the same type" if kind == facts[0, 1] else "of another type"
                raise ValueError("rank %d sums %d elements %s, rank 0 sums %d" % (rank, count, of, facts[0, 0]))


def _hosts(comm):
    """Ranks that share memory, host by host."""
    local = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    first = local.bcast(comm.rank, 0)
    local.Free()
    hosts = {}
    for rank, leader in enumerate(comm.allgather(first)):
        hosts.setdefault(leader, []).append(rank)
    return list(hosts.values())


def _a_core_each(hosts, rank):
    """Whether every rank of this host has a core for itself: waiting in a loop then costs nobody anything."""
    return len(next(host for host in hosts if rank in host)) <= len(os.sched_getaffinity(0))


def _forwards(stage, follows):
    """Whether the next stage sends just what this one receives, so that each segment can go on at once."""
    return (
        len(stage.receives) == len(follows.sends) == 1
        and stage.combine != SUM_BY_RANK
        and stage.receives[0][1:] == follows.sends[0][1:]
    )


def _segment_length(message, length, combine):
    """Elements of the segments in which a message is sent; what is summed by rank comes whole."""
    return max(message.stop - message.start, 1) if combine == SUM_BY_RANK else length
