"""Durations by each of NCCL's algorithms and protocols: ``lines(collective, paths, constants)``, times that are linear in bytes.

NCCL chooses the algorithm (ring, tree, reduction in the switch) and the protocol (LL, LL128, Simple) of each call by a model of the
same form (``src/graph/tuning.cc``: a latency by steps within and between nodes, and a bandwidth by protocol), so that the time of a
call is the least of the lines. Steps and bytes follow from the algorithms:

========================  =======================  =========================================  ==============================
collective, algorithm     steps                    bytes that a rank sends, of S              bytes that leave a domain
========================  =======================  =========================================  ==============================
all-reduce, ring          2 (n - 1), 2 (m - 1)     2 S (n - 1) / n                            the same
all-reduce, tree          2 (n/m - 1), 2 log2 m    2 S                                        2 S; S where m = 2
all-reduce, in the switch one, 2 log2 m            S                                          likewise
all-gather, r.-scatter    n - 1, m - 1             S (n - 1) / n                              the same
broadcast, reduce         one; a chunk a rank      S                                          S
all-to-all                one, a peer each         S (n - 1) / n                              S (n - n/m) / n of each rank
send/recv                 one                      S                                          S
========================  =======================  =========================================  ==============================

Three facts of NCCL bound trees between domains: a channel moves no more than its GPU reduces (``perChMaxTreeBws``), so that rings
are faster over fast NICs; messages of a few MiB do not fill a tree (``treeCorrectionFactor``); and what is one chunk is stored at
each hop before it goes on (Simple).

n ranks, m domains, S the bytes of the whole tensor on a rank (of an all-gather its result, of a reduce-scatter its input).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dpro_search.costmodel.collectives.nccl.constants import PROTOCOLS, NcclConstants
from dpro_search.costmodel.collectives.nccl.placement import Paths
from dpro_search.errors import InputError

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "send_recv")
SWITCH_RANKS = 5  # From so many ranks of a domain on, reductions in the switch are faster than rings.
ORDERED_US = 10.0  # Networks with a longer latency (TCP, EFA) do not deliver in order, as the flags of LL and LL128 need.
# From NCCL's search for channels (src/graph/search.cc, ncclTopoDupChannels) and its model of trees (src/graph/tuning.cc).
NCCL_LINK = 0.96  # Bytes that NCCL counts of a NIC's rate: 12 of 12.5 GB/s.
DOUBLED_BYTES_PER_US = 25e3  # From that rate on, channels are doubled where they are few.
FEW_CHANNELS = 4
ONE_RANK_TREE = 0.85  # Share of the rate of a tree whose ranks receive and send on one NIC.
# Bytes by which a tree lags until it is full: what NCCL's factors for messages of medium size (treeCorrectionFactor) come to,
# S (1 / factor - 1), for 16 MiB and more; they are 0.5 to 0.7 for less.
FILL_BYTES = {"LL": 0.0, "LL128": 4.0 * 2**20, "Simple": 14.0 * 2**20}
# A channel takes so many bytes before NCCL uses another: 512 threads with 64 bytes each (NCCL_SIMPLE_THREAD_THRESHOLD). Chunks of
# trees are no smaller either (src/enqueue.cc).
CHUNK_BYTES = 32.0 * 2**10
SWITCH_DEVICES = ("hopper", "blackwell")  # Architectures whose NVLink switches reduce (NVLink SHARP).


class Line(NamedTuple):
    """A way to do a collective."""

    algorithm: str
    protocol: str
    latency_us: float
    us_per_byte: float


def lines(collective: str, paths: Paths, constants: NcclConstants, copies: int = 0) -> tuple[Line, ...]:
    """The ways to do a collective: its time is the least of ``latency_us + us_per_byte * bytes``.

    Parameters
    ----------
    copies
        Of an all-to-all of items that each go to so many ranks, drawn at random, and that cross to another domain once, however
        many of its ranks they go to; 0: every copy crosses.

    Raises
    ------
    InputError
        No such collective.
    """
    if collective not in COLLECTIVES:
        raise InputError(f"collective '{collective}': use {', '.join(COLLECTIVES)}")
    if paths.ranks == 1:
        return (Line("none", "Simple", 0.0, 0.0),)
    costs = _Costs(paths, constants)
    if collective == "all_reduce":
        return (*_rings(costs, 2), *_trees(costs), *_switch(costs))
    if collective in ("all_gather", "reduce_scatter"):
        return _rings(costs, 1)
    if collective in ("broadcast", "reduce"):
        return _pipelines(costs)
    return _direct(costs, all_to_all=collective == "all_to_all", copies=copies)


class _Costs:
    """Times of steps and bytes on the paths of a group, by number of the protocol."""

    def __init__(self, paths: Paths, constants: NcclConstants) -> None:
        self.paths, self.constants = paths, constants
        self.architecture = constants.architecture(paths.device)
        self.n, self.m, self.local = paths.ranks, paths.domains, paths.ranks_per_domain
        self.ratio = constants.nvlink_ratio if paths.inside == "nvlink" else constants.pcie_ratio
        self.ordered = self.m == 1 or paths.nic_latency_us < ORDERED_US
        self.protocols = tuple(enumerate(PROTOCOLS))[0 if self.ordered else -1 :]
        # Times that bytes leave a domain in trees: between two, each direction is one tree's way up and the other's way down.
        # Copies in the host's memory are read and written on one bus, which both directions share.
        self.tree_bytes = 1.0 if self.m == 2 and not paths.staged else 2.0
        self.nic_bytes_per_us = paths.nic_bytes_per_us * (constants.staged_ratio if paths.staged else 1.0)
        self.nic_bytes_per_us *= constants.slingshot_ratio if paths.fabric == "slingshot" else 1.0

    def launch_us(self, protocol: int) -> float:
        return self.architecture.launch_us + self.constants.launch_more[protocol]

    def hop_us(self, protocol: int) -> float:
        return self.architecture.hop_us + self.constants.hop_more[protocol]

    def net_hop_us(self, protocol: int) -> float:
        return self.constants.net_hop[protocol] * self.paths.nic_latency_us

    def inside(self, protocol: int) -> float:
        """us of a byte from a rank to the next within a domain."""
        return 1.0 / (self.paths.ring_bytes_per_us * self.ratio[protocol])

    def tree_channels(self) -> float:
        """Channels of trees out of a domain: one for each NIC, two where a NIC is fast and channels are few.

        Channels whose NIC goes to the one rank of its domain count for less (NCCL's pattern TREE).
        """
        link = self.paths.nic_link_bytes_per_us
        count = self.paths.nic_bytes_per_us / link
        if NCCL_LINK * link >= DOUBLED_BYTES_PER_US and count <= FEW_CHANNELS:
            count *= 2
        return count * (ONE_RANK_TREE if self.local == 1 else 1.0)

    def ring_us_per_byte(self, protocol: int, rounds: int) -> float:
        """us of a byte in rings through all ranks."""
        inside_us = self.constants.own_part / self.n * self.inside(protocol)
        return inside_us + rounds * (self.n - 1) / self.n * max(self.inside(protocol), self.between(protocol))

    def prefers_rings(self, tree_us_per_byte: float) -> bool:
        """Whether NCCL takes rings for large all-reduces: it compares rates by the NICs' own, whatever the fabric carries of it."""
        nic_us_per_byte = 1.0 / (NCCL_LINK * self.paths.nic_bytes_per_us)
        trees = max(tree_us_per_byte, self.tree_bytes * nic_us_per_byte / self.constants.tree_ratio)
        return 2 * (self.n - 1) / self.n * nic_us_per_byte <= trees

    def between(self, protocol: int) -> float:
        """us of a byte out of a domain."""
        return 1.0 / (self.nic_bytes_per_us * self.constants.net_ratio[protocol])


def _rings(costs: _Costs, rounds: int) -> tuple[Line, ...]:
    """Rings through all ranks, once or (all-reduce) twice round.

    On a network that does not deliver in order, each step waits until the one before it is complete everywhere: all steps take as
    long as those between domains (an assumption; all-reduces of 4 to 64 MiB on two p4d or p4de start 0.4 to 1 ms later than rings
    and trees whose steps overlap).
    """
    n, m = costs.n, costs.m
    ways = []
    for number, protocol in costs.protocols:
        outer = m - 1 if costs.ordered else n - 1
        inner = rounds * (n - 1 - outer) * costs.hop_us(number)
        latency_us = costs.launch_us(number) + inner + rounds * outer * costs.net_hop_us(number)
        ways.append(Line("ring", protocol, latency_us, costs.ring_us_per_byte(number, rounds)))
    return tuple(ways)


def _trees(costs: _Costs) -> tuple[Line, ...]:
    """Double binary trees of domains, chains of ranks within each.

    However fast a NIC is, a channel of a tree moves no more than its GPU reduces: between two domains of fast NICs rings are
    faster.
    """
    if costs.m == 1:
        return ()
    depth, out = math.ceil(math.log2(costs.m)), costs.tree_bytes
    most = costs.tree_channels() * costs.architecture.tree_channel_bytes_per_us[costs.m > 2] / 2
    ways: list[Line] = []
    for number, protocol in costs.protocols:
        latency_us = costs.launch_us(number) + 2 * ((costs.local - 1) * costs.hop_us(number) + depth * costs.net_hop_us(number))
        slowest = max(2 * costs.inside(number), out * costs.between(number)) / costs.constants.tree_ratio
        us_per_byte = max(slowest, 1.0 / most)
        if costs.prefers_rings(1.0 / most):
            us_per_byte = max(us_per_byte, costs.ring_us_per_byte(number, 2))
        first = _first_chunks(costs, number, depth) if protocol == "Simple" else ()
        ways += _bending("tree", protocol, latency_us, (*first, *_filling(protocol, us_per_byte)))
    return tuple(ways)


def _first_chunks(costs: _Costs, protocol: int, depth: int) -> tuple[tuple[float, float], ...]:
    """Rates of `_bending` for what is one chunk of each channel of a tree: each hop waits for the whole chunk.

    At first it goes on one channel, then on more of them. LL and LL128 pass on each line as it comes.
    """
    channels, channel_us = costs.tree_channels(), 1.0 / costs.architecture.tree_channel_bytes_per_us[costs.m > 2]
    inside, outside = 2 * (costs.local - 1), 2 * depth  # hops
    one = inside * channel_us + outside * max(channel_us, costs.between(protocol))
    shared_us = channel_us / channels
    all_of_them = inside * max(shared_us, costs.inside(protocol)) + outside * max(shared_us, costs.between(protocol))
    return ((one, CHUNK_BYTES), (all_of_them, channels * CHUNK_BYTES))


def _filling(protocol: str, us_per_byte: float) -> tuple[tuple[float, float], ...]:
    """Rates of `_bending` for a tree between domains, whose chunks go up and down again before as many follow as it can hold.

    Until then bytes take twice as long.
    """
    return ((2 * us_per_byte, FILL_BYTES[protocol]), (us_per_byte, math.inf))


def _bending(algorithm: str, protocol: str, latency_us: float, rates: Sequence[tuple[float, float]]) -> tuple[Line, ...]:
    """A way whose further bytes take less: `rates` are us of a byte, and the size up to which they hold, the last for all sizes.

    A rate below a later one is taken to be that one.
    """
    ways, until, before = [Line(algorithm, protocol, latency_us, max(rate for rate, _ in rates))], rates[0][1], rates[1:]
    while before:
        rate = max(one for one, _ in before)
        last = ways[-1]
        ways.append(Line(algorithm, protocol, last.latency_us + until * (last.us_per_byte - rate), rate))
        until, before = before[0][1], before[1:]
    return tuple(ways)


def _switch(costs: _Costs) -> tuple[Line, ...]:
    """Reductions in the switch of a domain (NVLS), trees of domains between them."""
    paths, constants = costs.paths, costs.constants
    if not (paths.switched and paths.inside == "nvlink" and costs.local >= SWITCH_RANKS):
        return ()
    if costs.architecture.name not in SWITCH_DEVICES:
        return ()
    simple = PROTOCOLS.index("Simple")
    inside = 1.0 / (paths.ring_bytes_per_us * constants.switch_ratio)
    latency_us = costs.launch_us(simple) + constants.switch_us
    if costs.m == 1:
        return (Line("switch", "Simple", latency_us, inside),)
    latency_us += 2 * math.ceil(math.log2(costs.m)) * costs.net_hop_us(simple)
    outside = costs.tree_bytes * costs.between(simple) / constants.tree_ratio
    return _bending("switch and tree", "Simple", latency_us, _filling("Simple", max(inside, outside)))


def _pipelines(costs: _Costs) -> tuple[Line, ...]:
    """Rings from or to one rank: chunks follow each other, so that the next call starts while this one is under way.

    As in NCCL's model, LL takes one step however many ranks there are.
    """
    ways = []
    for number, protocol in costs.protocols:
        latency_us = costs.launch_us(number) + costs.hop_us(number) + (costs.n - 1) * costs.constants.pipeline_us[number]
        ways.append(Line("ring", protocol, latency_us, max(costs.inside(number), costs.between(number))))
    return tuple(ways)


def _direct(costs: _Costs, *, all_to_all: bool, copies: int = 0) -> tuple[Line, ...]:
    """Messages between pairs (LL and Simple; NCCL sends no LL128 between pairs)."""
    n, m, local, constants = costs.n, costs.m, costs.local, costs.constants
    ratio = constants.direct_ratio if all_to_all else constants.pair_ratio
    ways = []
    for number, protocol in costs.protocols:
        if protocol == "LL128":
            continue
        simple = int(protocol == "Simple")
        latency_us = costs.architecture.launch_us + simple * constants.direct_us + costs.hop_us(0)
        latency_us += costs.net_hop_us(number) if m > 1 else 0.0
        if all_to_all:
            latency_us += (local - 1) * constants.peer_us[simple]
            latency_us += (n - local) * constants.net_peer * costs.paths.nic_latency_us
            near, far = (local - 1) / n, (n - local) / n  # of the bytes, to ranks of the domain and of others
            if copies:  # expected number of other domains for each copy; there one rank passes items on
                near, far = (local - 1) / local, (m - 1) * (1 - (1 - 1 / m) ** copies) / copies
            inside = (near + constants.own_part / n) * costs.inside(number) / ratio
            outside = local * far * costs.between(number)
        else:
            inside, outside = costs.inside(number) / ratio, local * costs.between(number)  # the rank's own part of the NICs
        ways.append(Line("direct", protocol, latency_us, max(inside, outside)))
    return tuple(ways)
