"""What an all-reduce costs: one formula for each algorithm, with constants that `all_reduce_fit` fits to measured points.

A call on a limited link takes at least what its bytes take there, and at least what its messages and the processors take. While a
message is under way the link is idle; a shaped one (a token bucket) accumulates up to a burst of bytes meanwhile and catches up, so
that only longer pauses are lost. What processors do beside the link costs a part of it that is fitted: 0 where both overlap, 1
where one waits for the other.

Ranks may share cores, as on a testbed of many hosts on one machine. Then a core moves and sums the bytes of all its ranks, and
each message waits until its rank has the core. While ranks wait for other things most of the time, that costs little; more ranks
on a core come to wait for it alone. Where the time that cores are used was measured as well, this follows from it
(`costmodel/shared_cores.py`), and a call takes no less than its core is used.
"""

from __future__ import annotations

import msgspec
import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.costmodel.collectives import Algorithm, Counts, Points, counts
from dpro_search.costmodel.shared_cores import queued_us


class AllReduceCost(msgspec.Struct, frozen=True, kw_only=True):
    """Fitted constants of one algorithm on one network."""

    algorithm: Algorithm
    overhead_us: float  # Of a call, whatever the ranks.
    message_us: float  # Of each message that follows another.
    wire_factor: float  # Time on a limited link over that of the bare bytes: headers, acknowledgements, pauses.
    # move_us_per_byte, add_us_per_byte: Of the processors, for each byte that the busiest core moves and sums.
    move_us_per_byte: float
    add_us_per_byte: float
    exposed: float  # Part of the shorter of both, link and processors, that is not hidden behind the longer, from 0 to 1.
    turn_us: float = 0.0  # Of each message, for each further rank or server on its core.
    # Further time on a limited link, as a part of it, where ranks share cores: one without the core does not empty its sockets, so
    # that the other direction of an exchange waits.
    crowding: float = 0.0
    burst_bytes: float = 0.0  # That a limited link accumulates while it is idle; 0: none, idle time is lost.
    buffer_bytes: float = 0.0  # That a message may have before ranks which share a core crowd: what sockets hold.
    # Where ranks meet before each call: how long links have rested by then, over what messages and calls take without a link.
    rested: float = 0.0
    # call_busy_us, message_busy_us, byte_busy_us: What a rank uses its core for a call, for each message, and for each byte moved;
    # 0: it was not measured.
    call_busy_us: float = 0.0
    message_busy_us: float = 0.0
    byte_busy_us: float = 0.0
    ranks_per_host: int = 1  # That the constants are of: they stand for no other number.

    def counted(self, points: Points) -> Counts:
        """What the algorithm does in each all-reduce."""
        return counts(self.algorithm, points.ranks, points.servers, points.cores, self.ranks_per_host)

    def parts_us(self, points: Points) -> tuple[Floats, Floats, Floats]:
        """Times of the messages, of the link and of the processors, [points] each; one rank has none."""
        counted = self.counted(points)
        waited_us = self.overhead_us + counted.messages * (self.message_us + counted.turns * self.turn_us)
        used_us = self.call_busy_us + counted.messages * self.message_busy_us
        latency_us = np.where(points.ranks > 1, queued_us(waited_us, used_us, 1 + counted.turns), 0.0)
        beyond = _beyond_buffers(self.algorithm, points, counted, self.buffer_bytes)
        factor = self.wire_factor * np.where(counted.turns > 0, 1 + self.crowding * beyond, 1.0)
        wire_us = counted.wire * points.size_bytes / points.link_bytes_per_us * factor
        work_us = points.size_bytes * (counted.moved * self.move_us_per_byte + counted.added * self.add_us_per_byte)
        return latency_us, wire_us, work_us

    def busy_us(self, points: Points) -> Floats:
        """How long the busiest core is used in each all-reduce, us, [points]; 0: it was not measured."""
        counted = self.counted(points)
        found: Floats = core_uses(counted, points) @ np.array([self.call_busy_us, self.message_busy_us, self.byte_busy_us])
        return found

    def predict(self, points: Points) -> Floats:
        """Duration of each all-reduce in us, [points]."""
        latency_us, wire_us, work_us = self.parts_us(points)
        messages = self.counted(points).messages
        saved_us = messages * self.burst_bytes / points.link_bytes_per_us
        lost_us = np.maximum(latency_us - saved_us, 0.0)
        if self.algorithm is Algorithm.PARAMETER_SERVER:
            # Pushes and pulls go opposite ways: one direction rests while the other is used.
            wire_us = np.maximum(wire_us - saved_us, wire_us / 2)
        else:
            rested_us = np.minimum(self.rested * latency_us, self.burst_bytes / points.link_bytes_per_us)
            wire_us = np.maximum(wire_us - rested_us, 0.0)
        found: Floats = np.maximum(wire_us + lost_us, latency_us + work_us) + self.exposed * np.minimum(wire_us, work_us)
        return np.maximum(found, self.busy_us(points))


def core_uses(counted: Counts, points: Points) -> Floats:
    """What the busiest core is used for in each all-reduce: its ranks' calls, their messages, bytes moved, [points, 3]."""
    sharing = np.where(points.ranks > 1, 1 + counted.turns, 0.0)
    return np.stack([sharing, sharing * counted.messages, points.size_bytes * counted.moved], axis=1)


def _beyond_buffers(algorithm: Algorithm, points: Points, counted: Counts, buffer_bytes: float) -> Floats:
    """Part of the bytes that messages have beyond what sockets' buffers hold, [points]."""
    size, p = points.size_bytes, np.maximum(points.ranks, 1.0)
    if algorithm is not Algorithm.HALVING_DOUBLING:
        message_bytes = counted.wire * size / np.maximum(counted.messages, 1.0)
        return np.maximum(1 - buffer_bytes / np.maximum(message_bytes, 1.0), 0.0)
    within = np.floor(np.log2(p))
    total = np.where(2.0**within < p, 1.0, 0.0) * size
    over = np.where(2.0**within < p, np.maximum(size - buffer_bytes, 0.0), 0.0)
    for halved in range(1, int(within.max(initial=0)) + 1):
        part = np.where(halved <= within, size / 2.0**halved, 0.0)
        total, over = total + part, over + np.maximum(part - buffer_bytes, 0.0)
    found: Floats = over / np.maximum(total, 1.0)
    return found
